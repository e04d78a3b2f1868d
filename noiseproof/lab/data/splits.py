"""Labelled images, and stratified splits: a share of every class, chosen by a hash, so that a split
is the same on every machine."""

from __future__ import annotations

import csv
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.lab.data.counts import chosen_count
from noiseproof.lab.data.images import STRETCHED, DataError, Reading, shortened

SPLIT_OFF = "split off"
VALIDATION, TEST, TRAIN = 0, 1, 2  # counters that make the splits independent
_PURPOSES = (
    "for validation; --val-share 0 uses none",
    "for testing",
    "for training; --train-share 1 uses all",
)


class Split(NamedTuple):
    """Labelled images: pixels in memory, or else files to be streamed."""

    images: Tensor | None  # uint8, N x C x H x W, contiguous, on the CPU
    files: tuple[str, ...] | None  # also of images in memory, if they were read from files
    labels: Tensor  # int64, N
    groups: Tensor | None = None  # int64, N: images of one group, such as a video, stay together
    reading: Reading = STRETCHED  # how files become images of one size

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
    def unlabelled(cls, files: Sequence[str | Path], reading: Reading) -> Split:
        """Image files whose classes are not known; their labels are all 0."""
        names = tuple(os.fspath(file) for file in files)
        return cls(None, names, torch.zeros(len(names), dtype=torch.int64), reading=reading)

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
        return self._replace(images=images, files=files, labels=self.labels[index], groups=groups)


class StoredSplits(NamedTuple):
    """The images of a dataset as they are stored. Validation and test images are None if they are
    to be split off the training images."""

    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split | None
    validation_from: str = SPLIT_OFF
    test_from: str = ""


def with_groups(stored: StoredSplits, rule: str, root: Path) -> tuple[StoredSplits, list[str]]:
    """The splits of a folder with the group of each image, and a sentence about lines of a .csv
    file that are for other files, if there are any.

    Args:
        stored: the files of the folder.
        rule: what an image's group is. `folder`: its folder within that of the class, `folder:2`
            with the one inside; a .csv file of paths in `root` and groups; otherwise a regular
            expression that is searched for in the file's name, of which the first parenthesis
            counts, or all that matches. The same name is the same group in all classes.
        root: the folder.
    """
    depth = 1 if stored.test is None else 2  # of a file within its class
    level = re.fullmatch(r"folder(?::([1-9]\d*))?", rule)
    table = _read_groups(Path(rule), root) if rule.lower().endswith(".csv") else None

    def name_of(file: str) -> str | None:
        parts = Path(os.path.relpath(file, root)).parts
        if level:
            folders = parts[depth:-1][: int(level[1] or 1)]
            return "/".join(folders) if len(folders) == int(level[1] or 1) else None
        if table is not None:
            return table.get(os.path.join(*parts))
        match = re.search(rule, parts[-1])
        return match and (match[1] if match.re.groups else match[0])

    def grouped(split: Split | None) -> Split | None:
        if split is None:
            return None
        names = [name_of(file) for file in split.files or ()]
        lost = [f for f, name in zip(split.files or (), names, strict=True) if name is None]
        if lost:
            raise DataError(
                f"--group {rule} gives no group for {len(lost):,} of {len(names):,} images: "
                f"{shortened(lost)}; expected a group for each"
            )
        digests = [hashlib.sha256(os.fsencode(name or "")).digest() for name in names]
        numbers = [int.from_bytes(digest[:8], "big") >> 1 for digest in digests]
        return split._replace(groups=torch.tensor(numbers, dtype=torch.int64))

    train, validation, test = map(grouped, stored[1:4])
    assert train is not None
    files = [file for part in stored[1:4] if part for file in part.files or ()]
    unused = sorted((table or {}).keys() - {os.path.relpath(file, root) for file in files})
    note = f"paths in {rule} without an image in {root}: {len(unused):,} ({shortened(unused)})"
    splits = stored._replace(train=train, validation=validation, test=test)
    return splits, [note] if unused else []


def _read_groups(path: Path, root: Path) -> dict[str, str]:
    """The groups in a .csv file by path relative to `root`, without a header."""
    try:
        with path.expanduser().open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--group {path} cannot be read: {error}") from error
    if wrong := next((row for row in rows if len(row) != 2), None):
        raise DataError(f"--group {path} must have two columns, path and group, got {wrong}")
    if rows and not Path(rows[0][0]).suffix:
        del rows[0]
    return {os.path.relpath(root / name.strip(), root): group.strip() for name, group in rows}


