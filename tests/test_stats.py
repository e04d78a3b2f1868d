"""Statistics against textbook values, closed forms, and literal resampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import precision_recall_fscore_support

from noiseproof.lab.evaluation import stats


def outcomes(b: int, c: int, both: int = 5) -> tuple[list[int], list[int]]:
    """Right-or-wrong vectors with b images only the first gets, c only the second."""
    return [1] * b + [0] * c + [1] * both, [0] * b + [1] * c + [1] * both


def t_cdf(x: float, df: int) -> float:
    """Student's distribution function for whole df, by its finite sums (Abramowitz & Stegun
    26.7.3 and 26.7.4)."""
    angle = math.atan(x / math.sqrt(df))
    cos, sin = math.cos(angle), math.sin(angle)
    term, total = cos ** (df % 2), 0.0
    for power in range(df % 2, df - 1, 2):
        total += term
        term *= cos * cos * (power + 1) / (power + 2)
    return 0.5 + ((angle + sin * total) / math.pi if df % 2 else sin * total / 2)


def test_the_standard_deviation_uses_n_minus_one():
    values = [0.91, 0.93, 0.92, 0.97]
    mean = sum(values) / 4
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    assert stats.mean_std(values) == pytest.approx((mean, std, 4))
    assert stats.mean_std([1.0, 3.0]) == pytest.approx((2.0, math.sqrt(2), 2))


def test_the_pooled_spread_is_the_root_of_the_mean_variance():
    assert stats.pooled_std([0.1, 0.3]) == pytest.approx(math.sqrt((0.01 + 0.09) / 2))
    assert stats.pooled_std([None, None]) is None


# Upper 5 % points of the studentised range, as printed in textbooks.
PRINTED = [(2, 5, 3.64), (3, 10, 3.88), (5, 4, 6.29), (10, 5, 6.99), (5, math.inf, 3.86)]


@pytest.mark.parametrize(("groups", "df", "q"), PRINTED)
def test_the_critical_value_is_the_printed_one(groups: int, df: float, q: float):
    assert math.sqrt(2) * stats.critical_t(groups, df) == pytest.approx(q, abs=0.006)


@pytest.mark.parametrize("df", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("t", [0.5, 2.0, 6.0])
def test_with_two_groups_the_range_is_students_distribution(t: float, df: int):
    assert stats.range_p(t, 2, df) == pytest.approx(2 * (1 - t_cdf(t, df)), abs=1e-6)


@pytest.mark.parametrize(("groups", "df"), [(3, 1.3), (5, 4.6), (12, 30.0), (30, math.inf)])
def test_the_range_agrees_with_scipys(groups: int, df: float):
    for t in (1.0, 4.0):
        expected = scipy.stats.studentized_range.sf(math.sqrt(2) * t, groups, df)
        assert stats.range_p(t, groups, df) == pytest.approx(float(expected), abs=1e-6)


def test_a_chance_lies_between_0_and_1_where_the_quadrature_rounds_beyond():
    assert stats.range_p(0.001, 30, 1.3) == 1
    assert stats.range_p(10, 30) == 0


def test_the_level_is_exceeded_as_often_as_by_the_largest_of_simulated_differences():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40_000, 5))
    largest = np.ptp(values, axis=1) / math.sqrt(2)
    assert np.mean(largest > stats.critical_t(5)) == pytest.approx(0.05, abs=0.004)


def images(b: int, c: int, n: int = 2000, **more: Any) -> tuple[stats.Difference, float]:
    first, second = outcomes(b, c, both=n - b - c)
    comparison = stats.compare_images(first, second, **{"predictions": 1, "groups": 2} | more)
    assert comparison is not None
    return comparison


def test_over_images_the_interval_of_two_methods_is_the_usual_one():
    (diff, low, high), p = images(60, 40)
    half = 1.96 * math.sqrt((100 / 2000 - 0.01**2) / 2000)
    assert (diff, low, high) == pytest.approx((0.01, 0.01 - half, 0.01 + half), abs=2e-4)
    assert p == pytest.approx(math.erfc(20 / math.sqrt(102) / math.sqrt(2)), abs=1e-4)  # z-test


def test_over_images_two_methods_differ_about_where_mcnemars_exact_test_says_so():
    for total in range(1, 30):
        for b in range((total + 1) // 2, total + 1):
            exact = float(scipy.stats.binomtest(b, total).pvalue)
            _, p = images(b, total - b, n=4000)
            assert p < 0.05 if exact < 0.05 else p >= 0.05 or exact < 0.065


@pytest.mark.parametrize("groups", [2, 5])
def test_over_images_the_interval_excludes_zero_exactly_if_p_is_below_the_level(groups: int):
    for n in (20, 100, 2000):
        for b in range(1, 20):
            difference, p = images(b, 1, n, groups=groups)
            assert difference.contains_zero == (p >= 0.05)


def test_over_images_the_interval_is_that_of_the_bootstrapped_largest_difference():
    # Five equally accurate methods: resample images, and take the largest of all ten differences.
    rng = np.random.default_rng(3)
    correct = rng.random((5, 2000)) < 0.85
    first, second = np.triu_indices(5, 1)
    each = correct[first].astype(float) - correct[second]
    errors = each.std(axis=1) / math.sqrt(2000)
    resampled = rng.multinomial(2000, np.full(2000, 1 / 2000), size=2000) @ each.T / 2000
    largest = np.abs((resampled - each.mean(axis=1)) / errors).max(axis=1)
    comparison = stats.compare_images(correct[0], correct[1], predictions=1, groups=5)
    assert comparison is not None
    half = (comparison[0].high - comparison[0].low) / 2
    assert half == pytest.approx(np.quantile(largest, 0.95) * errors[0], rel=0.05)


def test_more_groups_widen_the_interval():
    assert images(60, 40)[0].low > images(60, 40, groups=5)[0].low
    assert images(60, 40)[1] < 0.05 < images(60, 40, groups=5)[1]


def test_over_images_the_sign_turns_with_the_arguments():
    (diff, low, high), p = images(30, 10)
    assert images(10, 30) == ((-diff, -high, -low), p)


def test_repeating_the_draws_of_the_same_images_hardly_narrows_the_interval():
    (_, low, high), _ = images(30, 20)
    (_, low_10, high_10), _ = images(30, 20, predictions=10)
    assert high_10 - low_10 == pytest.approx(high - low, rel=0.03)


def test_identical_predictions_are_not_different_with_some_uncertainty():
    difference, p = images(0, 0)
    assert (difference.diff, p) == (0.0, 1.0)
    assert difference.low == -difference.high < 0


def test_with_too_few_images_nothing_is_compared():
    right, wrong = [1] * 14, [0] * 14
    assert stats.compare_images(right[:7], wrong[:7], predictions=1, groups=2) is None
    assert stats.compare_images(right, wrong, predictions=1, groups=5) is None
    assert images(8, 0, n=8)[1] < 0.05


def trainings(
    first: list[float], second: list[float], groups: int = 2
) -> tuple[stats.Difference, float]:
    comparison = stats.compare_trainings(first, second, groups=groups)
    assert comparison is not None
    return comparison


def test_over_trainings_two_methods_are_compared_by_welchs_test():
    a, b = [0.91, 0.93, 0.92], [0.90, 0.86, 0.89, 0.88]
    expected: Any = scipy.stats.ttest_ind(a, b, equal_var=False)
    interval = expected.confidence_interval(0.95)
    difference, p = trainings(a, b)
    assert p == pytest.approx(expected.pvalue, rel=1e-5)
    assert difference.diff == pytest.approx(0.0375)
    assert difference[1:] == pytest.approx((interval.low, interval.high), rel=1e-5)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 20])
def test_over_trainings_the_interval_follows_the_closed_form_of_students_distribution(n: int):
    # One side without spread: n - 1 degrees of freedom.
    a, b = [0.9 + 0.01 * math.sin(i) for i in range(n)], [0.89, 0.89]
    (diff, low, high), p = trainings(a, b)
    error = np.std(a, ddof=1) / math.sqrt(n)
    assert p == pytest.approx(2 * (1 - t_cdf(abs(diff) / error, n - 1)), rel=1e-4)
    assert t_cdf((diff - low) / error, n - 1) == pytest.approx(0.975, rel=1e-6)
    assert high - diff == pytest.approx(diff - low)


def test_the_interval_of_three_trainings_each_by_hand():
    # Variances 3.52333 and 0.12333: error √(3.64667 / 3) = 1.10252; 2.1399 degrees of freedom,
    # of which the quantile at 97.5 % is 4.0441 (Student's table: 4.303 at 2, 3.182 at 3).
    difference, _ = trainings([73.8, 74.1, 74.5], [67.1, 69.5, 70.8])
    assert difference == pytest.approx((5.0, 5 - 4.0441 * 1.10252, 5 + 4.0441 * 1.10252), abs=2e-3)


def test_over_trainings_five_methods_are_compared_by_the_games_howell_test():
    a, b = [0.91, 0.93, 0.92], [0.90, 0.86, 0.89, 0.88]
    (diff, low, _), p = trainings(a, b, groups=5)
    error = math.sqrt(np.var(a, ddof=1) / 3 + np.var(b, ddof=1) / 4)
    df = error**4 / (np.var(a, ddof=1) ** 2 / 18 + np.var(b, ddof=1) ** 2 / 48)
    q = scipy.stats.studentized_range
    assert p == pytest.approx(float(q.sf(math.sqrt(2) * diff / error, 5, df)), rel=1e-5)
    assert diff - low == pytest.approx(float(q.ppf(0.95, 5, df)) / math.sqrt(2) * error, rel=1e-5)


@pytest.mark.parametrize("groups", [2, 5])
@pytest.mark.parametrize("shift", [0.0, -0.01, -0.02, -0.03, -0.05])
def test_over_trainings_the_interval_excludes_zero_exactly_if_p_is_below_the_level(
    shift: float, groups: int
):
    a, b = [0.91, 0.93, 0.92], [0.90 + shift, 0.86 + shift, 0.89 + shift, 0.88 + shift]
    difference, p = trainings(a, b, groups)
    assert difference.contains_zero == (p >= 0.05)


def test_without_spread_or_with_one_training_nothing_is_compared():
    assert stats.compare_trainings([0.5, 0.5], [0.25, 0.25], groups=2) is None
    assert stats.compare_trainings([0.9, 0.8], [0.7], groups=2) is None
    assert trainings([0.9, 0.9], [0.1, 0.2])[1] < 0.05


def test_class_scores_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    labels = rng.choice([0, 1, 3, 4], 300, p=[0.6, 0.2, 0.15, 0.05])  # no image of class 2
    predicted = np.where(rng.random(300) < 0.7, labels, rng.integers(-1, 4, 300))  # -1: no answer
    found = stats.class_scores(labels, predicted, "abcde")
    expected: Any = precision_recall_fscore_support(labels, predicted, labels=[0, 1, 3, 4])
    _, recall, f1, _ = expected
    assert found.macro_f1 == pytest.approx(np.mean(f1), abs=1e-12)
    assert found.recall == pytest.approx(dict(zip("abde", recall, strict=True)), abs=1e-12)
