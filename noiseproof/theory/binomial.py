"""Exact confidence limits for a probability, after Clopper and Pearson.

k of n independent trials succeeded; the success probability p is unknown. The upper limit is the
largest p under which k or fewer successes are not rarer than α = 1 − confidence, the lower limit
the smallest p under which k or more are not:

    P(Bin(n, upper) <= k) = α,        P(Bin(n, lower) >= k) = α.

Each covers p with probability at least `confidence`, for every n and p, with no approximation. Both
tails are regularised incomplete beta functions, P(Bin(n, p) >= k) = I_p(k, n − k + 1), evaluated by
a continued fraction and inverted by bisection.
"""

from __future__ import annotations

import math

__all__ = ["beta_tail", "lower_limit", "upper_limit"]

_TINY = 1e-300  # stands in for a zero denominator in the continued fraction
_TERMS = 100_000  # about sqrt(n) terms are needed; this serves any n below 1e9


def upper_limit(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The one-sided upper limit on a success probability; 1 without trials.

    >>> abs(upper_limit(0, 10) - (1 - 0.05 ** (1 / 10))) < 1e-12
    True
    """
    _check(successes, trials, confidence)
    return 1 - lower_limit(trials - successes, trials, confidence)


def lower_limit(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The one-sided lower limit on a success probability; 0 without trials.

    >>> abs(lower_limit(10, 10) - 0.05 ** (1 / 10)) < 1e-12
    True
    """
    _check(successes, trials, confidence)
    if successes == 0:
        return 0.0
    alpha = 1 - confidence
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return low  # the side that keeps the promise
        if beta_tail(middle, successes, trials - successes + 1) < alpha:
            low = middle
        else:
            high = middle


def beta_tail(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), for a, b > 0 and x in [0, 1].

    >>> round(beta_tail(0.5, 2, 2), 12), round(beta_tail(0.25, 1, 3), 12)  # 1 - 0.75³ = 0.578125
    (0.5, 0.578125)
    """
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"need a, b > 0 and x in [0, 1], got a={a}, b={b}, x={x}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - beta_tail(1 - x, b, a)
    front = a * math.log(x) + b * math.log1p(-x)
    front += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.log(a)
    return math.exp(front) / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)), evaluated front to back (Lentz's method).

    d_{2m} = m(b − m)x / ((a + 2m − 1)(a + 2m)),
    d_{2m+1} = −(a + m)(a + b + m)x / ((a + 2m)(a + 2m + 1)).
    """
    value = upper = 1.0
    lower = 0.0
    for j in range(1, _TERMS):
        m = j // 2
        if j % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + term * lower) or _TINY)
        upper = (1 + term / upper) or _TINY
        step = upper * lower
        value *= step
        if abs(step - 1) < 1e-15:
            return value
    raise ValueError(f"the continued fraction does not converge for x={x}, a={a}, b={b}")


def _check(successes: int, trials: int, confidence: float) -> None:
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie in [0, {trials}], got {successes}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
