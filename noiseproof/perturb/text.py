"""Perturbations as text, such as "gaussian:40/255+occlusion:20x70", applied from left to right.

"gaussian:0..0.1@0.8" perturbs an image with probability 0.8, and leaves the others as they are.

All that follows from such a text is determined here: whether it is valid, its heading in a table,
its family and its strength. Standard library only, since the command line validates its
settings before importing torch. `perturb.parse` makes the perturbation itself.

>>> read("downup:3+stripes:10x6")
[('downup', (3,)), ('stripes', (10, 6))]
>>> read("gausian:0.1")
Traceback (most recent call last):
    ...
ValueError: unknown perturbation 'gausian' in 'gausian:0.1': did you mean 'gaussian:0.1'? \
Known: gaussian, uniform, occlusion, stripes, downup, gaussian_noise, shot, impulse, defocus, \
glass, motion, zoom, snow, frost, fog, brightness, contrast, elastic, pixelate, jpeg, sensor, \
exposure, identity, clean; for example 'gaussian:40/255+occlusion:20x70'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from noiseproof.perturb.values import (
    bits,
    count,
    decimal,
    electrons,
    factor,
    iso,
    level,
    level_or_range,
    read_noise,
    severity,
    share,
    side_or_pair,
    stops,
)

# The 15 corruptions of CIFAR-10-C and ImageNet-C by family, in words.
_BY_FAMILY = {
    "noise": {
        "gaussian_noise": "Gaussian noise by severity",
        "shot": "shot noise",
        "impulse": "impulse noise",
    },
    "blur": {
        "defocus": "defocus blur",
        "glass": "glass blur",
        "motion": "motion blur",
        "zoom": "zoom blur",
    },
    "weather": {"snow": "snow", "frost": "frost", "fog": "fog", "brightness": "brightness"},
    "digital": {
        "contrast": "contrast",
        "elastic": "elastic transform",
        "pixelate": "pixelation",
        "jpeg": "JPEG compression",
    },
}
_CORRUPTIONS = {name: words for names in _BY_FAMILY.values() for name, words in names.items()}
CORRUPTION_FAMILIES = {name: family for family, names in _BY_FAMILY.items() for name in names}
"""The family of each corruption: noise, blur, weather or digital."""
CORRUPTIONS = tuple(f"{name}:{number}" for name in _CORRUPTIONS for number in range(1, 6))
"""All corruptions with all severities, as perturbation texts."""

HELP: dict[str, str] = {
    "gaussian": "Gaussian noise, by standard deviation or range: gaussian:40/255, gaussian:0..0.1",
    "uniform": "uniform noise in [-a, a]: uniform:0.06",
    "occlusion": "black patches, number x side or number x height x width: occlusion:20x70",
    "stripes": "vertical black stripes, number x width: stripes:10x6",
    "downup": "bilinear down-sampling by a factor, then up-sampling: downup:3",
    **{
        name: f"corruption: {words.removesuffix(' by severity')}, severity 1 to 5: {name}:3"
        for name, words in _CORRUPTIONS.items()
    },
    "sensor": "camera noise, by ISO, or electrons at white x read noise: sensor:iso1600, "
    "sensor:400x2",
    "exposure": "light times 2^stops: exposure:-2",
    "identity": "unchanged images, also called clean: identity",
}
_FAMILIES = {
    "gaussian": "Gaussian noise",
    "uniform": "uniform noise",
    "downup": "down- and up-sampling",
    **_CORRUPTIONS,
    "sensor": "sensor noise",
    "identity": "clean",
}
_ALIASES = {"clean": "identity"}
BUILT_IN = frozenset({*HELP, *_ALIASES})
"""The names of this package's own perturbations."""
_EXAMPLE = "gaussian:40/255+occlusion:20x70"

