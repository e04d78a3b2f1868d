"""Labelled images, and stratified splits: a share of every class, chosen by a hash, so that a split
is the same on every machine."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.lab.data.images import DataError

SPLIT_OFF = "split off"
VALIDATION, TEST, TRAIN = 0, 1, 2  # counters that make the splits independent
_PURPOSES = (
    "for validation; --val-share 0 uses none",
    "for testing",
    "for training; --train-share 1 uses all",
)


class Split(NamedTuple):
    """Labelled images: pixels in memory, or files to be streamed; the other one is None."""

    images: Tensor | None  # uint8, N x C x H x W, contiguous, on the CPU
    files: tuple[str, ...] | None
    labels: Tensor  # int64, N
    groups: Tensor | None = None  # int64, N: images of one group, such as a video, stay together

    @classmethod
    def from_arrays(
        cls,
        images: np.ndarray,
        labels: np.ndarray | list[int],
        groups: np.ndarray | list[int] | None = None,
    ) -> Split:
        pixels = torch.from_numpy(np.ascontiguousarray(images))
        grouped = None if groups is None else torch.as_tensor(groups, dtype=torch.int64)
        return cls(pixels, None, torch.as_tensor(labels, dtype=torch.int64), grouped)

    @classmethod
    def unlabelled(cls, files: Sequence[str | Path]) -> Split:
        """Image files whose classes are not known; their labels are all 0."""
        names = tuple(os.fspath(file) for file in files)
        return cls(None, names, torch.zeros(len(names), dtype=torch.int64))

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of images; len() of a named tuple is the number of its fields."""
        return len(self.labels)

    @property
    def pixels(self) -> Tensor:
        """The images; ValueError if they are not in memory."""
        if self.images is None:
            raise ValueError("images must be in memory, but they are streamed from files")
        return self.images

    def take(self, index: Tensor) -> Split:
        """The images at these positions."""
        images = None if self.images is None else self.images[index]
        files = None if self.files is None else tuple(self.files[i] for i in index.tolist())
        groups = None if self.groups is None else self.groups[index]
        return Split(images, files, self.labels[index], groups)


class StoredSplits(NamedTuple):
    """The images of a dataset as they are stored. Validation and test images are None if they are
    to be split off the training images."""

    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split | None
    validation_from: str = SPLIT_OFF
    test_from: str = ""


def stratified_split(
    split: Split, share: float, seed: int, purpose: int, classes: Sequence[str]
) -> tuple[Split, Split]:
    """The rest and the chosen images, both in their original order: `share` of each class is chosen
    by a hash of (seed, purpose, index).

    ceil(share * N) images are chosen in all, divided among the classes by largest remainder; both
    sides get at least one image of each class. Groups are chosen as a whole, by a hash of their
    numbers, until a class has at least as many images as without them.

    Args:
        split: the N images. The images of a group are of one class.
        share: of the images to choose, in (0, 1).
        seed: seed of the hash.
        purpose: `VALIDATION`, `TEST` or `TRAIN`.
        classes: names of the classes.

    >>> split = Split(None, tuple("abcdef"), torch.tensor([0, 0, 0, 0, 1, 1]))
    >>> rest, chosen = stratified_split(split, 0.5, 0, VALIDATION, ("cat", "dog"))
    >>> rest.count, chosen.labels.tolist()
    (3, [0, 0, 1])
    """
    labels = split.labels
    counts = torch.bincount(labels, minlength=len(classes))
    units = torch.arange(len(labels)) if split.groups is None else split.groups
    shuffled = draws.keys(seed, purpose, units).argsort(stable=True)
    order = shuffled[labels[shuffled].argsort(stable=True)]  # class by class, shuffled within
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    # The rank of the first image of each image's group, and of the last group of each class.
    _, group = units[order].unique_consecutive(return_inverse=True)
    first = torch.full_like(rank, len(rank)).scatter_reduce(0, group, rank, "amin")[group]
    last = torch.zeros_like(counts).scatter_reduce(0, labels[order], first, "amax")
    for name, count, most in zip(classes, counts.tolist(), last.tolist(), strict=True):
        if most < 1:
            left = "one image" if count == 1 else "one group of images" if count else "no images"
            purpose_words = f"{share:.0%} {_PURPOSES[purpose]}"
            raise DataError(f"class {name!r} has {left} left, too few to choose {purpose_words}")

    quota = counts.double() * share
    quantity = quota.floor().long().clamp(min=1)
    spare = math.ceil(share * len(labels) - 1e-9) - int(quantity.sum())
    quantity[(quantity - quota).argsort(stable=True)[: max(spare, 0)]] += 1
    chosen = first < quantity.minimum(last)[labels[order]]
    return split.take(order[~chosen].sort().values), split.take(order[chosen].sort().values)
