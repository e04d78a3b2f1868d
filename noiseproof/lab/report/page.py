"""Rows, predictions and figures of some runs as one HTML file that opens from disk.

The page fetches nothing and says nothing that is not computed from the runs. Beside it lie the same
tables as Markdown, CSV and LaTeX, and every figure as PNG and SVG. Whatever comes from outside
(class names, paths, settings) is escaped.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

import noiseproof
from noiseproof.lab.console import terminal
from noiseproof.lab.evaluation import words, writers
from noiseproof.lab.evaluation.tables import Cell, Table
from noiseproof.lab.evaluation.words import tested_by
from noiseproof.lab.files import write_atomically
from noiseproof.lab.report import accuracy_sections as breakdown
from noiseproof.lab.report import curvature_sections as insights
from noiseproof.lab.report import findings, gallery, summary
from noiseproof.lab.report import provenance as origin
from noiseproof.lab.report.figure_files import Press
from noiseproof.lab.report.results import Results, gather
from noiseproof.lab.runs import RunFolder
from noiseproof.perturb.text import heading

__all__ = ["report", "report_runs"]

_TEMPLATES = Path(__file__).parent / "templates"
_LARGEST = 7_500_000  # bytes of figures and pictures, so that the page stays below 8 MB


def report(runs: Sequence[RunFolder], output: Path, *, title: str | None = None) -> Path:
    """Writes output/report.html, the tables and figures/ beside it; returns the page's path.

    Runs must share their test images and be evaluated; where they are analysed, that is shown too.
    """
    results = gather(runs)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    for suffix in writers.WRITERS:
        text = writers.written(list(results.tables.values()), suffix)
        _write(output / f"report{suffix}", text)
    path = output / "report.html"
    _write(path, _page(results, output, title))
    return path


def report_runs(
    paths: Sequence[str | Path], output: str | Path | None = None, title: str | None = None
) -> Path:
    """The report on run folders; says where it lies.

    By default it goes into the folder of the run, or of the comparison that made all runs, or else
    into report/ beside the first run.
    """
    runs = [RunFolder.open(path) for path in paths]
    if not runs:
        raise ValueError("a report needs at least one run folder, got none")
    where = Path(output) if output is not None else _beside(runs)
    made = report(runs, where, title=title)
    terminal().print(f"Report: {made}", markup=False, soft_wrap=True)
    return made


def _beside(runs: Sequence[RunFolder]) -> Path:
    if len({run.path.resolve() for run in runs}) == 1:
        return runs[0].path
    parents = {run.path.resolve().parent for run in runs}
    parent = runs[0].path.parent
    if len(parents) == 1 and (parent / "comparison.json").is_file():
        return parent
    return parent / "report"


def _page(results: Results, output: Path, title: str | None) -> str:
    table = results.table
    classes = breakdown.build(results)
    pictures, missing = _gallery(results)
    looks = findings.looks(results)
    page = {"breakdown": classes, "gallery": pictures, "shapes": looks["shapes"]}
    press = Press(output / "figures", budget=_LARGEST - len(json.dumps(page)))
    for plate in findings.classes(results):  # on the page they have controls instead
        press.file(plate)
    sections = insights.sections(results)
    curves = [press.print(plate) for plate in findings.accuracy(results)]
    analysis = [
        {**section._asdict(), "plates": [press.print(plate) for plate in section.plates]}
        for section in sections
    ]
    training = [press.print(plate) for plate in findings.training(results)]
    contents = [("results", "Accuracy under noise")]
    contents += [("classes", "Class by class")] if classes else []
    contents += [("gallery", "Gallery"), *((s.anchor, s.title) for s in sections)]
    contents += [("training", "Training")] if training else []
    contents += [("made", "How this was made")]
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True)
    environment.filters["unbroken"] = _unbroken
    return environment.get_template("report.html.j2").render(
        title=title or _title(results),
        eyebrow=_eyebrow(results),
        version=noiseproof.__version__,
        date=datetime.date.today().isoformat(),
        css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        js=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        looks=looks,
        by=results.by,
        headline=summary.headline(results),
        paragraph=summary.paragraph(results),
        facts=summary.facts(results),
        contents=contents,
        results_intro=_intro(results),
        tables=[_sheet(results, t, w) for w, t in results.tables.items()],
        level_sentences=[summary.sentence(table, spec) for spec in table.perturbations]
        if len(table.labels) > 1
        else [],
        curves=curves,
        training=training,
        training_intro=summary.first_alone(results).strip(),
        places={label: i for i, label in enumerate(results.groups)},
        breakdown=classes,
        breakdown_intro=_breakdown_intro(results),
        gallery=pictures,
        gallery_missing=missing,
        gallery_intro=_gallery_intro(results, pictures),
        analysis=analysis,
        commands=origin.commands(results, output),
        made=origin.facts(results),
        runs=origin.runs(results),
        settings=origin.settings(results),
        settings_intro=origin.intro(results),
        page=page,
    )


def _unbroken(text: str) -> str:
    """The text with numbers held to their units, so that no line begins with a lone % or ×.

    >>> _unbroken("91 % at 1.1 × the time")
    '91\\xa0% at 1.1\\xa0× the time'
    """
    return re.sub(r"(?<=\d) (?=[%×±]|s\b|min\b|h\b)", "\xa0", text)


def _title(results: Results) -> str:
    labels, data = results.table.labels, results.rows[results.weights][0]["data"]
    if len(labels) == 1:
        return f"{labels[0]} on {data}"
    return f"{summary.number(len(labels)).capitalize()} {results.by}s on {data}"


def _eyebrow(results: Results) -> str:
    table = results.table
    parts = [f"{table.n:,} test images", f"{len(results.classes)} classes"]
    parts += [f"{len(table.perturbations)} conditions", f"{len(results.runs)} trained models"]
    return " · ".join(parts)


def _intro(results: Results) -> str:
    tests = tested_by(results.table)
    told = f"; ≈ marks what cannot be told from it by {tests}" if tests else ""
    best = "" if len(results.table.labels) == 1 else (
        f" The highest mean of a column is underlined{told}. Click a header to sort."
    )  # fmt: skip
    return f"Accuracy in % on test images that no {results.by} was trained or selected on.{best}"


def _breakdown_intro(results: Results) -> str:
    count, most = len(results.classes), breakdown.MATRIX
    worst = f" Of {count} classes, the {most} that fare worst on average are shown."
    what = "trainings and noise draws" if results.table.seeds > 1 else "noise draws"
    return f"Predictions of all {what} are pooled." + (worst if count > most else "")


def _gallery(results: Results) -> tuple[dict[str, Any] | None, str]:
    try:
        return gallery.build(results), ""
    except (ValueError, OSError) as error:
        return None, f"The test images cannot be shown: {error}."


def _gallery_intro(results: Results, pictures: dict[str, Any] | None) -> str:
    if pictures is None:
        return ""
    over = "test images and trainings" if results.table.seeds > 1 else "test images"
    return (
        f"{len(pictures['truth'])} test images, picked by class and not by result, with the noise "
        "of the evaluation's first draw; below each, what every model sees in it and how sure it "
        f"is. The accuracies beside the names are over all {over}."
        f"{summary.first_alone(results)}"
    )


def _sheet(results: Results, table: Table, weights: str) -> dict[str, Any]:
    """A table of accuracies for the page, with the time of a training where it is known."""
    times = summary.costs(results)
    head = [results.by, *map(heading, table.perturbations)]
    head += ["training"] if times else []
    rows = []
    for label in table.labels:
        cells = [_cell(table, table.cells.get((label, s)), s) for s in table.perturbations]
        if times:
            seconds = times.get(label)
            text = "–" if seconds is None else summary.duration(seconds)
            value = "" if seconds is None else seconds
            cells.append({"value": value, "mean": text, "spread": "", "mark": "", "sign": ""})
        place = list(results.groups).index(label)
        rows.append({"label": label, "cells": cells, "colour": place})
    also = "Weights of the best epoch by validation" if weights == "best" else table.title
    return {
        "title": table.title,
        "summary": also,
        "head": head,
        "rows": rows,
        "notes": words.notes(table),
    }


_SIGNS = {"close": "≈", "untested": "?"}


def _cell(table: Table, cell: Cell | None, spec: str) -> dict[str, Any]:
    if cell is None:
        return {"value": "", "mean": "–", "spread": "", "mark": "", "sign": "", "title": ""}
    mean, _, spread = writers.cell_text(table, cell).partition(" ")
    return {
        "value": cell.mean,
        "mean": mean,
        "spread": spread,
        "mark": cell.mark,
        "sign": _SIGNS.get(cell.mark, ""),
        "title": _told(cell),
    }


def _told(cell: Cell) -> str:
    """What the tests say of a cell, for the pointer that rests on it."""
    if cell.behind is None:
        return "highest mean of this column" if cell.mark == "best" else ""
    low, high = -100 * cell.behind.high, -100 * cell.behind.low
    verdict = "; cannot be told from the best" if cell.mark == "close" else ""
    if verdict and "welch" in cell.tests and "welch" not in cell.unsure:
        verdict += " on these images"  # though the interval over trainings leaves 0 out
    return (
        f"{-100 * cell.behind.diff:.1f} points behind the best "
        f"(95 % interval over {cell.over} {low:.1f} to {high:.1f}){verdict}"
    )


def _write(path: Path, text: str) -> None:
    write_atomically(path, text)
