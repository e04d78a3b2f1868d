"""The statistics behind a table: means and standard deviations, confidence intervals, tests.

Two classifiers are compared on the same images under the same noise, so tests over images are
paired: only the images on which the two disagree count. These tests hold the trained models fixed.
Whether another training would change the ranking is a question about trainings, answered by
Welch's t-test and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.05  # of significance
CONFIDENCE = 1 - LEVEL  # of intervals
RESAMPLES = 10_000  # of the bootstrap


class MeanStd(NamedTuple):
    """A mean, the sample standard deviation (n - 1; None for a single value), and n."""

    mean: float
    std: float | None
    n: int


class Difference(NamedTuple):
    """The mean of the first minus that of the second, with its 95 % confidence interval."""

    diff: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def mean_std(values: ArrayLike) -> MeanStd:
    """Mean and sample standard deviation, √(Σ(x - mean)² / (n - 1)), of `values`.

    >>> mean_std([1.0, 2.0, 3.0])
    MeanStd(mean=2.0, std=1.0, n=3)
    >>> mean_std([0.5])
    MeanStd(mean=0.5, std=None, n=1)
    """
    x = np.asarray(values, dtype=float)
    return MeanStd(float(x.mean()), float(x.std(ddof=1)) if x.size > 1 else None, int(x.size))


def pooled_std(stds: Sequence[float | None]) -> float | None:
    """The typical standard deviation of several groups, √(mean of the variances).

    Args:
        stds: one standard deviation per group, None for a group of one value; None is returned if
            all are None.

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


def mcnemar_exact(correct_a: ArrayLike, correct_b: ArrayLike) -> float:
    """The two-sided p-value of McNemar's exact test: are the n = b + c disagreements split evenly?

    b counts the images on which only the first is right, c those on which only the second is. Under
    equal accuracy b is Binomial(n, 1/2), so p = min(1, 2 · Σ_{k ≤ min(b, c)} C(n, k) / 2ⁿ).

    Args:
        correct_a: whether the first classifier is right on each image, shape n.
        correct_b: the same for the second classifier, on the same images.

    >>> mcnemar_exact([1] * 6 + [0], [0] * 6 + [1])  # 2 · (1 + 7) / 128
    0.125
    """
    from scipy.stats import binomtest  # about a second to import

    first, second = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    b, c = int((first & ~second).sum()), int((~first & second).sum())
    return 1.0 if b == c else float(binomtest(b, b + c).pvalue)


def paired_bootstrap(correct_a: ArrayLike, correct_b: ArrayLike) -> Difference:
    """Percentile interval of the accuracy difference a - b, resampling images with replacement.

    Draws are averaged for each image first: the images are the sample, and ten noisy views of one
    image are not ten images. The difference of an image takes few values (21 for ten draws), so a
    resample is a multinomial draw of how often each value occurs. That has the same distribution
    as picking n images and is cheaper: 0.02 s for 10,000 images, where scipy.stats.bootstrap
    takes 2 s.

    Args:
        correct_a: whether the first classifier is right, draws x n.
        correct_b: the same for the second classifier, on the same images.

    >>> paired_bootstrap([[1, 1, 0, 1]], [[1, 1, 0, 1]])
    Difference(diff=0.0, low=0.0, high=0.0)
    """
    first, second = np.asarray(correct_a, dtype=float), np.asarray(correct_b, dtype=float)
    per_image = np.round(first.mean(axis=0) - second.mean(axis=0), 12)  # equal values become one
    values, counts = np.unique(per_image, return_counts=True)
    n = per_image.size
    rng = np.random.default_rng(0)
    chunk = max(1, 4_000_000 // values.size)  # bounds memory when there are many values
    means = [
        rng.multinomial(n, counts / n, size=min(chunk, RESAMPLES - start)) @ values / n
        for start in range(0, RESAMPLES, chunk)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Difference(float(per_image.mean()), float(low), float(high))


def welch(first: ArrayLike, second: ArrayLike) -> tuple[Difference, float]:
    """Welch's interval of the difference of two means, for variances that may differ, and the
    two-sided p-value of the t-test.

    The interval contains 0 exactly if p ≥ LEVEL. If neither group has any spread, the statistic is
    undefined: the interval has no width, and p is 1 for equal means and 0 otherwise.

    Args:
        first: two or more values.
        second: two or more values.

    >>> difference, p = welch([1.0, 3.0], [0.0, 0.0])  # mean 2, error 1, one degree of freedom
    >>> [round(x, 4) for x in difference]  # Cauchy: tan(0.475 π) = 12.7062
    [2.0, -10.7062, 14.7062]
    """
    from scipy.stats import t  # about a second to import

    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    diff = float(a.mean()) - float(b.mean())
    var_a, var_b = (float(x.std(ddof=1)) ** 2 / x.size for x in (a, b))
    if var_a + var_b < 1e-30:  # rounding of equal values
        return Difference(diff, diff, diff), 1.0 if abs(diff) < 1e-12 else 0.0
    # Not ttest_ind, which warns of precision loss if one of the two groups has no spread.
    error = math.sqrt(var_a + var_b)
    df = (var_a + var_b) ** 2 / (var_a**2 / (a.size - 1) + var_b**2 / (b.size - 1))
    half = error * float(t.ppf((1 + CONFIDENCE) / 2, df))
    p = 2 * float(t.sf(abs(diff) / error, df))
    return Difference(diff, diff - half, diff + half), p
