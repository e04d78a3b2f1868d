"""Figures of feature space: embeddings, separation at each stage, distances in the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from noiseproof.lab.figures.palette import INK, MUTED, Theme, class_colours, colour, line, marker
from noiseproof.lab.figures.style import below, empty, grid, percent, rules, short, themed

__all__ = ["distances", "geometry_histograms", "stage_separation", "tsne", "tsne_stages"]

Arrays = Mapping[str, NDArray[Any]]


@themed
def tsne(
    embeddings: Mapping[str, Arrays],
    labels: ArrayLike,
    classes: Sequence[str],
    *,
    theme: Theme = "light",
) -> Figure:
    """A column a label, `clean` above `noisy` (n x 2 each, fitted together: one scale for both)."""
    figure, axes = grid(2, len(embeddings), cell=(max(1.75, 7.0 / max(3, len(embeddings))), 2.05))
    for column, (label, places) in zip(axes.T, embeddings.items(), strict=True):
        box = _box(np.concatenate([places["clean"], places["noisy"]]))
        for ax, view in zip(column, ("clean", "noisy"), strict=True):
            _cloud(ax, places[view], labels, len(classes), box)
        column[0].set_title(label)
    for ax, view in zip(axes[:, 0], ("clean", "noisy"), strict=True):
        ax.set_ylabel(view)
    _class_legend(figure, classes)
    return figure


@themed
def tsne_stages(
    embeddings: Mapping[str, Mapping[str, NDArray[Any]]],
    labels: ArrayLike,
    classes: Sequence[str],
    *,
    theme: Theme = "light",
) -> Figure:
    """A row a label, a column a stage: `embeddings[label][stage]`, n x 2 each."""
    stages = list(dict.fromkeys(stage for row in embeddings.values() for stage in row))
    figure, axes = grid(len(embeddings), len(stages), cell=(max(1.45, 7.0 / len(stages)), 1.75))
    for row, (label, placed) in zip(axes, embeddings.items(), strict=True):
        for ax, stage in zip(row, stages, strict=True):
            if stage in placed:
                _cloud(ax, placed[stage], labels, len(classes), _box(placed[stage]))
            else:
                empty(ax, "not analysed", theme)
        row[0].set_ylabel(label)
    for ax, stage in zip(axes[0], stages, strict=True):
        ax.set_title(stage)
    _class_legend(figure, classes)
    return figure


def _cloud(
    ax: Axes, places: NDArray[Any], labels: ArrayLike, classes: int, box: tuple[Any, Any]
) -> None:
    shades = np.array(class_colours(classes), dtype=object)
    size = float(np.clip(2200 / max(len(places), 1), 1.2, 9))
    c = [shades[label] for label in np.asarray(labels)]
    # One bitmap: thousands of marks would make an SVG of megabytes.
    ax.scatter(places[:, 0], places[:, 1], s=size, c=c, lw=0, alpha=0.8, rasterized=True)
    ax.set_xlim(*box[0])
    ax.set_ylim(*box[1])
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _box(places: NDArray[Any]) -> tuple[Any, Any]:
    """Limits of a square around all points."""
    low, high = places.min(0), places.max(0)
    middle, half = (low + high) / 2, 0.54 * float((high - low).max() or 1.0)
    return (middle[0] - half, middle[0] + half), (middle[1] - half, middle[1] + half)


def _class_legend(figure: Figure, classes: Sequence[str], most: int = 20) -> None:
    if len(classes) > most:
        figure.supxlabel(f"colours: {len(classes)} classes", fontsize=8)
        return
    marks = [
        Line2D([], [], marker="o", ls="", color=shade, ms=5, label=short(name))
        for name, shade in zip(classes, class_colours(len(classes)), strict=True)
    ]
    widest = 0.4 + 0.08 * max(len(short(name)) for name in classes)  # about, in inches
    columns = max(1, min(10, len(classes), int(figure.get_figwidth() / widest)))
    figure.legend(handles=marks, loc="outside lower center", ncols=columns,
                  handletextpad=0.1, columnspacing=1.1)  # fmt: skip


@themed
def stage_separation(found: Mapping[str, Arrays], *, theme: Theme = "light") -> Figure:
    """k-NN accuracy and silhouette of raw features at each stage: clean solid, noisy dashed.

    Each label has `stages` (S), and `knn` and `silhouette` (2 x S: clean, noisy).
    """
    figure, axes = grid(1, 2, cell=(3.9, 3.3))
    for ax, kind in zip(axes[0], ("knn", "silhouette"), strict=True):
        for label, arrays in found.items():
            stages = [str(stage) for stage in arrays["stages"]]
            for view, style in ((0, "solid"), (1, (0, (3, 1.6)))):
                ax.plot(stages, arrays[kind][view], marker=marker(label), linestyle=style,
                        color=colour(label, theme), mfc="none" if view else None)  # fmt: skip
        rules(ax)
        ax.margins(x=0.06)
    axes[0, 0].set_title("k-NN accuracy, leave one out")
    axes[0, 1].set_title("silhouette")
    percent(axes[0, 0])
    for ax in axes[0]:
        ax.set_xlabel("stage of the network")
    marks = [Line2D([], [], color=colour(n, theme), marker=marker(n), label=n) for n in found]
    marks += [
        Line2D([], [], color=MUTED[theme], label="clean"),
        Line2D([], [], color=MUTED[theme], ls=(0, (3, 1.6)), label="noisy"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=min(7, len(marks)))
    return figure


@themed
def geometry_histograms(
    found: Mapping[str, Arrays], *, radius: float | None = None, theme: Theme = "light"
) -> Figure:
    """A row a label: distances to the own centroid and to the nearest boundary, clean and noisy.

    Arrays `clean.centroid`, `noisy.centroid`, `clean.boundary` and `noisy.boundary`, a value a
    sample. The boundary is signed: below 0 stands a misclassified sample.
    """
    figure, axes = grid(len(found), 2, cell=(3.7, 1.25 + 0.5 / len(found)), sharex="col")
    for column, kind in enumerate(("centroid", "boundary")):
        every = np.concatenate(
            [np.asarray(a[f"{view}.{kind}"]) for a in found.values() for view in ("clean", "noisy")]
        )
        every = every[np.isfinite(every)]
        edges = np.linspace(every.min(), np.quantile(every, 0.995), 48)
        for ax, (label, arrays) in zip(axes[:, column], found.items(), strict=True):
            shade = colour(label, theme)
            weights = np.full(len(arrays[f"clean.{kind}"]), 1 / len(arrays[f"clean.{kind}"]))
            ax.hist(arrays[f"clean.{kind}"], edges, weights=weights, color=shade, alpha=0.35, lw=0)
            ax.hist(arrays[f"noisy.{kind}"], edges, weights=weights, color=shade, histtype="step",
                    lw=1.4)  # fmt: skip
            if kind == "centroid" and radius is not None:
                ax.axvline(radius, color=INK[theme], lw=1, ls=(0, (3, 2)))
            if kind == "boundary":
                ax.axvline(0, color=INK[theme], lw=1, ls=(0, (3, 2)))
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
    for ax, label in zip(axes[:, 0], found, strict=True):
        ax.set_ylabel(label, rotation=0, ha="right", va="center", color=colour(label, theme))
    axes[0, 0].set_title("distance to the own centroid")
    axes[0, 1].set_title("signed distance to the nearest boundary")
    axes[-1, 0].set_xlabel("units of feature space" + ("" if radius is None else
                           f"; dashed: radius {radius:g}"))  # fmt: skip
    axes[-1, 1].set_xlabel("units of feature space; left of 0: misclassified")
    marks = [
        Line2D([], [], color=MUTED[theme], lw=7, alpha=0.45, label="clean"),
        Line2D([], [], color=MUTED[theme], lw=1.4, label="noisy"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2)
    return figure


@themed
def distances(found: Mapping[str, Arrays], *, theme: Theme = "light") -> Figure:
    """Distance to the own centroid over that to the nearest other: the share of samples below.

    It has no scale, so that models may be compared; beyond 1 a feature is nearer to another class.
    Arrays `clean.centroid`, `clean.rival` and the same of `noisy`.
    """
    figure, axes = grid(1, 2, cell=(3.9, 3.1), sharey=True)
    for ax, view in zip(axes[0], ("clean", "noisy"), strict=True):
        for label, arrays in found.items():
            ratio = arrays[f"{view}.centroid"] / np.maximum(arrays[f"{view}.rival"], 1e-30)
            ax.step(*below(ratio), where="post", label=label, **line(label, theme))
        ax.axvline(1, color=MUTED[theme], lw=1)
        ax.set_xscale("log")
        ax.set_ylim(0, 1.02)
        ax.set_title(view)
        ax.set_xlabel("own / nearest other centroid")
        percent(ax)
        rules(ax)
    axes[0, 0].set_ylabel("test samples below")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  handlelength=2.4)  # fmt: skip
    return figure
