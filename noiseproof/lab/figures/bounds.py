"""The curvature bounds, sample by sample: what was measured against what the theory allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from noiseproof.lab.figures.palette import MUTED, Theme, colour, marker
from noiseproof.lab.figures.style import empty, grid, logarithmic, rules, themed

__all__ = ["theory_bounds"]

_PANELS = (
    ("upper bound, the paper's", "curvature", "upper", "holds_upper", "bound on Λ", "measured Λ"),
    ("upper bound, sharper", "curvature", "upper_sharp", "holds_upper_sharp", "bound on Λ", ""),
    ("lower bound", "lower_left", "lower_right", "holds_lower", "bound on 2Λ + (tr H)²",
     "measured 2Λ + (tr H)²"),
)  # fmt: skip


@themed
def theory_bounds(
    found: Mapping[str, Mapping[str, NDArray[Any]]],
    *,
    space: str = "pixels",
    theme: Theme = "light",
) -> Figure:
    """Each label has the fields of `noiseproof.theory.CurvatureBounds` as arrays, a value a sample.

    On the line both sides are equal; an upper bound holds below it, a lower bound above. What is
    not positive (a bound that says nothing) cannot be drawn and is counted as unseen.
    """
    figure, axes = grid(1, 3, cell=(2.85, 3.0 + 0.14 * len(found)))
    for ax, (title, measured, bound, holds, below, left) in zip(axes[0], _PANELS, strict=True):
        seen: list[NDArray[Any]] = []
        lines = []
        for label, arrays in found.items():
            x, y = np.asarray(arrays[bound]), np.asarray(arrays[measured])
            drawn = (x > 0) & (y > 0)
            ax.scatter(x[drawn], y[drawn], s=9, lw=0, alpha=0.6, color=colour(label, theme),
                       marker=marker(label), label=label, rasterized=True)  # fmt: skip
            seen += [x[drawn], y[drawn]]
            held = np.asarray(arrays[holds])
            hidden = int((~drawn).sum())
            said = f"{label}: holds for {int(held.sum())} of {len(held)}"
            lines.append(said + (f", {hidden} unseen" if hidden else ""))
        every = np.concatenate(seen) if seen else np.array([])
        if len(every) == 0:
            empty(ax, "says nothing here", theme)
        else:
            ends = np.array([every.min() / 3, every.max() * 3])
            logarithmic(ax, "both")
            ax.plot(ends, ends, color=MUTED[theme], lw=1)
            rules(ax, "both")
        ax.set_title(title)
        ax.set_xlabel(f"{below} ({space})\n\n" + "\n".join(lines), loc="left", fontsize=7.5)
        ax.set_ylabel(left)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", markerscale=1.8,
        ncols=min(6, len(found)), handletextpad=0.1,
    )  # fmt: skip
    return figure
