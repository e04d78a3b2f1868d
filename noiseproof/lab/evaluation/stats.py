"""The statistics that stand behind a table: means and spreads, intervals, tests.

Two classifiers are compared on the same images under the same noise, so tests over images are
paired: what counts is where the two disagree. They hold the trained models fixed; whether another
training would give another order is asked of the trainings, by Welch's test and its interval.
Needs numpy and the standard library alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Difference",
    "McNemar",
    "Summary",
    "mcnemar_exact",
    "most_frequent",
    "paired_bootstrap",
    "pooled_std",
    "student_p",
    "summary",
    "welch",
    "welch_interval",
    "wilson",
]


class Summary(NamedTuple):
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
    """Accuracy of the first minus that of the second, and the interval it lies in."""

    diff: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def summary(values: ArrayLike) -> Summary:
    """Mean and sample standard deviation, √(Σ(x - mean)² / (n - 1)).

    >>> summary([1.0, 2.0, 3.0])
    Summary(mean=2.0, std=1.0, n=3)
    >>> summary([0.5])
    Summary(mean=0.5, std=None, n=1)
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    if x.size == 0:
        raise ValueError("a summary needs at least one value, got none")
    return Summary(float(x.mean()), float(x.std(ddof=1)) if x.size > 1 else None, int(x.size))


def pooled_std(stds: Sequence[float | None]) -> float | None:
    """The typical spread of several groups, √(mean of the variances); None if none has a spread.

    >>> pooled_std([3.0, None, 4.0]) == math.sqrt(12.5)
    True
    """
    known = [s * s for s in stds if s is not None]
    return math.sqrt(sum(known) / len(known)) if known else None


def most_frequent(labels: ArrayLike) -> float:
    """The share of the most frequent class: the accuracy of one answer for all images.

    >>> most_frequent([2, 0, 2, 1])
    0.5
    """
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    return float(counts.max() / counts.sum())


def mcnemar_exact(correct_a: ArrayLike, correct_b: ArrayLike) -> McNemar:
    """McNemar's exact test: are the n = b + c disagreements split evenly?

    Under equal accuracy b is Binomial(n, 1/2), so p = min(1, 2 · Σ_{k ≤ min(b, c)} C(n, k) / 2ⁿ).
    The sum is taken in logarithms: it neither overflows nor vanishes for 10⁵ disagreements.

    >>> a = [1] * 6 + [0] * 1
    >>> b = [0] * 6 + [1] * 1
    >>> mcnemar_exact(a, b)  # 2 · (1 + 7) / 128
    McNemar(b=6, c=1, p=0.125)
    """
    first, second = _pair(correct_a, correct_b, 1)
    first, second = first > 0.5, second > 0.5
    b = int(np.count_nonzero(first & ~second))
    c = int(np.count_nonzero(~first & second))
    n, least = b + c, min(b, c)
    if b == c:
        return McNemar(b, c, 1.0)
    k = np.arange(least, dtype=np.float64)
    terms = np.concatenate([[0.0], np.cumsum(np.log(n - k) - np.log(k + 1))])  # log C(n, k)
    top = terms[-1]  # C(n, k) grows up to n / 2
    log_p = top + math.log(np.exp(terms - top).sum()) + (1 - n) * math.log(2)
    p = math.exp(min(0.0, log_p))
    return McNemar(b, c, float(f"{p:.12g}"))  # the digits beyond are rounding


