"""Images that are in two splits: near-duplicates, and groups that a folder's own splits divide.

A near-duplicate is a copy that was resized, compressed, brightened or slightly cropped, or the next
frame of a video. Every image is described by the differences between neighbouring cells of a grid
of 10 x 10 grey means, each as the signed square root, so that one strong edge such as a horizon
does not outweigh the rest; the description has length 1. Two images are near-duplicates if the dot
product of their descriptions is at least 0.87. Mirrored or rotated copies are not found.

Not all pairs are compared: images are sorted by the signs of random projections, 24 times with
other projections, and each is compared with the next 8. That finds 97 % of the pairs among the
60,000 images of CIFAR-10 (benchmarks/duplicates.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import interpolate

from noiseproof.lab.data.images import DataError, decode, reasons
from noiseproof.lab.data.splits import Split, StoredSplits

_CELLS, _CELL = 10, 4  # the grid, and pixels per cell
_SIDE = _CELLS * _CELL
_LUMA = torch.tensor([0.299, 0.587, 0.114])
_ENOUGH = 32  # least height and width of images that need not be read again
_RESOLUTION = 8 * _SIDE  # at which large JPEGs are decoded, at least
SIMILAR = 0.87  # least dot product of near-duplicates
_SORTS, _NEXT = 24, 8
_EXAMPLES = 3
Pairs = NDArray[np.int64]  # 2 x K, positions of images


class Leak(NamedTuple):
    """Held-out images that are also in training, as config.json records them."""

    kind: str  # "near-duplicates" or "groups"
    split: str  # "test" or "validation"
    images: int  # how many of the split's
    of: int  # its number of images
    examples: list[tuple[str, str]]  # files: held out, and used for training

    def __str__(self) -> str:
        """A sentence about it."""
        have = "has" if self.images == 1 else "have"
        shared = "near-duplicates" if self.kind == "near-duplicates" else "images of the same group"
        used = "training" if self.split == "validation" else "training or validation"
        shown = "; ".join(f"{one} and {other}" for one, other in self.examples)
        return (
            f"{self.images:,} of {self.of:,} {self.split} images {have} {shared} in {used}, which "
            f"makes accuracy look better than it is: {shown}{'; …' * (self.images > _EXAMPLES)}"
        )


def leak_hint(group: str | None) -> str:
    """What to do about leaks.

    Args:
        group: the rule by which images are grouped, if there is one.
    """
    if group is not None:
        return "--dedupe keeps near-duplicates and images of a group in one split"
    return "--dedupe keeps near-duplicates in one split, and --group images of a scene"


def recorded_leaks(info: Mapping[str, Any]) -> list[str]:
    """A sentence about each leak that the `info` of a run records."""
    return [str(Leak(**leak)) for leak in info.get("leaks", ())]


def near_duplicates(*parts: Split | None) -> Pairs:
    """Pairs of positions of nearly the same image, each pair once; DataError if a file cannot be
    read.

    Args:
        parts: images, one part after the other: pixels of at least 32 x 32, or else files, which
            are then decoded for this.
    """
    return similar_pairs(np.concatenate([described(part) for part in parts if part is not None]))


def described(part: Split) -> NDArray[np.float32]:
    """The description of each image; DataError if a file cannot be read.

    Args:
        part: images, as for `near_duplicates`.
    """
    if part.images is not None and min(part.images.shape[2:]) >= _ENOUGH:
        few = max(1, (1 << 23) // part.images[0].numel())  # to keep memory small
        return np.concatenate([descriptions(_grey(images)) for images in part.images.split(few)])
    files = part.files or ()
    progress = f"looking for near-duplicates in {len(files):,} files"
    pixels, errors = decode(files, (1, _SIDE, _SIDE), progress=progress, enough=_RESOLUTION)
    if errors:
        raise DataError(reasons(errors))
    return descriptions(pixels)


def _grey(pixels: Tensor) -> Tensor:
    """N x 1 x 40 x 40, as `decode` reads files."""
    weights = _LUMA if pixels.shape[1] == 3 else torch.ones(1)
    grey = (pixels * weights.view(-1, 1, 1)).sum(1, keepdim=True)
    return interpolate(grey, (_SIDE, _SIDE), mode="bilinear", antialias=True).round().byte()


def descriptions(pixels: Tensor) -> NDArray[np.float32]:
    """A vector of length 1 per image, or 0 for an image without any contrast.

    Args:
        pixels: uint8, N x 1 x 40 x 40.
    """
    grid = pixels.numpy().reshape(-1, _CELLS, _CELL, _CELLS, _CELL)
    cells = grid.sum((2, 4), dtype=np.int32) // _CELL**2
    steps = [np.diff(cells, axis=axis).reshape(len(cells), -1) for axis in (1, 2)]
    vectors = np.concatenate(steps, axis=1).astype(np.float32)
    vectors = np.sign(vectors) * np.sqrt(np.abs(vectors))
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


def similar_pairs(vectors: NDArray[np.float32]) -> Pairs:
    """Pairs of positions whose vectors have a dot product of at least 0.87.

    Args:
        vectors: one row per image.
    """
    generator, codes = np.random.default_rng(0), set[tuple[int, int]]()
    for _ in range(_SORTS):
        projections = generator.standard_normal((vectors.shape[1], 32)).astype(np.float32)
        order = np.lexsort(np.packbits(vectors @ projections > 0, axis=1).T)
        row = torch.from_numpy(vectors[order])
        for distance in range(1, min(_NEXT, len(row) - 1) + 1):
            similarity = torch.linalg.vecdot(row[distance:], row[:-distance])
            (found,) = np.nonzero(similarity.numpy() >= SIMILAR)
            ends = np.sort([order[found], order[found + distance]], axis=0)
            codes.update(zip(*ends.tolist(), strict=True))
    return np.array(sorted(codes), dtype=np.int64).reshape(-1, 2).T


def find_leaks(parts: Sequence[Split | None], root: str) -> list[Leak]:
    """What held-out images share with those that a model is trained with.

    Args:
        parts: training, validation and test images, with their files.
        root: the folder of all files.
    """
    images, roles = _joined(parts)
    names = [os.path.relpath(file, root) for file in images.files or ()]
    pairs = {"near-duplicates": near_duplicates(*parts)}
    if images.groups is not None:
        first = _first(images.groups.numpy())
        pairs["groups"] = np.stack([first, np.arange(len(first))])
    found = []
    for kind, (one, other) in pairs.items():
        for role, split in ((2, "test"), (1, "validation")):
            crossing = (roles[one] < role) & (roles[other] == role)
            held_out, where = np.unique(other[crossing], return_index=True)
            used = one[crossing][where]
            examples = [(names[i], names[k]) for i, k in zip(held_out, used, strict=True)]
            count = int((roles == role).sum())
            found.append(Leak(kind, split, len(held_out), count, examples[:_EXAMPLES]))
    return [leak for leak in found if leak.images]


def without_leaks(stored: StoredSplits) -> tuple[StoredSplits, str]:
    """The splits of a folder with each cluster of near-duplicates as a group, together with the
    groups that it touches, and a sentence about them. If the folder has splits of its own, a group
    that is in several goes to training as a whole, or to validation if it has no training images.

    Args:
        stored: the files of the folder.
    """
    images, roles = _joined(stored[1:4])
    one, other = near_duplicates(*stored[1:4])
    numbers = np.arange(images.count) if images.groups is None else images.groups.numpy()
    unique, group = np.unique(numbers, return_inverse=True)
    links = coo_array((np.ones(len(one)), (group[one], group[other])), (len(unique),) * 2)
    first = _first(connected_components(links, directed=False)[1][group])
    new = roles[first]
    images = images._replace(groups=torch.from_numpy(numbers[first]))
    for role, part in enumerate(("training", "validation", "test")):
        lost = set(images.labels[roles == role].tolist()) - set(images.labels[new == role].tolist())
        if lost:
            raise DataError(
                f"--dedupe leaves no {part} images of class {stored.classes[min(lost)]!r}: all "
                "have near-duplicates or groups in training"
            )
    splits = [
        None if part is None else images.take(torch.from_numpy(np.flatnonzero(new == role)))
        for role, part in enumerate(stored[1:4])
    ]
    assert splits[0] is not None
    clustered = len(np.unique([one, other]))
    text = f"{clustered:,} near-duplicates, those of each cluster in one split"
    if moved := int((new != roles).sum()):
        text += f"; {moved:,} held-out images moved for that"
    return stored._replace(train=splits[0], validation=splits[1], test=splits[2]), text


def _joined(parts: Sequence[Split | None]) -> tuple[Split, NDArray[np.int64]]:
    """All files as one split, and for each 0 for training, 1 for validation, 2 for testing."""
    present = [(role, part) for role, part in enumerate(parts) if part is not None]
    roles = np.concatenate([np.full(part.count, role) for role, part in present])
    files = tuple(file for _, part in present for file in part.files or ())
    labels = torch.cat([part.labels for _, part in present])
    groups = [part.groups for _, part in present if part.groups is not None]
    grouped = torch.cat(groups) if len(groups) == len(present) else None
    first = present[0][1]
    return first._replace(images=None, files=files, labels=labels, groups=grouped), roles


def _first(numbers: NDArray[Any]) -> NDArray[np.int64]:
    """For each element, the first position of its value."""
    _, position, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return position[inverse]
