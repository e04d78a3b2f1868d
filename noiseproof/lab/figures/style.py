"""Layout shared by all figures, on a transparent background; the colours are in `palette`."""

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
    "cumulative_share",
    "gridlines",
    "label_lines",
    "log_scale",
    "percent_ticks",
    "placeholder",
    "shorten",
    "subplots",
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


def themed(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorates a function that draws a figure with the rcParams of its `theme`."""

    @functools.wraps(draw)
    def draw_themed(*args: P.args, **kwargs: P.kwargs) -> Figure:
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
            figure = draw(*args, **kwargs)
            for ax in figure.axes:
                # Ticks are created when the figure is rendered, after this context has ended.
                ax.tick_params(which="both", color=muted, labelcolor=ink, labelsize=8, width=0.8)
                for axis in (ax.xaxis, ax.yaxis):
                    axis.get_offset_text().set_color(ink)
        return figure

    return draw_themed


def subplots(
    rows: int, columns: int, *, cell: tuple[float, float], **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """A figure with rows x columns axes of `cell` (width, height) inches; the axes as an array."""
    figure = Figure(figsize=(columns * cell[0], rows * cell[1]), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def label_lines(ax: Axes, ends: Mapping[str, tuple[float, float]], theme: Theme) -> None:
    """Labels lines at their right ends, (x, y) in data coordinates, without overlap."""
    if not ends:
        return
    low, high = ax.get_ylim()
    inches = ax.figure.bbox.height / ax.figure.dpi
    room = 0.16 * (high - low) / (0.8 * inches)  # a line of text, in data units
    order = sorted(ends, key=lambda label: ends[label][1])
    wanted = np.array([ends[label][1] for label in order])
    for label, y in zip(order, spread(wanted, room, low, high), strict=True):
        line = {"arrowstyle": "-", "color": FAINT[theme], "lw": 0.8, "shrinkA": 0, "shrinkB": 2}
        ax.annotate(
            label,
            xy=ends[label],
            xytext=(1.03, y),
            textcoords=ax.get_yaxis_transform(),
            color=colour(label, theme),
            fontsize=8.5,
            va="center",
            arrowprops=line,
            annotation_clip=False,
        )


def spread(wanted: Sequence[float] | NDArray[Any], room: float, low: float, high: float) -> Any:
    """Ascending positions near `wanted`, at least `room` apart and, if they fit, in [low, high].

    >>> spread([1.0, 1.0, 5.0], 1.0, 0.0, 6.0).tolist()
    [0.5, 1.5, 5.0]
    """
    groups: list[tuple[float, int]] = []  # (middle, size) of positions that are `room` apart
    for y in wanted:
        middle, size = float(y), 1
        while groups and middle - groups[-1][0] < room * (size + groups[-1][1]) / 2:
            other, count = groups.pop()
            middle = (middle * size + other * count) / (size + count)
            size += count
        groups.append((middle, size))
    out = np.concatenate([m + room * (np.arange(n) - (n - 1) / 2) for m, n in groups])
    over = max(0.0, out[-1] - high)
    out = out - over
    return out + max(0.0, low - out[0]) if len(out) * room <= high - low + room else out


def percent_ticks(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Labels the ticks of fractions in percent."""
    from matplotlib.ticker import PercentFormatter

    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))


def gridlines(ax: Axes, axis: Literal["x", "y", "both"] = "y") -> None:
    """Faint lines at the major ticks."""
    ax.grid(visible=True, axis=axis, which="major", linewidth=0.6)


def cumulative_share(values: ArrayLike, points: int = 300) -> tuple[NDArray[Any], NDArray[Any]]:
    """(values, share of all values at or below each), at no more than `points` values.

    >>> value, share = cumulative_share([3.0, 1.0, 2.0, 4.0])
    >>> value.tolist(), share.tolist()
    ([1.0, 2.0, 3.0, 4.0], [0.25, 0.5, 0.75, 1.0])
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    index = np.unique(np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(int))
    return x[index], (index + 1) / len(x)


def log_scale(ax: Axes, axis: Literal["x", "y", "both"]) -> None:
    """Logarithmic axes with ticks only at powers of ten: there are many decades."""
    for name in ("x", "y") if axis == "both" else (axis,):
        ax.set(**{f"{name}scale": "log"})
    ax.minorticks_off()


def shorten(name: str, length: int = 18) -> str:
    """A name of at most `length` characters that matplotlib shows literally.

    >>> shorten("a very long class name"), shorten("$x$")
    ('a very long class…', '\\\\$x\\\\$')
    """
    name = name if len(name) <= length else name[: length - 1].rstrip() + "…"
    literal = name.replace("$", r"\$")  # else mathematics
    return "\u200a" + literal if literal.startswith("_") else literal  # else not in a legend


def placeholder(ax: Axes, text: str, theme: Theme) -> None:
    """Shows `text` in place of a plot that has no data."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED[theme])
    ax.set_xticks([])
    ax.set_yticks([])
