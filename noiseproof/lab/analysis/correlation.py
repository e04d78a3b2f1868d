"""How curvature and robustness go together, sample by sample: plain functions of two vectors.

`curvature` is one Λ a test sample, `counts` how many of `draws` noisy copies of it were classified
rightly. Needs numpy alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Groups", "Retained", "count_groups", "pearson", "ranks", "retained_share"]

Array = NDArray[np.float64]
SHARES = tuple(np.round(np.arange(0.05, 1.0001, 0.05), 2).tolist())


class Retained(NamedTuple):
    """Accuracy on the share of samples with the lowest curvature."""

    share: Array
    accuracy: Array
    n: NDArray[np.int64]  # how many samples that is


class Groups(NamedTuple):
    """Samples grouped by k = 0..draws right answers, and how k and mean curvature correlate."""

    k: NDArray[np.int64]
    n: NDArray[np.int64]
    mean: Array  # mean curvature of each group; NaN where it is empty
    r_groups: float  # Pearson's r of k and the means of the groups that have samples
    r_samples: float  # Pearson's r of count and curvature over all samples
    rank_samples: float  # Spearman's: the same of ranks, which a few huge curvatures cannot rule
    slope: float  # of the line through the groups' means, by least squares
    intercept: float

    @property
    def empty(self) -> list[int]:
        """The k that no sample has."""
        return self.k[self.n == 0].tolist()


def retained_share(
    curvature: ArrayLike, accuracy: ArrayLike, shares: ArrayLike = SHARES
) -> Retained:
    """Mean `accuracy` (of each sample, 0 to 1) over the p·n samples of lowest curvature, per p.

    At least one sample is kept; equal curvatures stay in the order given.

    >>> retained_share([3.0, 1.0, 2.0, 4.0], [0.5, 1.0, 0.8, 0.0], [0.25, 0.5, 1.0]).accuracy
    array([1.   , 0.9  , 0.575])
    """
    x, y = _pair(curvature, accuracy)
    p = np.asarray(shares, dtype=np.float64)
    if len(p) == 0 or p.min() <= 0 or p.max() > 1:
        raise ValueError(f"shares must lie in (0, 1], got {p.tolist()}")
    means = np.cumsum(y[np.argsort(x, kind="stable")]) / np.arange(1, len(y) + 1)
    kept = np.clip(np.rint(p * len(x)).astype(np.int64), 1, len(x))
    return Retained(p, means[kept - 1], kept)


def count_groups(curvature: ArrayLike, counts: ArrayLike, draws: int) -> Groups:
    """Mean curvature of the samples that were right k times of `draws`, for k = 0..draws.

    >>> found = count_groups([4.0, 2.0, 1.0, 1.0], [0, 1, 2, 2], draws=3)
    >>> found.n.tolist(), found.mean.tolist(), found.empty
    ([1, 1, 2, 0], [4.0, 2.0, 1.0, nan], [3])
    >>> round(found.slope, 12), round(found.r_groups, 4)
    (-1.5, -0.982)
    """
    x, y = _pair(curvature, counts)
    k = y.astype(np.int64)
    if not np.array_equal(k, y) or k.min() < 0 or k.max() > draws:
        raise ValueError(f"counts must be whole numbers in [0, {draws}]")
    n = np.bincount(k, minlength=draws + 1)
    sums = np.bincount(k, weights=x, minlength=draws + 1)
    mean = np.divide(sums, n, out=np.full(draws + 1, np.nan), where=n > 0)
    ks, has = np.arange(draws + 1), n > 0
    slope = intercept = float("nan")
    if has.sum() > 1:
        away = ks[has] - ks[has].mean()
        slope = float(away @ mean[has] / (away @ away))
        intercept = float(mean[has].mean() - slope * ks[has].mean())
    return Groups(
        ks,
        n,
        mean,
        pearson(ks[has], mean[has]),
        pearson(k, x),
        pearson(ranks(k), ranks(x)),
        slope,
        intercept,
    )


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's r; NaN for fewer than two points or where one side does not vary.

    >>> round(pearson([1, 2, 3], [2, 4, 7]), 6)
    0.993399
    >>> pearson([1, 1], [0, 5])
    nan
    """
    a, b = _pair(x, y)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if len(a) > 1 and size > 0 else float("nan")


def ranks(values: ArrayLike) -> Array:
    """Ranks from 1; equal values share their mean rank.

    >>> ranks([10.0, 30.0, 10.0]).tolist()
    [1.5, 3.0, 1.5]
    """
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[place]


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) == 0:
        raise ValueError(f"need two vectors of one length, got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("values must be finite numbers, got NaN or infinity")
    return x, y
