"""Perturbations as text, such as "gaussian:40/255+occlusion:20x70", read from left to right.

This file holds what text and values are valid, and is plain Python: the command line checks its
settings here before torch is imported. The perturbations themselves check their values with the
same functions.

>>> check("downup:3+stripes:10x6")
>>> check("gausian:0.1")
Traceback (most recent call last):
    ...
ValueError: unknown perturbation 'gausian' in 'gausian:0.1': did you mean 'gaussian'? \
Known are gaussian, uniform, occlusion, stripes, downup, identity, clean; \
a valid text is 'gaussian:40/255+occlusion:20x70'
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noiseproof.perturb.base import Perturbation

__all__ = ["HELP", "check", "parse"]

HELP: dict[str, str] = {
    "gaussian": "Gaussian noise of a std, or of a range of them: gaussian:40/255, gaussian:0..0.1",
    "uniform": "uniform noise in [-a, a]: uniform:0.06",
    "occlusion": "black patches, number x side or number x height x width: occlusion:20x70",
    "stripes": "vertical black stripes, number x width: stripes:10x6",
    "downup": "bilinear down-sampling by a factor and back up: downup:3",
    "identity": "the images as they are (also called clean): identity",
}
_ALIASES = {"clean": "identity"}
_EXAMPLE = "gaussian:40/255+occlusion:20x70"

_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def parse(text: str) -> Perturbation:
    """The perturbation that `text` describes; the inverse of `str`.

    >>> parse("gaussian:40/255+occlusion:20x70")
    Chain(Gaussian(std=0.1568627450980392), Occlusion(patches=20, size=70))
    >>> print(parse("clean"))
    identity
    """
    steps = _read(text)

    from noiseproof.perturb import base, masks, noise, resample

    classes: dict[str, Callable[..., Perturbation]] = {
        "gaussian": noise.Gaussian,
        "uniform": noise.Uniform,
        "occlusion": masks.Occlusion,
        "stripes": masks.Stripes,
        "downup": resample.DownUp,
        "identity": base.Identity,
    }
    made = [classes[name](*arguments) for name, arguments in steps]
    return made[0] if len(made) == 1 else base.Chain(*made)


def check(text: str) -> None:
    """Raises the ValueError that `parse` would raise, without importing torch."""
    _read(text)


def _read(text: str) -> list[tuple[str, tuple[Any, ...]]]:
    """The name and the constructor's arguments of every step."""
    if not isinstance(text, str):
        raise ValueError(f"a perturbation must be text such as {_EXAMPLE!r}, got {text!r}")
    steps: list[tuple[str, tuple[Any, ...]]] = []
    for part in text.split("+"):
        name, colon, body = (piece.strip() for piece in part.partition(":"))
        name = name.lower()
        name = _ALIASES.get(name, name)
        if not name:
            raise ValueError(
                f"a perturbation has no name in {text!r}; a valid text is {_EXAMPLE!r}"
            )
        if name not in HELP:
            known = [*HELP, *_ALIASES]
            nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"unknown perturbation {name!r} in {text!r}: did you mean {nearest!r}? "
                f"Known are {', '.join(known)}; a valid text is {_EXAMPLE!r}"
            )
        try:
            if name == "identity" and colon:
                raise ValueError("it takes no arguments")
            steps.append((name, _READERS[name](body)))
        except ValueError as error:
            raise ValueError(f"cannot read {part.strip()!r}: {error} ({HELP[name]})") from None
    return steps


# From the text after the colon to arguments.


def _read_gaussian(body: str) -> tuple[Any, ...]:
    low, dots, high = body.partition("..")
    std = (_number(low), _number(high)) if dots else _number(low)
    return (level_or_range("std", std),)


def _read_uniform(body: str) -> tuple[Any, ...]:
    return (level("amplitude", _number(body)),)


def _read_occlusion(body: str) -> tuple[Any, ...]:
    patches, *sides = _integers(body, 2, 3)
    size = sides[0] if len(sides) == 1 else tuple(sides)
    return count("patches", patches), side_or_pair("size", size)


def _read_stripes(body: str) -> tuple[Any, ...]:
    number, width = _integers(body, 2, 2)
    return count("count", number), count("width", width)


def _read_downup(body: str) -> tuple[Any, ...]:
    return (factor("factor", _number(body)),)


_READERS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "gaussian": _read_gaussian,
    "uniform": _read_uniform,
    "occlusion": _read_occlusion,
    "stripes": _read_stripes,
    "downup": _read_downup,
    "identity": lambda body: (),
}


def _number(text: str) -> float:
    """A decimal, or a fraction of two."""
    pieces = [piece.strip() for piece in text.split("/")]
    if len(pieces) > 2 or not all(_DECIMAL.fullmatch(piece) for piece in pieces):
        raise ValueError(f"expected a number such as 0.1 or 40/255, got {text!r}")
    numbers = [float(piece) for piece in pieces]
    if len(numbers) == 1:
        return numbers[0]
    if numbers[1] == 0:
        raise ValueError(f"the fraction {text!r} divides by zero")
    return numbers[0] / numbers[1]


def _integers(text: str, least: int, most: int) -> list[int]:
    """Whole numbers joined by x."""
    pieces = [piece.strip() for piece in text.split("x")]
    if not (least <= len(pieces) <= most and all(_INTEGER.fullmatch(p) for p in pieces)):
        many = f"{least}" if least == most else f"{least} or {most}"
        raise ValueError(f"expected {many} whole numbers joined by x, got {text!r}")
    return [int(piece) for piece in pieces]


# What values are valid, in the text and in the constructors.


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
    return number + 0.0  # minus zero becomes zero


def level_or_range(what: str, value: object) -> float | tuple[float, float]:
    """A level or a pair low <= high; a range of one point becomes a level."""
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
    """A side or a pair (height, width); a pair of equals becomes a side."""
    if not isinstance(value, (tuple, list)):
        return count(what, value)
    if len(value) != 2:
        raise ValueError(f"{what} must be a side or a pair (height, width), got {value!r}")
    height, width = count(what, value[0]), count(what, value[1])
    return height if height == width else (height, width)


def factor(what: str, value: object) -> float:
    """A finite number, at least 1; an int if it is whole."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 1):
        raise ValueError(f"{what} must be finite and at least 1, got {number}")
    return int(number) if number.is_integer() else number


def show(value: float) -> str:
    """The shorter of k/255 and the decimal that gives `value` back exactly.

    >>> show(40 / 255), show(0.2), show(1.0), show(1e30)
    ('40/255', '0.2', '1', '1e30')
    """
    decimal = repr(float(value)).removesuffix(".0").replace("e+", "e")  # + joins perturbations
    k = round(255 * value) if value <= 2 else 0
    fraction = f"{k}/255"
    exact = 0 < k <= 255 and k / 255 == value
    return fraction if exact and len(fraction) < len(decimal) else decimal
