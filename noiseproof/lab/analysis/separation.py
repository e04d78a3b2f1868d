"""How well classes part in a feature space, in numbers that no projection can flatter.

Both figures are of the raw features and need no fitting: the share of samples whose nearest
neighbours vote for their class, and the silhouette. Distances are taken a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Separation", "knn_accuracy", "separation", "silhouette"]

_ROWS = 1024  # rows of the distance matrix in memory


class Separation(NamedTuple):
    knn: float  # leave-one-out accuracy of the nearest neighbours
    silhouette: float  # mean over samples, in [-1, 1]


def separation(features: Tensor, labels: Tensor, neighbours: int = 10) -> Separation:
    """Both figures of B x D features."""
    return Separation(
        knn_accuracy(features, labels, neighbours), float(silhouette(features, labels).mean())
    )


@torch.no_grad()
def knn_accuracy(features: Tensor, labels: Tensor, neighbours: int = 10) -> float:
    """Share of samples that the k nearest *other* samples vote into their own class.

    Fewer than k others: all of them vote. Of classes with equally many votes, the one with the
    nearest neighbour wins.

    >>> points = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    >>> knn_accuracy(points, torch.tensor([0, 0, 1, 1]), 1)
    1.0
    """
    count = _check(features, labels)
    k = min(neighbours, len(features) - 1)
    if k < 1:
        raise ValueError(f"needs 1 neighbour and 2 samples, got {neighbours} and {len(features)}")
    right = 0
    # A vote each, and for ties a half, a quarter, ...: the nearest outweighs all behind it.
    order = torch.arange(1, k + 1, dtype=torch.float64, device=features.device)
    weight = 1 + 0.5**order
    for rows, apart in _distances(features):
        apart[torch.arange(len(rows), device=rows.device), rows] = torch.inf
        near = labels[apart.topk(k, largest=False).indices]  # rows x k, nearest first
        votes = weight.new_zeros(len(rows), count)
        votes.scatter_add_(1, near, weight.expand(len(rows), -1))
        right += int((votes.argmax(1) == labels[rows]).sum())
    return right / len(features)


@torch.no_grad()
def silhouette(features: Tensor, labels: Tensor) -> Tensor:
    """s = (b − a) / max(a, b) of each sample, B.

    a is the mean distance to the others of its class, b that to the nearest other class. Samples
    that are alone in their class have s = 0.

    >>> silhouette(torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0, 0, 1])).tolist()
    [0.75, 0.6666666865348816, 0.0]
    """
    count = _check(features, labels)
    totals = torch.bincount(labels, minlength=count).to(features.dtype)
    member = torch.nn.functional.one_hot(labels, count).to(features.dtype)
    found = features.new_zeros(len(features))
    for rows, apart in _distances(features):
        own = labels[rows][:, None]
        sums = apart @ member  # rows x classes
        a = sums.gather(1, own) / (totals[own] - 1).clamp(min=1)
        means = torch.where(totals > 0, sums / totals.clamp(min=1), torch.inf)
        b = means.scatter(1, own, torch.inf).amin(1, keepdim=True)
        s = (b - a) / torch.maximum(a, b).clamp(min=torch.finfo(a.dtype).tiny)
        alone = (totals[own] <= 1) | b.isinf()
        found[rows] = torch.where(alone, 0.0, s)[:, 0]
    return found


def _distances(features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(numbers of the rows, their distances to all), exactly: neighbours may be very close."""
    index = torch.arange(len(features), device=features.device)
    for rows in index.split(_ROWS):
        mode = "donot_use_mm_for_euclid_dist"
        yield rows, torch.cdist(features[rows], features, compute_mode=mode)


def _check(features: Tensor, labels: Tensor) -> int:
    fits = features.ndim == 2 and labels.shape == features.shape[:1] and len(labels) > 0
    if not fits or not features.is_floating_point() or labels.dtype != torch.int64:
        raise ValueError(
            "features must be B x D floats and labels B of int64, got "
            f"{tuple(features.shape)} of {features.dtype} and {tuple(labels.shape)} of "
            f"{labels.dtype}"
        )
    return int(labels.max()) + 1
