"""The curvature bounds of the theory against measured curvature, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from noiseproof.lab.figures.palette import MUTED, Theme, colour, marker
from noiseproof.lab.figures.style import gridlines, log_scale, placeholder, subplots, themed

__all__ = ["theory_bounds"]

_PANELS = (
    ("upper bound (paper)", "curvature", "upper", "holds_upper", "bound on Λ", "measured Λ"),
    ("upper bound (sharper)", "curvature", "upper_sharp", "holds_upper_sharp", "bound on Λ", ""),
    ("lower bound", "lower_left", "lower_right", "holds_lower", "bound on 2Λ + (tr H)²",
     "measured 2Λ + (tr H)²"),
)  # fmt: skip


@themed
def theory_bounds(
    bounds: Mapping[str, Mapping[str, NDArray[Any]]],
    *,
    space: str = "pixels",
    theme: Theme = "light",
) -> Figure:
    """Measured curvature against its bounds, one marker per sample.

    On the line, both sides are equal; an upper bound holds below it, a lower bound above. Samples
    with a value that is not positive (a vacuous bound) are hidden, and counted.

    Args:
        bounds: for each label the fields of `noiseproof.theory.CurvatureBounds`, as arrays.
        space: coordinates of the curvature.
        theme: "light" or "dark".
    """
    figure, axes = subplots(1, 3, cell=(2.85, 3.0 + 0.14 * len(bounds)))
    for ax, (title, measured, bound, holds, below, left) in zip(axes[0], _PANELS, strict=True):
        shown: list[NDArray[Any]] = []
        lines = []
        for label, arrays in bounds.items():
            x, y = np.asarray(arrays[bound]), np.asarray(arrays[measured])
            positive = (x > 0) & (y > 0)
            ax.scatter(x[positive], y[positive], s=9, lw=0, alpha=0.6, color=colour(label, theme),
                       marker=marker(label), label=label, rasterized=True)  # fmt: skip
            shown += [x[positive], y[positive]]
            held = np.asarray(arrays[holds])
            hidden = int((~positive).sum())
            text = f"{label}: holds for {int(held.sum())} of {len(held)}"
            lines.append(text + (f", {hidden} hidden" if hidden else ""))
        values = np.concatenate(shown) if shown else np.array([])
        if len(values) == 0:
            placeholder(ax, "vacuous here", theme)
        else:
            ends = np.array([values.min() / 3, values.max() * 3])
            log_scale(ax, "both")
            ax.plot(ends, ends, color=MUTED[theme], lw=1)
            gridlines(ax, "both")
        ax.set_title(title)
        ax.set_xlabel(f"{below} ({space})\n\n" + "\n".join(lines), loc="left", fontsize=7.5)
        ax.set_ylabel(left)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", markerscale=1.8,
        ncols=min(6, len(bounds)), handletextpad=0.1,
    )  # fmt: skip
    return figure
