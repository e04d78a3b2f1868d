"""The report's section on theory: each bound, the measured value, and where it is vacuous."""

from __future__ import annotations

from functools import partial
from typing import Any

from noiseproof.lab import figures
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.sections import Analyses, Section, arrays, named


def theory_section(analyses: Analyses) -> Section | None:
    by_label = {
        label: [{**row, "name": _name(row)} for row in analysis.rows("theory")]
        for label, analysis in analyses.items()
    }
    by_label = {label: rows for label, rows in by_label.items() if rows}
    if not by_label:
        return None
    by_name: dict[str, dict[str, Any]] = {}
    for label, rows in by_label.items():
        for row in rows:
            if row.get("stage") in (None, "features"):
                by_name.setdefault(row["name"], {})[label] = row
    tested = {x: rows for x, rows in by_name.items() if any("holds" in r for r in rows.values())}
    intro = (
        "Every bound of the theory, evaluated on these models. A bound is vacuous if it allows all "
        "possible values. The tables for each method explain the bounds in words."
    )
    statements = {"by_label": by_label, "by_name": tested}
    return Section("theory", "Theory", intro, _figures(analyses), statements)


def _figures(analyses: Analyses) -> list[ReportFigure]:
    bounds = {
        label: {k.removeprefix("curvature."): v for k, v in content.items() if "curvature." in k}
        for label, content in arrays(analyses, "theory").items()
    }
    bounds = {label: content for label, content in bounds.items() if content}
    if not bounds:
        return []
    shares = {
        label: 100 * row["holds"]
        for label, analysis in analyses.items()
        for row in analysis.rows("theory", "upper bound on curvature")
        if row["value"] is not None
    }
    holds = f"The paper's upper bound holds for this share of samples: {named(shares, '{:.0f} %')}."
    return [
        ReportFigure(
            "theory-bounds",
            partial(figures.theory_bounds, bounds),
            f"Measured curvature against its bounds. {holds}",
            "One marker per sample. Upper bounds hold below the line, lower bounds above it. The "
            "bounds assume that the loss is quadratic around the image; where it is not, they can "
            f"fail. {holds}",
        )
    ]


def _name(row: dict[str, Any]) -> str:
    facts = [str(row[key]) for key in ("data", "stage") if key in row]
    return row["metric"] + (f" ({', '.join(facts)})" if facts else "")
