"""What is analysed: a trained model, its data, and passes over them in bounded memory.

Samples are chosen by a hash of (seed, position in the split), so all runs on the same data are
analysed on the same images, and a smaller sample is a subset of a larger one. An image gets exactly
the noise that it gets in `noiseproof evaluate`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noiseproof import draws as random
from noiseproof.lab.analysis.differentiable import twice_differentiable
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.splits import Split
from noiseproof.lab.models.classifier import Classifier
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.objectives.spheres import feature_scale
from noiseproof.perturb import parse
from noiseproof.perturb.base import Perturbation
from noiseproof.perturb.text import noise_levels
from noiseproof.robustness import perturb_samples
from noiseproof.wrapped import Wrapped

Arrays = dict[str, NDArray[Any]]
Row = dict[str, Any]
Progress = Callable[[float], None]  # called with the share that is done, from 0 to 1
View = Literal["clean", "noisy"]
VIEWS: tuple[View, ...] = ("clean", "noisy")  # of the test images

TRAIN_LIMIT = 50_000  # training images that centroids are computed from
STAGE_SAMPLES = 2000  # whose features at all stages are used: the time of t-SNE grows faster than n
_TEST, _TRAIN, _VALIDATION = 11, 12, 13  # purposes of random numbers


class Measured(NamedTuple):
    """The result of a part of the analysis: arrays, and rows of one number each."""

    arrays: Arrays
    rows: list[Row]


def row(metric: str, value: float | int | bool | None, **facts: Any) -> Row:
    """One number: its name, its value, and the facts that distinguish it from similar ones. Numbers
    that are not finite become None, since JSON does not have them."""
    values = {"metric": metric, "value": value, **facts}
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class Settings:
    """The settings of an analysis, as `analyse` describes them.

    A part is measured again only if one that it depends on changes.
    """

    probes: int = 20
    step: float = 1e-2
    draws: int = 10
    noise: tuple[str, ...] = ("gaussian:0.1",)
    seed: int = 0
    samples: int | None = None
    stages: bool = False
    conditions: tuple[str, ...] = ()  # that the run was evaluated under

    @property
    def level(self) -> float:
        """The (largest) level of the first noise, in pixels; 0.1 if it has none."""
        return max(noise_levels(self.noise[0]), default=0.1) or 0.1


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
    device: where the model runs.
    """

    run: RunFolder
    dataset: Dataset
    weights: Weights = "last"
    settings: Settings = field(default_factory=Settings)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _features: dict[tuple[View, bool], Features] = field(default_factory=dict, init=False)

    @cached_property
    def model(self) -> Classifier | Wrapped:
        return self.run.model(self.weights, self.device).float()

    @cached_property
    def smooth_model(self) -> Classifier | Wrapped:
        """The same function as `model`, in operations that have second derivatives."""
        return twice_differentiable(self.model)

    @cached_property
    def scale(self) -> Tensor:
        """std of the model's normalisation, C x 1 x 1: normalised coordinates are u = x / scale."""
        std = self.model.std.view(-1, 1, 1)
        return std if len(std) == self.dataset.size[0] else std.mean(0, keepdim=True)

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
        if (view, stages) not in self._features:
            index = self.test_sample(STAGE_SAMPLES if stages else None)
            noise = parse(self.noise) if view == "noisy" else None
            self._features[view, stages] = self._pass(self.dataset.test, index, noise, stages)
        return self._features[view, stages]

    def features_under(self, perturbation: str) -> Features:
        """Penultimate features of the test samples under the first draw of any perturbation."""
        return self._pass(self.dataset.test, self.test_sample(), parse(perturbation), stages=False)

    def validation_features(self, perturbation: str) -> Features:
        """Those of the validation images; of a sample if there are more than ten times `samples`.
        ValueError if the run kept none."""
        validation, samples = self.dataset.validation, self.settings.samples
        if validation is None:
            raise ValueError(f"{self.run.path} kept no validation images")
        limit = None if samples is None else 10 * samples
        index = self._sample(validation, _VALIDATION, limit)
        return self._pass(validation, index, parse(perturbation), stages=False)

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

    @property
    def radius(self) -> float:
        """The radius of the spheres, in the units of the features."""
        method = self.run.config.method
        return self._relative(method.spheres_radius) if method.relative else method.radius

    @property
    def margin(self) -> float:
        """The margin of the loss, in the units of the features."""
        method = self.run.config.method
        return self._relative(method.spheres_margin) if method.relative else method.margin

    def _relative(self, share: float) -> float:
        """A share of the norm of the training features, in their units."""
        return share * float(feature_scale(self.train_features.penultimate))

    @torch.no_grad()
    def _pass(
        self, split: Split, index: Tensor, noise: Perturbation | None, stages: bool
    ) -> Features:
        model = self.model
        batches: dict[str, list[Tensor]] = defaultdict(list)
        for x, _, positions in self.batches(split, index):
            images = perturb_samples(x, positions, noise, 0, self.settings.seed) if noise else x
            if stages and isinstance(model, Classifier):
                outputs = model.blocks(images)
            else:  # a network with its own head has no stages
                outputs = {"features": model.features(images)}
            for stage, values in outputs.items():
                batches[stage].append(values.float().cpu())
        joined = {stage: torch.cat(values) for stage, values in batches.items()}
        return Features(joined, split.labels[index], index)

    def _sample(self, split: Split, purpose: int, *limits: int | None) -> Tensor:
        """The first positions of a hashed order, ascending; the order is the same for any limit."""
        size = min([split.count, *(limit for limit in limits if limit is not None)])
        positions = torch.arange(split.count)
        if size == split.count:
            return positions
        keys = random.keys(self.settings.seed, torch.tensor(purpose), positions)
        return keys.argsort()[:size].sort().values
