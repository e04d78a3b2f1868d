"""Milliseconds a training step takes, for each method, beside a literal step of the same method.

    python benchmarks/train.py                                       # digits on a CPU: a minute
    python benchmarks/train.py --batch 64 512 --engines eager graph  # on a GPU: ResNet18, 32 x 32

Noiseproof's step is timed as `train` runs it (see `measured` in scaling.py). The literal step
computes the same loss as a plain reading of the paper would: a Python loop over classes and rivals,
torchvision transforms image by image in a DataLoader, a forward pass a view, the default optimiser
and memory layout, loss and hits read after every step. Both run in the same precision. What an
epoch costs besides its steps is taken from a whole `train`.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import tempfile
import time
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to be run by its path, too
from benchmarks import scaling
from benchmarks.scaling import EngineName, settings, timed
from noiseproof import perturb
from noiseproof.lab import build, checkpoint, models
from noiseproof.lab.config import Config, Method, MethodName
from noiseproof.lab.data import Split, load
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.train import train


@dataclass(frozen=True)
class Arguments:
    """Times the training step of each method, beside a literal implementation of it."""

    methods: tuple[MethodName, ...] = typing.get_args(MethodName)
    """Methods to time."""
    engines: tuple[EngineName, ...] = ("auto",)
    """How noiseproof's step is executed; one that does not fit here falls back and says so."""
    batch: tuple[int, ...] = (64,)
    """Images a step."""
    steps: int | None = None
    """Steps a block, of which one warms up; 200 on a GPU, 20 on a CPU."""
    blocks: int = 5
    """Blocks that the median is taken over."""
    data: str | None = None
    """A .npz file or a dataset's name; random images on a GPU, the digits on a CPU."""
    size: int | None = None
    """Height and width of random images, 32 on a GPU; on a CPU, take them instead of digits."""
    images: int | None = None
    """How many random images; 50,000 on a GPU, 2,000 on a CPU."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    baseline: bool = True
    """Also time the literal step."""
    workers: int | None = None
    """Processes that transform images for the literal step; up to 8 on a GPU, 0 on a CPU."""
    epochs: int = 3
    """Whole epochs to time, for what they cost besides their steps; 0 leaves that out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    json: Path | None = None
    """File of the results; results/benchmarks/train-DEVICE.json."""


