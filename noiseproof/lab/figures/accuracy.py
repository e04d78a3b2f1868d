"""Figures of accuracy: by noise level, confidence, class, pair of classes, and epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from noiseproof.lab.figures.palette import ACCENT, INK, MUTED, Theme, colour, line_style, marker
from noiseproof.lab.figures.style import (
    label_lines,
    legend_below,
    percent_ticks,
    run_label,
    shorten,
    subplots,
    themed,
)


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
    figure, ((ax,),) = subplots(1, 1, cell=(6.6, 3.7), grid="y")
    ends: dict[str, tuple[float, float]] = {}
    for label, curve in curves.items():
        columns = {name: np.asarray(values, dtype=float) for name, values in curve.items()}
        order = np.argsort(columns["level"])
        x, y = columns["level"][order], columns["mean"][order]
        if "std" in curve:
            s = np.nan_to_num(columns["std"][order])
            ax.fill_between(x, y - s, y + s, color=colour(label, theme), alpha=0.16, lw=0)
        ax.plot(x, y, marker=marker(label), label=run_label(label), **line_style(label, theme))
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
    ax.set(xlabel=level, ylabel="test accuracy")
    ax.margins(x=0.02)
    percent_ticks(ax)
    label_lines(ax, ends, theme)
    return figure


@themed
def certified_accuracy(radii: Mapping[str, ArrayLike], *, theme: Theme = "light") -> Figure:
    """The share of images that are certified at each L2 radius, as steps.

    Args:
        radii: for each label the certified radius of every image; negative where the answer is
            wrong or none.
        theme: "light" or "dark".
    """
    figure, ((ax,),) = subplots(1, 1, cell=(6.6, 3.7), grid="y")
    ends: dict[str, tuple[float, float]] = {}
    largest = max(float(np.max(values, initial=0.0)) for values in radii.values())
    for label, values in radii.items():
        found = np.asarray(values, dtype=float)
        x = np.unique(np.concatenate([[0.0], found[found > 0]]))
        y = np.array([np.mean(found >= r) for r in x])
        # The share at x is that up to x; beyond the last radius nothing is certified.
        ax.plot(np.append(x, x[-1]), np.append(y, 0.0), drawstyle="steps-pre",
                label=run_label(label), **line_style(label, theme))  # fmt: skip
        ends[label] = (float(x[-1]), float(y[-1]))
    ax.set(xlabel="L2 radius, in pixel units", ylabel="certified accuracy",
           xlim=(0, 1.02 * largest or 1), ylim=(0, 1.02))  # fmt: skip
    percent_ticks(ax)
    label_lines(ax, ends, theme)
    return figure


@themed
def reliability(
    bins: Mapping[str, Mapping[str, Mapping[str, ArrayLike]]],
    *,
    fewest: int = 20,
    theme: Theme = "light",
) -> Figure:
    """Reliability diagrams: accuracy by confidence, one panel per condition.

    Args:
        bins: for each condition and label `images`, `correct` and `confidence`, the sums over the
            images of each bin.
        fewest: a bin with fewer images is left out.
        theme: "light" or "dark".
    """
    width = min(3.6, 8.1 / len(bins))
    figure, axes = subplots(1, len(bins), cell=(width, width + 0.6), grid="both", sharey=True)
    for ax, (condition, by_label) in zip(axes[0], bins.items(), strict=True):
        ax.plot([0, 1], [0, 1], color=MUTED[theme], lw=1, ls=(0, (2, 2)), zorder=0)
        for label, sums in by_label.items():
            columns = {name: np.asarray(values, dtype=float) for name, values in sums.items()}
            shown = columns["images"] >= fewest
            confidence, correct = (
                columns[name][shown] / columns["images"][shown]
                for name in ("confidence", "correct")
            )
            ax.plot(confidence, correct, marker=marker(label), ms=4, label=run_label(label),
                    **line_style(label, theme))  # fmt: skip
        ax.set(title=shorten(condition, 30), xlabel="probability of the answer", aspect="equal",
               xlim=(0, 1.03), ylim=(0, 1.03))  # fmt: skip
        percent_ticks(ax)
        percent_ticks(ax, "x")
    axes[0, 0].set_ylabel("right answers")
    legend_below(figure, axes[0, 0].get_legend_handles_labels()[0], handlelength=2.4)
    return figure


@themed
def corruptions(
    accuracy: Mapping[str, ArrayLike],
    names: Sequence[str],
    families: Sequence[str],
    *,
    theme: Theme = "light",
) -> Figure:
    """Accuracy under each corruption, one row per corruption and one marker per label, from top to
    bottom.

    Args:
        accuracy: for each label the accuracy under each corruption, as fractions; NaN is left out.
        names: of the corruptions.
        families: of the corruptions; a gap and a heading separate one from the next.
        theme: "light" or "dark".
    """
    table = np.array(list(accuracy.values()), dtype=float)
    if table.shape != (len(accuracy), len(names)) or len(names) != len(families):
        raise ValueError(f"expected accuracies under {len(names)} corruptions, got {table.shape}")
    starts = [i > 0 and family != families[i - 1] for i, family in enumerate(families)]
    y = -(np.arange(len(names)) + 1.1 * np.cumsum(starts))
    figure, ((ax,),) = subplots(1, 1, cell=(6.4, 0.9 - 0.235 * float(y[-1])), grid="x")
    ax.hlines(y, np.nanmin(table, 0), np.nanmax(table, 0), lw=1, color=MUTED[theme], alpha=0.5)
    for label, row in zip(accuracy, table, strict=True):
        ax.scatter(row, y, s=30, marker=marker(label), label=run_label(label),
                   color=colour(label, theme), lw=0, zorder=3)  # fmt: skip
    ax.set_yticks(y, [shorten(name) for name in names])
    for i, family in enumerate(families):
        if starts[i]:
            ax.text(-0.01, y[i] + 1.0, family, transform=ax.get_yaxis_transform(), ha="right",
                    va="center", fontsize=8, fontweight="bold", color=MUTED[theme])  # fmt: skip
    ax.set(ylim=(y[-1] - 0.7, 0.7), xlabel="test accuracy")
    percent_ticks(ax, "x")
    legend_below(figure, ax.get_legend_handles_labels()[0], handletextpad=0.1)
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
    count = max(1, len(columns))
    figure, axes = subplots(1, count, cell=(8.1 / count, 2.9), grid="y")
    for ax, column in zip(axes[0], columns, strict=False):
        for label, rows in metrics.items():
            points = [(row["epoch"], row[column]) for row in rows if column in row]
            ax.plot(*zip(*points, strict=True), **line_style(label, theme), lw=1.5)
        ax.set(title=titles[column], xlabel="epoch")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if column == "loss":
            ax.set_yscale("log")
        else:
            percent_ticks(ax)
    lines = [Line2D([], [], label=run_label(x), **line_style(x, theme)) for x in metrics]
    legend_below(figure, lines, handlelength=2.6)
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
            if i == j or share >= 0.005:
                strong = "white" if theme == "light" else "black"
                ink = strong if wrong[i, j] > middle else INK[theme]
                weight = "bold" if i == j else "normal"
                ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5,
                        fontweight=weight, color=ink)  # fmt: skip
    if len(classes) <= 60:
        names = [shorten(name, 14) for name in classes]
        narrow = max(map(len, classes), default=0) <= 3
        ax.set_xticks(range(len(names)), names, rotation=0 if narrow else 90)
        ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="predicted", ylabel="true class", title=shorten(title, 64))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    figure.supxlabel("numbers: % of the true class; colour: errors", fontsize=8,
                     color=MUTED[theme])  # fmt: skip
    return figure


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
    for label, recalls in accuracy.items():
        if np.shape(recalls) != (len(classes),):
            shape = np.shape(recalls)
            raise ValueError(f"{label} needs {len(classes)} recalls, got shape {shape}")
    table = np.array(list(accuracy.values()), dtype=float)
    order = np.argsort(-np.nanmean(table, axis=0), kind="stable")  # drawn from the bottom up
    table = table[:, order]
    figure, ((ax,),) = subplots(1, 1, cell=(6.4, 1.0 + 0.27 * len(classes)), grid="x")
    ax.hlines(range(len(classes)), np.nanmin(table, 0), np.nanmax(table, 0), lw=1,
              color=MUTED[theme], alpha=0.5)  # fmt: skip
    for label, row in zip(accuracy, table, strict=True):
        ax.scatter(row, range(len(classes)), s=30, marker=marker(label),
                   label=run_label(label),
                   color=colour(label, theme), lw=0, zorder=3)  # fmt: skip
    ax.set_yticks(range(len(classes)), [shorten(str(classes[i])) for i in order.tolist()])
    ax.set(ylim=(-0.6, len(classes) - 0.4), xlabel="recall")
    percent_ticks(ax, "x")
    legend_below(figure, ax.get_legend_handles_labels()[0], handletextpad=0.1)
    return figure
