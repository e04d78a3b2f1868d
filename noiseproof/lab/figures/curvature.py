"""Figures of input curvature: its distribution, relation to robustness, estimation and bounds; and
of the loss surface around a few inputs.

Curvature is Λ = Σλ² of the Hessian of the loss, one value per test sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from noiseproof.lab.figures.palette import INK, MUTED, Theme, colour, line_style, marker
from noiseproof.lab.figures.style import (
    cumulative_share,
    label_lines,
    legend_below,
    log_scale,
    percent_ticks,
    placeholder,
    run_label,
    shorten,
    subplots,
    themed,
)

_PANELS = (
    ("upper bound (paper)", "curvature", "upper", "upper", "bound on Λ", "measured Λ"),
    ("upper bound (sharper)", "curvature", "upper_sharp", "upper_sharp", "bound on Λ", ""),
    ("lower bound (with the trace)", "lower_left", "lower_right", "lower", "bound on 2Λ + (tr H)²",
     "measured 2Λ + (tr H)²"),
)  # fmt: skip


@themed
def curvature_boxplot(
    curvature: Mapping[str, ArrayLike],
    *,
    quantity: str = "curvature Λ",
    space: str = "normalised inputs",
    theme: Theme = "light",
) -> Figure:
    """Box plot of the lowest 90 % of curvatures: median, quartiles, 5th and 95th percentile.

    The axis is logarithmic if the 25th to 95th percentiles span more than a factor of 30.

    Args:
        curvature: of the samples of each label.
        quantity: name of the values.
        space: coordinates of the curvature.
        theme: "light" or "dark".
    """
    ordered = {label: np.sort(np.asarray(v, dtype=np.float64)) for label, v in curvature.items()}
    low = {label: v[: max(1, round(0.9 * len(v)))] for label, v in ordered.items()}
    quantiles = {label: np.quantile(v, [0.05, 0.25, 0.5, 0.75, 0.95]) for label, v in low.items()}
    upper = np.array([q[1:] for q in quantiles.values()])
    log = upper.max() > 30 * max(upper.min(), 1e-300)
    floor = _floor(low) if log else -np.inf
    figure, ((ax,),) = subplots(1, 1, cell=(6.4, 0.9 + 0.42 * len(low)), grid="x")
    boxes = [
        dict(zip(("whislo", "q1", "med", "q3", "whishi"), np.maximum(q, floor), strict=True))
        for q in quantiles.values()
    ]
    artists = ax.bxp(
        boxes, positions=range(len(boxes)), orientation="horizontal", showfliers=False,
        widths=0.55, patch_artist=True, capwidths=0.25,
    )  # fmt: skip
    for i, (label, q) in enumerate(quantiles.items()):
        shade = colour(label, theme)
        artists["boxes"][i].set(facecolor=shade, edgecolor=shade, alpha=0.35)
        artists["medians"][i].set(color=shade, linewidth=2.6)
        for part in ("whiskers", "caps"):
            for artist in artists[part][2 * i : 2 * i + 2]:
                artist.set(color=shade, linewidth=1.2)
        ax.annotate(f"{q[2]:.2g}", (max(q[2], floor), i), xytext=(0, 11),
                    textcoords="offset points", ha="center", fontsize=7.5)  # fmt: skip
    ax.set_yticks(range(len(low)), [run_label(label) for label in low])
    ax.invert_yaxis()
    if log:
        log_scale(ax, "x")
    ax.set_xlabel(f"{quantity} of the lowest 90 % of test samples\n{space}")
    return figure


@themed
def curvature_distribution(
    curvature: Mapping[str, ArrayLike],
    *,
    space: str = "normalised inputs",
    theme: Theme = "light",
) -> Figure:
    """Cumulative distribution of curvature: the share of test samples below each value.

    Args:
        curvature: of the samples of each label.
        space: coordinates of the curvature.
        theme: "light" or "dark".
    """
    values = {label: np.asarray(v, dtype=np.float64) for label, v in curvature.items()}
    floor = _floor(values)
    figure, ((ax,),) = subplots(1, 1, cell=(6.4, 3.4), grid="both")
    for label, curvatures in values.items():
        x, shares = cumulative_share(curvatures)
        ax.step(np.maximum(x, floor), shares, where="post", label=run_label(label),
                **line_style(label, theme))  # fmt: skip
    log_scale(ax, "x")
    percent_ticks(ax)
    ax.set(ylim=(0, 1.02), xlabel=f"curvature Λ\n{space}", ylabel="test samples below")
    legend_below(figure, ax.get_legend_handles_labels()[0], handlelength=2.6)
    return figure


@themed
def accuracy_vs_retained_share(
    curves: Mapping[str, Mapping[str, Mapping[str, ArrayLike]]], *, theme: Theme = "light"
) -> Figure:
    """Accuracy on the share of samples with the lowest curvature, one panel per noise.

    Args:
        curves: curves[noise][label] has `share` and `accuracy`, as fractions.
        theme: "light" or "dark".
    """
    figure, axes = subplots(1, len(curves), cell=(4.3, 3.2), grid="y", sharey=True)
    for ax, (noise, lines) in zip(axes[0], curves.items(), strict=True):
        for label, curve in lines.items():
            ax.plot(curve["share"], curve["accuracy"], **line_style(label, theme))
        ax.set(title=noise, xlabel="share of samples retained, lowest curvature first", xlim=(0, 1))
        percent_ticks(ax, "x")
        percent_ticks(ax)
    axes[0, 0].set_ylabel("accuracy under noise")
    for ax, lines in zip(axes[0], curves.values(), strict=True):  # now the shared scale is known
        last = {x: (np.max(c["share"]), np.asarray(c["accuracy"])[-1]) for x, c in lines.items()}
        label_lines(ax, last, theme)
    return figure


@themed
def correct_count_vs_curvature(
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    space: str = "normalised inputs",
    theme: Theme = "light",
) -> Figure:
    """Mean curvature of the samples that are classified correctly in k noise draws.

    Rows are noises, columns labels. Larger markers mean more samples. Groups without samples are
    crosses on the zero line, and are listed. Every panel has its own curvature scale.

    Args:
        groups: groups[noise][label] has `n` and `mean`, the number of samples and the mean
            curvature for k = 0, 1, ... correct draws; `slope` and `intercept` of the line through
            the means; and the correlations `r_groups` and `r_samples`. A correlation that is NaN is
            not shown, nor the line if it is `r_groups`.
        space: coordinates of the curvature.
        theme: "light" or "dark".
    """
    labels = list(dict.fromkeys(label for row in groups.values() for label in row))
    figure, axes = subplots(len(groups), len(labels), cell=(max(1.85, 6.6 / len(labels)), 2.5),
                        grid="y", sharex=True)  # fmt: skip
    for row, (noise, panels) in zip(axes, groups.items(), strict=True):
        for ax, label in zip(row, labels, strict=True):
            if label in panels:
                _count_panel(ax, panels[label], label, theme)
        row[0].set_ylabel(f"{noise}\nmean curvature Λ")
    for ax, label in zip(axes[0], labels, strict=True):
        ax.set_title(run_label(label, 18), pad=16)  # above the power of ten of the axis
    for ax in axes[-1]:
        ax.set_xlabel("k correct draws")
    figure.supxlabel(
        "k: noise draws in which a sample is classified correctly; larger markers: more samples\n"
        f"curvature: {space}",
        fontsize=8, color=MUTED[theme],
    )  # fmt: skip
    return figure


def _count_panel(ax: Axes, group: Mapping[str, Any], label: str, theme: Theme) -> None:
    n, mean = np.asarray(group["n"]), np.asarray(group["mean"])
    k, empty = np.flatnonzero(n), np.flatnonzero(n == 0)
    if np.isfinite(group["r_groups"]):
        ends_at = k[[0, -1]]
        ax.plot(ends_at, group["intercept"] + group["slope"] * ends_at, color=MUTED[theme], lw=1,
                ls=(0, (4, 2)), zorder=1)  # fmt: skip
    size = 14 + 90 * np.sqrt(n[k] / max(n.max(), 1))
    ax.scatter(k, mean[k], s=size, color=colour(label, theme), alpha=0.85, lw=0, zorder=2)
    correlations = {"groups": group["r_groups"], "samples": group["r_samples"]}
    lines = [f"r = {r:.2f} over {what}" for what, r in correlations.items() if np.isfinite(r)]
    if len(empty):
        ax.scatter(empty, np.zeros(len(empty)), marker="x", s=18, lw=1, color=MUTED[theme],
                   label="empty")  # fmt: skip
        lines.append(f"empty: k = {_ranges(empty.tolist())}")
    ax.text(
        0.98, 0.97, "\n".join(lines), transform=ax.transAxes, ha="right", va="top", fontsize=6.8
    )
    top = max(float(np.nanmax(mean, initial=0.0)), 1e-300)
    draws = len(n) - 1
    ax.set(xticks=range(0, draws + 1, max(1, draws // 5)), xlim=(-0.6, draws + 0.6))
    ax.set_ylim(-0.06 * top, 1.45 * top)
    ax.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)


@themed
def step_study(
    studies: Mapping[str, Mapping[str, NDArray[Any]]],
    *,
    used: float | None = None,
    space: str = "normalised inputs",
    theme: Theme = "light",
) -> Figure:
    """Ratio of finite-difference and Hessian estimates by step: medians, quartiles as bands.

    At 1 they agree. Small steps cross kinks of a ReLU network, the smallest so rarely that the
    median returns to 1; large steps leave the neighbourhood of the image.

    Args:
        studies: for each label `steps` (S), `finite_difference` (S x n) and `hessian` (n).
        used: the step of the analysis, which is marked.
        space: coordinates of the step.
        theme: "light" or "dark".
    """
    figure, ((ax,),) = subplots(1, 1, cell=(7.2, 3.3), grid="y")
    ax.axhline(1, color=MUTED[theme], lw=1)
    for label, study in studies.items():
        positive = np.asarray(study["hessian"]) > 0
        if not positive.any():
            continue
        ratio = np.asarray(study["finite_difference"])[:, positive] / study["hessian"][positive]
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75], axis=1)
        steps, tiny = np.asarray(study["steps"]), 1e-6
        ax.fill_between(steps, np.maximum(low, tiny), np.maximum(high, tiny), lw=0, alpha=0.13,
                        color=colour(label, theme))  # fmt: skip
        ax.plot(steps, np.maximum(middle, tiny), marker=marker(label),
                label=run_label(label), **line_style(label, theme))  # fmt: skip
    log_scale(ax, "both")
    if used is not None:
        ax.axvline(used, color=MUTED[theme], lw=1, ls=(0, (2, 2)), zorder=0)
        ax.annotate("step used", (used, 1), xycoords=("data", "axes fraction"), xytext=(4, -9),
                    textcoords="offset points", fontsize=8, color=MUTED[theme])  # fmt: skip
    ax.set(xlabel=f"step ({space})", ylabel="finite difference / Hessian")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", handlelength=2.6)
    return figure


@themed
def theory_bounds(
    bounds: Mapping[str, Mapping[str, NDArray[Any]]], *, theme: Theme = "light"
) -> Figure:
    """Measured curvature against its bounds, one marker per sample.

    On the line, both sides are equal; an upper bound holds below it, a lower bound above. Vacuous
    bounds are hidden. Below each panel is the number of samples for which the bound holds, of those
    for which it is informative.

    Args:
        bounds: for each label the fields of `noiseproof.theory.CurvatureBounds`, as arrays.
        theme: "light" or "dark".
    """
    figure, axes = subplots(1, 3, cell=(2.85, 3.0 + 0.14 * len(bounds)), grid="both")
    for ax, (title, measured, bound, name, below, left) in zip(axes[0], _PANELS, strict=True):
        shown: list[NDArray[Any]] = []
        lines = []
        for label, arrays in bounds.items():
            x, y = np.asarray(arrays[bound]), np.asarray(arrays[measured])
            holds, vacuous = (np.asarray(arrays[f"{kind}_{name}"]) for kind in ("holds", "vacuous"))
            informative = ~(vacuous & holds)
            drawn = informative & (x > 0) & (y > 0)
            ax.scatter(x[drawn], y[drawn], s=9, lw=0, alpha=0.6, color=colour(label, theme),
                       marker=marker(label), label=run_label(label), rasterized=True)  # fmt: skip
            shown += [x[drawn], y[drawn]]
            count, held = int(informative.sum()), int((informative & holds).sum())
            verdict = f"holds for {held} of {count}" if count else "vacuous"
            lines.append(f"{run_label(label)}: {verdict}")
        values = np.concatenate(shown) if shown else np.array([])
        if len(values) == 0:
            placeholder(ax, "vacuous here", theme)
        else:
            ends = np.array([values.min() / 3, values.max() * 3])
            log_scale(ax, "both")
            ax.plot(ends, ends, color=MUTED[theme], lw=1)
        ax.set_title(title)
        ax.set_xlabel(f"{below} (pixels)\n\n" + "\n".join(lines), loc="left", fontsize=7.5)
        ax.set_ylabel(left)
    handles, _ = axes[0, 0].get_legend_handles_labels()
    legend_below(figure, handles, markerscale=1.8, handletextpad=0.1)
    return figure


@themed
def loss_surface(
    surfaces: Mapping[str, Mapping[str, NDArray[Any]]],
    *,
    images: NDArray[Any] | None = None,
    names: Sequence[str] = (),
    theme: Theme = "light",
) -> Figure:
    """Contour maps of the negative loss, one row per input and one column per label.

    The dot is the input; a white line is the decision boundary of its class.

    Args:
        surfaces: for each label `distance` (P), and `negative_loss` and `margin` (K x P x P).
        images: of the K inputs, K x C x H x W, shown in the first column.
        names: of the K inputs.
        theme: "light" or "dark".
    """
    count = min(len(arrays["negative_loss"]) for arrays in surfaces.values())
    first = 0 if images is None else 1  # column of the first label
    width = max(1.75, 7.4 / max(3, len(surfaces) + first))
    figure, axes = subplots(count, len(surfaces) + first, cell=(width, width + 0.25))
    short = [shorten(name, 12) for name in names] or [""] * count
    for k, row in enumerate(axes):
        if images is not None:
            _image(row[0], images[k], short[k])
        _surface_row(figure, row[first:], list(surfaces.values()), k, theme)
        above = f"{short[k]}\n" if names and images is None else ""
        row[first].set_ylabel(f"{above}orthogonal")
    for ax, label in zip(axes[0, first:], surfaces, strict=True):
        ax.set_title(run_label(label, 18))
    for ax in axes[-1, first:]:
        ax.set_xlabel("along the gradient")
    for ax in axes[:-1, first:].flat:
        ax.set_xticklabels([])
    figure.supxlabel("distances in pixel space", color=MUTED[theme], fontsize=8.5)
    return figure


def _image(ax: Axes, image: NDArray[Any], name: str) -> None:
    pixels = np.moveaxis(np.clip(image, 0, 1), 0, -1)
    ax.imshow(pixels if pixels.shape[-1] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[], xlabel=name)
    ax.spines[:].set_visible(False)


def _surface_row(
    figure: Figure,
    axes: Sequence[Axes],
    surfaces: Sequence[Mapping[str, NDArray[Any]]],
    k: int,
    theme: Theme,
) -> None:
    """Input `k` in all models, on one scale."""
    values = np.stack([arrays["negative_loss"][k] for arrays in surfaces])
    high = float(values.max())
    levels = np.linspace(min(high - 1e-9, float(values.min())), high, 22)
    for ax, arrays in zip(axes, surfaces, strict=True):
        d, margin = arrays["distance"], arrays["margin"][k]
        contours = ax.contourf(d, d, arrays["negative_loss"][k], levels=levels, cmap="cividis")
        contours.set(edgecolor="face", linewidth=0.3)  # else an SVG shows seams between bands
        if margin.min() < 0 < margin.max():
            ax.contour(d, d, margin, levels=[0.0], colors="white", linewidths=1.3)
        ax.plot(0, 0, "o", color="black", ms=6, mec="white", mew=0.9)
        ax.set_aspect("equal")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        ax.spines[:].set_visible(False)
        if ax is not axes[0]:
            ax.set_yticklabels([])
    contours = axes[0].collections[0]
    bar = figure.colorbar(contours, ax=list(axes), shrink=0.85, pad=0.015, aspect=18)
    bar.set_label("negative loss (nats)", color=INK[theme])
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.locator = MaxNLocator(4)
    bar.update_ticks()


def _floor(values: Mapping[str, NDArray[np.float64]]) -> float:
    """Where a logarithmic axis shows a curvature of 0 (a loss that is flat to rounding)."""
    positive = np.concatenate(list(values.values()))
    positive = positive[positive > 0]
    return float(np.quantile(positive, 0.005)) if len(positive) else 1e-12


def _ranges(numbers: list[int]) -> str:
    """Consecutive numbers as ranges.

    >>> _ranges([0, 2, 3, 4, 7])
    '0, 2–4, 7'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)
