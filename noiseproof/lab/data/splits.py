"""Which images are for what: shares of every class, drawn by a hash, so that a split is the same on
every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.lab import config
from noiseproof.lab.data.images import DataError

__all__ = ["TEST", "split_off", "stratified"]

_VALIDATION, TEST = 0, 1  # counters that keep the two splits' draws apart
_FOR = ("to validate; --val-share 0 keeps none", "to test")


def stratified(
    labels: Tensor, share: float, seed: int, purpose: int, classes: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Indices (rest, taken), ascending: `share` of each class is taken, by a hash of (seed, index).

    ceil(share * N) are taken in all, divided among the classes by largest remainder, and at least
    one of each class lands on either side.

    >>> rest, taken = stratified(torch.tensor([0, 0, 0, 0, 1, 1]), 0.5, 0, 0, "ab")
    >>> len(rest), (taken < 4).tolist()
    (3, [True, True, False])
    """
    counts = torch.bincount(labels, minlength=len(classes))
    for name, count in zip(classes, counts.tolist(), strict=True):
        if count < 2:
            raise DataError(
                f"class {name!r} has {count} image(s) left, too few for {share:.0%} {_FOR[purpose]}"
            )
    quota = counts.double() * share
    take = quota.floor().long().clamp(min=1)
    spare = math.ceil(share * len(labels) - 1e-9) - int(take.sum())
    take[(take - quota).argsort(stable=True)[: max(spare, 0)]] += 1
    take = take.minimum(counts - 1)

    shuffled = draws.keys(seed, purpose, torch.arange(len(labels))).argsort()
    order = shuffled[labels[shuffled].argsort(stable=True)]  # class after class, shuffled within
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    taken = place < take[labels[order]]
    return order[~taken].sort().values, order[taken].sort().values


def split_off(labels: Tensor, config: config.Data, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Indices (rest, kept): what is split off the training images by `val_share`."""
    if config.val_share == 0:
        return torch.arange(len(labels)), torch.arange(0)
    return stratified(labels, config.val_share, config.split_seed, _VALIDATION, classes)
