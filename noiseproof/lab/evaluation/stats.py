"""The statistics behind a table: means and standard deviations, and comparisons of its methods.

The best of a column is chosen after looking, so a test of each rival at 5 % would call some method
worse in far more than 5 % of columns. The comparisons here therefore hold for all pairs of the
methods of a column together (Tukey): if all are equally accurate, the chance that any pair is
called different is 5 %. Intervals are simultaneous in the same sense, so that an interval excludes
0 exactly if p < `LEVEL`. With two methods they are the usual test and interval of a difference.

Methods are compared on the same images under the same noise, so the comparison over images is
paired. It holds the trained models fixed. Whether another training would change the ranking is a
question about trainings, answered by the comparison over trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Correct = Callable[[str, str, str], "NDArray[Any] | None"]
"""(run, weights, perturbation) -> whether each prediction is right, draws x n; None if unknown."""
LEVEL = 0.05  # of significance, for all comparisons of a column together


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


def is_unbalanced(labels: ArrayLike) -> bool:
    """Whether the most frequent class in `labels` has at least twice the images of the rarest.

    >>> is_unbalanced([0, 0, 1]), is_unbalanced([0, 0, 1, 1, 1])
    (True, False)
    """
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    return bool(counts.max() >= 2 * counts.min())


@dataclass(frozen=True)
class ClassScores:
    """What accuracy hides if classes are unbalanced."""

    macro_f1: float  # mean over classes of the harmonic mean of precision and recall
    recall: dict[str, float]  # share of the images of each class that are classified correctly


def class_scores(labels: ArrayLike, predicted: ArrayLike, classes: Sequence[str]) -> ClassScores:
    """Macro-F1 and the recall of each class with images.

    Args:
        labels: true class of each image.
        predicted: predicted class of each image.
        classes: names of the classes.

    >>> class_scores([0, 0, 0, 1], [0, 0, 0, 0], ["cat", "dog"])
    ClassScores(macro_f1=0.42857142857142855, recall={'cat': 1.0, 'dog': 0.0})
    """
    true, given = np.asarray(labels), np.asarray(predicted)
    present, images = np.unique(true, return_counts=True)
    hits = np.array([np.sum((true == k) & (given == k)) for k in present])
    answers = np.array([np.sum(given == k) for k in present])
    recall = {classes[int(k)]: float(r) for k, r in zip(present, hits / images, strict=True)}
    return ClassScores(float(np.mean(2 * hits / (images + answers))), recall)


def mean_class_scores(scores: Sequence[ClassScores]) -> ClassScores | None:
    """The mean of each; None if there are none or their classes differ."""
    if len({tuple(each.recall) for each in scores}) != 1:
        return None
    names = scores[0].recall
    recall = {name: float(np.mean([each.recall[name] for each in scores])) for name in names}
    return ClassScores(float(np.mean([each.macro_f1 for each in scores])), recall)


def range_p(t: float, groups: int, df: float = math.inf) -> float:
    """The chance that the largest |t| among all pairs of `groups` equal means is `t` or more.

    This is the distribution of Tukey's studentised range, at √2 · t. The quadrature takes 0.2 ms;
    scipy.stats.studentized_range takes 25 ms, and 400 ms for a quantile.

    Args:
        t: a difference of two means in units of its standard error.
        groups: number of means, two or more.
        df: degrees of freedom of the standard error.

    >>> round(range_p(1.96, groups=2), 4), round(range_p(1.96, groups=5), 4)
    (0.05, 0.2858)
    """
    from scipy import special

    scale, weight = np.ones(1), np.ones(1)  # of the standard error
    if math.isfinite(df):  # its square is a gamma variable; the trapezoidal rule in its logarithm
        ends = special.gammaincinv(df / 2, 1e-9), special.gammainccinv(df / 2, 1e-9)
        x, step = np.linspace(*np.log(ends), num=72, retstep=True)
        weight = np.exp(df / 2 * x - np.exp(x) - special.gammaln(df / 2)) * step
        scale = np.sqrt(np.exp(x) / (df / 2))
    z, step = np.linspace(-8.0, 8.0, num=64, retstep=True)  # the smallest of the means
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * step
    others = special.ndtr(z[:, None] + math.sqrt(2) * t * scale) - special.ndtr(z)[:, None]
    smaller = groups * (density[:, None] * others ** (groups - 1)).sum(axis=0)
    return float(np.clip((weight * (1 - smaller)).sum(), 0.0, 1.0))


@lru_cache
def critical_t(groups: int, df: float = math.inf) -> float:
    """The value that the largest |t| among all pairs exceeds with a chance of `LEVEL` if all means
    are equal. Arguments as for `range_p`.

    >>> round(critical_t(2), 3), round(critical_t(5), 3), round(critical_t(2, df=1.0), 3)
    (1.96, 2.728, 12.706)
    """
    from scipy.optimize import brentq
    from scipy.special import stdtrit

    pairs = groups * (groups - 1) / 2
    low, high = (float(stdtrit(df, 1 - LEVEL / 2 / count)) for count in (1, pairs))  # Bonferroni
    root: Any = brentq(lambda t: range_p(t, groups, df) - LEVEL, 0.99 * low, 1.01 * high, xtol=1e-6)
    return float(root)


def compare_images(
    first: ArrayLike, second: ArrayLike, *, predictions: int, groups: int
) -> tuple[Difference, float] | None:
    """The difference of two accuracies over the same images, simultaneous for all pairs of a column
    (Tukey-Kramer), and its p-value. None if there are too few images.

    With c from `critical_t`, differences of mean m and variance v over n images give the interval
    m ± c √(v / (n - c²)): the values δ that a score test does not reject, for which the variance is
    taken around δ. It excludes 0 exactly if |m| > c √((v + m²) / n). The variance counts two more
    images, on which the two differ by one prediction in either direction: without them, four
    images out of thousands could decide. With them, two methods with one prediction per image
    differ significantly if the p-value of McNemar's exact test is below 0.05, and not if it is
    above 0.064.

    Args:
        first: share of correct predictions for each image, over all draws and trainings. Draws are
            averaged because the images are the sample: ten noisy views are not ten images.
        second: the same for the other method, on the same images.
        predictions: how many predictions these shares are based on; of two numbers, the smaller.
        groups: number of methods in the column.

    >>> same = compare_images([1, 1, 0, 1] * 9, [1, 1, 0, 1] * 9, predictions=1, groups=2)
    >>> same and (same[0].diff, round(same[0].high, 3), same[1])
    (0.0, 0.081, 1.0)
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    n, squared = differences.size, critical_t(groups) ** 2
    if n < 2 * squared:  # 8 images for two methods, 15 for five
        return None
    mean = float(differences.mean())
    variance = (float(np.square(differences - mean).sum()) + 2 / predictions**2) / n
    half = math.sqrt(squared * variance / (n - squared))
    p = range_p(abs(mean) / math.sqrt((variance + mean**2) / n), groups)
    return Difference(mean, mean - half, mean + half), p


