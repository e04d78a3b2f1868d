"""Figures of feature space: embeddings, class separation by stage, distances, abstention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from noiseproof.lab.figures.palette import (
    INK,
    MUTED,
    Theme,
    class_colours,
    colour,
    line_style,
    marker,
)
from noiseproof.lab.figures.style import (
    cumulative_share,
    legend_below,
    percent_ticks,
    placeholder,
    run_label,
    shorten,
    subplots,
    themed,
)

Arrays = Mapping[str, NDArray[Any]]


@themed
def tsne(
    embeddings: Mapping[str, Arrays],
    labels: ArrayLike,
    classes: Sequence[str],
    *,
    theme: Theme = "light",
) -> Figure:
    """Embeddings of clean images above those of noisy images, one column per label.

    Args:
        embeddings: for each label `clean` and `noisy`, n x 2 each, fitted together.
        labels: class of each sample.
        classes: names of the classes.
        theme: "light" or "dark".
    """
    views = {v: {x: points[v] for x, points in embeddings.items()} for v in ("clean", "noisy")}
    width = max(1.75, 7.0 / max(3, len(embeddings)))
    return _scatter_plots(views, labels, classes, (width, 2.05), theme, shared_limits=True)


@themed
def tsne_stages(
    embeddings: Mapping[str, Mapping[str, NDArray[Any]]],
    labels: ArrayLike,
    classes: Sequence[str],
    *,
    theme: Theme = "light",
) -> Figure:
    """Embeddings of each stage of the network, one row per label and one column per stage.

    Args:
        embeddings: embeddings[label][stage], n x 2 each.
        labels: class of each sample.
        classes: names of the classes.
        theme: "light" or "dark".
    """
    width = max(1.45, 7.0 / len(set().union(*embeddings.values())))
    return _scatter_plots(embeddings, labels, classes, (width, 1.75), theme)


def _scatter_plots(
    rows: Mapping[str, Mapping[str, NDArray[Any]]],
    labels: ArrayLike,
    classes: Sequence[str],
    cell: tuple[float, float],
    theme: Theme,
    shared_limits: bool = False,
) -> Figure:
    """rows[row][column], n x 2 each, in squares; the limits of a column may be shared."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    figure, axes = subplots(len(rows), len(columns), cell=cell)
    shades = class_colours(len(classes))
    colours = [shades[label] for label in np.asarray(labels)]
    for row_axes, (name, row) in zip(axes, rows.items(), strict=True):
        row_axes[0].set_ylabel(run_label(name))
        for ax, column in zip(row_axes, columns, strict=True):
            if column not in row:
                placeholder(ax, "not analysed", theme)
                continue
            inside = [r[column] for r in rows.values()] if shared_limits else [row[column]]
            low, high = np.min(inside, axis=(0, 1)), np.max(inside, axis=(0, 1))
            middle, half = (low + high) / 2, 0.54 * float((high - low).max() or 1.0)
            (left, bottom), (right, top) = middle - half, middle + half
            size = float(np.clip(2200 / max(len(row[column]), 1), 1.2, 9))
            # Rasterised: thousands of markers would make an SVG of megabytes.
            ax.scatter(*row[column].T, s=size, c=colours, lw=0, alpha=0.8, rasterized=True)
            ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    for ax, column in zip(axes[0], columns, strict=True):
        ax.set_title(run_label(column, 18))
    _class_legend(figure, classes)
    return figure


def _class_legend(figure: Figure, classes: Sequence[str]) -> None:
    if len(classes) > 20:
        figure.supxlabel(f"colours: {len(classes)} classes", fontsize=8)
        return
    markers = [
        Line2D([], [], marker="o", ls="", color=shade, ms=5, label=shorten(name))
        for name, shade in zip(classes, class_colours(len(classes)), strict=True)
    ]
    legend_below(figure, markers, handletextpad=0.1, columnspacing=1.1)


@themed
def stage_separation(separation: Mapping[str, Arrays], *, theme: Theme = "light") -> Figure:
    """k-NN accuracy and silhouette of the raw features by stage: clean solid, noisy dashed.

    Args:
        separation: for each label `stages` (S), and `knn` and `silhouette` (2 x S: clean, noisy).
        theme: "light" or "dark".
    """
    figure, axes = subplots(1, 2, cell=(3.9, 3.3), grid="y")
    for ax, kind in zip(axes[0], ("knn", "silhouette"), strict=True):
        for label, arrays in separation.items():
            stages = [str(stage) for stage in arrays["stages"]]
            for view, style in ((0, "solid"), (1, (0, (3, 1.6)))):
                ax.plot(stages, arrays[kind][view], marker=marker(label), linestyle=style,
                        color=colour(label, theme), mfc="none" if view else None)  # fmt: skip
        ax.margins(x=0.06)
        ax.set_xlabel("stage of the network")
    axes[0, 0].set_title("k-NN accuracy, leave-one-out")
    axes[0, 1].set_title("silhouette")
    percent_ticks(axes[0, 0])
    lines = [
        Line2D([], [], color=colour(x, theme), marker=marker(x), label=run_label(x, 18))
        for x in separation
    ]
    lines += [
        Line2D([], [], color=MUTED[theme], label="clean"),
        Line2D([], [], color=MUTED[theme], ls=(0, (3, 1.6)), label="noisy"),
    ]
    legend_below(figure, lines)
    return figure


