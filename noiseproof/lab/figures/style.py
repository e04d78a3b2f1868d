"""How every figure is laid out, on a transparent ground; its colours are in `palette`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from noiseproof.lab.figures.palette import FAINT, INK, MUTED, Theme, colour

__all__ = [
    "below",
    "empty",
    "ends",
    "grid",
    "logarithmic",
    "percent",
    "rules",
    "short",
    "themed",
]

P = ParamSpec("P")

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
