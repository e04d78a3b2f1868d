"""What is analysed: a trained model, its data, and passes over them in bounded memory.

Samples are chosen by a hash of (seed, position in the split), so all runs on the same data are
analysed on the same images, and a smaller sample is a subset of a larger one. An image gets exactly
the noise that it gets in `noiseproof evaluate`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from noiseproof import draws as random
from noiseproof.lab.analysis.differentiable import twice_differentiable
from noiseproof.lab.analysis.part import Settings
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset, Split
from noiseproof.lab.models.classifier import Classifier
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import parse
from noiseproof.perturb.base import Perturbation
from noiseproof.robustness import perturb_samples

View = Literal["clean", "noisy"]
VIEWS: tuple[View, ...] = ("clean", "noisy")  # of the test images

TRAIN_LIMIT = 50_000  # training images that centroids are computed from
STAGE_SAMPLES = 2000  # of features of all stages: the time of t-SNE grows faster than their number
_TEST, _TRAIN = 11, 12  # purposes of random numbers


class Features(NamedTuple):
    """Pooled features of each stage, the penultimate ones last, under "features"."""

    stages: dict[str, Tensor]  # n x D each, float32, on the CPU
    labels: Tensor  # n
    positions: Tensor  # n, in the split

    @property
    def penultimate(self) -> Tensor:
        return self.stages["features"]


@dataclass(eq=False)
class Subject:
    """A model of a run, on one device, with the test samples that are analysed.

    run: the run folder.
    dataset: the run's data.
    weights: of the last or of the best epoch.
    settings: of the analysis.
    device: that the model runs on.
    """

    run: RunFolder
    dataset: Dataset
    weights: Weights = "last"
    settings: Settings = field(default_factory=Settings)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def model(self) -> Classifier:
        return self.run.model(self.weights, self.device).float()

    @cached_property
    def smooth_model(self) -> Classifier:
        """The same function as `model`, in operations that have second derivatives."""
        return twice_differentiable(self.model)

    @cached_property
    def scale(self) -> Tensor:
        """std of the model's normalisation, C x 1 x 1: normalised coordinates are u = x / scale."""
        std = self.model.std.view(-1, 1, 1)
        return std if len(std) == self.model.channels else std.mean(0, keepdim=True)

    @cached_property
    def head(self) -> nn.Linear:
        """A copy of the model's last layer on the CPU, where the features are."""
        return copy.deepcopy(self.model.head).cpu()

    @property
    def space(self) -> str:
        """The coordinates of curvature, in words."""
        listed = ", ".join(f"{s:.3g}" for s in self.scale.flatten().tolist())
        return f"normalised (u = x / std, std = {listed})"

    @property
    def noise(self) -> str:
        """The main noise of the analysis."""
        return self.settings.noise[0]

    def test_sample(self, limit: int | None = None) -> Tensor:
        """Positions in the test set, ascending: all, or at most `samples` and `limit` of them."""
        return self._sample(self.dataset.test, _TEST, limit, self.settings.samples)

    def batches(self, split: Split, index: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches of (pixels in [0, 1], labels, positions in the split) on the device."""
        c, h, w = self.dataset.size
        images, values = (2048, 1 << 24) if self.device.type == "cuda" else (256, 1 << 18)
        size = max(8, min(images, values // (c * h * w)))
        options = {"index": index, "workers": self.run.config.data.workers}
        for batch in Batches(split, self.dataset.size, size, self.device, **options):
            pixels, labels, positions = batch
            yield pixels.float() / 255, labels, positions

    def perturb(self, x: Tensor, index: Tensor, noise: Perturbation, draw: int = 0) -> Tensor:
        """The noisy images of a draw, as `evaluate` generates them with noise seed `seed`."""
        return perturb_samples(x, index, noise, draw, self.settings.seed)

    def source(self, purpose: int, index: Tensor) -> random.PerSample:
        """Random numbers for the samples at `index`, whatever the batch."""
        seed = self.settings.seed
        return random.PerSample(random.keys(seed, torch.tensor(purpose).to(index), index))

    def facts(self, view: View) -> dict[str, str]:
        """The facts of a row about a view."""
        return {"data": view, **({"perturbation": self.noise} if view == "noisy" else {})}

    def features(self, view: View, *, stages: bool = False) -> Features:
        """Penultimate features of the test samples, clean or under the first draw of the noise.

        With `stages`, those of all stages, of at most `STAGE_SAMPLES` samples. They are computed
        once for all parts.
        """
        key = (view, stages)
        if key not in self._computed:
            index = self.test_sample(STAGE_SAMPLES if stages else None)
            noise = self.noise if view == "noisy" else None
            self._computed[key] = self._pass(self.dataset.test, index, noise, stages)
        return self._computed[key]

    @cached_property
    def _computed(self) -> dict[tuple[View, bool], Features]:
        return {}

    @cached_property
    def train_features(self) -> Features:
        """Penultimate features of the training images, unaugmented; of a sample if there are more
        than `TRAIN_LIMIT` or than ten times `samples`."""
        samples = self.settings.samples
        limit = None if samples is None else 10 * samples
        index = self._sample(self.dataset.train, _TRAIN, limit, TRAIN_LIMIT)
        return self._pass(self.dataset.train, index, None, stages=False)

    @cached_property
    def centroids(self) -> Tensor:
        """Mean training feature of each class, C x D."""
        train, features = self.train_features, self.train_features.penultimate.double()
        sums = features.new_zeros(len(self.dataset.classes), features.shape[1])
        sums.index_add_(0, train.labels, features)
        counts = torch.bincount(train.labels, minlength=len(sums)).clamp(min=1)
        return (sums / counts[:, None]).float()

    @torch.no_grad()
    def _pass(self, split: Split, index: Tensor, noise: str | None, stages: bool) -> Features:
        perturbation = None if noise is None else parse(noise)
        batches: dict[str, list[Tensor]] = {}
        for x, _, places in self.batches(split, index):
            images = x if perturbation is None else self.perturb(x, places, perturbation)
            model = self.model
            outputs = model.blocks(images) if stages else {"features": model.features(images)}
            for stage, values in outputs.items():
                batches.setdefault(stage, []).append(values.float().cpu())
        joined = {stage: torch.cat(values).clone() for stage, values in batches.items()}
        return Features(joined, split.labels[index], index)

    def _sample(self, split: Split, purpose: int, *limits: int | None) -> Tensor:
        """The first positions of a hashed order, ascending; the order is the same for any limit."""
        size = min([split.count, *(limit for limit in limits if limit is not None)])
        positions = torch.arange(split.count)
        if size == split.count:
            return positions
        keys = random.keys(self.settings.seed, torch.tensor(purpose), positions)
        return keys.argsort()[:size].sort().values
