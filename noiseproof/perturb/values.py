"""Validation of a perturbation's values: levels, counts, sizes, factors, severities.

Both the text of a perturbation and its constructor use it. Standard library only.

In each function `what` is the name of the value in error messages.
"""

from __future__ import annotations

import math
from numbers import Integral, Real


def level(what: str, value: object) -> float:
    """A number from 0 to 1. One within 1e-12 of k/255 becomes k/255, for k = 1, …, 255."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{what} must be finite and at least 0, got {number}")
    k = round(255 * number) if number <= 2 else 0
    if 0 < k <= 255 and abs(number - k / 255) <= 1e-12:
        return k / 255
    if number > 1:
        meant = f"; did you mean {show(number)}/255?" if number <= 255 else ""
        raise ValueError(
            f"{what} must be at most 1, since pixels lie in [0, 1], got {show(number)}{meant}"
        )
    return number + 0.0  # turns -0.0 into 0.0


def level_or_range(what: str, value: object) -> float | tuple[float, float]:
    """A level, or a pair low <= high; a pair of equal levels becomes a level."""
    if not isinstance(value, (tuple, list)):
        return level(what, value)
    if len(value) != 2:
        raise ValueError(f"{what} must be a number or a pair (low, high), got {value!r}")
    low, high = level(what, value[0]), level(what, value[1])
    if low > high:
        raise ValueError(f"the range of {what} must have low <= high, got {low} > {high}")
    return low if low == high else (low, high)


def count(what: str, value: object) -> int:
    """A whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")
    return int(value)


def side_or_pair(what: str, value: object) -> int | tuple[int, int]:
    """A side, or a pair (height, width); a pair of equal sides becomes a side."""
    if not isinstance(value, (tuple, list)):
        return count(what, value)
    if len(value) != 2:
        raise ValueError(f"{what} must be a side or a pair (height, width), got {value!r}")
    height, width = count(what, value[0]), count(what, value[1])
    return height if height == width else (height, width)


def factor(what: str, value: object) -> float:
    """A finite number of at least 1; an int if it is whole."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 1):
        raise ValueError(f"{what} must be finite and at least 1, got {number}")
    return int(number) if number.is_integer() else number


def share(what: str, value: object) -> float:
    """A number above 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1:
        raise ValueError(f"{what} must be a number above 0 and below 1, got {value!r}")
    return float(value)


def severity(what: str, value: object) -> int:
    """A whole number from 1 to 5."""
    return _whole(what, value, 1, 5)


def number(what: str, value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    return float(value) + 0.0  # turns -0.0 into 0.0


def iso(what: str, value: object) -> int:
    """A whole number from 100 to 6400."""
    return _whole(what, value, 100, 6400)


def electrons(what: str, value: object) -> float:
    """A number from 1 to a million."""
    return _between(what, value, 1, 1_000_000)


def read_noise(what: str, value: object) -> float:
    """A number from 0 to 10,000."""
    return _between(what, value, 0, 10_000)


def bits(what: str, value: object) -> int:
    """A whole number from 1 to 16."""
    return _whole(what, value, 1, 16)


def stops(what: str, value: object) -> float:
    """A number from −10 to 10."""
    return _between(what, value, -10, 10)


def _whole(what: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{what} must be a whole number from {low} to {high}, got {value!r}")
    return int(value)


def _between(what: str, value: object, low: int, high: int) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise ValueError(f"{what} must be a number from {low:,} to {high:,}, got {value!r}")
    return float(value) + 0.0  # turns -0.0 into 0.0


def show(value: float) -> str:
    """The shorter of k/255 and the decimal that reads back as exactly `value`.

    >>> show(40 / 255), show(0.2), show(1.0), show(1e30)
    ('40/255', '0.2', '1', '1e30')
    """
    shown = decimal(value)
    k = round(255 * value) if value <= 2 else 0
    fraction = f"{k}/255"
    exact = 0 < k <= 255 and k / 255 == value
    return fraction if exact and len(fraction) < len(shown) else shown


def decimal(value: float) -> str:
    """The decimal that reads back as exactly `value`.

    >>> decimal(-2.0), decimal(40 / 255), decimal(1e30)
    ('-2', '0.1568627450980392', '1e30')
    """
    return repr(float(value)).removesuffix(".0").replace("e+", "e")  # + joins perturbations
