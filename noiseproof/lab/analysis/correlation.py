"""How curvature and robustness correlate over samples: functions of two vectors.

`curvature` has one Λ per test sample; `counts` says how many of `draws` noisy copies of the sample
were classified correctly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
FEWEST_GROUPS = 5  # below that, a correlation of group means is mostly chance
SHARES = tuple(np.round(np.arange(0.05, 1.0001, 0.05), 2).tolist())


class Retained(NamedTuple):
    """Accuracy on the share of samples with the lowest curvature."""

    share: Array
    accuracy: Array
    n: NDArray[np.int64]  # number of samples


class Groups(NamedTuple):
    """Samples grouped by k = 0..draws correct predictions, and how k and curvature correlate."""

    k: NDArray[np.int64]
    n: NDArray[np.int64]
    mean: Array  # mean curvature of each group; NaN if it is empty
    r_groups: float  # Pearson's r of k and the mean curvatures of the nonempty groups; NaN if there
    # are fewer than `FEWEST_GROUPS`
    r_samples: float  # Pearson's r of count and curvature over all samples
    rank_samples: float  # Spearman's, which a few huge curvatures do not dominate
    slope: float  # of the least-squares line through the means of the groups
    intercept: float

    @property
    def empty(self) -> list[int]:
        """The k without samples."""
        return self.k[self.n == 0].tolist()


def retained_share(
    curvature: ArrayLike, accuracy: ArrayLike, shares: ArrayLike = SHARES
) -> Retained:
    """Mean accuracy over the p·n samples of lowest curvature, for each share p.

    At least one sample is retained; equal curvatures keep their order.

    Args:
        curvature: of each sample.
        accuracy: of each sample, from 0 to 1.
        shares: the p, in (0, 1].

    >>> retained_share([3.0, 1.0, 2.0, 4.0], [0.5, 1.0, 0.8, 0.0], [0.25, 0.5, 1.0]).accuracy
    array([1.   , 0.9  , 0.575])
    """
    x, y = _pair(curvature, accuracy)
    p = np.asarray(shares, dtype=np.float64)
    means = np.cumsum(y[np.argsort(x, kind="stable")]) / np.arange(1, len(y) + 1)
    n = np.clip(np.rint(p * len(x)).astype(np.int64), 1, len(x))
    return Retained(p, means[n - 1], n)


def lowest(values: ArrayLike, share: float) -> Array:
    """The lowest `share` of the values, in (0, 1], ascending; at least one.

    >>> lowest([3.0, 1.0, 2.0, 9.0], 0.75).tolist()
    [1.0, 2.0, 3.0]
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return ordered[: max(1, round(share * len(ordered)))]


def count_groups(curvature: ArrayLike, counts: ArrayLike, draws: int) -> Groups:
    """Mean curvature of the samples that were classified correctly in k draws, for k = 0..draws.

    Args:
        curvature: of each sample.
        counts: draws in which each sample was classified correctly.
        draws: noisy copies of each sample.

    >>> groups = count_groups([4.0, 2.0, 1.0, 1.0], [0, 1, 2, 2], draws=3)
    >>> groups.n.tolist(), groups.mean.tolist(), groups.empty
    ([1, 1, 2, 0], [4.0, 2.0, 1.0, nan], [3])
    >>> round(groups.slope, 12), round(groups.r_samples, 4), groups.r_groups
    (-1.5, -0.9847, nan)
    """
    x, y = _pair(curvature, counts)
    k = y.astype(np.int64)
    if not np.array_equal(k, y) or k.min() < 0 or k.max() > draws:
        raise ValueError(f"counts must be whole numbers in [0, {draws}]")
    n = np.bincount(k, minlength=draws + 1)
    sums = np.bincount(k, weights=x, minlength=draws + 1)
    mean = np.divide(sums, n, out=np.full(draws + 1, np.nan), where=n > 0)
    ks, nonempty = np.arange(draws + 1), n > 0
    line = np.polyfit(ks[nonempty], mean[nonempty], 1) if nonempty.sum() > 1 else (np.nan, np.nan)
    enough = nonempty.sum() >= FEWEST_GROUPS
    r_groups = _pearson(ks[nonempty], mean[nonempty]) if enough else float("nan")
    return Groups(ks, n, mean, r_groups, _pearson(k, x), spearman(k, x), *map(float, line))


def _pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's r; NaN for fewer than two points or if one side is constant."""
    from scipy.stats import pearsonr

    a, b = _pair(x, y)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(pearsonr(a, b).statistic)  # pyright: ignore[reportAttributeAccessIssue]


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation, where equal values share their mean rank; NaN for fewer than two
    points, and if one side is constant or has a NaN.

    >>> round(spearman([1, 2, 3], [2, 4, 400]), 6)
    1.0
    """
    from scipy.stats import rankdata

    a, b = rankdata(x), rankdata(y)
    return float("nan") if np.isnan(a).any() or np.isnan(b).any() else _pearson(a, b)


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or len(x) == 0:
        raise ValueError(f"need two vectors of the same length, got {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("values must be finite, got NaN or infinity")
    return x, y