_JOINT = re.compile(r"(?<!:)\+")  # not the sign in exposure:+2
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?(?:/\d+)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Registration(NamedTuple):
    """A function that a user has registered as a perturbation; see `perturb.register`."""

    function: Callable[..., Any]
    levels: tuple[float, float] | None
    deterministic: bool
    help: str


REGISTERED: dict[str, Registration] = {}


class Step(NamedTuple):
    """One member of a chain: its name, and the text after the colon."""

    name: str
    body: str


def steps(text: str) -> list[Step]:
    """The members of a chain, valid or not; "clean" becomes "identity".

    >>> steps("downup:3+clean")
    [Step(name='downup', body='3'), Step(name='identity', body='')]
    """
    parts = (re.split(":|(?=@)", part, maxsplit=1) for part in _JOINT.split(text))
    pairs = ((name.strip().lower(), "".join(body).strip()) for name, *body in parts)
    return [Step(_ALIASES.get(name, name), body) for name, body in pairs]


def read(text: str) -> list[tuple[str, tuple[Any, ...]]]:
    """The name and the constructor arguments of every step; ValueError if the text is invalid, as
    from `perturb.parse`."""
    if not isinstance(text, str):
        raise ValueError(f"a perturbation must be text such as {_EXAMPLE!r}, got {text!r}")
    parsed: list[tuple[str, tuple[Any, ...]]] = []
    for part, (name, body) in zip(_JOINT.split(text), steps(text), strict=True):
        if not name:
            raise ValueError(f"a perturbation has no name in {text!r}; write it as in {_EXAMPLE!r}")
        if name not in HELP and name not in REGISTERED:
            meant = _suggestion(part.strip().lower())
            hint = ". If it is your own, register it, in a command with --plugin."
            raise ValueError(
                f"unknown perturbation {name!r} in {text!r}"
                f"{f': did you mean {meant}?' if meant else hint} "
                f"Known: {', '.join(_known())}; for example {_EXAMPLE!r}"
            )
        try:
            own = REGISTERED.get(name)
            bare = name == "identity" or (own and own.levels is None)
            if (bare and ":" in part) or (name == "identity" and body):
                raise ValueError("it takes no arguments")
            parsed.append((name, _arguments(name, body.partition("@")[0])))
            _share(body)
        except ValueError as error:
            raise ValueError(f"cannot read {part.strip()!r}: {error} ({help_line(name)})") from None
    return parsed


def is_known(text: str) -> bool:
    """Whether a text is valid; that of a user's own perturbation is while it is registered.

    >>> is_known("gaussian:0.1"), is_known("rain:0.5")
    (True, False)
    """
    try:
        read(text)
    except ValueError:
        return False
    return True


def help_line(name: str) -> str:
    """What a perturbation does, with an example at the end."""
    if name in HELP:
        return HELP[name]
    own = REGISTERED[name]
    if own.levels is None:
        return f"{own.help}: {name}"
    low, high = map(decimal, own.levels)
    return f"{own.help}, level {low} to {high}: {name}:{high}"


def _known() -> list[str]:
    return [*HELP, *_ALIASES, *REGISTERED]


def _suggestion(step: str) -> str:
    """What a step with an unknown name may have meant; empty if nothing is close.

    >>> _suggestion("15"), _suggestion("0.1"), _suggestion("shot_noise:3")
    ("'gaussian:15/255'", "'gaussian:0.1'", "'shot:3'")
    >>> _suggestion("gaussian=0.1"), _suggestion("fgo:3"), _suggestion("blur:3"), _suggestion("x")
    ("'gaussian:0.1'", "'fog:3'", "'defocus', 'glass', 'motion' or 'zoom'", '')
    """
    name, body = re.fullmatch(r"([^:=\s]*)[:=\s]*(.*)", step, re.DOTALL).groups()  # pyright: ignore
    if _DECIMAL.fullmatch(step.split("/")[0].strip()):  # a level without a name
        return repr(
            f"gaussian:{step}" if "/" in step or float(step) <= 1 else f"gaussian:{step}/255"
        )
    kind = "blur" if name == "gaussian_blur" else name  # one of the four extra corruptions
    if kind in _BY_FAMILY:
        *first, last = map(repr, _BY_FAMILY[kind])
        return f"{', '.join(first)} or {last}"
    known = _known()
    longer = [other for other in known if name == other or name.startswith(f"{other}_")]
    nearest = (longer or get_close_matches(name, known, n=1) or [""])[0]
    return repr(f"{nearest}:{body}" if body else nearest) if nearest else ""


