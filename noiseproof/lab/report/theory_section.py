"""The report's section on theory: each bound beside what was measured, and where it is vacuous."""

from __future__ import annotations

from typing import Any

from noiseproof.lab import figures
from noiseproof.lab.report.figure_files import Plate
from noiseproof.lab.report.sections import Analyses, Section, arrays, each, spoken

__all__ = ["theory"]


def theory(analyses: Analyses) -> Section | None:
    found = {label: a.rows("theory") for label, a in analyses.items()}
    found = {label: rows for label, rows in found.items() if rows}
    if not found:
        return None
    sheets = [_overview(found), *(_sheet(label, rows) for label, rows in found.items())]
    intro = (
        "Every bound of the theory, evaluated on these models. A bound is vacuous where it allows "
        "more than could ever be measured; the lists of each method say so in words."
    )
    return Section("theory", "Theory", intro, _plates(analyses), sheets, [])


def _plates(analyses: Analyses) -> list[Plate]:
    bounds = {
        label: {k.removeprefix("curvature."): v for k, v in values.items() if "curvature." in k}
        for label, values in arrays(analyses, "theory").items()
    }
    bounds = {label: values for label, values in bounds.items() if values}
    if not bounds:
        return []
    held = each(analyses, "theory", "upper bound on curvature")
    shares = {
        label: 100 * row["holds"]
        for label in held
        for row in analyses[label].rows("theory", "upper bound on curvature")
    }
    said = f"The paper's upper bound holds for this share of samples: {spoken(shares, '{:.0f} %')}."
    return [
        Plate(
            "theory-bounds",
            lambda theme: figures.theory_bounds(bounds, theme=theme),
            f"Measured curvature against its bounds. {said}",
            "A mark a sample. Upper bounds hold below the line, lower bounds above. The bounds "
            "take the loss for quadratic around the image; where that is wrong they may fail, "
            f"which is information and not a mistake. {said}",
        )
    ]


def _name(row: dict[str, Any]) -> str:
    more = [str(row[key]) for key in ("data", "stage") if key in row]
    return row["metric"] + (f" ({', '.join(more)})" if more else "")


def _overview(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A line a statement, a column a label: the share of cases for which it holds."""
    by_name = {
        label: {_name(row): row for row in rows if row.get("stage") in (None, "features")}
        for label, rows in found.items()
    }
    names = dict.fromkeys(name for rows in by_name.values() for name in rows)
    lines = []
    for place, name in enumerate(names):
        if any("holds" in rows.get(name, {}) for rows in by_name.values()):
            cells = [_held(rows.get(name)) for rows in by_name.values()]
            lines.append([{"text": name, "value": place, "words": True}, *cells])
    title = "Share of samples, classes or pairs for which each statement holds"
    return {"title": title, "head": ["statement", *found], "rows": lines, "fold": ""}


def _held(row: dict[str, Any] | None) -> dict[str, Any]:
    if row is None or row.get("holds") is None:
        return {"text": "–", "value": ""}
    vacuous = row.get("vacuous") or 0.0
    if vacuous >= 0.999:
        return {"text": "", "note": "vacuous", "value": ""}
    note = f"{100 * vacuous:.0f} % vacuous" if vacuous else ""
    return {"text": f"{100 * row['holds']:.0f} %", "note": note, "value": row["holds"]}


def _sheet(label: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    lines = []
    for place, row in enumerate(rows):
        of = f" ({row['of']})" if row.get("of") else ""
        lines.append(
            [
                {"text": _name(row), "value": place, "words": True},
                {"text": _number(row["value"]) + of, "value": _plain(row["value"])},
                {"text": _number(row.get("bound")), "value": _plain(row.get("bound"))},
                {"text": str(row.get("sentence", "")), "value": "", "words": True},
            ]
        )
    head = ["statement", "measured", "bound", "in words"]
    return {
        "title": f"Bounds of {label}",
        "head": head,
        "rows": lines,
        "fold": f"Bounds of {label}, in words",
    }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _plain(value: float | None) -> float | str:
    return "" if value is None else value
