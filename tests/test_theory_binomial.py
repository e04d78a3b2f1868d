"""Clopper–Pearson limits against closed forms, exact rational tails and an independent library."""

from fractions import Fraction
from math import comb

import pytest

from noiseproof.theory import lower_limit, upper_limit


def exact_tail(k: int, n: int, p: Fraction) -> Fraction:
    """P(Bin(n, p) >= k), in rational arithmetic."""
    return sum((comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1)), Fraction(0))


@pytest.mark.parametrize("n", [1, 2, 10, 1000, 1_000_000])
def test_no_success_and_all_successes_have_closed_forms(n: int):
    for confidence in (0.5, 0.95, 0.999):
        alpha = 1 - confidence
        assert upper_limit(0, n, confidence) == pytest.approx(1 - alpha ** (1 / n), rel=1e-8)
        assert lower_limit(n, n, confidence) == pytest.approx(alpha ** (1 / n), rel=1e-12)
        assert upper_limit(n, n, confidence) == 1
        assert lower_limit(0, n, confidence) == 0


@pytest.mark.parametrize(("k", "n"), [(1, 2), (1, 5), (3, 7), (9, 20), (19, 20), (5, 60)])
def test_the_limits_solve_the_exact_tail_equation(k: int, n: int):
    low, high = lower_limit(k, n, 0.95), upper_limit(k, n, 0.95)
    assert float(exact_tail(k, n, Fraction(low))) == pytest.approx(0.05, rel=1e-11)
    assert float(1 - exact_tail(k + 1, n, Fraction(high))) == pytest.approx(0.05, rel=1e-11)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.9999])
def test_the_limits_agree_with_scipy(confidence: float):
    stats = pytest.importorskip("scipy.stats")
    for k, n in [(1, 3), (17, 1000), (500, 1000), (4991, 5000), (12345, 100_000)]:
        low = stats.beta.ppf(1 - confidence, k, n - k + 1)
        high = stats.beta.ppf(confidence, k + 1, n - k)
        assert lower_limit(k, n, confidence) == pytest.approx(low, rel=1e-8)
        assert upper_limit(k, n, confidence) == pytest.approx(high, rel=1e-8)


@pytest.mark.parametrize("p", [Fraction(1, 20), Fraction(1, 3), Fraction(9, 10)])
def test_the_lower_limit_has_the_stated_coverage(p: Fraction):
    n, confidence = 25, 0.9
    covered = sum(
        comb(n, k) * p**k * (1 - p) ** (n - k)
        for k in range(n + 1)
        if lower_limit(k, n, confidence) <= p
    )
    assert covered >= confidence


def test_without_trials_the_limits_are_0_and_1():
    assert (lower_limit(0, 0), upper_limit(0, 0)) == (0, 1)


def test_impossible_counts_and_levels_raise_errors():
    with pytest.raises(ValueError, match=r"successes must lie in \[0, 3\], got 4"):
        upper_limit(4, 3)
    with pytest.raises(ValueError, match=r"confidence must lie in \(0, 1\), got 1"):
        lower_limit(1, 3, 1)