def shares(text: str) -> list[float | None]:
    """The share of the images that each step is applied to; None stands for all of them.

    >>> shares("gaussian:0..0.1@0.8+downup:3")
    [0.8, None]
    """
    return [_share(step.body) for step in steps(text)]


def _share(body: str) -> float | None:
    _, at, text = body.partition("@")
    return share("the share after @", _number(text)) if at else None


def is_clean(text: str) -> bool:
    """Whether the text is the identity.

    >>> is_clean("Clean"), is_clean("gaussian:0.1")
    (True, False)
    """
    return all(step == Step("identity", "") for step in steps(text))


def has_no_effect(text: str) -> bool:
    """Whether a valid text leaves images as they are: the identity, or noise of level 0.

    >>> has_no_effect("clean"), has_no_effect("gaussian:0+downup:1"), has_no_effect("fog:1")
    (True, True, False)
    """
    neutral = {"gaussian": 0, "uniform": 0, "downup": 1, "exposure": 0, "identity": None}
    return all(
        name in neutral and arguments in ((), (neutral[name],)) for name, arguments in read(text)
    )


# For display. These accept any text, including one that this version cannot parse.


def heading(text: str) -> str:
    """A perturbation as the heading of a column.

    >>> heading("gaussian:8/255"), heading("downup:3+occlusion:20x70")
    ('σ=8/255', 'down-up 3 + occlusion 20×70')
    >>> heading("gaussian:0..0.1@0.8")
    'σ=0–0.1 (0.8 of images)'
    """
    parts = []
    for name, body in steps(text):
        value = _typeset(body)
        special = {
            "gaussian": f"σ={value}",
            "uniform": f"uniform ±{value}",
            "downup": f"down-up {value}",
        }
        plain = {"identity": "clean", "jpeg": "JPEG"}.get(name, name.replace("_", " "))
        parts.append(special.get(name, f"{plain} {value}") if value else plain)
    return "".join(c if c.isprintable() else " " for c in " + ".join(parts))


def strength(text: str) -> str:
    """The strength of a perturbation within its family, as an axis tick.

    >>> strength("gaussian:8/255"), strength("occlusion:20x70"), strength("clean")
    ('8/255', '20×70', 'clean')
    """
    parts = (_typeset(body) or name for name, body in steps(text))
    return " + ".join(parts).replace("identity", "clean")


def _typeset(body: str) -> str:
    value, at, part = body.partition("@")
    value = re.sub(r"(?<=\d)x(?=\d)", "×", value).replace("..", "–")
    value = re.sub(r"^iso(?=\d)", "ISO ", re.sub(r"^-", "−", value))
    return f"{value} ({part} of images)".lstrip() if at else value


def family(text: str) -> str:
    """The kind of perturbation, in words.

    >>> family("gaussian:8/255"), family("downup:3+occlusion:20x70"), family("clean")
    ('Gaussian noise', 'Down- and up-sampling + occlusion', 'Clean')
    """
    words = " + ".join(
        _FAMILIES.get(name, name) + " on some images" * ("@" in body) for name, body in steps(text)
    )
    return words[:1].upper() + words[1:]