def stratified_split(
    split: Split,
    share: float,
    seed: int,
    purpose: int,
    classes: Sequence[str],
    members: str = "images",
) -> tuple[Split, Split]:
    """The rest and the chosen images, both in their original order: `share` of each class is chosen
    by a hash of (seed, purpose, index).

    ceil(share * N) images are chosen in all, divided among the classes by largest remainder; both
    sides get at least one image of each class. Groups are chosen as a whole, by a hash of their
    numbers: first those of several classes, as long as they bring the classes closer to their
    shares; then those of one class, until it has at least as many images as without groups.

    Args:
        split: the N images.
        share: of the images to choose, in (0, 1).
        seed: seed of the hash.
        purpose: `VALIDATION`, `TEST` or `TRAIN`.
        classes: names of the classes.
        members: what groups consist of, for error messages.

    >>> split = Split(None, tuple("abcdef"), torch.tensor([0, 0, 0, 0, 1, 1]))
    >>> rest, chosen = stratified_split(split, 0.5, 0, VALIDATION, ("cat", "dog"))
    >>> rest.count, chosen.labels.tolist()
    (3, [0, 0, 1])
    """
    labels = split.labels
    counts = torch.bincount(labels, minlength=len(classes))
    units = torch.arange(len(labels)) if split.groups is None else split.groups
    quota = counts.double() * share
    quantity = quota.floor().long().clamp(min=1)
    spare = chosen_count(len(labels), share) - int(quantity.sum())
    quantity[(quantity - quota).argsort(stable=True)[: max(spare, 0)]] += 1

    keys = draws.keys(seed, purpose, units)
    mixed, taken = _mixed_groups(labels, units, keys, counts, quantity)
    taken_counts, left_counts = (
        torch.bincount(labels[part], minlength=len(classes)) for part in (taken, mixed & ~taken)
    )
    shuffled = keys.argsort(stable=True)
    shuffled = shuffled[~mixed[shuffled]]
    order = shuffled[labels[shuffled].argsort(stable=True)]  # class by class, shuffled within
    pure = counts - taken_counts - left_counts
    rank = torch.arange(len(order)) - (pure.cumsum(0) - pure)[labels[order]]
    # The rank of the first image of each image's group, and of the last group of each class.
    _, group = units[order].unique_consecutive(return_inverse=True)
    first = torch.full_like(rank, len(rank)).scatter_reduce(0, group, rank, "amin")[group]
    last = torch.zeros_like(counts).scatter_reduce(0, labels[order], first, "amax")
    # Both sides need a group: one that is taken, one that is left, or one of this class alone.
    sides = torch.stack([taken_counts > 0, left_counts > 0, pure > 0, last > 0]).sum(0)
    for label, name in enumerate(classes):
        if sides[label] < 2:
            count, groups = int(counts[label]), len(units[labels == label].unique())
            left = (
                "one image" if count == 1 else f"one group of {members}" if count else "no images"
            )
            left = f"only groups of {members} that other classes need" if groups > 1 else left
            purpose_words = f"{share:.0%} {_PURPOSES[purpose]}"
            raise DataError(f"class {name!r} has {left} left, too few to choose {purpose_words}")

    quantity = (quantity - taken_counts).maximum((taken_counts == 0).long())
    limit = torch.where(left_counts > 0, pure, last)
    chosen = first < quantity.minimum(limit)[labels[order]]
    taken[order[chosen]] = True
    return split.take((~taken).nonzero()[:, 0]), split.take(taken.nonzero()[:, 0])


def _mixed_groups(
    labels: Tensor, units: Tensor, keys: Tensor, counts: Tensor, quantity: Tensor
) -> tuple[Tensor, Tensor]:
    """Which images are in groups of several classes, and which of these are chosen.

    Args:
        labels: the class of each image.
        units: the group of each image.
        keys: the hash of each image's group, which gives their order.
        counts: images of each class.
        quantity: images to choose of each class.
    """
    numbers, group = units.unique(return_inverse=True)
    low, high = (torch.zeros_like(numbers).scatter_reduce(0, group, labels, reduction,
                 include_self=False) for reduction in ("amin", "amax"))  # fmt: skip
    mixed = (low != high)[group]
    taken = torch.zeros_like(mixed)
    if not mixed.any():
        return mixed, taken
    members = mixed.nonzero()[:, 0]
    members = members[keys[members].argsort(stable=True)]
    contents: dict[int, Counter[int]] = {}  # images of each class, by group, in the hash's order
    for number, label in zip(group[members].tolist(), labels[members].tolist(), strict=True):
        contents.setdefault(number, Counter())[label] += 1
    # As large a share of the images in mixed groups as of the others.
    target = (quantity * torch.bincount(labels[mixed], minlength=len(counts)) / counts).tolist()
    missing, rest = list(target), counts.tolist()
    chosen: set[int] = set()

    def cost(content: Counter[int]) -> float:
        """The change of the squared relative errors; infinite if a class had no images left."""
        if any(rest[label] == n for label, n in content.items()):
            return math.inf
        changes = ((missing[c] - n) ** 2 - missing[c] ** 2 for c, n in content.items())
        return sum(change / target[c] ** 2 for c, change in zip(content, changes, strict=True))

    def choose(number: int) -> None:
        chosen.add(number)
        for label, n in contents[number].items():
            missing[label], rest[label] = missing[label] - n, rest[label] - n

    for candidate, content in contents.items():
        if cost(content) < 0:
            choose(candidate)
    only_mixed = set(range(len(counts))) - set(labels[~mixed].tolist())
    for label in sorted(only_mixed):
        candidates = [g for g, content in contents.items() if label in content and g not in chosen]
        if missing[label] == target[label] and candidates:  # none is chosen yet
            best = min(candidates, key=lambda g: cost(contents[g]))
            if cost(contents[best]) < math.inf:
                choose(best)
    taken[members] = torch.isin(group[members], torch.tensor(sorted(chosen), dtype=torch.int64))
    return mixed, taken
