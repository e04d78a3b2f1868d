"""The loss around one input, a model beside the other, on one scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from noiseproof.lab.figures.palette import INK, Theme
from noiseproof.lab.figures.style import grid, themed

__all__ = ["loss_surface"]


@themed
def loss_surface(
    surfaces: Mapping[str, Mapping[str, NDArray[Any]]], *, theme: Theme = "light"
) -> Figure:
    """Maps of the negative loss: `distance` (P), `negative_loss` and `margin` (P x P) of a label.

    The dot is the input. A white line is the decision boundary of its class.
    """
    figure, axes = grid(1, len(surfaces), cell=(max(1.8, 7.4 / max(3, len(surfaces))), 2.6),
                        sharey=True)  # fmt: skip
    low = min(float(np.min(s["negative_loss"])) for s in surfaces.values())
    high = max(float(np.max(s["negative_loss"])) for s in surfaces.values())
    low = min(low, high - 1e-9)
    levels = np.linspace(low, high, 22)
    drawn = None
    for ax, (label, found) in zip(axes[0], surfaces.items(), strict=True):
        d = found["distance"]
        drawn = ax.contourf(d, d, found["negative_loss"], levels=levels, cmap="cividis")
        margin = found["margin"]
        if margin.min() < 0 < margin.max():
            ax.contour(d, d, margin, levels=[0.0], colors="white", linewidths=1.3)
        ax.plot(0, 0, "o", color="black", ms=6, mec="white", mew=0.9)
        ax.set_aspect("equal")
        ax.set_title(label)
        ax.set_xlabel("along the gradient")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
    axes[0, 0].set_ylabel("across it (random)\ndistance in pixel space")
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=list(axes[0]), shrink=0.8, pad=0.015, aspect=24)
        bar.set_label("negative loss, in nats", color=INK[theme])
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        bar.locator = MaxNLocator(6)
        bar.update_ticks()
    return figure
