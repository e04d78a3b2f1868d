"""Statistics against textbook values, closed forms, and literal resampling."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.stats

from noiseproof.lab.evaluation import stats


def outcomes(b: int, c: int, both: int = 5) -> tuple[list[int], list[int]]:
    """Right-or-wrong vectors with b images only the first gets, c only the second."""
    return [1] * b + [0] * c + [1] * both, [0] * b + [1] * c + [1] * both


def binomial_p(b: int, c: int) -> float:
    """2 · Σ_{k ≤ min(b, c)} C(n, k) / 2ⁿ in exact arithmetic; the terms are built one by one."""
    n, term, total = b + c, 1, 0
    for k in range(min(b, c) + 1):
        total += term
        term = term * (n - k) // (k + 1)
    return float(min(Fraction(1), Fraction(2 * total, 2**n)))


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
    assert stats.mcnemar_exact(*outcomes(b, c)) == pytest.approx(p)


def test_mcnemar_gives_the_textbook_value_of_the_prime_minister_survey():
    # Agresti: approval of 1,600 people in two surveys, 150 changed one way and 86 the other.
    assert stats.mcnemar_exact(*outcomes(150, 86)) == pytest.approx(3.7e-5, rel=0.02)


@pytest.mark.parametrize(("b", "c"), [(150, 86), (5060, 4940), (5001, 4999), (5400, 4600)])
def test_mcnemar_agrees_with_exact_arithmetic(b: int, c: int):
    assert stats.mcnemar_exact(*outcomes(b, c)) == pytest.approx(binomial_p(b, c), rel=1e-10)


def test_mcnemar_works_for_a_hundred_thousand_disagreements():
    # By the normal approximation: z = (2000 - 1) / √100,000 with the continuity correction.
    z = 1999 / math.sqrt(100_000)
    p = stats.mcnemar_exact(*outcomes(51_000, 49_000))
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)


def test_mcnemar_does_not_depend_on_the_order_or_on_agreements():
    one = stats.mcnemar_exact(*outcomes(9, 4, both=0))
    other = stats.mcnemar_exact(*outcomes(4, 9, both=300))
    assert one == other < 1


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
    found = stats.paired_bootstrap([a], [b])
    each = np.array(a) - np.array(b)
    half = 1.96 * each.std() / math.sqrt(2000)
    assert (found.low, found.high) == pytest.approx((0.01 - half, 0.01 + half), abs=6e-4)
    assert found.diff == pytest.approx(0.01)


def test_the_bootstrap_is_seeded_and_turns_its_sign_with_its_arguments():
    a, b = outcomes(30, 10, both=100)
    found, turned = stats.paired_bootstrap([a], [b]), stats.paired_bootstrap([b], [a])
    assert stats.paired_bootstrap([a], [b]) == found
    assert turned.diff == -found.diff
    assert not found.contains_zero
    assert turned.high < 0


def test_repeating_the_draws_of_the_same_images_does_not_narrow_the_interval():
    a, b = outcomes(30, 20, both=100)
    once = stats.paired_bootstrap([a], [b])
    assert stats.paired_bootstrap([a] * 10, [b] * 10) == pytest.approx(once)


def test_the_bootstrap_of_many_distinct_values_works_in_chunks(monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 2000)
    rng = np.random.default_rng(0)
    a, b = rng.random((1, 3000)), rng.random((1, 3000))
    found = stats.paired_bootstrap(a, b)
    half = 1.96 * (a - b).std() / math.sqrt(3000)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.06)


def test_welch_agrees_with_scipys_t_test():
    a, b = [0.91, 0.93, 0.92], [0.90, 0.86, 0.89, 0.88]
    expected: Any = scipy.stats.ttest_ind(a, b, equal_var=False)
    interval = expected.confidence_interval(0.95)
    difference, p = stats.welch(a, b)
    assert p == pytest.approx(expected.pvalue, rel=1e-12)
    assert difference.diff == pytest.approx(0.0375)
    assert difference[1:] == pytest.approx((interval.low, interval.high), rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 20])
def test_welch_agrees_with_the_closed_form_of_students_distribution(n: int):
    # One side without spread: n - 1 degrees of freedom.
    a, b = [0.9 + 0.01 * math.sin(i) for i in range(n)], [0.89, 0.89]
    (diff, low, high), p = stats.welch(a, b)
    error = np.std(a, ddof=1) / math.sqrt(n)
    assert p == pytest.approx(2 * (1 - t_cdf(abs(diff) / error, n - 1)), rel=1e-9)
    assert t_cdf((diff - low) / error, n - 1) == pytest.approx(0.975, rel=1e-10)
    assert high - diff == pytest.approx(diff - low)


def test_welchs_interval_of_three_trainings_each_by_hand():
    # Variances 3.52333 and 0.12333: error √(3.64667 / 3) = 1.10252; 2.1399 degrees of freedom,
    # of which the quantile at 97.5 % is 4.0441 (Student's table: 4.303 at 2, 3.182 at 3).
    difference, _ = stats.welch([73.8, 74.1, 74.5], [67.1, 69.5, 70.8])
    assert difference == pytest.approx((5.0, 5 - 4.0441 * 1.10252, 5 + 4.0441 * 1.10252), abs=2e-3)


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.02, 0.03, 0.05])
def test_welchs_interval_contains_zero_exactly_if_p_is_at_least_the_level(shift: float):
    a, b = [0.91, 0.93, 0.92], [0.90 + shift, 0.86 + shift, 0.89 + shift, 0.88 + shift]
    difference, p = stats.welch(a, b)
    assert difference.contains_zero == (p >= 0.05)


def test_welch_without_spread_has_an_interval_of_no_width_and_is_certain():
    assert stats.welch([0.5, 0.5], [0.25, 0.25]) == ((0.25, 0.25, 0.25), 0.0)
    assert stats.welch([0.9, 0.9], [0.9, 0.9])[1] == 1.0
