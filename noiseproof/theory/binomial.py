"""Exact confidence limits for a probability, after Clopper and Pearson.

Of n independent trials k succeeded; the success probability p is unknown. The upper limit is the
largest p under which k or fewer successes have probability α = 1 − confidence or more, the lower
limit the smallest p under which k or more have:

    P(Bin(n, upper) <= k) = α,        P(Bin(n, lower) >= k) = α.

Each covers p with probability at least `confidence`, for every n and p, with no approximation: the
tail is summed term by term and inverted by bisection.
"""

from __future__ import annotations

import math

import torch


def upper_limit(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The one-sided upper limit on a success probability; 1 without trials.

    Args:
        successes: k, from 0 to `trials`.
        trials: n, independent.
        confidence: probability, in (0, 1), with which the limit covers p.

    >>> abs(upper_limit(0, 10) - (1 - 0.05 ** (1 / 10))) < 1e-12
    True
    """
    _check(successes, trials, confidence)
    return 1 - lower_limit(trials - successes, trials, confidence)


def lower_limit(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The one-sided lower limit on a success probability; 0 without trials.

    Arguments as for `upper_limit`.

    >>> abs(lower_limit(10, 10) - 0.05 ** (1 / 10)) < 1e-12
    True
    """
    _check(successes, trials, confidence)
    if successes == 0:
        return 0.0
    count = torch.arange(successes, trials + 1, dtype=torch.float64)
    log_ways = torch.lgamma(count.new_tensor(trials + 1)) - torch.lgamma(count + 1)
    log_ways -= torch.lgamma(trials - count + 1)
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        log_terms = log_ways + count * math.log(middle) + (trials - count) * math.log1p(-middle)
        if float(log_terms.exp().sum()) < 1 - confidence:  # P(Bin(trials, middle) >= successes)
            low = middle
        else:
            high = middle
    return low  # of the two, the one that still covers p


def _check(successes: int, trials: int, confidence: float) -> None:
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie in [0, {trials}], got {successes}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
