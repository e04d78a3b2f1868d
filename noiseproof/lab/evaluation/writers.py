"""The formats of a table: terminal, Markdown, CSV, LaTeX and JSON.

Numbers and marks come from `evaluation.tables`, notes from `evaluation.words`. Names of runs,
methods and data are escaped in every format: they cannot control a terminal or act as markup.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from noiseproof.lab.evaluation import severities
from noiseproof.lab.evaluation.calibration import SCORES
from noiseproof.lab.evaluation.tables import Cell, Mark, Table
from noiseproof.lab.evaluation.words import (
    calibration_notes,
    corruption_notes,
    main_sentences,
    notes,
)
from noiseproof.perturb.text import CORRUPTION_FAMILIES, heading, steps

T = TypeVar("T")


def cell_text(table: Table, cell: Cell | None) -> str:
    """A cell as '93.1 ± 0.4', or with several trainings '93.1 ± 0.6 (0.4)'; '–' if it is missing.

    Args:
        table: the table, which decides on decimals and on which spread to show.
        cell: one of its cells, or None.
    """
    if cell is None:
        return "–"
    text = table.percent(cell.mean)
    if table.seeds == 1:
        return text if cell.draws_std is None else f"{text} ± {table.percent(cell.draws_std)}"
    if cell.seeds_std is not None:
        text += f" ± {table.percent(cell.seeds_std)}"
    return text if cell.draws_std is None else f"{text} ({table.percent(cell.draws_std)})"


_SIGNS: dict[Mark, str] = {"best": "", "close": " ≈", "untested": " ?", "": ""}


def _signed(table: Table, cell: Cell | None) -> str:
    return cell_text(table, cell) + (_SIGNS[cell.mark] if cell else "")


def console(table: Table, width: int | None = None) -> RichTable:
    """The table for a terminal, the best in bold; transposed, and said to be, if it is wider than
    `width`."""
    upright = _console(table, table.labels, table.columns, transposed=False)
    if width is None or Console(width=10_000).measure(upright).maximum <= width:
        return upright
    return _console(table, table.columns, table.labels, transposed=True)


def _console(
    table: Table, down: Sequence[str], across: Sequence[str], transposed: bool
) -> RichTable:
    title = Text(table.title) if table.title else None
    rich_table = RichTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    if transposed:
        rich_table.caption = Text(
            f"Rows and columns are swapped to fit this terminal: one column per {table.by}."
        )
        rich_table.caption_justify = "left"
    rich_table.add_column("perturbation" if transposed else table.by, overflow="fold")
    for name in across:
        head = Text(name if transposed else heading(name))
        rich_table.add_column(head, justify="right", overflow="fold")
    for name in down:
        line = [Text(heading(name) if transposed else name)]
        for other in across:
            cell = table.cells.get((other, name) if transposed else (name, other))
            style = "bold" if cell and cell.mark == "best" else ""
            line.append(Text(_signed(table, cell), style=style))
        rich_table.add_row(*line)
    return rich_table


def show(table: Table, out: Console, *, sentences: bool = True) -> None:
    """Prints a table and its notes, and before them its corruptions, if it has any.

    Args:
        table: the table.
        out: the console.
        sentences: also print the summary.
    """
    out.print()
    out.print(console(table, out.width))
    for title, columns in corruption_tables(table).items():
        out.print()
        grid = _corruption_grid(table, columns, Text, lambda text: Text(text.plain, style="bold"))
        out.print(_rich_grid(title, grid, sections=True))
    below = [*notes(table), *(corruption_notes(table) if table.corruptions else ())]
    for line in [*below, *(main_sentences(table) if sentences else ())]:
        out.print(line, markup=False, highlight=False)


class CorruptionColumn(NamedTuple):
    """A column of a table of corruptions."""

    head: str
    label: str
    measure: Literal["accuracy", "drop", "CE"]

    def value(self, table: Table, spec: str) -> float | None:
        """The number of a row, as a fraction; None if it is unknown."""
        if self.measure == "drop":
            return table.drop(self.label, spec)
        if self.measure == "CE":
            return table.corruption_error(self.label, spec)
        cell = table.cells.get((self.label, spec))
        return cell.mean if cell else None

    def text(self, table: Table, spec: str) -> str:
        """The number of a row as text, in %; accuracies with their spread and sign."""
        value = self.value(table, spec)
        if self.measure == "accuracy" or value is None:
            return _signed(table, table.cells.get((self.label, spec))) if value is not None else "–"
        return table.percent(value) if self.measure == "drop" else f"{100 * value:.1f}"


def corruption_tables(table: Table) -> dict[str, list[CorruptionColumn]]:
    """The columns of the tables of corruptions, by title: one table with all measures of a single
    label, or a table of each measure with a column for each label. Rows are `table.corruptions`.
    """
    labels = [label for label in table.labels if (label, severities.ALL) in table.cells]
    titles: dict[Literal["accuracy", "drop", "CE"], str] = {
        "accuracy": "Accuracy under corruptions, in %"
    }
    if any(table.drop(label, severities.ALL) is not None for label in labels):
        titles["drop"] = "Drop against clean images, in percentage points"
    if table.baseline:
        titles["CE"] = "Corruption error (CE), in %"
    about = f", {table.title}" if table.title else ""
    if len(labels) == 1:
        heads = {"accuracy": "accuracy (%)", "drop": "drop (points)", "CE": "CE (%)"}
        columns = [CorruptionColumn(heads[measure], labels[0], measure) for measure in titles]
        return {f"Corruptions{about}": columns}
    return {
        f"{title}{about}": [CorruptionColumn(label, label, measure) for label in labels]
        for measure, title in titles.items()
        if labels
    }


def corruption_names(spec: str) -> tuple[str, str]:
    """The family of a corruption and its name.

    >>> corruption_names("fog:1..5"), corruption_names("corruptions:1..5")
    (('weather', 'fog'), ('', 'all 15'))
    """
    return CORRUPTION_FAMILIES.get(steps(spec)[0].name, ""), severities.title(spec)


def _corruption_grid(
    table: Table,
    columns: Sequence[CorruptionColumn],
    escape: Callable[[str], T],
    bold: Callable[[T], T],
) -> list[list[T]]:
    """The header and the rows of a table of corruptions as escaped text; `bold` marks the best
    accuracy of a row."""
    lines = [[escape(x) for x in ("family", "corruption", *(column.head for column in columns))]]
    for spec in table.corruptions:
        lines.append([escape(name) for name in corruption_names(spec)])
        for column in columns:
            text = escape(column.text(table, spec))
            cell = table.cells.get((column.label, spec))
            best = column.measure == "accuracy" and cell is not None and cell.mark == "best"
            lines[-1].append(bold(text) if best and len(table.labels) > 1 else text)
    return lines


_NAMES = 2  # columns of a table of corruptions or of calibration that name its rows


def show_calibration(table: Table, out: Console) -> None:
    """Prints ECE, NLL and Brier score, a line for each perturbation and label.

    Args:
        table: the table.
        out: the console.
    """
    out.print()
    out.print(_rich_grid(_calibration_title(table), _calibration_grid(table, Text)))
    for line in calibration_notes(table):
        out.print(line, markup=False, highlight=False)


def _rich_grid(title: str, grid: Sequence[Sequence[Text]], *, sections: bool = False) -> RichTable:
    """A header and rows for a terminal; `sections` separates rows whose first texts differ."""
    head, *rows = grid
    rich_table = RichTable(
        title=Text(title), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left"
    )
    for i, name in enumerate(head):
        justify = "left" if i < _NAMES else "right"
        rich_table.add_column(name, justify=justify, overflow="fold")
    for row, following in zip(rows, [*rows[1:], rows[-1]] if rows else [], strict=True):
        rich_table.add_row(*row, end_section=sections and row[0] != following[0])
    return rich_table


def _calibration_title(table: Table) -> str:
    return f"Calibration, {table.title}" if table.title else "Calibration"


def _calibration_grid(table: Table, escape: Callable[[str], T]) -> list[list[T]]:
    """The header and the rows of a table of calibration as escaped text; cells without calibration
    are left out."""
    lines = [["perturbation", table.by, "ECE (%)", "NLL", "Brier score"]]
    for spec in table.perturbations:
        for label, cell in table.column(spec).items():
            if cell.calibration:
                values = [cell.calibration[name] for name in SCORES]
                ece, nll, brier = (math.inf if value is None else value for value in values)
                numbers = table.percent(ece), f"{nll:.3f}".replace("inf", "∞"), f"{brier:.3f}"
                lines.append([heading(spec), label, *numbers])
    return [[escape(text) for text in line] for line in lines]


def _grid(table: Table, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """The header and the rows as escaped text; the best of a column is inserted into `bold`."""
    lines = [[table.by, *(escape(heading(spec)) for spec in table.columns)]]
    for label in table.labels:
        lines.append([escape(label)])
        for spec in table.columns:
            cell = table.cells.get((label, spec))
            text = escape(_signed(table, cell))
            lines[-1].append(bold % text if cell and cell.mark == "best" else text)
    return lines


def markdown(table: Table) -> str:
    """A GitHub table with its notes, and its corruptions, if it has any."""
    texts = [_markdown(table.title, _grid(table, markdown_text, "**%s**"), 1, notes(table))]
    for title, columns in corruption_tables(table).items():
        grid = _corruption_grid(table, columns, markdown_text, "**{}**".format)
        texts.append(_markdown(title, grid, _NAMES, corruption_notes(table)))
    return "\n".join(texts)


def calibration_markdown(table: Table) -> str:
    """The calibration of a table, as a GitHub table."""
    grid = _calibration_grid(table, markdown_text)
    return _markdown(_calibration_title(table), grid, _NAMES, calibration_notes(table))


def _markdown(title: str, grid: Sequence[Sequence[str]], names: int, below: Sequence[str]) -> str:
    """Escaped text as a GitHub table, with `names` columns of names and then numbers."""
    head, *rows = grid
    rule = ["---"] * names + ["---:"] * (len(head) - names)
    lines = [f"**{markdown_text(title)}**", ""] if title else []
    lines += [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
    return "\n".join([*lines, "", *(f"{note}  " for note in below)]).rstrip() + "\n"


def markdown_text(text: str) -> str:
    """
    >>> print(markdown_text("a|b <i> _c_"))
    a\\|b &lt;i&gt; \\_c\\_
    """
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", html.escape(text, quote=False))


def csv_text(table: Table) -> str:
    """One line per cell, numbers as fractions in full precision; missing values are empty. Means
    over severities also have the drop against clean images and the corruption error; unbalanced
    test images, macro-F1 and the recall of each class."""
    out = io.StringIO()
    names = ["mean", "draws_std", "draws", "seeds_std", "seeds", "mark", "p"]
    writer = csv.writer(out, lineterminator="\n")
    interval = ["behind", "low", "high", "interval_over"]
    scores = [*SCORES, "drop", "ce", "macro_f1", "recall"]
    writer.writerow([table.by, "weights", "perturbation", *names, *interval, "n", *scores])
    for label in table.labels:
        for spec in table.perturbations:
            cell = table.cells.get((label, spec))
            if cell is None:
                continue
            numbers = [getattr(cell, name) for name in names]
            behind = [*cell.behind, cell.interval_over] if cell.behind else [""] * len(interval)
            name = spreadsheet_text(label)
            scores = [cell.calibration.get(score) for score in SCORES]
            summary = [None, None]
            if spec in table.corruptions:
                summary = [table.drop(label, spec), table.corruption_error(label, spec)]
            about = [name, table.weights[label], spec]
            classes = cell.classes
            recall = classes.recall.items() if classes else ()
            by_class = spreadsheet_text("; ".join(f"{name} {value:.4f}" for name, value in recall))
            f1 = classes.macro_f1 if classes else None
            writer.writerow([*about, *numbers, *behind, table.n, *scores, *summary, f1, by_class])
    return out.getvalue()


def spreadsheet_text(text: str) -> str:
    """Text for a cell of a CSV file, which a spreadsheet does not take for a formula.

    >>> spreadsheet_text("=1+1"), spreadsheet_text("-1"), spreadsheet_text("cat")
    ("'=1+1", '-1', 'cat')
    """
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)  # a number, such as a class named -1, calls nothing
    except ValueError:
        return f"'{text}"
    return text


def latex(table: Table) -> str:
    """A booktabs table with its notes as caption, and its corruptions, if it has any."""
    texts = [_latex(table.title, _grid(table, _tex, r"\textbf{%s}"), 1, notes(table))]
    for title, columns in corruption_tables(table).items():
        grid = _corruption_grid(table, columns, _tex, r"\textbf{{{}}}".format)
        texts.append(_latex(title, grid, _NAMES, corruption_notes(table)))
    return "\n".join(texts)


def calibration_latex(table: Table) -> str:
    """The calibration of a table, as a booktabs table."""
    grid = _calibration_grid(table, _tex)
    return _latex(_calibration_title(table), grid, _NAMES, calibration_notes(table))


def _latex(title: str, grid: Sequence[Sequence[str]], names: int, below: Sequence[str]) -> str:
    """Escaped text as a booktabs table, with `names` columns of names and then numbers."""
    head, *rows = (" & ".join(cells) + r" \\" for cells in grid)
    sentences = [f"{title}.", *below] if title else below
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(' '.join(sentences))}}}"]
    lines += [rf"\begin{{tabular}}{{{'l' * names}{'r' * (len(grid[0]) - names)}}}"]
    lines += [r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}"]) + "\n"


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "σ": r"$\sigma$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "–": "--",
    **{c: "\\" + c for c in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return text.translate(str.maketrans(_TEX))


WRITERS: dict[str, Callable[[Table], str]] = {".md": markdown, ".csv": csv_text, ".tex": latex}


def written(tables: Sequence[Table], suffix: str, *, calibration: bool = False) -> str:
    """The text of a file with several tables.

    Args:
        tables: one or more.
        suffix: .md or .tex, one table after the other, or .csv, under one header.
        calibration: also write their tables of calibration; .csv has its columns in any case.
    """
    texts = [WRITERS[suffix](table) for table in tables]
    if calibration and suffix != ".csv":
        write = {".md": calibration_markdown, ".tex": calibration_latex}[suffix]
        texts += [write(table) for table in tables]
    if suffix == ".csv":
        return texts[0] + "".join(text.partition("\n")[2] for text in texts[1:])
    return "\n".join(texts)


def as_dict(table: Table) -> dict[str, Any]:
    """The table as plain values for JSON, with its notes."""
    cells = [
        {
            table.by: label,
            "weights": table.weights[label],
            "perturbation": spec,
            **asdict(cell),
        }
        for (label, spec), cell in table.cells.items()
    ]
    about = {"title": table.title, "n": table.n, "guess": table.majority_share}
    return {**about, "cells": cells, "notes": notes(table)}
