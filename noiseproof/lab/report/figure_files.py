"""Figures made ready for a page: written as PNG and SVG, embedded as data in light and dark.

A figure is laid out and drawn once, in light colours; its dark twin is the same SVG in the dark
colours of the same palette. The page gets SVG, or PNG where it would grow too large.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import matplotlib

from noiseproof.lab.figures.palette import DARK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Draw", "Plate", "Press", "Print", "Theme", "darkened"]

Theme = Literal["light", "dark"]
Draw = Callable[[Theme], "Figure"]
_FINE, _COARSE = 160, 100  # dots per inch of a file, and of a bitmap in the page


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
        return self.width < 660


class Press:
    """Writes figures into a folder and embeds them, within a budget of bytes for the page."""

    def __init__(self, folder: Path, budget: int):
        self.folder, self.left = folder, budget
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, plate: Plate) -> tuple[Figure, bytes]:
        """Writes NAME.svg and NAME.png, in light colours; returns the figure and its SVG."""
        figure = plate.draw("light")
        engine = figure.get_layout_engine()
        if engine is not None:  # lay it out once, and not again for each format
            engine.execute(figure)
            figure.set_layout_engine(None)
        svg, png = _saved(figure, "svg"), _saved(figure, "png")
        (self.folder / f"{plate.name}.svg").write_bytes(svg)
        (self.folder / f"{plate.name}.png").write_bytes(png)
        return figure, svg

    def print(self, plate: Plate) -> Print:
        """Writes the plate's files and embeds it in both themes."""
        figure, svg = self.file(plate)
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
        if 2 * len(svg) * 4 / 3 <= self.left / 4:  # two of it, in base 64
            pair = _uri(svg, "svg"), _uri(darkened(svg), "svg")
        else:
            dark = _saved(plate.draw("dark"), "png", dpi=_COARSE)
            pair = _uri(_saved(figure, "png", dpi=_COARSE), "png"), _uri(dark, "png")
        self.left -= sum(map(len, pair))
        return Print(plate.name, plate.alt, plate.caption, *pair, width, height)


def darkened(svg: bytes) -> bytes:
    """The SVG in the dark colours of the palette; other colours, such as those of classes, stay.

    >>> darkened(b'<path style="fill: #0072b2; stroke: #123456"/>')
    b'<path style="fill: #56b4e9; stroke: #123456"/>'
    """

    def dark(found: re.Match[str]) -> str:
        return DARK.get(found[0].lower(), found[0])

    return re.sub(r"#[0-9a-fA-F]{6}\b", dark, svg.decode()).encode()


def _saved(figure: Figure, kind: Literal["svg", "png"], dpi: int = _FINE) -> bytes:
    out = io.BytesIO()
    # A fixed salt and no date: the same rows give the same file.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "noiseproof", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, dpi=dpi, metadata=metadata)
    return out.getvalue()


def _uri(content: bytes, kind: Literal["svg", "png"]) -> str:
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
