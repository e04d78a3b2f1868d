"""The report's section on theory: each bound, the measured value, and where it is vacuous."""

from __future__ import annotations

from functools import partial
from typing import Any

from noiseproof.lab import figures
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.sections import Analyses, Section, arrays, named

__all__ = ["theory_section"]

Rows = list[dict[str, Any]]


def theory_section(analyses: Analyses) -> Section | None:
    rows = {label: analysis.rows("theory") for label, analysis in analyses.items()}
    rows = {label: statements for label, statements in rows.items() if statements}
    if not rows:
        return None
    tables = [_overview(rows), *(_details(label, of_label) for label, of_label in rows.items())]
    intro = (
        "Every bound of the theory, evaluated on these models. A bound is vacuous if it allows all "
        "possible values. The tables for each method explain the bounds in words."
    )
    return Section("theory", "Theory", intro, _figures(analyses), tables, [])


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


def _overview(rows: dict[str, Rows]) -> dict[str, Any]:
    """One line per statement, one column per label: the share of cases for which it holds."""
    by_name = {
        label: {_name(row): row for row in of_label if row.get("stage") in (None, "features")}
        for label, of_label in rows.items()
    }
    names = dict.fromkeys(name for of_label in by_name.values() for name in of_label)
    lines = []
    for order, name in enumerate(names):
        if any("holds" in of_label.get(name, {}) for of_label in by_name.values()):
            cells = [_share(of_label.get(name)) for of_label in by_name.values()]
            lines.append([{"text": name, "value": order, "words": True}, *cells])
    title = "Share of samples, classes or pairs for which each statement holds"
    return {"title": title, "head": ["statement", *rows], "rows": lines, "summary": ""}


def _share(row: dict[str, Any] | None) -> dict[str, Any]:
    if row is None or row.get("holds") is None:
        return {"text": "–", "value": ""}
    vacuous = row.get("vacuous") or 0.0
    if vacuous >= 0.999:
        return {"text": "", "note": "vacuous", "value": ""}
    note = f"{100 * vacuous:.0f} % vacuous" if vacuous else ""
    return {"text": f"{100 * row['holds']:.0f} %", "note": note, "value": row["holds"]}


def _details(label: str, rows: Rows) -> dict[str, Any]:
    """Measured value, bound and sentence of each statement for one label."""
    lines = []
    for order, row in enumerate(rows):
        of = f" ({row['of']})" if row.get("of") else ""
        measured, bound = _number(row["value"]), _number(row.get("bound"))
        lines.append(
            [
                {"text": _name(row), "value": order, "words": True},
                {**measured, "text": measured["text"] + of},
                bound,
                {"text": str(row.get("sentence", "")), "value": "", "words": True},
            ]
        )
    head = ["statement", "measured", "bound", "in words"]
    return {
        "title": f"Bounds for {label}",
        "head": head,
        "rows": lines,
        "summary": f"Bounds for `{label}`, in words",
    }


def _number(value: float | None) -> dict[str, Any]:
    return {"text": "–", "value": ""} if value is None else {"text": f"{value:.3g}", "value": value}
