"""The statistics behind a table: means and standard deviations, confidence intervals, tests.

Two classifiers are compared on the same images under the same noise, so tests over images are
paired: only the images on which the two disagree count. These tests hold the trained models fixed.
Whether another training would change the ranking is a question about trainings, answered by
Welch's t-test and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class MeanStd(NamedTuple):
    """A mean, the sample standard deviation (n - 1; None for a single value), and n."""

    mean: float
    std: float | None
    n: int


class McNemar(NamedTuple):
    """`b`: only the first is right; `c`: only the second is; `p`: two-sided exact p-value."""

    b: int
    c: int
    p: float


class Difference(NamedTuple):
    """The mean of the first minus that of the second, with its confidence interval."""

    diff: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


class Welch(NamedTuple):
    """The difference of two means with Welch's t interval, and the two-sided p-value."""

    difference: Difference
    p: float


def mean_std(values: ArrayLike) -> MeanStd:
    """Mean and sample standard deviation, √(Σ(x - mean)² / (n - 1)), of `values`.

    >>> mean_std([1.0, 2.0, 3.0])
    MeanStd(mean=2.0, std=1.0, n=3)
    >>> mean_std([0.5])
    MeanStd(mean=0.5, std=None, n=1)
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    if x.size == 0:
        raise ValueError("a mean needs at least one value, got none")
    return MeanStd(float(x.mean()), float(x.std(ddof=1)) if x.size > 1 else None, int(x.size))


def pooled_std(stds: Sequence[float | None]) -> float | None:
    """The typical standard deviation of several groups, √(mean of the variances).

    Args:
        stds: one standard deviation per group, None for a group of one value; None is returned if
            all groups are so.

    >>> pooled_std([3.0, None, 4.0]) == math.sqrt(12.5)
    True
    """
    variances = [std * std for std in stds if std is not None]
    return math.sqrt(sum(variances) / len(variances)) if variances else None


def majority_share(labels: ArrayLike) -> float:
    """The share of the most frequent class in `labels`: the accuracy of always predicting it.

    >>> majority_share([2, 0, 2, 1])
    0.5
    """
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    return float(counts.max() / counts.sum())


def mcnemar_exact(correct_a: ArrayLike, correct_b: ArrayLike) -> McNemar:
    """McNemar's exact test: are the n = b + c disagreements split evenly?

    Under equal accuracy b is Binomial(n, 1/2), so p = min(1, 2 · Σ_{k ≤ min(b, c)} C(n, k) / 2ⁿ).

    Args:
        correct_a: whether the first classifier is right on each image, shape n.
        correct_b: the same for the second classifier, on the same images.

    >>> a = [1] * 6 + [0] * 1
    >>> b = [0] * 6 + [1] * 1
    >>> mcnemar_exact(a, b)  # 2 · (1 + 7) / 128
    McNemar(b=6, c=1, p=0.125)
    """
    from scipy.stats import binomtest  # about a second to import

    first, second = (x > 0.5 for x in _paired(correct_a, correct_b, max_dims=1))
    b = int(np.count_nonzero(first & ~second))
    c = int(np.count_nonzero(~first & second))
    return McNemar(b, c, 1.0 if b == c else float(binomtest(b, b + c).pvalue))


def paired_bootstrap(
    correct_a: ArrayLike,
    correct_b: ArrayLike,
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Percentile interval of the accuracy difference a - b, resampling images with replacement.

    Draws are averaged for each image first: the images are the sample, and ten noisy views of one
    image are not ten images. The difference of an image takes few values (21 for ten draws), so a
    resample is a multinomial draw of how often each value occurs. That has the same distribution
    as picking n images and is cheaper: 0.02 s for 10,000 images, where scipy.stats.bootstrap
    takes 2 s.

    Args:
        correct_a: whether the first classifier is right, shape n or draws x n.
        correct_b: the same for the second classifier, on the same images.
        resamples: number of bootstrap resamples.
        level: confidence level of the interval.
        seed: seed of the resampling.

    >>> paired_bootstrap([1, 1, 0, 1], [1, 1, 0, 1])
    Difference(diff=0.0, low=0.0, high=0.0)
    """
    _check_level(level)
    first, second = _paired(correct_a, correct_b, max_dims=2)
    per_image = np.round(first.mean(axis=0) - second.mean(axis=0), 12)  # equal values become one
    values, counts = np.unique(per_image, return_counts=True)
    n = per_image.size
    rng = np.random.default_rng(seed)
    chunk = max(1, 4_000_000 // values.size)  # bounds memory when there are many values
    means = [
        rng.multinomial(n, counts / n, size=min(chunk, resamples - start)) @ values / n
        for start in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(per_image.mean()), float(low), float(high))


def welch(first: ArrayLike, second: ArrayLike, level: float = 0.95) -> Welch:
    """Welch's t-test of equal means, for variances that may differ, and its interval.

    The interval contains 0 exactly if p ≥ 1 - level. If neither group has any spread, the statistic
    is undefined: the interval has no width, and p is 1 for equal means and 0 otherwise.

    Args:
        first: two or more values.
        second: two or more values.
        level: confidence level of the interval.

    >>> found = welch([1.0, 3.0], [0.0, 0.0])  # mean 2, error 1, one degree of freedom
    >>> [round(x, 4) for x in found.difference]  # Cauchy: tan(0.475 π) = 12.7062
    [2.0, -10.7062, 14.7062]
    >>> welch([0.9, 0.9], [0.9, 0.9]).p
    1.0
    """
    from scipy.stats import t  # about a second to import

    _check_level(level)
    a, b = mean_std(first), mean_std(second)
    if a.std is None or b.std is None:
        raise ValueError(f"Welch's test needs two values on each side, got {a.n} and {b.n}")
    diff, var_a, var_b = a.mean - b.mean, a.std**2 / a.n, b.std**2 / b.n
    if var_a + var_b < 1e-30:  # rounding of equal values
        return Welch(Difference(diff, diff, diff), 1.0 if abs(diff) < 1e-12 else 0.0)
    # Not ttest_ind, which warns of precision loss if one of the two groups has no spread.
    error = math.sqrt(var_a + var_b)
    df = (var_a + var_b) ** 2 / (var_a**2 / (a.n - 1) + var_b**2 / (b.n - 1))
    half = error * float(t.ppf((1 + level) / 2, df))
    p = 2 * float(t.sf(abs(diff) / error, df))
    return Welch(Difference(diff, diff - half, diff + half), p)


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level:g}")


def _paired(
    first: ArrayLike, second: ArrayLike, max_dims: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both as float arrays over the same images: shape n, and for `max_dims` = 2 draws x n."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    for array in (a, b):
        if array.ndim not in range(1, max_dims + 1):
            shape = "n" if max_dims == 1 else "n or draws x n"
            raise ValueError(f"correctness must have shape {shape}, got {array.shape}")
    if a.shape[-1] != b.shape[-1] or a.shape[-1] == 0:
        raise ValueError(f"both must cover the same images, got {a.shape[-1]} and {b.shape[-1]}")
    return (np.atleast_2d(a), np.atleast_2d(b)) if max_dims == 2 else (a, b)
