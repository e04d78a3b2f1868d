"""How every figure looks: one palette, in a light and a dark dress, on a transparent ground.

A method has the same colour, marker and line in every figure. The hues are Okabe and Ito's, which
readers with any common colour blindness can tell apart; markers and dashes say the same once more.
Other settings of a method ("discriminative-code") have a shade of its colour, and what names no
method one of a few colours of its own; which one follows from the name alone.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "CLASS_COLOURS",
    "INK",
    "METHOD_COLOURS",
    "METHOD_DASHES",
    "METHOD_MARKERS",
    "MUTED",
    "Theme",
    "below",
    "class_colours",
    "colour",
    "ends",
    "grid",
    "percent",
    "rules",
    "short",
    "themed",
]

P = ParamSpec("P")
Theme = Literal["light", "dark"]

METHOD_COLOURS: dict[Theme, dict[str, str]] = {
    "light": {
        "normal": "#4D4D4D",
        "noisy": "#E69F00",
        "both": "#0072B2",
        "stability": "#009E73",
        "discriminative": "#D55E00",
    },
    "dark": {
        "normal": "#C8C8C8",
        "noisy": "#F0B429",
        "both": "#56B4E9",
        "stability": "#2CC49A",
        "discriminative": "#FF8040",
    },
}
METHOD_MARKERS = {
    "normal": "o", "noisy": "v", "both": "s", "stability": "^", "discriminative": "D",
}  # fmt: skip
METHOD_DASHES: dict[str, Any] = {
    "normal": (0, (1.2, 1.4)),
    "noisy": (0, (4, 1.5, 1, 1.5)),
    "both": (0, (4, 1.8)),
    "stability": (0, (7, 1.8)),
    "discriminative": "solid",
}
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
_SHADES = (("#000000", 0.45), ("#FFFFFF", 0.45))  # of other settings of a method

_SHAPE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
}


def themed(make: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draws a figure in the dress that its `theme` names; rcParams are as before afterwards."""

    @functools.wraps(make)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        theme = kwargs.get("theme", "light")
        if theme not in ("light", "dark"):
            raise ValueError(f"theme must be light or dark, got {theme!r}")
        ink, muted = INK[theme], MUTED[theme]
        coloured = {
            "text.color": ink,
            "axes.labelcolor": ink,
            "axes.titlecolor": ink,
            "axes.edgecolor": muted,
            "xtick.color": muted,
            "ytick.color": muted,
            "grid.color": FAINT[theme],
            "legend.labelcolor": ink,
        }
        with matplotlib.rc_context(cast(Any, {**_SHAPE, **coloured})):
            figure = make(*args, **kwargs)
            for ax in figure.axes:
                # Ticks are made when drawn, which is after this context has ended.
                ax.tick_params(which="both", color=muted, labelcolor=ink, labelsize=8, width=0.8)
                for axis in (ax.xaxis, ax.yaxis):
                    axis.get_offset_text().set_color(ink)
        return figure

    return drawn


