"""What the report's sections on an analysis have in common: what was found, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from noiseproof.lab.analyse import Analysis, read
from noiseproof.lab.report.plates import Plate
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


def spoken(values: Mapping[str, float], form: str = "{:.2g}") -> str:
    """
    >>> spoken({"both": 0.5, "normal": 0.25}, "{:.0%}")
    'both 50% and normal 25%'
    """
    return listed([f"{label} {form.format(value)}" for label, value in values.items()])


def percents(values: Mapping[str, float]) -> str:
    return spoken({x: 100 * v for x, v in values.items()}, "{:.1f} %")


def extremes(values: Mapping[str, float]) -> str:
    if len(values) == 1:
        return spoken(values)
    low, high = min(values, key=lambda x: values[x]), max(values, key=lambda x: values[x])
    return f"lowest for {low} ({values[low]:.2g}) and highest for {high} ({values[high]:.2g})"


def fact(analyses: Analyses, part: str, name: str) -> Any:
    """A fact that the rows of a part carry, such as the space that was measured in."""
    rows = (row for analysis in analyses.values() for row in analysis.rows(part))
    return next((row[name] for row in rows if name in row), None)
