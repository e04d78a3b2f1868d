"""`noiseproof report`: the results of runs as one HTML file that opens from disk.

The page loads nothing from outside, and everything that it states is computed from the runs. The
tables are also written as Markdown, CSV and LaTeX, and the figures as PNG and SVG. All text (class
names, paths, settings) is escaped.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

import noiseproof
from noiseproof.lab.comparison_files import is_comparison
from noiseproof.lab.console import terminal
from noiseproof.lab.evaluation import words, writers
from noiseproof.lab.files import write_atomically
from noiseproof.lab.report import gallery, provenance, summary
from noiseproof.lab.report.accuracy_sections import (
    MATRIX_CLASSES,
    accuracy_figures,
    class_breakdown,
    class_figures,
    corruption_figures,
    label_styles,
    training_figures,
    weak_classes,
)
from noiseproof.lab.report.calibration_section import calibration_section
from noiseproof.lab.report.curvature_sections import curvature_section, surface_section
from noiseproof.lab.report.decision import Decision, next_commands, save_decision
from noiseproof.lab.report.feature_sections import (
    abstention_conditions,
    abstention_section,
    features_section,
    geometry_section,
)
from noiseproof.lab.report.figure_files import FigureWriter
from noiseproof.lab.report.results import Results, gather
from noiseproof.lab.report.sections import Section, first_analyses
from noiseproof.lab.report.theory_section import theory_section
from noiseproof.lab.report.worst_case_section import worst_case_section
from noiseproof.lab.runs import RunFolder
from noiseproof.perturb.text import heading

_TEMPLATES = Path(__file__).parent / "templates"
_BUDGET = 7_500_000  # bytes of figures and images, so that the page stays below 8 MB


def report(
    runs: Sequence[RunFolder],
    output: Path,
    *,
    title: str | None = None,
    baseline: str | Path | None = None,
) -> Path:
    """Writes OUTPUT/report.html, the tables and OUTPUT/figures/; returns the path of the page.

    Args:
        runs: evaluated run folders with the same test images. Their analyses are shown as well.
        output: the folder to write to.
        title: of the page; by default the methods and the data.
        baseline: the run that corruption errors are relative to; by default the only one of method
            normal.
    """
    results = gather(runs, baseline)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    for suffix in writers.WRITERS:
        text = writers.written(list(results.tables.values()), suffix)
        write_atomically(output / f"report{suffix}", text)
    decision = save_decision(results, output)
    path, choice = output / "report.html", None if isinstance(decision, str) else decision
    write_atomically(path, _page(results, choice, output, title))
    return path


def report_runs(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    title: str | None = None,
    baseline: str | Path | None = None,
) -> Path:
    """Writes the report on run folders and prints its path.

    Args:
        paths: of the run folders.
        output: the folder to write to; by default that of the run or of the comparison that all
            runs belong to, or else report/ next to the first run.
        title: of the page.
        baseline: as in `report`.
    """
    runs = [RunFolder.open(path) for path in paths]
    if not runs:
        raise ValueError("a report needs at least one run folder, got none")
    folder = Path(output) if output is not None else _default_output(runs)
    path = report(runs, folder, title=title, baseline=baseline)
    terminal().print(f"Report: {path}", markup=False, soft_wrap=True)
    return path


def analysis_sections(results: Results) -> list[Section]:
    """The sections on the analyses of the runs; none if they were not analysed."""
    analyses = first_analyses(results)
    sections = (
        curvature_section(analyses),
        surface_section(analyses, results.classes),
        features_section(analyses, results.classes),
        geometry_section(analyses),
        abstention_section(analyses),
        theory_section(analyses),
    )
    note = summary.first_training_note(results)
    return [s._replace(intro=s.intro + note) for s in sections if s is not None]


def _default_output(runs: Sequence[RunFolder]) -> Path:
    if len({run.path.resolve() for run in runs}) == 1:
        return runs[0].path
    parents = {run.path.resolve().parent for run in runs}
    parent = runs[0].path.parent
    return parent if len(parents) == 1 and is_comparison(parent) else parent / "report"


def _page(results: Results, decision: Decision | None, output: Path, title: str | None) -> str:
    table = results.table
    breakdown = class_breakdown(results)
    images, missing_images = _gallery(results)
    styles = label_styles(results)
    taken = decision.choice.label if decision else table.labels[0]
    data = {"breakdown": breakdown, "gallery": images, "shapes": styles["shapes"]}
    writer = FigureWriter(output / "figures", budget=_BUDGET - len(json.dumps(data)))
    for figure in class_figures(results):  # the page shows them with controls instead
        writer.write(figure)
    curves = [writer.embed(figure) for figure in accuracy_figures(results)]
    corruptions = [writer.embed(figure) for figure in corruption_figures(results)]
    analyses, worst_case = first_analyses(results), worst_case_section(results)
    sections = [
        {**section._asdict(), "figures": [writer.embed(figure) for figure in section.figures]}
        for section in (calibration_section(results), worst_case, *analysis_sections(results))
        if section is not None
    ]
    training = [writer.embed(figure) for figure in training_figures(results)]
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True)
    environment.filters["prose"] = _prose
    environment.filters["heading"] = heading
    return environment.get_template("report.html.j2").render(
        title=title or _title(results),
        version=noiseproof.__version__,
        date=datetime.date.today().isoformat(),
        css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        js=Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
        styles=styles,
        results=results,
        table=table,
        summary=summary,
        decision=decision if len(table.labels) > 1 else None,
        next_commands=next_commands(decision, output) if decision else [],
        words=words,
        provenance=provenance,
        cell_text=writers.cell_text,
        corruption_tables=writers.corruption_tables,
        corruption_names=writers.corruption_names,
        corruptions=corruptions,
        first_training_note=summary.first_training_note(results),
        curves=curves,
        training=training,
        order={label: i for i, label in enumerate(results.groups)},
        breakdown=breakdown,
        taken=taken,
        weak_classes=weak_classes(breakdown, taken) if breakdown else [],
        matrix_classes=MATRIX_CLASSES,
        gallery=images,
        gallery_missing=missing_images,
        sections=sections,
        worst_case=worst_case is not None,
        analyses=analyses,
        abstention_conditions=abstention_conditions(analyses),
        commands=provenance.commands(results, output),
        data=data,
    )


def _prose(text: str) -> Markup:
    """Text as HTML: escaped, names in backticks as code, no line break before a unit or value.

    >>> _prose("`both` 91 % at < 2 s")
    Markup('<code>both</code>\\xa091\\xa0% at &lt; 2\\xa0s')
    """
    unbroken = re.sub(r"(?<=\d) (?=[%×±]|s\b|min\b|h\b)|(?<=[`σα]) (?=\d)", "\xa0", text)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(unbroken))))


def _title(results: Results) -> str:
    labels, data = results.table.labels, results.data_name
    if len(labels) == 1:
        return f"{labels[0]} on {data}"
    return f"{words.number_word(len(labels)).capitalize()} {results.by}s on {data}"


def _gallery(results: Results) -> tuple[dict[str, Any] | None, str]:
    try:
        return gallery.build(results), ""
    except (ValueError, OSError) as error:
        return None, f"The test images cannot be shown: {error}."
