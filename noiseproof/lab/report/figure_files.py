"""The figures of a report: written as PNG and SVG files, and embedded in light and dark.

A figure is laid out and drawn once, in the light theme; the dark version is the same SVG with the
colours of the dark palette. The page embeds SVG, or PNG if the page would become too large.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from noiseproof.lab.figures.palette import DARK
from noiseproof.lab.figures.style import NARROW, narrow_figures

_NARROW_BYTES = 150_000  # of an SVG for a phone, at most
_FILE_DPI, _PAGE_DPI = 160, 100  # of a PNG file or for a phone, and of a PNG in the page


class ReportFigure(NamedTuple):
    """A figure to be drawn. `alt` describes it to those who cannot see it."""

    name: str  # of its files
    draw: Callable[..., Figure]  # takes `theme`
    alt: str
    caption: str

    @property
    def plain_alt(self) -> str:
        """The alt text without the backticks of names."""
        return self.alt.replace("`", "")


class FigureWriter:
    """Writes figures to files and embeds them in a page.

    Args:
        folder: for the files.
        budget: bytes that all embedded figures may take.
    """

    def __init__(self, folder: Path, budget: int):
        self.folder, self.budget = folder, budget
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, report_figure: ReportFigure) -> tuple[Figure, bytes]:
        """Writes NAME.svg and NAME.png in the light theme; returns the figure and its SVG."""
        figure = report_figure.draw(theme="light")
        svg, png = _render(figure, "svg"), _render(figure, "png")
        (self.folder / f"{report_figure.name}.svg").write_bytes(svg)
        (self.folder / f"{report_figure.name}.png").write_bytes(png)
        return figure, svg

    def embed(self, report_figure: ReportFigure) -> dict[str, Any]:
        """Writes the files; returns what the page shows: `name`, `alt`, `caption`, the data URIs
        `light` and `dark`, `width` and `height` in CSS pixels, and `narrow`, the data URIs of a
        version for a phone, if there is one."""
        figure, svg = self.write(report_figure)
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
        if 2 * len(svg) * 4 / 3 <= self.budget / 4:  # both themes in base 64
            light, dark, mime = svg, darkened(svg), "image/svg+xml"
        else:
            light = _render(figure, "png", dpi=_PAGE_DPI)
            dark = _render(report_figure.draw(theme="dark"), "png", dpi=_PAGE_DPI)
            mime = "image/png"
        uris: dict[str, Any] = {"light": data_uri(light, mime), "dark": data_uri(dark, mime)}
        self.budget -= sum(map(len, uris.values()))
        uris["narrow"] = self._narrow(report_figure)
        texts = {"alt": report_figure.plain_alt, "caption": report_figure.caption}
        return {"name": report_figure.name, **texts, **uris, "width": width, "height": height}

    def _narrow(self, report_figure: ReportFigure) -> dict[str, str] | None:
        """The figure for a phone in both themes; None if it has no such layout or is too large."""
        with narrow_figures():
            figure = report_figure.draw(theme="light")
            if figure.get_size_inches()[0] > NARROW:
                return None
            light, mime = _render(figure, "svg"), "image/svg+xml"
            dark = darkened(light)
            if len(light) > min(_NARROW_BYTES, self.budget / 16):
                light, mime = _few_colours(_render(figure, "png")), "image/png"
                if len(light) > self.budget / 16:
                    return None
                dark = _few_colours(_render(report_figure.draw(theme="dark"), "png"))
        uris = {"light": data_uri(light, mime), "dark": data_uri(dark, mime)}
        self.budget -= sum(map(len, uris.values()))
        return uris


def darkened(svg: bytes) -> bytes:
    """The SVG in the dark colours of the palette; other colours, such as those of classes, remain.

    >>> darkened(b'<path style="fill: #0072b2; stroke: #123456"/>')
    b'<path style="fill: #56b4e9; stroke: #123456"/>'
    """

    def dark(match: re.Match[str]) -> str:
        return DARK.get(match[0].lower(), match[0])

    return re.sub(r"#[0-9a-fA-F]{6}\b", dark, svg.decode()).encode()


def _render(figure: Figure, kind: Literal["svg", "png"], dpi: int = _FILE_DPI) -> bytes:
    engine = figure.get_layout_engine()
    if engine is not None:  # lay it out once, and not by a drawing of its own for each format
        engine.execute(figure)
        figure.set_layout_engine(None)
    out = io.BytesIO()
    # A fixed salt and no date: the same data give the same file.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "noiseproof", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, dpi=dpi, metadata=metadata)
    return out.getvalue()


def _few_colours(png: bytes) -> bytes:
    """The image in 256 colours, which makes it several times smaller."""
    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.quantize(method=Image.Quantize.FASTOCTREE).save(out, "png", optimize=True)
    return out.getvalue()


def data_uri(content: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
