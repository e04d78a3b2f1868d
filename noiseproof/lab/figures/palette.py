"""Colours, markers and line styles of figures, in a light and a dark theme.

A method has the same colour, marker and line style in every figure. The colours are Okabe and
Ito's, which can be distinguished with any common colour blindness; markers and dashes distinguish
the methods as well. A variant of a method ("discriminative-code") has a shade of its colour and a
marker and dashes of its own, and a label without a method's name one of a few other colours; the
name alone decides which.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb

Theme = Literal["light", "dark"]

_METHODS: dict[str, tuple[str, str, str, Any]] = {  # light colour, dark colour, marker, dashes
    "normal": ("#4D4D4D", "#C8C8C8", "o", (0, (1.2, 1.4))),
    "noisy": ("#E69F00", "#F0B429", "v", (0, (4, 1.5, 1, 1.5))),
    "both": ("#0072B2", "#56B4E9", "s", (0, (4, 1.8))),
    "stability": ("#009E73", "#2CC49A", "^", (0, (7, 1.8))),
    "discriminative": ("#D55E00", "#FF8040", "D", "solid"),
    "spheres": ("#7A5BB8", "#B9A3F0", "P", (0, (8, 1.5, 1, 1.5, 1, 1.5))),
    "augmix": ("#A64D79", "#E3A3CB", "X", (0, (1.2, 1.4, 4, 1.4))),
}
METHOD_COLOURS: dict[Theme, dict[str, str]] = {
    "light": {method: light for method, (light, *_) in _METHODS.items()},
    "dark": {method: dark for method, (_, dark, *_) in _METHODS.items()},
}
METHOD_MARKERS = {method: marker for method, (_, _, marker, _) in _METHODS.items()}
ACCENT = {theme: colours["discriminative"] for theme, colours in METHOD_COLOURS.items()}
CLASS_COLOURS = (
    "#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE",
    "#AA3377", "#999999", "#EE8866", "#44BB99", "#8866CC",
)  # fmt: skip
INK: dict[Theme, str] = {"light": "#1F2328", "dark": "#E8E8E8"}
MUTED: dict[Theme, str] = {"light": "#6A737D", "dark": "#9AA3AD"}
FAINT: dict[Theme, str] = {"light": "#D9DDE1", "dark": "#3C434B"}
OTHERS: dict[Theme, tuple[str, ...]] = {
    "light": ("#882255", "#332288", "#7A6A00", "#B0406A", "#6B4226"),
    "dark": ("#CC79A7", "#8F84F0", "#CFC04A", "#F08BB0", "#C79A6B"),
}
_SHADES = ("black", "white")  # mixed into the colours of variants
_MARKERS = ("<", ">", "*", "p", "d", "h")  # of variants
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.2)), (0, (1.6, 1)))  # of variants


def method_of(label: str) -> str | None:
    """The method in a label, or None.

    >>> method_of("both"), method_of("both-s1"), method_of("noisy (best)"), method_of("bothered")
    ('both', 'both', 'noisy', None)
    """
    words = re.split(r"[^a-z]+", label.lower())
    return next((word for word in words if word in METHOD_MARKERS), None)


def variant_of(label: str) -> str:
    """The rest of a label without the method, the seed and the epoch (best or last).

    >>> variant_of("both-s1"), variant_of("noisy (best)"), variant_of("discriminative-code-s0")
    ('', '', 'code')
    """
    words = re.split(r"[^a-z0-9]+", label.lower())
    plain = re.compile(rf"{'|'.join(METHOD_MARKERS)}|s\d+|best|last|")
    return " ".join(word for word in words if not plain.fullmatch(word))


def colour(label: str, theme: Theme = "light") -> str:
    """The colour of a label.

    Args:
        label: of a method or a run, such as "both" or "noisy-s3 (best)".
        theme: "light" or "dark".
    """
    method, number = method_of(label), _variant_number(label)
    if method is None:
        return OTHERS[theme][(number or 0) % len(OTHERS[theme])]
    return shades(method, theme)[0 if number is None else 1 + number % len(_SHADES)]


def _variant_number(label: str) -> int | None:
    variant = variant_of(label)
    return zlib.crc32(variant.encode()) if variant else None


def shades(method: str, theme: Theme) -> list[str]:
    """The colour of a method, and those of its variants.

    >>> shades("both", "light")
    ['#0072B2', '#003F62', '#73B1D5']
    """
    plain = METHOD_COLOURS[theme][method]
    mixed: list[Any] = [
        0.55 * np.array(to_rgb(plain)) + 0.45 * np.array(to_rgb(x)) for x in _SHADES
    ]
    return [plain, *(to_hex(rgb).upper() for rgb in mixed)]


def line_style(label: str, theme: Theme) -> dict[str, Any]:
    """Colour and dashes of a label's line, as arguments of `plot`."""
    method, number = method_of(label), _variant_number(label)
    dashes = "solid"
    if method:
        dashes = _METHODS[method][3] if number is None else _DASHES[number % len(_DASHES)]
    return {"color": colour(label, theme), "linestyle": dashes}


def marker(label: str) -> str:
    method, number = method_of(label), _variant_number(label)
    if method is None:
        return "P"
    return METHOD_MARKERS[method] if number is None else _MARKERS[number % len(_MARKERS)]


def class_colours(count: int) -> list[Any]:
    """One colour per class: ten distinct ones, or evenly spaced ones of a colour map for more."""
    if count <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:count])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def _dark_colours() -> dict[str, str]:
    pairs = [(palette["light"], palette["dark"]) for palette in (INK, MUTED, FAINT)]
    pairs += zip(OTHERS["light"], OTHERS["dark"], strict=True)
    for method in METHOD_MARKERS:
        pairs += zip(shades(method, "light"), shades(method, "dark"), strict=True)
    return {light.lower(): dark.lower() for light, dark in pairs}


DARK = _dark_colours()  # light colour -> dark colour of the same meaning
