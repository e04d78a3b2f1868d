"""What the report's sections on an analysis share: their parts, the analyses, and number formats.

Texts of a report are plain; `names in backticks` are shown as code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from noiseproof.lab.analysis.store import Analysis, read
from noiseproof.lab.evaluation.words import listed, names
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.results import Results

Analyses = Mapping[str, Analysis]


class Section(NamedTuple):
    """A section of the page; the template builds its tables from the analyses and, for the
    theory, from `statements`."""

    anchor: str
    title: str
    intro: str
    figures: list[ReportFigure]
    statements: dict[str, Any] | None = None


def first_analyses(results: Results) -> dict[str, Analysis]:
    """The analysis of the first training of each label, if it was analysed."""
    analyses = {x: read(results.run(x), results.weights) for x in results.table.labels}
    return {label: analysis for label, analysis in analyses.items() if analysis is not None}


def values(analyses: Analyses, part: str, metric: str, **facts: Any) -> dict[str, float]:
    """The value of a metric for each label that has it."""
    by_label = {label: a.value(part, metric, **facts) for label, a in analyses.items()}
    return {label: value for label, value in by_label.items() if value is not None}


def arrays(analyses: Analyses, part: str) -> dict[str, dict[str, Any]]:
    """The arrays of a part for each label that has it."""
    by_label = {label: analysis.arrays(part) for label, analysis in analyses.items()}
    return {label: content for label, content in by_label.items() if content is not None}


def fact(analyses: Analyses, part: str, name: str) -> Any:
    """A fact in the rows of a part, such as the space of the curvature."""
    rows = (row for analysis in analyses.values() for row in analysis.rows(part))
    return next((row[name] for row in rows if name in row), None)


def rounded(value: float) -> str:
    """Two significant digits, or whole numbers from 100.

    >>> rounded(152.3), rounded(0.037), rounded(8.6e-16)
    ('152', '0.037', '8.6e-16')
    """
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def named(numbers: Mapping[str, float], form: str | None = None) -> str:
    """
    >>> named({"both": 0.5, "normal": 0.25}, "{:.0%}")
    '`both` 50% and `normal` 25%'
    """
    texts = {x: form.format(v) if form else rounded(v) for x, v in numbers.items()}
    return listed([f"`{label}` {text}" for label, text in texts.items()])


def named_percents(shares: Mapping[str, float]) -> str:
    return named({label: 100 * share for label, share in shares.items()}, "{:.1f} %")


def lowest_and_highest(numbers: Mapping[str, float], lost: Collection[str] = ()) -> str:
    """
    Args:
        numbers: by label.
        lost: labels whose number is mostly rounding error, so that it is not stated.

    >>> lowest_and_highest({"both": 0.5, "normal": 0.25})
    'lowest for `normal` (0.25) and highest for `both` (0.5)'
    >>> lowest_and_highest({"both": 0.1, "noisy": 0.2501, "normal": 0.25}, ["both"])
    '0.25 for `noisy` and `normal`; for `both` it is lost in rounding'
    >>> lowest_and_highest({"both": 0.5, "normal": 0.5})
    '0.5 for `both` and `normal`'
    """
    resolved = {label: value for label, value in numbers.items() if label not in lost}
    excluded = f"for {names(lost)} it is lost in rounding" if lost else ""
    if not resolved:
        return "lost in rounding"
    low, high = (rounded(choose(resolved.values())) for choose in (min, max))
    lowest, highest = (
        names(x for x, value in resolved.items() if rounded(value) == text) for text in (low, high)
    )
    text = f"lowest for {lowest} ({low}) and highest for {highest} ({high})"
    if low == high:
        text = f"{low} for {lowest}"
    return f"{text}; {excluded}" if excluded else text
