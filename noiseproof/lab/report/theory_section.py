"""The report's section on theory: which statements can fail, which do, and which say nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

from noiseproof.lab import figures
from noiseproof.lab.evaluation.words import listed, names
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.sections import Analyses, Section, arrays, rounded
from noiseproof.theory.verdict import LOOSE

Row = dict[str, Any]
Cell = tuple[str, list[str]]  # of a table: its text, and remarks in small type
_CHECKS = "Bounds that assume a quadratic loss: informative samples for which they hold"
_PROVED = "Statements that are proved: for how many classes or pairs they are informative"


def theory_section(analyses: Analyses) -> Section | None:
    rows_of = {label: analysis.rows("theory") for label, analysis in analyses.items()}
    rows_of = {label: rows for label, rows in rows_of.items() if rows}
    # Older analyses have no verdicts, and counted vacuous bounds as bounds that hold.
    current = {x: rows for x, rows in rows_of.items() if any("verdict" in row for row in rows)}
    old = [label for label in rows_of if label not in current]
    if not rows_of:
        return None
    intro = (
        "The paper's statements on these models. A statement is vacuous if it says nothing about a "
        "case, and informative otherwise. Bounds on curvature assume that the loss is quadratic "
        "around the image, so they can fail; the other statements are proved, so the question is "
        "only whether they are informative."
    )
    if old:
        intro += (
            f" The theory of {names(old)} was measured by an older version, and is not shown; "
            "`noiseproof analyse RUN --parts theory` measures it again."
        )
    by_label = {x: [{**row, "name": _name(row)} for row in rows] for x, rows in current.items()}
    statements = {
        "by_label": by_label,
        "tables": {
            _CHECKS: _by_name(by_label, checked=True, cell=check_cell),
            _PROVED: _by_name(by_label, checked=False, cell=proof_cell),
        },
    }
    shown = {label: analyses[label] for label in current}
    return Section("theory", "Theory", intro, _figures(shown), statements if current else None)


def _by_name(by_label: dict[str, list[Row]], *, checked: bool, cell: Any) -> dict[str, Any]:
    """The cell of each statement and label; of the statements at several stages, the last."""
    table: dict[str, dict[str, Cell]] = {}
    for label, rows in by_label.items():
        for row in rows:
            counted = row.get("checked") is checked and (checked or "cases" in row)
            if counted and row.get("stage") in (None, "features"):
                table.setdefault(row["name"], {})[label] = cell(row)
    return table


def check_cell(row: Row) -> Cell:
    """For how many informative samples a bound holds, and remarks.

    >>> check_cell({"verdict": "violated", "cases": 64, "informative": 18, "held": 1})
    ('1 of 18', ['46 vacuous'])
    >>> check_cell({"verdict": "holds", "cases": 9, "informative": 9, "held": 9, "factor": 3e9})
    ('9 of 9', ['loose: 3e+09 ×'])
    """
    if row["verdict"] is None:
        return "–", []
    cases, informative, factor = row["cases"], row["informative"], row.get("factor")
    if not informative:
        return "", ["vacuous"]
    remarks = [f"{cases - informative} vacuous"] if informative < cases else []
    remarks += [f"loose: {rounded(factor)} ×"] if factor and factor >= LOOSE else []
    return f"{row['held']} of {informative}", remarks


def proof_cell(row: Row) -> Cell:
    """For how many classes or pairs a proved statement is informative.

    >>> proof_cell({"cases": 10, "informative": 8, "unit": "classes"})
    ('8 of 10 classes', [])
    >>> proof_cell({"cases": 1, "informative": 1}), proof_cell({"cases": 1, "informative": 0})
    (('proved', []), ('', ['vacuous']))
    """
    if not row["informative"]:
        return "", ["vacuous"]
    if "unit" not in row:
        return "proved", []
    return f"{row['informative']} of {row['cases']} {row['unit']}", []


def _figures(analyses: Analyses) -> list[ReportFigure]:
    bounds = {
        label: {k.removeprefix("curvature."): v for k, v in content.items() if "curvature." in k}
        for label, content in arrays(analyses, "theory").items()
    }
    bounds = {label: content for label, content in bounds.items() if content}
    if not bounds:
        return []
    cells = {
        label: check_cell(row)
        for label, analysis in analyses.items()
        for row in analysis.rows("theory", "upper bound on curvature")
        if row["verdict"] is not None
    }
    held = [
        f"`{label}` {count}" + (f" ({', '.join(remarks)})" if remarks else "")
        for label, (count, remarks) in cells.items()
        if count
    ]
    vacuous = [label for label, (count, _) in cells.items() if not count]
    text = "The paper's upper bound"
    if held:
        text += f" holds for these numbers of informative samples: {listed(held)}"
    if vacuous:
        text += f"{'; it' if held else ''} is vacuous for all samples of {names(vacuous)}"
    return [
        ReportFigure(
            "theory-bounds",
            partial(figures.theory_bounds, bounds),
            f"Measured curvature against its bounds. {text}.",
            "One marker per sample; vacuous bounds are not shown. Upper bounds hold below the "
            "line, lower bounds above it. The bounds assume that the loss is quadratic around the "
            f"image; where it is not, they can fail. {text}.",
        )
    ]


def _name(row: Row) -> str:
    facts = [str(row[key]) for key in ("data", "stage", "paper") if row.get(key) is not None]
    return row["metric"] + (f" ({', '.join(facts)})" if facts else "")