def paired_bootstrap(
    correct_a: ArrayLike,
    correct_b: ArrayLike,
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Percentile interval of the accuracy difference a - b, resampling images with replacement.

    Arguments are right-or-wrong of shape n, or draws x n. Draws are averaged for each image first:
    the images are the sample, ten noisy views of one image are not ten images. The difference of an
    image takes few values (21 for ten draws), so a resample is a multinomial draw of how often each
    value occurs, which is the same distribution as picking n images and far cheaper.

    >>> paired_bootstrap([1, 1, 0, 1], [1, 1, 0, 1])
    Difference(diff=0.0, low=0.0, high=0.0)
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    first, second = _pair(correct_a, correct_b, 2)
    each = np.round(first.mean(axis=0) - second.mean(axis=0), 12)  # equal values become one
    values, counts = np.unique(each, return_counts=True)
    n = each.size
    rng = np.random.default_rng(seed)
    chunk = max(1, 4_000_000 // values.size)  # bounds memory where values are many
    means = [
        rng.multinomial(n, counts / n, size=min(chunk, resamples - start)) @ values / n
        for start in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(each.mean()), float(low), float(high))


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; it stays inside [0, 1] and works at 0 and n.

    >>> low, high = wilson(10, 10)
    >>> round(low, 4), high
    (0.7225, 1.0)
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"successes must lie in [0, n] with n > 0, got {successes} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def welch(first: ArrayLike, second: ArrayLike) -> float:
    """Two-sided p-value of Welch's t-test: equal means, variances that may differ.

    With no spread in either group the statistic is undefined: p is 1 for equal means, 0 otherwise.

    >>> welch([0.9, 0.9], [0.9, 0.9])
    1.0
    """
    diff, error, df = _welch(first, second)
    if error == 0.0:
        return 1.0 if abs(diff) < 1e-12 else 0.0
    return student_p(diff / error, df)


def welch_interval(first: ArrayLike, second: ArrayLike, level: float = 0.95) -> Difference:
    """Welch's t interval of the difference of means: it contains 0 where p of `welch` is at least
    1 - level. With no spread in either group it has no width.

    >>> found = welch_interval([1.0, 3.0], [0.0, 0.0])  # mean 2, error 1, one degree of freedom
    >>> [round(x, 4) for x in found]  # Cauchy: tan(0.475 π) = 12.7062
    [2.0, -10.7062, 14.7062]
    """
    diff, error, df = _welch(first, second)
    half = 0.0 if error == 0.0 else error * _student_quantile(1 - level, df)
    return Difference(diff, diff - half, diff + half)


def _welch(first: ArrayLike, second: ArrayLike) -> tuple[float, float, float]:
    """Difference of means, its standard error (0 where there is no spread), degrees of freedom."""
    a, b = summary(first), summary(second)
    if a.std is None or b.std is None:
        raise ValueError(f"Welch's test needs two values on each side, got {a.n} and {b.n}")
    va, vb = a.std**2 / a.n, b.std**2 / b.n
    if va + vb < 1e-30:  # rounding of equal values
        return a.mean - b.mean, 0.0, math.inf
    df = (va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))
    return a.mean - b.mean, math.sqrt(va + vb), df


def _student_quantile(p: float, df: float) -> float:
    """The t that |T| exceeds with probability `p`, by halving."""
    if not 0.0 < p < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {1 - p:g}")
    low, high = 0.0, 1.0
    while student_p(high, df) > p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > p else (low, middle)
    return high


def student_p(t: float, df: float) -> float:
    """P(|T| ≥ |t|) for Student's T with `df` degrees of freedom, I_x(df/2, 1/2), x = df/(df + t²).

    >>> round(student_p(1.0, 1.0), 12)  # Cauchy: half of it lies within [-1, 1]
    0.5
    """
    x = df / (df + t * t)
    return min(1.0, max(0.0, _incomplete_beta(df / 2, 0.5, x)))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, use the mirror image
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d = 1.0 / _not_zero(1.0 + term * d, tiny)
            c = _not_zero(1.0 + term / c, tiny)
            step = c * d
            fraction *= step
        if abs(step - 1.0) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def _not_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _pair(first: ArrayLike, second: ArrayLike, most: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both as float arrays over the same images: n for `most` = 1, draws x n for `most` = 2."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    for array in (a, b):
        if array.ndim not in range(1, most + 1):
            shape = "n" if most == 1 else "n or draws x n"
            raise ValueError(f"correctness must have shape {shape}, got {array.shape}")
    if a.shape[-1] != b.shape[-1] or a.shape[-1] == 0:
        raise ValueError(f"both must cover the same images, got {a.shape[-1]} and {b.shape[-1]}")
    return (np.atleast_2d(a), np.atleast_2d(b)) if most == 2 else (a, b)