def grid(
    rows: int, columns: int, *, cell: tuple[float, float], **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """A figure of rows x columns axes, each `cell` inches wide and high; axes as a 2-d array."""
    figure = Figure(figsize=(columns * cell[0], rows * cell[1]), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def method_of(label: str) -> str | None:
    """The method that a label names, perhaps with more behind it.

    >>> method_of("both"), method_of("both-s1"), method_of("noisy (best)"), method_of("bothered")
    ('both', 'both', 'noisy', None)
    """
    words = re.split(r"[^a-z]+", label.lower())
    return next((word for word in words if word in METHOD_MARKERS), None)


def variant_of(label: str) -> str:
    """What a label says besides its method, the number of a seed and the choice of the epoch.

    >>> variant_of("both-s1"), variant_of("noisy (best)"), variant_of("discriminative-code-s0")
    ('', '', 'code')
    """
    words = re.split(r"[^a-z0-9]+", label.lower())
    plain = re.compile(rf"{'|'.join(METHOD_MARKERS)}|s\d+|best|last|")
    return " ".join(word for word in words if not plain.fullmatch(word))


def colour(label: str, theme: Theme = "light") -> str:
    """The colour of a label's method, or a shade of it, or one of those for what is no method."""
    method, variant = method_of(label), variant_of(label)
    number = zlib.crc32(variant.encode())
    if method is None:
        return OTHERS[theme][number % len(OTHERS[theme])]
    return shades(method, theme)[1 + number % len(_SHADES) if variant else 0]


def shades(method: str, theme: Theme) -> list[str]:
    """A method's colour, and those of its other settings.

    >>> shades("both", "light")
    ['#0072B2', '#003F62', '#73B1D5']
    """
    plain = METHOD_COLOURS[theme][method]
    return [plain, *(_mixed(plain, other, share) for other, share in _SHADES)]


def _mixed(colour: str, other: str, share: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round((1 - share) * a + share * b):02X}" for a, b in pairs)


def line(label: str, theme: Theme) -> dict[str, Any]:
    """Colour and dashes of a label's line."""
    return {
        "color": colour(label, theme),
        "linestyle": METHOD_DASHES.get(method_of(label) or "", "solid"),
    }


def marker(label: str) -> str:
    return METHOD_MARKERS.get(method_of(label) or "", "P")


def class_colours(count: int) -> list[Any]:
    """A colour a class: ten that differ well, and a walk through the hues for more."""
    if count <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:count])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def ends(ax: Axes, places: Mapping[str, tuple[float, float]], theme: Theme) -> None:
    """Names lines at their right ends, (x, y) in data coordinates, moved apart where they meet."""
    if not places:
        return
    low, high = ax.get_ylim()
    inches = ax.figure.bbox.height / ax.figure.dpi
    room = 0.16 * (high - low) / (0.8 * inches)  # a line of text, in data units
    order = sorted(places, key=lambda label: places[label][1])
    wanted = np.array([places[label][1] for label in order])
    for label, y in zip(order, spread(wanted, room, low, high), strict=True):
        x, own = places[label]
        tie = {"arrowstyle": "-", "color": FAINT[theme], "lw": 0.8, "shrinkA": 0, "shrinkB": 2}
        ax.annotate(
            label,
            xy=(x, own),
            xytext=(1.03, y),
            textcoords=ax.get_yaxis_transform(),
            color=colour(label, theme),
            fontsize=8.5,
            va="center",
            arrowprops=tie,
            annotation_clip=False,
        )


def spread(wanted: Sequence[float] | NDArray[Any], room: float, low: float, high: float) -> Any:
    """Ascending places near `wanted`, at least `room` apart and, if they fit, within [low, high].

    >>> spread([1.0, 1.0, 5.0], 1.0, 0.0, 6.0).tolist()
    [0.5, 1.5, 5.0]
    """
    groups = [[float(y)] for y in wanted]  # each is a run of neighbours, `room` apart
    placed: list[tuple[float, int]] = []  # (middle, how many)
    for (y,) in groups:
        middle, count = y, 1
        while (
            placed
            and middle - (count - 1) * room / 2
            < placed[-1][0] + (placed[-1][1] - 1) * room / 2 + room
        ):
            before, many = placed.pop()
            middle = (middle * count + before * many) / (count + many)
            count += many
        placed.append((middle, count))
    out = np.concatenate([m + room * (np.arange(n) - (n - 1) / 2) for m, n in placed])
    over = max(0.0, out[-1] - high)
    out = out - over
    return out + max(0.0, low - out[0]) if len(out) * room <= high - low + room else out


def percent(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Ticks of fractions as percents."""
    from matplotlib.ticker import PercentFormatter

    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))


def rules(ax: Axes, axis: Literal["x", "y", "both"] = "y") -> None:
    """Faint lines to read values by."""
    ax.grid(visible=True, axis=axis, which="major", linewidth=0.6)


def below(values: ArrayLike, points: int = 300) -> tuple[NDArray[Any], NDArray[Any]]:
    """(value, share of values at or below it), at no more than `points` places.

    >>> below([3.0, 1.0, 2.0, 4.0])[0].tolist(), below([3.0, 1.0, 2.0, 4.0])[1].tolist()
    ([1.0, 2.0, 3.0, 4.0], [0.25, 0.5, 0.75, 1.0])
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    kept = np.unique(np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(int))
    return x[kept], (kept + 1) / len(x)


def logarithmic(ax: Axes, axis: Literal["x", "y", "both"]) -> None:
    """Logarithmic axes with ticks at powers of ten alone: over many decades others are a blur."""
    for name in ("x", "y") if axis == "both" else (axis,):
        ax.set(**{f"{name}scale": "log"})
    ax.minorticks_off()


def short(name: str, most: int = 18) -> str:
    """A name that fits, as plain text: a dollar is no mathematics, an underscore hides nothing.

    >>> short("a very long class name"), short("$x$")
    ('a very long class…', '\\\\$x\\\\$')
    """
    name = name if len(name) <= most else name[: most - 1].rstrip() + "…"
    plain = name.replace("$", r"\$")
    return "\u200a" + plain if plain.startswith("_") else plain  # legends leave out _names


def empty(ax: Axes, text: str, theme: Theme) -> None:
    """Says in the place of a plot that there is nothing to plot."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED[theme])
    ax.set_xticks([])
    ax.set_yticks([])
