"""What an analysis looks at: a trained model, its data, and passes over them in bounded memory.

Samples are chosen by a hash of (seed, place in the split), so all runs on the same data are
analysed on the same images, and a smaller sample is part of a larger one. Noise is keyed exactly
as in `noiseproof.lab.evaluation.evaluate`: an image is disturbed here as it was there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from noiseproof import draws as random
from noiseproof.lab.analysis.differentiable import twice_differentiable
from noiseproof.lab.data.datasets import Dataset, Split
from noiseproof.lab.models.classifier import Classifier
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import parse
from noiseproof.perturb.base import Perturbation
from noiseproof.robustness import perturb_samples

__all__ = ["TRAIN_LIMIT", "Features", "Subject"]

TRAIN_LIMIT = 50_000  # training images that centroids are taken from
_TEST, _TRAIN = 11, 12  # counters that keep the choice of samples apart from other draws


class Features(NamedTuple):
    """Pooled features of each stage, the penultimate last under "features", and their labels."""

    stages: dict[str, Tensor]  # n x D each, float32, on the CPU
    labels: Tensor  # n
    places: Tensor  # n, in the split

    @property
    def last(self) -> Tensor:
        return self.stages["features"]


@dataclass(eq=False)
class Subject:
    """One model of one run, on one device."""

    run: RunFolder
    dataset: Dataset
    weights: Weights = "last"
    seed: int = 0
    samples: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def model(self) -> Classifier:
        return self.run.model(self.weights, self.device).float()

    @cached_property
    def twice(self) -> Classifier:
        """The same function as `model`, to be differentiated twice."""
        return twice_differentiable(self.model)

    @cached_property
    def scale(self) -> Tensor:
        """std of the model's normalisation, C x 1 x 1: u = x / scale are its own coordinates."""
        std = self.model.std.view(-1, 1, 1)
        return std if len(std) == self.model.channels else std.mean(0, keepdim=True)

    @cached_property
    def head(self) -> nn.Linear:
        """The model's last layer, on the CPU, where the features are."""
        return copy.deepcopy(self.model.head).cpu()

    @property
    def space(self) -> str:
        """The coordinates of `scale` in words."""
        listed = ", ".join(f"{s:.3g}" for s in self.scale.flatten().tolist())
        return f"normalised (u = x / std, std = {listed})"

    def chosen(self, limit: int | None = None) -> Tensor:
        """Places in the test set, ascending: all, or a sample of at most `samples` and `limit`."""
        return _sample(self.dataset.test.count, self.seed, _TEST, self.samples, limit)

    def batches(self, split: Split, index: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(pixels in [0, 1], labels, places in the split) on the device."""
        c, h, w = self.dataset.size
        most, pixels = (2048, 1 << 24) if self.device.type == "cuda" else (256, 1 << 18)
        size = max(8, min(most, pixels // (c * h * w)))
        if split.images is not None:
            for part in index.split(size):
                x = split.images[part].to(self.device).float() / 255
                yield x, split.labels[part].to(self.device), part.to(self.device)
            return
        from noiseproof.lab.data.stream import (
            FileDataset,  # here: torchvision takes seconds to import
        )

        files = FileDataset(split, self.dataset.size, augment="none", seed=0, epoch=0, views=1)
        loader = DataLoader(
            Subset(files, index.tolist()),
            batch_size=size,
            num_workers=min(self.run.config.data.workers, os.cpu_count() or 1),
        )
        for x, y, place in loader:
            yield x.to(self.device).float() / 255, y.to(self.device), place.to(self.device)

    def disturb(self, x: Tensor, index: Tensor, noise: Perturbation, draw: int = 0) -> Tensor:
        """The noisy images of this draw, those that `evaluate` sees with noise seed `seed`."""
        return perturb_samples(x, index, noise, draw, self.seed)

    def source(self, purpose: int, index: Tensor) -> random.PerSample:
        """Random numbers of the samples at `index`, their own in any batch."""
        return random.PerSample(random.keys(self.seed, torch.tensor(purpose).to(index), index))

    def test(self, noise: str | None = None) -> Features:
        """Penultimate features of the chosen test samples, under the first draw of `noise`."""
        return self._kept(noise, None)

    def stages(self, noise: str | None, limit: int) -> Features:
        """Pooled features of every stage, of at most `limit` of the chosen test samples."""
        return self._kept(noise, limit)

    def _kept(self, noise: str | None, limit: int | None) -> Features:
        """A pass that several parts ask for is made once."""
        key = (noise, limit)
        if key not in self._passed:
            index = self.chosen(limit)
            self._passed[key] = self._pass(self.dataset.test, index, noise, limit is not None)
        return self._passed[key]

    @cached_property
    def _passed(self) -> dict[tuple[str | None, int | None], Features]:
        return {}

    @cached_property
    def train(self) -> Features:
        """Penultimate features of the training images, unaugmented; a sample of very many."""
        limit = None if self.samples is None else 10 * self.samples
        index = _sample(self.dataset.train.count, self.seed, _TRAIN, TRAIN_LIMIT, limit)
        return self._pass(self.dataset.train, index, None, stages=False)

    @cached_property
    def centroids(self) -> Tensor:
        """Mean training feature of each class, C x D."""
        train = self.train
        sums = torch.zeros(len(self.dataset.classes), train.last.shape[1], dtype=torch.float64)
        sums.index_add_(0, train.labels, train.last.double())
        counts = torch.bincount(train.labels, minlength=len(sums)).clamp(min=1)
        return (sums / counts[:, None]).float()

    @torch.no_grad()
    def _pass(self, split: Split, index: Tensor, noise: str | None, stages: bool) -> Features:
        perturbation = None if noise is None else parse(noise)
        found: dict[str, list[Tensor]] = {}
        for x, _, place in self.batches(split, index):
            seen = x if perturbation is None else self.disturb(x, place, perturbation)
            passed = self.model.blocks(seen) if stages else {"features": self.model.features(seen)}
            for name, values in passed.items():
                found.setdefault(name, []).append(values.float().cpu())
        joined = {name: torch.cat(parts).clone() for name, parts in found.items()}
        return Features(joined, split.labels[index], index)


def _sample(count: int, seed: int, purpose: int, *limits: int | None) -> Tensor:
    """The first of a hashed order, ascending; the order does not depend on the limits."""
    most = min([count, *(limit for limit in limits if limit is not None)])
    places = torch.arange(count)
    if most == count:
        return places
    return random.keys(seed, torch.tensor(purpose), places).argsort()[:most].sort().values
