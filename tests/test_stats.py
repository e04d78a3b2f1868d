"""Statistics against textbook values, scipy, and literal resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from noiseproof.lab.evaluation import stats


def outcomes(b: int, c: int, both: int = 5) -> tuple[list[int], list[int]]:
    """Right-or-wrong vectors with b images only the first gets, c only the second."""
    return [1] * b + [0] * c + [1] * both, [0] * b + [1] * c + [1] * both


def test_a_summary_uses_n_minus_one():
    values = [0.91, 0.93, 0.92, 0.97]
    mean = sum(values) / 4
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    assert stats.summary(values) == pytest.approx((mean, std, 4))


def test_a_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        stats.summary([])


def test_the_pooled_spread_is_the_root_of_the_mean_variance():
    assert stats.pooled_std([0.1, 0.3]) == pytest.approx(math.sqrt((0.01 + 0.09) / 2))
    assert stats.pooled_std([None, None]) is None


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (10, 2, 0.03857421875),  # 2 · (1 + 12 + 66) / 4096
        (5, 0, 0.0625),
        (8, 1, 0.0390625),  # 2 · (1 + 9) / 512
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_gives_the_values_counted_by_hand(b: int, c: int, p: float):
    assert stats.mcnemar_exact(*outcomes(b, c)) == pytest.approx((b, c, p))


def test_mcnemar_gives_the_textbook_value_of_the_prime_minister_survey():
    # Agresti: approval of 1,600 people in two surveys, 150 changed one way and 86 the other.
    p = stats.mcnemar_exact(*outcomes(150, 86)).p
    assert p == pytest.approx(scipy.stats.binomtest(86, 236, 0.5).pvalue, rel=1e-10)
    assert p == pytest.approx(3.7e-5, rel=0.02)


@pytest.mark.parametrize(("b", "c"), [(50_600, 49_400), (50_001, 49_999), (52_000, 48_000)])
def test_mcnemar_works_for_a_hundred_thousand_disagreements(b: int, c: int):
    expected = scipy.stats.binomtest(b, b + c, 0.5).pvalue
    assert stats.mcnemar_exact(*outcomes(b, c)).p == pytest.approx(expected, rel=1e-7)


def test_mcnemar_does_not_depend_on_the_order_or_on_agreements():
    one = stats.mcnemar_exact(*outcomes(9, 4, both=0))
    other = stats.mcnemar_exact(*outcomes(4, 9, both=300))
    assert (one.b, one.c, one.p) == (other.c, other.b, other.p)


def test_the_bootstrap_agrees_with_literally_resampled_images():
    rng = np.random.default_rng(3)
    a, b = rng.random((10, 200)) < 0.85, rng.random((10, 200)) < 0.80
    each = a.mean(0) - b.mean(0)
    literal = [each[rng.integers(0, 200, 200)].mean() for _ in range(4000)]
    low, high = np.quantile(literal, [0.025, 0.975])
    found = stats.paired_bootstrap(a, b)
    assert found.diff == pytest.approx(a.mean() - b.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.002)


def test_the_bootstrap_interval_has_the_normal_width_for_many_images():
    a, b = outcomes(60, 40, both=1900)
    found = stats.paired_bootstrap(a, b)
    each = np.array(a) - np.array(b)
    half = 1.96 * each.std() / math.sqrt(2000)
    assert (found.low, found.high) == pytest.approx((0.01 - half, 0.01 + half), abs=6e-4)
    assert found.diff == pytest.approx(0.01)


def test_the_bootstrap_is_seeded_and_turns_its_sign_with_its_arguments():
    a, b = outcomes(30, 10, both=100)
    assert stats.paired_bootstrap(a, b) == stats.paired_bootstrap(a, b)
    turned = stats.paired_bootstrap(b, a)
    found = stats.paired_bootstrap(a, b)
    assert turned.diff == -found.diff
    assert not found.contains_zero
    assert turned.high < 0


def test_repeating_the_draws_of_the_same_images_does_not_narrow_the_interval():
    a, b = outcomes(30, 20, both=100)
    once = stats.paired_bootstrap(a, b)
    assert stats.paired_bootstrap([a] * 10, [b] * 10) == pytest.approx(once)


def test_the_bootstrap_of_many_distinct_values_works_in_chunks():
    rng = np.random.default_rng(0)
    a, b = rng.random(3000), rng.random(3000)
    found = stats.paired_bootstrap(a, b, resamples=2000)
    half = 1.96 * (a - b).std() / math.sqrt(3000)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.06)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (93, 100), (1, 3), (49_000, 50_000)])
def test_wilson_agrees_with_scipy(k: int, n: int):
    interval = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
    assert stats.wilson(k, n) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="5 of 4"):
        stats.wilson(5, 4)


@pytest.mark.parametrize(
    ("t", "df"), [(0.0, 3), (2.0, 1), (-2.776, 4), (0.3, 7.7), (30, 2), (4, 900)]
)
def test_the_tail_of_students_distribution_agrees_with_scipy(t: float, df: float):
    assert stats.student_p(t, df) == pytest.approx(2 * scipy.stats.t.sf(abs(t), df), rel=1e-10)


def test_welch_agrees_with_scipy():
    a, b = [0.91, 0.93, 0.92], [0.90, 0.86, 0.89, 0.88]
    expected = scipy.stats.ttest_ind(a, b, equal_var=False)[1]
    assert stats.welch(a, b) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_welchs_interval_agrees_with_scipy(level: float):
    a, b = [0.91, 0.93, 0.92], [0.90, 0.86, 0.89, 0.88]
    expected = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)  # pyright: ignore
    found = stats.welch_interval(a, b, level)
    assert found.diff == pytest.approx(0.0375)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_welchs_interval_of_three_trainings_each_by_hand():
    # Variances 3.52333 and 0.12333: error √(3.64667 / 3) = 1.10252; 2.1399 degrees of freedom,
    # of which the quantile at 97.5 % is 4.0441 (Student's table: 4.303 at 2, 3.182 at 3).
    found = stats.welch_interval([73.8, 74.1, 74.5], [67.1, 69.5, 70.8])
    assert found == pytest.approx((5.0, 5 - 4.0441 * 1.10252, 5 + 4.0441 * 1.10252), abs=2e-3)


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.02, 0.03, 0.05])
def test_welchs_interval_contains_zero_where_the_test_cannot_tell(shift: float):
    a, b = [0.91, 0.93, 0.92], [0.90 + shift, 0.86 + shift, 0.89 + shift, 0.88 + shift]
    assert stats.welch_interval(a, b).contains_zero == (stats.welch(a, b) >= 0.05)


def test_welchs_interval_has_no_width_without_spread_and_needs_a_level():
    assert stats.welch_interval([0.5, 0.5], [0.25, 0.25]) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        stats.welch_interval([0.1, 0.2], [0.3, 0.5], 1.5)


def test_welch_needs_a_spread_on_both_sides():
    with pytest.raises(ValueError, match="1 and 2"):
        stats.welch([0.9], [0.8, 0.9])
    assert stats.welch([0.9, 0.9], [0.8, 0.8]) == 0.0


@pytest.mark.parametrize("function", [stats.mcnemar_exact, stats.paired_bootstrap])
def test_different_images_cannot_be_paired(function):
    with pytest.raises(ValueError, match="3 and 2"):
        function([1, 0, 1], [1, 0])
