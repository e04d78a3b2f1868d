"""Figures made ready for a page: drawn light and dark, written as PNG and SVG, embedded as data.

A plate's name is its file's name under figures/. The page gets the SVG, or where that would be
large (thousands of points), the PNG.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Draw", "Plate", "Print", "Theme", "filed", "printed"]

Theme = Literal["light", "dark"]
Draw = Callable[[Theme], "Figure"]
LARGEST_SVG = 150_000  # bytes of an SVG that a page embeds; two of each figure are in it
_DPI = 160


class Plate(NamedTuple):
    """A figure to be printed, with what it shows (alt) and what to see in it (caption)."""

    name: str
    draw: Draw
    alt: str
    caption: str


class Print(NamedTuple):
    """A figure on the page; `light` and `dark` are data URIs, sizes are in CSS pixels."""

    name: str
    alt: str
    caption: str
    light: str
    dark: str
    width: int
    height: int

    @property
    def narrow(self) -> bool:
        return self.width < 620


def filed(plate: Plate, folder: Path) -> tuple[Figure, bytes, bytes]:
    """Writes folder/NAME.svg and .png in light colours; returns the figure and both files."""
    figure = plate.draw("light")
    svg, png = _saved(figure, "svg"), _saved(figure, "png")
    (folder / f"{plate.name}.svg").write_bytes(svg)
    (folder / f"{plate.name}.png").write_bytes(png)
    return figure, svg, png


def printed(plate: Plate, folder: Path) -> Print:
    """Writes the plate's files and embeds it in both themes."""
    figure, svg, png = filed(plate, folder)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    kind: Literal["svg", "png"] = "svg" if len(svg) <= LARGEST_SVG else "png"
    dark = _saved(plate.draw("dark"), kind)
    pair = (_uri(svg if kind == "svg" else png, kind), _uri(dark, kind))
    return Print(plate.name, plate.alt, plate.caption, *pair, width, height)


def _saved(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    out = io.BytesIO()
    # A fixed salt and no date: the same rows give the same file.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "noiseproof", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, dpi=_DPI, metadata=metadata)
    return out.getvalue()


def _uri(content: bytes, kind: Literal["svg", "png"]) -> str:
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
