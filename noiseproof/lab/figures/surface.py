"""The loss surface around a few inputs, models side by side, one scale per input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from noiseproof.lab.figures.palette import INK, MUTED, Theme
from noiseproof.lab.figures.style import shorten, subplots, themed

__all__ = ["loss_surface"]

_LEVELS = 22


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
    for k, row in enumerate(axes):
        if images is not None:
            _image(row[0], images[k], shorten(names[k], 12) if names else "")
        _row(figure, row[first:], [(arrays, k) for arrays in surfaces.values()], theme)
    for ax, label in zip(axes[0, first:], surfaces, strict=True):
        ax.set_title(label)
    for ax in axes[-1, first:]:
        ax.set_xlabel("along the gradient")
    for ax in axes[:-1, first:].flat:
        ax.set_xticklabels([])
    for k, ax in enumerate(axes[:, first]):
        name = f"{shorten(names[k], 12)}\n" if names and images is None else ""
        ax.set_ylabel(f"{name}orthogonal")
    figure.supxlabel("distances in pixel space", color=MUTED[theme], fontsize=8.5)
    return figure


def _image(ax: Axes, image: NDArray[Any], name: str) -> None:
    pixels = np.moveaxis(np.clip(image, 0, 1), 0, -1)
    ax.imshow(pixels if pixels.shape[-1] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[], xlabel=name)
    ax.spines[:].set_visible(False)


def _row(
    figure: Figure,
    axes: Sequence[Axes],
    surfaces: Sequence[tuple[Mapping[str, NDArray[Any]], int]],
    theme: Theme,
) -> None:
    """One input in all models, on one scale."""
    values = [arrays["negative_loss"][k] for arrays, k in surfaces]
    high = max(float(v.max()) for v in values)
    low = min(high - 1e-9, *(float(v.min()) for v in values))
    levels, contours = np.linspace(low, high, _LEVELS), None
    for ax, (arrays, k) in zip(axes, surfaces, strict=True):
        d, margin = arrays["distance"], arrays["margin"][k]
        contours = ax.contourf(d, d, arrays["negative_loss"][k], levels=levels, cmap="cividis")
        contours.set(edgecolor="face", linewidth=0.3)  # else an SVG shows seams between bands
        if margin.min() < 0 < margin.max():
            ax.contour(d, d, margin, levels=[0.0], colors="white", linewidths=1.3)
        ax.plot(0, 0, "o", color="black", ms=6, mec="white", mew=0.9)
        ax.set_aspect("equal")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        if ax is not axes[0]:
            ax.set_yticklabels([])
    if contours is not None:
        bar = figure.colorbar(contours, ax=list(axes), shrink=0.85, pad=0.015, aspect=18)
        bar.set_label("negative loss (nats)", color=INK[theme])
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        bar.locator = MaxNLocator(4)
        bar.update_ticks()