def compare_trainings(
    first: ArrayLike, second: ArrayLike, *, groups: int
) -> tuple[Difference, float] | None:
    """The difference of two mean accuracies over trainings, simultaneous for all pairs of a column
    (Games-Howell: Welch's standard error and degrees of freedom), and its p-value. None if one side
    has a single training, or neither has any spread.

    Args:
        first: the accuracy of each training.
        second: the same for the other method.
        groups: number of methods in the column.

    >>> comparison = compare_trainings([1.0, 3.0], [0.0, 0.0], groups=2)
    >>> comparison and [round(x, 4) for x in comparison[0]]  # Cauchy: tan(0.475 π) = 12.7062
    [2.0, -10.7062, 14.7062]
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if min(a.size, b.size) < 2:
        return None
    var_a, var_b = (float(x.var(ddof=1)) / x.size for x in (a, b))
    if var_a + var_b < 1e-30:  # rounding of equal values
        return None
    diff, error = float(a.mean()) - float(b.mean()), math.sqrt(var_a + var_b)
    df = (var_a + var_b) ** 2 / (var_a**2 / (a.size - 1) + var_b**2 / (b.size - 1))
    half = critical_t(groups, df) * error
    return Difference(diff, diff - half, diff + half), range_p(abs(diff) / error, groups, df)
