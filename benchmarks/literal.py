"""A literal training step as a baseline: what a plain reading of the paper gives.

A Python loop over classes and rivals, torchvision transforms image by image in a DataLoader, one
forward pass per view, the default optimiser and memory layout, loss and accuracy read after every
step. `train.py` times it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks import timing
from benchmarks.timing import timed
from noiseproof import perturb
from noiseproof.lab.config import Config, Method
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.splits import Split
from noiseproof.lab.device import precision
from noiseproof.lab.models.classifier import classifier_for

AUGMENTATIONS = ("none", "crop", "crop-flip")  # those of the paper


class LiteralLoss:
    """The discriminative loss class by class and rival by rival, as the paper writes its sums.

    Pairs of classes without a decision boundary are not excluded: that would only make it slower.
    """

    def __init__(self, method: Method, num_classes: int):
        self.method, self.num_classes = method, num_classes
        self.previous: dict[int, Tensor] = {}

    def __call__(self, features: Tensor, labels: Tensor, head: nn.Linear, noisy: Tensor) -> Tensor:
        m = self.method
        per_class = []
        for c in range(self.num_classes):
            members = labels == c
            if not members.any():
                continue
            current = centroid = features[members].mean(0)
            if c in self.previous:
                centroid = m.centroid_momentum * self.previous[c]
                centroid = centroid + (1 - m.centroid_momentum) * current
            self.previous[c] = centroid.detach()
            hinges = []
            for rival in range(self.num_classes):
                if rival != c:
                    normal = head.weight[c] - head.weight[rival]
                    offset = head.bias[c] - head.bias[rival]
                    distance = (normal @ current + offset) / normal.norm()
                    hinges.append(F.relu(m.margin - distance))
            per_class.append(
                m.compact_weight * self._spread(features[members], centroid)
                + m.noisy_weight * self._spread(noisy[members], centroid)
                + m.margin_weight * torch.stack(hinges).max()
                + m.norm_weight * centroid.norm()
            )
        return torch.stack(per_class).mean()

    def _spread(self, members: Tensor, centroid: Tensor) -> Tensor:
        return F.relu((members - centroid).norm(dim=1) - self.method.radius).square().mean()


def literal_loss(
    model: Any, criterion: LiteralLoss, labels: Tensor, clean: Tensor, noisy: Tensor, half: bool
) -> tuple[Tensor, Tensor]:
    """Loss and logits of one batch; `half` runs the network under bf16 autocast."""
    m, features, noisy_features = criterion.method, clean, clean
    with torch.autocast(clean.device.type, torch.bfloat16, enabled=half):
        if m.method == "both":
            logits, labels = model(torch.cat([clean, noisy])), torch.cat([labels, labels])
        else:
            features = model.features(noisy if m.method == "noisy" else clean)
            logits = model.head(features)
            if m.method in ("stability", "discriminative"):
                noisy_features = model.features(noisy)
    loss = F.cross_entropy(logits.float(), labels)
    if m.method == "stability":
        distance = (features.float() - noisy_features.float()).norm(dim=1)
        loss = loss + m.stability_weight * distance.mean()
    if m.method == "discriminative":
        loss = loss + criterion(features.float(), labels, model.head, noisy_features.float())
    return loss, logits[: len(clean)]


class LiteralImages(Dataset):
    """(label, *views); each view is cropped, flipped, scaled and noised separately, on the CPU."""

    def __init__(self, split: Split, config: Config):
        noise = perturb.parse(config.method.noise)
        if split.images is None or not isinstance(noise, perturb.Gaussian):
            raise ValueError(f"the literal step needs Gaussian noise and no files, got {noise}")
        self.images, self.labels, self.std = split.images, split.labels.tolist(), noise.std
        size = self.images.shape[2:]
        crop = [v2.RandomCrop(size, padding=min(size) // 8)]
        steps = ([], crop, [*crop, v2.RandomHorizontalFlip()])
        scale = v2.ToDtype(torch.float32, scale=True)
        self.transform = v2.Compose([*steps[AUGMENTATIONS.index(config.data.augment)], scale])
        self.method, self.paired = config.method.method, config.method.views == "paired"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, label = self.images[index], self.labels[index]
        clean = self.transform(image)
        if self.method == "normal":
            return label, clean
        other = clean if self.paired or self.method == "noisy" else self.transform(image)
        noisy = (other + self.std * torch.randn_like(other)).clamp(0, 1)
        return (label, noisy) if self.method == "noisy" else (label, clean, noisy)


def literal(
    config: Config, device: torch.device, workers: int, steps: int, blocks: int
) -> dict[str, float]:
    """Milliseconds per literal step, with data loading and on one batch already on the device."""
    timing.clear_caches()
    data = load_dataset(config.data)
    o, half = config.optim, precision(config, device.type) == "bf16"
    torch.manual_seed(config.run.seed)
    model = classifier_for(config.model, data).to(device)
    criterion = LiteralLoss(config.method, len(data.classes))
    optimizer = torch.optim.SGD(
        model.parameters(), o.lr, o.momentum, weight_decay=o.weight_decay, nesterov=True
    )
    loader = DataLoader(
        LiteralImages(data.train, config),
        batch_size=min(o.batch_size, data.train.count),
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def run(batches: Iterable[Any], count: int) -> None:
        hits = total = 0.0
        for _, (labels, *views) in zip(range(count), batches, strict=False):
            labels, views = labels.to(device), [view.to(device) for view in views]
            optimizer.zero_grad()
            loss, logits = literal_loss(model, criterion, labels, views[0], views[-1], half)
            loss.backward()
            optimizer.step()
            total += loss.item()
            hits += (logits.argmax(1) == labels).sum().item()

    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # endless epochs
    with_data = timed(lambda count: run(batches, count), steps, blocks, device)
    batch = [tensor.to(device) for tensor in next(batches)]
    without_data = timed(lambda count: run([batch] * count, count), steps, blocks, device)
    return {"ms": statistics.median(with_data), "ms_without_data": statistics.median(without_data)}
