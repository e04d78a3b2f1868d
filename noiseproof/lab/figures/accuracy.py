"""Figures of accuracy: by noise level, by class, by pair of classes, and by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from noiseproof.lab.figures.palette import ACCENT, MUTED, Theme, colour, line_style, marker
from noiseproof.lab.figures.style import (
    gridlines,
    label_lines,
    percent_ticks,
    shorten,
    subplots,
    themed,
)

__all__ = ["accuracy_curves", "confusion", "per_class", "training_curves"]


@themed
def accuracy_curves(
    curves: Mapping[str, Mapping[str, ArrayLike]],
    *,
    level: str = "standard deviation of the noise, in pixel units",
    names: Mapping[float, str] | None = None,
    train_level: float | None = None,
    theme: Theme = "light",
) -> Figure:
    """Accuracy by noise level.

    Args:
        curves: for each label `level`, `mean` and, for a band of mean ± std, `std`; accuracies are
            fractions.
        level: label of the x axis.
        names: text of the ticks, by level, such as "8/255"; by default the levels, where 0 is
            "clean".
        train_level: level of the training noise, which is marked.
        theme: "light" or "dark".
    """
    figure, ((ax,),) = subplots(1, 1, cell=(6.6, 3.7))
    ends: dict[str, tuple[float, float]] = {}
    for label, curve in curves.items():
        order = np.argsort(np.asarray(curve["level"], dtype=float))
        x = np.asarray(curve["level"], dtype=float)[order]
        y = np.asarray(curve["mean"], dtype=float)[order]
        if "std" in curve:
            s = np.nan_to_num(np.asarray(curve["std"], dtype=float)[order])
            ax.fill_between(x, y - s, y + s, color=colour(label, theme), alpha=0.16, lw=0)
        ax.plot(x, y, marker=marker(label), label=label, **line_style(label, theme))
        ends[label] = (float(x[-1]), float(y[-1]))
    levels = sorted({float(x) for c in curves.values() for x in np.asarray(c["level"]).ravel()})
    if names:
        ax.set_xticks(list(names), list(names.values()))
    elif len(levels) <= 8:
        ax.set_xticks(levels, [f"{x:.3g}" if x else "clean" for x in levels])
    if train_level is not None:
        ax.axvline(train_level, color=MUTED[theme], lw=1, ls=(0, (2, 2)), zorder=0)
        ax.annotate("training noise", (train_level, 0), xycoords=("data", "axes fraction"),
                    xytext=(4, 4), textcoords="offset points", fontsize=8,
                    color=MUTED[theme])  # fmt: skip
    ax.set_xlabel(level)
    ax.set_ylabel("test accuracy")
    ax.margins(x=0.02)
    percent_ticks(ax)
    gridlines(ax)
    label_lines(ax, ends, theme)
    return figure


@themed
def training_curves(
    metrics: Mapping[str, Sequence[Mapping[str, float]]], *, theme: Theme = "light"
) -> Figure:
    """Loss, training and validation accuracy by epoch.

    Args:
        metrics: for each label the rows of a run's metrics.csv.
        theme: "light" or "dark".
    """
    titles = {"loss": "training loss (own terms)", "train_accuracy": "training accuracy",
              "val_accuracy": "validation accuracy",
              "val_noisy_accuracy": "validation, noisy"}  # fmt: skip
    columns = [k for k in titles if any(k in row for rows in metrics.values() for row in rows)]
    if len(columns) == 4:  # less room for each title
        titles |= {"loss": "training loss", "val_accuracy": "validation, clean"}
    figure, axes = subplots(1, max(1, len(columns)), cell=(8.1 / max(1, len(columns)), 2.9))
    for ax, column in zip(axes[0], columns, strict=False):
        for label, rows in metrics.items():
            points = [(row["epoch"], row[column]) for row in rows if column in row]
            ax.plot(*zip(*points, strict=True), **line_style(label, theme), lw=1.5)
        ax.set_title(titles[column])
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if column == "loss":
            ax.set_yscale("log")
        else:
            percent_ticks(ax)
        gridlines(ax)
    lines = [Line2D([], [], label=label, **line_style(label, theme)) for label in metrics]
    figure.legend(handles=lines, loc="outside lower center", ncols=min(6, len(lines)),
                  handlelength=2.6)  # fmt: skip
    return figure


@themed
def confusion(
    matrix: ArrayLike, classes: Sequence[str], *, title: str = "", theme: Theme = "light"
) -> Figure:
    """A confusion matrix, in % of each true class.

    Args:
        matrix: C x C counts; rows are true classes, columns predictions.
        classes: their names.
        title: of the figure.
        theme: "light" or "dark".
    """
    counts = np.asarray(matrix, dtype=np.float64)
    if counts.shape != (len(classes), len(classes)):
        raise ValueError(f"expected {len(classes)} x {len(classes)} counts, got {counts.shape}")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = float(np.clip(1.6 + 0.36 * len(classes), 3.2, 9))
    figure, ((ax,),) = subplots(1, 1, cell=(side + 0.5, side))
    wrong = shares.copy()
    np.fill_diagonal(wrong, 0.0)  # colour shows only the errors, which are much rarer
    accent = ACCENT[theme]
    shade = LinearSegmentedColormap.from_list("errors", [(*to_rgb(accent), 0.04), accent])
    image = ax.imshow(wrong, cmap=shade, vmin=0, vmax=max(0.05, float(wrong.max())))
    if len(classes) <= 20:
        middle = float(image.get_clim()[1] or 1) / 2
        for (i, j), share in np.ndenumerate(shares):
            if i != j and share < 0.005:
                continue
            strong = wrong[i, j] > middle
            ink = ("white" if theme == "light" else "black") if strong else None
            weight = "bold" if i == j else "normal"
            ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5,
                    fontweight=weight, **({"color": ink} if ink else {}))  # fmt: skip
    if len(classes) <= 60:
        names = [shorten(name, 14) for name in classes]
        ax.set_xticks(range(len(names)), names, rotation=0 if _narrow(classes) else 90)
        ax.set_yticks(range(len(names)), names)
    ax.set_xlabel("predicted")
    ax.set_ylabel("true class")
    ax.set_title(title)
    ax.tick_params(length=0)
    for side_name in ("left", "bottom"):
        ax.spines[side_name].set_visible(False)
    figure.supxlabel("numbers: % of the true class; colour: errors", fontsize=8,
                     color=MUTED[theme])  # fmt: skip
    return figure


def _narrow(classes: Sequence[str]) -> bool:
    return max(map(len, classes), default=0) <= 3


@themed
def per_class(
    accuracy: Mapping[str, ArrayLike], classes: Sequence[str], *, theme: Theme = "light"
) -> Figure:
    """Recall of each class, one row per class and one marker per label, hardest class on top.

    Args:
        accuracy: for each label the recall of each class, as fractions.
        classes: their names.
        theme: "light" or "dark".
    """
    values: dict[str, NDArray[Any]] = {k: np.asarray(v, dtype=float) for k, v in accuracy.items()}
    for label, row in values.items():
        if row.shape != (len(classes),):
            raise ValueError(f"{label} needs {len(classes)} recalls, got shape {row.shape}")
    mean = np.nanmean(np.stack(list(values.values())), axis=0)
    order = np.argsort(-mean, kind="stable")  # drawn from the bottom up
    figure, ((ax,),) = subplots(1, 1, cell=(6.4, 1.0 + 0.27 * len(classes)))
    table = np.stack(list(values.values()))[:, order]
    ax.hlines(range(len(classes)), np.nanmin(table, 0), np.nanmax(table, 0), lw=1,
              color=MUTED[theme], alpha=0.5)  # fmt: skip
    for label, row in values.items():
        ax.scatter(row[order], range(len(classes)), s=30, marker=marker(label), label=label,
                   color=colour(label, theme), lw=0, zorder=3)  # fmt: skip
    ax.set_yticks(range(len(classes)), [shorten(str(classes[i])) for i in order.tolist()])
    ax.set_ylim(-0.6, len(classes) - 0.4)
    percent_ticks(ax, "x")
    ax.set_xlabel("recall")
    gridlines(ax, "x")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center",
                  ncols=min(6, len(values)), handletextpad=0.1)  # fmt: skip
    return figure
