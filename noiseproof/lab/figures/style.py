"""Layout shared by all figures, on a transparent background; the colours are in `palette`."""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from noiseproof.lab.console import printable
from noiseproof.lab.figures.palette import FAINT, INK, MUTED, Theme, colour, line_style

P = ParamSpec("P")

NARROW = 3.5  # inches: the width of a figure for a phone
_narrow: ContextVar[bool] = ContextVar("narrow", default=False)
_LAYOUT = matplotlib.rc_params_from_file(
    str(Path(__file__).with_name("figures.mplstyle")), use_default_template=False
)


class _NarrowFigure(Figure):
    """A figure for a phone: its panels are stacked, its lines of text are short, and its legends
    have few columns and are below the axes."""

    panels: NDArray[Any]  # the axes, rows x columns as in a wide figure
    per_line: int  # how many of them are next to each other

    def add_panels(
        self, rows: int, columns: int, per_line: int, *, sharex: Any = False, **options: Any
    ) -> NDArray[Any]:
        """Axes of rows x columns panels, each row broken into lines of `per_line`."""
        lines = -(-columns // per_line)
        axes = self.subplots(rows * lines, per_line, squeeze=False, **options)
        axes = axes.reshape(rows, lines * per_line)
        for ax in axes[:, columns:].flat:
            ax.remove()
        self.panels, self.per_line = axes[:, :columns], per_line
        for column in self.panels.T if sharex else ():
            for ax in column[1:]:
                ax.sharex(column[0])
        return self.panels

    def label_panels(self) -> None:
        """Repeats the titles in every row and the label of a row on each of its lines."""
        titles = [ax.get_title("left") for ax in self.panels[0]]
        for row in self.panels:
            label = row[0].yaxis.label
            look: Any = {x: getattr(label, f"get_{x}")() for x in ("rotation", "color", "ha", "va")}
            for i, (ax, title) in enumerate(zip(row, titles, strict=True)):
                ax.set_title(_wrapped(title, 32 // self.per_line), loc="left")
                ax.set_xlabel(_wrapped(ax.get_xlabel(), 40 if self.per_line == 1 else 16))
                if i % self.per_line == 0 and not ax.get_ylabel():
                    ax.set_ylabel(label.get_text(), **look)

    def supxlabel(self, t: str, **options: Any) -> Any:
        return super().supxlabel(_wrapped(t, 46), **options)

    def legend(self, *args: Any, **options: Any) -> Any:
        options |= {"loc": "outside lower center", "ncols": min(2, options.get("ncols", 2))}
        return super().legend(*args, **options)


@contextlib.contextmanager
def narrow_figures() -> Iterator[None]:
    """Figures drawn in this block are for a phone: at most `NARROW` wide, their panels stacked,
    small ones of a grid two to a line, and their labels inside."""
    token = _narrow.set(True)
    try:
        yield
    finally:
        _narrow.reset(token)


def themed(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorates a function that draws a figure with the rcParams of its `theme`."""

    @functools.wraps(draw)
    def draw_themed(*args: P.args, **kwargs: P.kwargs) -> Figure:
        theme = kwargs.get("theme", "light")
        if theme not in ("light", "dark"):
            raise ValueError(f"theme must be light or dark, got {theme!r}")
        ink, muted = INK[theme], MUTED[theme]
        inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "legend.labelcolor")
        lines = ("axes.edgecolor", "xtick.color", "ytick.color")
        colours = {**dict.fromkeys(inked, ink), **dict.fromkeys(lines, muted)}
        settings: Any = {**_LAYOUT, **colours, "grid.color": FAINT[theme]}
        with matplotlib.rc_context(settings):
            figure = draw(*args, **kwargs)
            if isinstance(figure, _NarrowFigure):
                figure.label_panels()
            for ax in figure.axes:
                # Ticks are created when the figure is rendered, after this context has ended.
                ax.tick_params(which="both", color=muted, labelcolor=ink, labelsize=8, width=0.8)
                for axis in (ax.xaxis, ax.yaxis):
                    axis.get_offset_text().set_color(ink)
        return figure

    return draw_themed


def subplots(
    rows: int,
    columns: int,
    *,
    cell: tuple[float, float],
    grid: Literal["x", "y", "both"] | None = None,
    **options: Any,
) -> tuple[Figure, NDArray[Any]]:
    """A figure with rows x columns axes of `cell` (width, height) inches, with faint lines at the
    major ticks of the `grid` axes; and the axes as an array. See `narrow_figures` for a phone."""
    if _narrow.get():
        width, height = cell
        per_line = 2 if rows > 1 and width < 0.75 * NARROW else 1
        if rows > 1:  # a wide figure has titles above its first row alone
            height = height * min(1, NARROW / (per_line * width)) + 0.4
        size = (min(NARROW, columns * width), rows * -(-columns // per_line) * height)
        figure = _NarrowFigure(figsize=size, layout="constrained")
        axes = figure.add_panels(rows, columns, per_line, **options)
    else:
        figure = Figure(figsize=(columns * cell[0], rows * cell[1]), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat if grid else ():
        ax.grid(visible=True, axis=grid, which="major", linewidth=0.6)
    return figure, axes


def _wrapped(text: str, width: int) -> str:
    """The text with no line longer than `width`, if its words allow that."""
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


def label_lines(ax: Axes, ends: Mapping[str, tuple[float, float]], theme: Theme) -> None:
    """Labels lines at their right ends, (x, y) in data coordinates, without overlap; in a narrow
    figure by a legend inside."""
    if not ends:
        return
    if _narrow.get():
        lines = [Line2D([], [], label=run_label(x), **line_style(x, theme)) for x in ends]
        ax.legend(handles=lines, loc="best", fontsize=8)
        return
    low, high = ax.get_ylim()
    inches = ax.figure.bbox.height / ax.figure.dpi
    room = 0.16 * (high - low) / (0.8 * inches)  # a line of text, in data units
    room *= max(run_label(label).count("\n") + 1 for label in ends)
    order = sorted(ends, key=lambda label: ends[label][1])
    wanted = np.array([ends[label][1] for label in order])
    for label, y in zip(order, spread(wanted, room, low, high), strict=True):
        line = {"arrowstyle": "-", "color": FAINT[theme], "lw": 0.8, "shrinkA": 0, "shrinkB": 2}
        ax.annotate(
            run_label(label),
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
    offsets = room * np.arange(len(wanted))
    out = isotonic_regression(np.asarray(wanted) - offsets).x + offsets
    out -= max(0.0, out[-1] - high)
    return out + max(0.0, low - out[0]) if len(out) * room <= high - low + room else out


def percent_ticks(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Labels the ticks of fractions in percent."""
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))


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
    name = printable(name)
    name = name if len(name) <= length else name[: length - 1].rstrip() + "…"
    literal = name.replace("$", r"\$")  # else read as mathematics
    return "\u200a" + literal if literal.startswith("_") else literal  # else left out of legends


def run_label(label: str, width: int = 32) -> str:
    """The name of a run or method, in at most three lines of `width` characters: 32, or 18 above a
    panel of a grid.

    >>> run_label("a-run-with-quite-a-long-name-that-needs-two-lines")
    'a-run-with-quite-a-long-name-\\nthat-needs-two-lines'
    """
    lines = textwrap.wrap(printable(label), width, max_lines=3, placeholder="…")
    return "\n".join(shorten(line, width) for line in lines) or shorten(label)


def legend_below(figure: Figure, handles: Sequence[Artist], **options: Any) -> None:
    """Draws a legend below a figure, with as many columns as its width has room for, roughly. The
    figure grows by the lines after the first."""
    labels = [str(handle.get_label()).split("\n") for handle in handles]
    widest = 0.4 + 0.08 * max((len(line) for label in labels for line in label), default=0)
    columns = max(1, min(10, len(labels), int(figure.get_figwidth() / widest)))
    lines = -(-len(labels) // columns) * max(map(len, labels), default=1)
    if not _narrow.get():
        figure.set_figheight(figure.get_figheight() + 0.17 * (lines - 1))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **options)


def placeholder(ax: Axes, text: str, theme: Theme) -> None:
    """Shows `text` in place of a plot that has no data."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED[theme])
    ax.set_xticks([])
    ax.set_yticks([])
