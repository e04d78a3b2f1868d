"""Stratified splits: a share of every class, chosen by a hash, so that a split is the same on every
machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.lab.config import Data
from noiseproof.lab.data.images import DataError

__all__ = ["TEST", "split_validation", "stratified_split"]

_VALIDATION, TEST = 0, 1  # counters that make the two splits independent
_PURPOSES = ("for validation; --val-share 0 uses none", "for testing")


def stratified_split(
    labels: Tensor, share: float, seed: int, purpose: int, classes: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Indices (rest, chosen), ascending: `share` of each class is chosen, by a hash of
    (seed, purpose, index).

    ceil(share * N) images are chosen in all, divided among the classes by largest remainder; both
    sides get at least one image of each class.

    Args:
        labels: class ids, N.
        share: of the images to choose, in (0, 1).
        seed: seed of the hash.
        purpose: 0 for validation, `TEST` for testing.
        classes: names of the classes.

    >>> rest, chosen = stratified_split(torch.tensor([0, 0, 0, 0, 1, 1]), 0.5, 0, 0, "ab")
    >>> len(rest), (chosen < 4).tolist()
    (3, [True, True, False])
    """
    counts = torch.bincount(labels, minlength=len(classes))
    for name, count in zip(classes, counts.tolist(), strict=True):
        if count < 2:
            raise DataError(
                f"class {name!r} has {count} image(s) left, too few for {share:.0%} "
                + _PURPOSES[purpose]
            )
    quota = counts.double() * share
    quantity = quota.floor().long().clamp(min=1)
    spare = math.ceil(share * len(labels) - 1e-9) - int(quantity.sum())
    quantity[(quantity - quota).argsort(stable=True)[: max(spare, 0)]] += 1
    quantity = quantity.minimum(counts - 1)

    shuffled = draws.keys(seed, purpose, torch.arange(len(labels))).argsort()
    order = shuffled[labels[shuffled].argsort(stable=True)]  # class by class, shuffled within
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    chosen = rank < quantity[labels[order]]
    return order[~chosen].sort().values, order[chosen].sort().values


def split_validation(labels: Tensor, config: Data, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Indices (training, validation) of the training images, by `val_share` and `split_seed`.

    Args:
        labels: class ids of the training images.
        config: share and seed.
        classes: names of the classes.
    """
    if config.val_share == 0:
        return torch.arange(len(labels)), torch.arange(0)
    return stratified_split(labels, config.val_share, config.split_seed, _VALIDATION, classes)