@themed
def geometry_histograms(
    geometry: Mapping[str, Arrays], *, radius: float | None = None, theme: Theme = "light"
) -> Figure:
    """Distances to the class centroid and to the nearest boundary, clean and noisy, row by row.

    Args:
        geometry: for each label `clean.centroid`, `noisy.centroid`, `clean.boundary` and
            `noisy.boundary`, one value per sample. The distance to the boundary is negative for a
            misclassified sample.
        radius: of the spheres, which is marked.
        theme: "light" or "dark".
    """
    figure, axes = subplots(len(geometry), 2, cell=(3.7, 1.25 + 0.5 / len(geometry)), sharex="col")
    views = ("clean", "noisy")
    for column, kind in enumerate(("centroid", "boundary")):
        values = np.concatenate([a[f"{view}.{kind}"] for a in geometry.values() for view in views])
        values = values[np.isfinite(values)]
        edges = np.linspace(values.min(), np.quantile(values, 0.995), 48)
        for ax, (label, arrays) in zip(axes[:, column], geometry.items(), strict=True):
            clean, noisy, shade = (
                arrays[f"clean.{kind}"],
                arrays[f"noisy.{kind}"],
                colour(label, theme),
            )
            weights = np.full(len(clean), 1 / len(clean))
            ax.hist(clean, edges, weights=weights, color=shade, alpha=0.35, lw=0,
                    histtype="stepfilled")  # fmt: skip
            ax.hist(noisy, edges, weights=weights, color=shade, histtype="step", lw=1.4)
            line = radius if kind == "centroid" else 0
            if line is not None:
                ax.axvline(line, color=INK[theme], lw=1, ls=(0, (3, 2)))
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
    for ax, label in zip(axes[:, 0], geometry, strict=True):
        shade = colour(label, theme)
        ax.set_ylabel(run_label(label, 18), rotation=0, ha="right", va="center", color=shade)
    axes[0, 0].set_title("distance to the class centroid")
    axes[0, 1].set_title("signed distance to the nearest boundary")
    dashed = "" if radius is None else f"; dashed: radius {radius:g}"
    axes[-1, 0].set_xlabel(f"units of feature space{dashed}")
    axes[-1, 1].set_xlabel("units of feature space; left of 0: misclassified")
    markers = [
        Line2D([], [], color=MUTED[theme], lw=7, alpha=0.45, label="clean"),
        Line2D([], [], color=MUTED[theme], lw=1.4, label="noisy"),
    ]
    legend_below(figure, markers)
    return figure


@themed
def distances(geometry: Mapping[str, Arrays], *, theme: Theme = "light") -> Figure:
    """Cumulative distribution of the distance to a sample's own centroid over the nearest other's.

    The ratio does not depend on the scale of the features, so models can be compared; above 1, a
    feature is nearer to another class.

    Args:
        geometry: for each label `clean.centroid`, `clean.rival`, `noisy.centroid` and
            `noisy.rival`, one value per sample.
        theme: "light" or "dark".
    """
    figure, axes = subplots(1, 2, cell=(3.9, 3.1), grid="y", sharey=True)
    for ax, view in zip(axes[0], ("clean", "noisy"), strict=True):
        for label, arrays in geometry.items():
            ratio = arrays[f"{view}.centroid"] / np.maximum(arrays[f"{view}.rival"], 1e-30)
            ax.step(*cumulative_share(ratio), where="post", label=run_label(label),
                    **line_style(label, theme))  # fmt: skip
        ax.axvline(1, color=MUTED[theme], lw=1)
        ax.set(xscale="log", ylim=(0, 1.02), title=view, xlabel="own / nearest other centroid")
        percent_ticks(ax)
    axes[0, 0].set_ylabel("test samples below")
    legend_below(figure, axes[0, 0].get_legend_handles_labels()[0], handlelength=2.4)
    return figure


@themed
def risk_coverage(
    abstention: Mapping[str, Arrays], *, score: str = "probability", theme: Theme = "light"
) -> Figure:
    """Share of wrong answers against the share of images that are answered, surest first.

    Args:
        abstention: for each label `coverage`, and the risk at each coverage by a score:
            `clean.probability` and `noisy.probability`, for example.
        score: by which images are answered or not.
        theme: "light" or "dark".
    """
    figure, axes = subplots(1, 2, cell=(3.9, 3.1), grid="y", sharey=True)
    for ax, view in zip(axes[0], ("clean", "noisy"), strict=True):
        for label, arrays in abstention.items():
            style = {**line_style(label, theme), "marker": None}
            ax.plot(arrays["coverage"], arrays[f"{view}.{score}"], label=run_label(label), **style)
        ax.set(xlim=(0, 1), title=view, xlabel="share of images answered")
        percent_ticks(ax)
        percent_ticks(ax, "x")
    axes[0, 0].set(ylabel="wrong among these", ylim=(0, None))  # after all lines: shared
    legend_below(figure, axes[0, 0].get_legend_handles_labels()[0], handlelength=2.4)
    return figure