class LiteralLoss:
    """The discriminative loss class by class and rival by rival, as the paper's sums are written.

    Pairs of classes without a boundary are not looked for: that would only make it slower.
    """

    def __init__(self, method: Method, num_classes: int):
        self.method, self.num_classes = method, num_classes
        self.previous: dict[int, Tensor] = {}

    def __call__(self, features: Tensor, labels: Tensor, head: nn.Linear, noisy: Tensor) -> Tensor:
        m = self.method
        per_class = []
        for c in range(self.num_classes):
            own = labels == c
            if not own.any():
                continue
            current = centroid = features[own].mean(0)
            if c in self.previous:
                centroid = m.centroid_momentum * self.previous[c]
                centroid = centroid + (1 - m.centroid_momentum) * current
            self.previous[c] = centroid.detach()
            hinges = []
            for i in range(self.num_classes):
                if i != c:
                    normal = head.weight[c] - head.weight[i]
                    distance = (normal @ current + head.bias[c] - head.bias[i]) / normal.norm()
                    hinges.append(F.relu(m.margin - distance))
            per_class.append(
                m.compact_weight * self._spread(features[own], centroid)
                + m.noisy_weight * self._spread(noisy[own], centroid)
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
    m, features, other = criterion.method, clean, clean
    with torch.autocast(clean.device.type, torch.bfloat16, enabled=half):
        if m.method == "both":
            logits, labels = model(torch.cat([clean, noisy])), torch.cat([labels, labels])
        else:
            features = model.features(noisy if m.method == "noisy" else clean)
            logits = model.head(features)
            if m.method in ("stability", "discriminative"):
                other = model.features(noisy)
    loss = F.cross_entropy(logits.float(), labels)
    if m.method == "stability":
        apart = (features.float() - other.float()).norm(dim=1)
        loss = loss + m.stability_weight * apart.mean()
    if m.method == "discriminative":
        loss = loss + criterion(features.float(), labels, model.head, other.float())
    return loss, logits[: len(clean)]


class LiteralImages(Dataset):
    """(label, views): each view cropped, flipped, scaled and noised by itself, on the CPU."""

    def __init__(self, split: Split, config: Config):
        noise = perturb.parse(config.method.noise)
        if split.images is None or not isinstance(noise, perturb.Gaussian):
            raise ValueError(f"the literal step takes Gaussian noise and no files, got {noise}")
        self.images, self.labels, self.std = split.images, split.labels.tolist(), noise.std
        size = self.images.shape[2:]
        crop = [v2.RandomCrop(size, padding=min(size) // 8)]
        steps = {"none": [], "crop": crop, "crop-flip": [*crop, v2.RandomHorizontalFlip()]}
        scale = v2.ToDtype(torch.float32, scale=True)
        self.transform = v2.Compose([*steps[config.data.augment], scale])
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
    """Milliseconds of the literal step, with its data and on one batch that waits on the device."""
    scaling.forget()
    data = load(config.data)
    o, half = config.optim, build.precision(config, device.type) == "bf16"
    classes = len(data.classes)
    torch.manual_seed(config.run.seed)
    model = models.build(
        config.model, num_classes=classes, size=data.size, mean=data.mean, std=data.std
    ).to(device)
    criterion = LiteralLoss(config.method, classes)
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

    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    whole = timed(lambda count: run(batches, count), steps, blocks, device)
    held = [part.to(device) for part in next(batches)]
    alone = timed(lambda count: run([held] * count, count), steps, blocks, device)
    return {"ms": statistics.median(whole), "ms_without_data": statistics.median(alone)}


def epoch_costs(
    data: str, ms: float, engine: EngineName, epochs: int, **changes: Any
) -> dict[str, Any]:
    """Seconds of whole epochs of `train` with validation, against their steps at `ms` each.

    An epoch lasts from one row of metrics to the next, with a checkpoint between; the first, which
    may compile, is left out. By default there is a checkpoint in five minutes.
    """
    scaling.forget()
    ends: list[float] = []
    saves: list[float] = []
    append, save = RunFolder.append_metrics, checkpoint.save

    def appending(run: RunFolder, row: dict[str, Any]) -> None:
        append(run, row)
        ends.append(time.perf_counter())

    def saving(*arguments: Any) -> None:
        began = time.perf_counter()
        save(*arguments)
        saves.append(time.perf_counter() - began)

    often = {"epochs": epochs + 1, "checkpoint_minutes": 0.0, "val_share": 0.1, "engine": engine}
    config = settings(data, **changes, **often, name=f"epochs-{changes['batch_size']}")
    with (
        patch.object(RunFolder, "append_metrics", appending),
        patch.object(checkpoint, "save", saving),
    ):
        run = train(config, progress=True)
    batch, images = config.optim.batch_size, run.info["samples"]["train"]
    steps = images // min(batch, images)
    inside = statistics.median(row["seconds"] for row in run.metrics()[1:])
    whole = statistics.median(b - a for a, b in itertools.pairwise(ends))
    saved, training = statistics.median(saves), steps * ms / 1e3
    return {
        "method": config.method.method,
        "batch": batch,
        "engine": run.info["engine"],
        "epochs": epochs,
        "steps": steps,
        "epoch_seconds": whole,
        "steps_seconds": training,  # steps x ms
        "training_seconds": inside,  # the same by this training's own clock
        "checkpoint_seconds": saved,
        "other_seconds": whole - training - saved,
        "fixed_share": 1 - training / whole,
        "fixed_share_by_default": 1 - training / (whole - saved) + saved / 300,
    }


def matrix_rate(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a product of two large square matrices reaches here, in TFLOP a second."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    ms = statistics.median(timed(run, 20 if device.type == "cuda" else 2, 5, device))
    return {"size": n, "dtype": str(dtype).removeprefix("torch."), "tflops": 2 * n**3 / ms / 1e9}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    text = (
        f"{row['method']:<15}{row['batch']:>6} {row['engine']:<8}{row['ms']:>9.3f}"
        f"{row['images_per_second']:>10,.0f}{row['views_per_second']:>10,.0f}"
        f"{row['matrix_share']:>9.1%}"
    )
    if "literal" in row:
        slow = row["literal"]
        text += f"{slow['ms']:>9.2f}{slow['ms_without_data']:>9.2f}{row['ratio']:>8.1f}"
    return text + (f"  {row['note']}" if row["note"] else "")


def epoch_line(e: dict[str, Any]) -> str:
    """What `epoch_costs` found, in words."""
    return (
        f"an epoch of {e['method']}, batch {e['batch']}: {e['epoch_seconds']:.3f} s; "
        f"steps x ms {e['steps_seconds']:.3f} s, by its own clock {e['training_seconds']:.3f} s, "
        f"a checkpoint {e['checkpoint_seconds']:.3f} s; not in steps x ms: "
        f"{e['fixed_share_by_default']:.1%}, with a checkpoint every epoch {e['fixed_share']:.1%}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = scaling.device_of(a.device)
    cuda = device.type == "cuda"
    steps = a.steps or (200 if cuda else 20)
    workers = a.workers if a.workers is not None else (min(8, os.cpu_count() or 1) if cuda else 0)
    with tempfile.TemporaryDirectory() as folder:
        data = a.data or "digits"
        if a.data is None and (cuda or a.size):
            count = a.images or (50_000 if cuda else 2_000)
            data = scaling.random_images(Path(folder) / "random.npz", count, a.size or 32, 10)
        model = a.model or ("resnet18" if cuda else "small_cnn")
        common = {"model": model, "device": device.type, "output": folder}
        precision = build.precision(settings(data, **common), device.type)
        rate = matrix_rate(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        report: dict[str, Any] = {
            "settings": {
                "data": Path(data).stem,
                "size": list(load(settings(data).data).size),
                "model": model,
                "precision": precision,
                "steps": steps,
                "blocks": a.blocks,
                "literal_workers": workers,
            },
            "matrix": rate,
            "rows": [],
            "epochs": [],
        }
        print(f"product of two {rate['size']} x {rate['size']} matrices in {rate['dtype']}: "
              f"{rate['tflops']:.3g} TFLOP/s\n"
              f"{'method':<15}{'batch':>6} {'engine':<8}{'ms/step':>9}{'images/s':>10}"
              f"{'views/s':>10}{'of rate':>9}{'literal':>9}{'no data':>9}{'ratio':>8}")  # fmt: skip
        for batch in a.batch:
            best: dict[str, tuple[float, EngineName]] = {}
            for method in a.methods:
                wanted = {**common, "method": method, "batch_size": batch}
                count = max(1, steps // 10), a.blocks
                config = settings(data, **wanted)
                slow = literal(config, device, workers, *count) if a.baseline else None
                for engine in a.engines:
                    row = scaling.measured(settings(data, **wanted, engine=engine), steps, a.blocks)
                    row["matrix_share"] = row["gflop"] / row["ms"] / rate["tflops"]
                    if slow:
                        row |= {"literal": slow, "ratio": slow["ms"] / row["ms"]}
                    report["rows"].append(row)
                    best[method] = min(best.get(method, (math.inf, engine)), (row["ms"], engine))
                    print(line(row), flush=True)
                    scaling.write(a.json, "train", device, report)  # what there is so far
            if a.epochs and best:
                method = "discriminative" if "discriminative" in best else a.methods[-1]
                wanted = {**common, "method": method, "batch_size": batch}
                found = epoch_costs(data, *best[method], a.epochs, **wanted)
                report["epochs"].append(found)
                print(epoch_line(found), flush=True)
        written = scaling.write(a.json, "train", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