def ordered(texts: Iterable[str]) -> list[str]:
    """Clean first, then family by family in order of appearance, each from weak to strong.

    >>> ordered(["gaussian:20/255", "stripes:10x6", "clean", "gaussian:8/255"])
    ['clean', 'gaussian:8/255', 'gaussian:20/255', 'stripes:10x6']
    """
    unique = list(dict.fromkeys(texts))
    seen = {name: i for i, name in enumerate(dict.fromkeys(map(family, unique)))}
    return sorted(unique, key=lambda text: (not is_clean(text), seen[family(text)], numbers(text)))


def families(texts: Iterable[str]) -> dict[str, list[str]]:
    """The texts other than clean, grouped by family, in order.

    >>> families(["clean", "gaussian:0.2", "gaussian:0.1"])
    {'Gaussian noise': ['gaussian:0.1', 'gaussian:0.2']}
    """
    groups: dict[str, list[str]] = {}
    for text in ordered(texts):
        if not is_clean(text):
            groups.setdefault(family(text), []).append(text)
    return groups


def numbers(text: str) -> tuple[float, ...]:
    """All numbers in a perturbation's text.

    >>> numbers("gaussian:0..51/255"), numbers("occlusion:20x70")
    ((0.0, 0.2), (20.0, 70.0))
    """
    return tuple(_number(n) for _, body in steps(text) for n in _NUMBER.findall(body))


def noise_levels(text: str) -> tuple[float, ...]:
    """The levels, in pixels, of the first pixel noise in the chain; empty if there is none.

    >>> noise_levels("gaussian:0..0.1"), noise_levels("uniform:0.2+occlusion:1x3")
    ((0.0, 0.1), (0.2,))
    >>> noise_levels("downup:2")
    ()
    """
    for name, arguments in read(text):
        if name in ("gaussian", "uniform"):
            (value,) = arguments
            return value if isinstance(value, tuple) else (value,)
    return ()


def _arguments(name: str, body: str) -> tuple[Any, ...]:
    """The constructor arguments in the text after the colon."""
    if name == "gaussian":
        low, dots, high = body.partition("..")
        std = (_number(low), _number(high)) if dots else _number(low)
        return (level_or_range("std", std),)
    if name == "uniform":
        return (level("amplitude", _number(body)),)
    if name == "occlusion":
        patches, *sides = _integers(body, 2, 3)
        return count("patches", patches), side_or_pair("size", sides if sides[1:] else sides[0])
    if name == "stripes":
        number, width = _integers(body, 2, 2)
        return count("count", number), count("width", width)
    if name == "downup":
        return (factor("factor", _number(body)),)
    if name == "sensor":
        return _sensor(body)
    if name == "exposure":
        return (stops("stops", _number(body)),)
    if name in _CORRUPTIONS:
        number = int(body) if _INTEGER.fullmatch(body) else body
        if name == "jpeg" and isinstance(number, int) and 5 < number <= 100:
            raise ValueError(f"expected a severity from 1 to 5, not a quality, got {number}")
        return (severity("severity", number),)
    own = REGISTERED.get(name)
    if own is not None and own.levels is not None:
        (low, high), value = own.levels, _number(body)
        if not low <= value <= high:
            limits = f"from {decimal(low)} to {decimal(high)}"
            raise ValueError(f"the level must be {limits}, got {decimal(value)}")
        return (value,)
    return ()


def _sensor(body: str) -> tuple[Any, ...]:
    """ISO as "iso1600", or electrons, read noise and perhaps bits, joined by x."""
    if body.lower().startswith("iso"):
        setting = body[3:].strip()
        return (iso("iso", int(setting) if _INTEGER.fullmatch(setting) else setting),)
    pieces = [piece.strip() for piece in body.split("x")]
    if not 2 <= len(pieces) <= 3:
        raise ValueError(f"expected iso1600 or electrons x read noise, got {body!r}")
    given = (
        electrons("electrons", _number(pieces[0])),
        read_noise("read noise", _number(pieces[1])),
    )
    depth = [bits("bits", int(x) if _INTEGER.fullmatch(x) else x) for x in pieces[2:]]
    return (None, *given, *depth)


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
