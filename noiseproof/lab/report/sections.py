"""What the report's sections on an analysis have in common: what was found, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from noiseproof.lab.analysis.store import Analysis, read
from noiseproof.lab.report.figure_files import Plate
from noiseproof.lab.report.results import Results
from noiseproof.lab.report.summary import listed

__all__ = [
    "Analyses",
    "Section",
    "arrays",
    "each",
    "extremes",
    "fact",
    "known",
    "percents",
    "spoken",
]

Analyses = Mapping[str, Analysis]


class Section(NamedTuple):
    """A part of the page; a sheet is a table with `title`, `head`, `rows` and `fold`."""

    anchor: str
    title: str
    intro: str
    plates: list[Plate]
    sheets: list[dict[str, Any]]
    notes: list[str]


def known(results: Results) -> dict[str, Analysis]:
    """The analysis of each label's first training, where there is one."""
    found = {x: read(results.run(x), results.weights) for x in results.table.labels}
    return {label: analysis for label, analysis in found.items() if analysis is not None}


def each(analyses: Analyses, part: str, metric: str, **facts: Any) -> dict[str, float]:
    """The value of a metric for every label that has it."""
    found = {label: a.value(part, metric, **facts) for label, a in analyses.items()}
    return {label: value for label, value in found.items() if value is not None}


def arrays(analyses: Analyses, part: str) -> dict[str, dict[str, Any]]:
    found = {label: analysis.arrays(part) for label, analysis in analyses.items()}
    return {label: values for label, values in found.items() if values is not None}


def short(value: float) -> str:
    """Two digits of a number, written as a person would.

    >>> short(152.3), short(0.037), short(8.6e-16)
    ('152', '0.037', '8.6e-16')
    """
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def spoken(values: Mapping[str, float], form: str | None = None) -> str:
    """
    >>> spoken({"both": 0.5, "normal": 0.25}, "{:.0%}")
    'both 50% and normal 25%'
    """
    said = {label: form.format(v) if form else short(v) for label, v in values.items()}
    return listed([f"{label} {text}" for label, text in said.items()])


def percents(values: Mapping[str, float]) -> str:
    return spoken({x: 100 * v for x, v in values.items()}, "{:.1f} %")


def extremes(values: Mapping[str, float]) -> str:
    if len(values) == 1:
        return spoken(values)
    low, high = min(values, key=lambda x: values[x]), max(values, key=lambda x: values[x])
    return f"lowest for {low} ({short(values[low])}) and highest for {high} ({short(values[high])})"


def fact(analyses: Analyses, part: str, name: str) -> Any:
    """A fact that the rows of a part carry, such as the space that was measured in."""
    rows = (row for analysis in analyses.values() for row in analysis.rows(part))
    return next((row[name] for row in rows if name in row), None)
