"""From evaluation rows to one table: methods (or runs) down, perturbations across.

Two spreads are kept apart. `draws_std` says how much the accuracy of one trained model moves with
the noise it happens to be tested under; `seeds_std` says how much it moves with the training. Only
the second tells whether another training would give another order.

A cell is marked "best" where its mean is the highest of its column, and "close" where it cannot be
told from the best. The rule, at the 5 % level and with no correction for the number of comparisons:

- images: the 95 % bootstrap interval of the difference to the best, on the same images under the
  same noise, contains 0. Where both sides gave one prediction an image, McNemar's exact test must
  agree, since the bootstrap is too sure of itself when few images differ;
- trainings, where both sides have two or more: Welch's t-test over the trainings' means has
  p ≥ 0.05.

One "cannot tell" is enough for "close"; a cell with neither kind of evidence is "untested".
How a table looks as text is in this module too: `console`, `markdown`, `csv_text`, `latex`.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from noiseproof.lab import stats

Row = Mapping[str, Any]
Correct = Callable[[str, str, str], "NDArray[Any] | None"]
"""(run, weights, perturbation) -> right or wrong, draws x n, or None where it is not known."""
Mark = Literal["best", "close", "untested", ""]
LEVEL = 0.05


@dataclass(frozen=True)
class Cell:
    """One accuracy, as a fraction. `behind` is this minus the best, on the same images."""

    mean: float
    draws_std: float | None
    draws: int
    seeds_std: float | None
    seeds: int
    mark: Mark = ""
    behind: stats.Difference | None = None
    p: float | None = None


@dataclass(frozen=True)
class Table:
    """`cells[label, perturbation]`; a pair that was not evaluated is absent."""

    title: str
    by: Literal["method", "run"]
    labels: tuple[str, ...]
    perturbations: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    weights: Mapping[str, str]
    n: int

    @property
    def seeds(self) -> int:
        """The most trainings behind one cell."""
        return max(cell.seeds for cell in self.cells.values())

    @property
    def draws(self) -> int:
        """The most noise draws behind one training of a cell."""
        return max(cell.draws for cell in self.cells.values())

    def percent(self, value: float) -> str:
        """In %, with two decimals, or one where fewer than 1,000 images support it."""
        return f"{100 * value:.{1 if self.n < 1000 else 2}f}"

    def notes(self) -> list[str]:
        """What the numbers and marks mean, for the foot of the table."""
        lines = [f"Accuracy in % on {self.n:,} test images."]
        if self.seeds > 1:
            lines.append(
                f"Mean over up to {self.seeds} trainings ± standard deviation over trainings; in "
                "brackets the standard deviation over noise draws of one training."
            )
        elif self.draws > 1:
            lines.append(
                f"± is the standard deviation over {self.draws} noise draws of one training; a "
                "value without ± comes from a single pass."
            )
        marks = {cell.mark for cell in self.cells.values()}
        if "close" in marks:
            lines.append("≈ cannot be told from the best of its column (5 % level, paired tests).")
        if "untested" in marks:
            lines.append("? could not be tested against the best of its column.")
        return lines


def build(
    rows: Iterable[Row],
    *,
    by: Literal["method", "run"] = "method",
    correct: Correct | None = None,
    title: str = "",
) -> Table:
    """The table of `rows`, labels and perturbations in the order in which they first appear.

    A repeated (run, weights, perturbation, draw) counts once, with its last value. Where rows of
    both weights are given, each gets a line of its own: "normal" and "normal (best)".
    """
    rows = list(rows)
    mixed = len({row["weights"] for row in rows}) > 1
    values: dict[tuple[str, str], dict[tuple[str, str], dict[int, float]]] = {}
    labels: dict[str, str] = {}
    perturbations: dict[str, None] = {}
    seen: dict[str, set[Any]] = {"fingerprint": set(), "noise_seed": set(), "n": set()}
    for row in rows:
        label = printable(str(row[by]))
        if mixed and row["weights"] != "last":
            label += f" ({row['weights']})"
        spec, run = str(row["perturbation"]), (str(row["run"]), str(row["weights"]))
        labels[label], perturbations[spec] = run[1], None
        cell = values.setdefault((label, spec), {})
        cell.setdefault(run, {})[int(row["draw"])] = float(row["value"])
        for name, found in seen.items():
            found.add(row[name])
    if not values:
        raise ValueError("a table needs at least one evaluation row, got none")
    for name, found in seen.items():
        if len(found) > 1:
            listed = ", ".join(sorted(map(str, found)))
            raise ValueError(f"rows of one table must have the same {name}, got {listed}")
    cells = {key: _cell(by_run) for key, by_run in values.items()}
    for spec in perturbations:
        _mark(cells, values, spec, [x for x in labels if (x, spec) in cells], correct)
    n = int(seen["n"].pop())
    return Table(printable(title), by, tuple(labels), tuple(perturbations), cells, labels, n)


def _cell(by_run: dict[tuple[str, str], dict[int, float]]) -> Cell:
    each = [stats.summary(list(values.values())) for values in by_run.values()]
    over = stats.summary([s.mean for s in each])
    spread = stats.pooled_std([s.std for s in each])
    return Cell(over.mean, spread, max(s.n for s in each), over.std, over.n)


def _mark(
    cells: dict[tuple[str, str], Cell],
    values: Mapping[tuple[str, str], Mapping[tuple[str, str], Mapping[int, float]]],
    spec: str,
    labels: Sequence[str],
    correct: Correct | None,
) -> None:
    """Writes the marks of one column into `cells`."""
    top = max(cells[label, spec].mean for label in labels)
    best = next(label for label in labels if cells[label, spec].mean == top)

    def images(label: str) -> list[NDArray[Any]] | None:
        """Right or wrong, draws x n, of every training behind the cell."""
        found = [correct(*run, spec) if correct else None for run in values[label, spec]]
        return None if any(x is None for x in found) else [x for x in found if x is not None]

    def means(label: str) -> list[float]:
        return [stats.summary(list(v.values())).mean for v in values[label, spec].values()]

    best_images = images(best)
    for label in labels:
        cell = cells[label, spec]
        if cell.mean == top:
            cells[label, spec] = replace(cell, mark="best")
            continue
        behind: stats.Difference | None = None
        p: float | None = None
        verdicts: list[bool] = []  # True: cannot be told apart
        mine = images(label)
        if mine is not None and best_images is not None:
            first, second = (np.stack([x.mean(axis=0) for x in s]) for s in (mine, best_images))
            behind = stats.paired_bootstrap(first, second)
            verdicts.append(behind.contains_zero)
            if all(len(s) == 1 and len(s[0]) == 1 for s in (mine, best_images)):
                p = stats.mcnemar_exact(mine[0][0], best_images[0][0]).p
                verdicts.append(p >= LEVEL)
        if min(cell.seeds, cells[best, spec].seeds) > 1:
            p = stats.welch(means(label), means(best))
            verdicts.append(p >= LEVEL)
        mark: Mark = "untested" if not verdicts else "close" if any(verdicts) else ""
        cells[label, spec] = replace(cell, mark=mark, behind=behind, p=p)


# Words.


def column_title(spec: str) -> str:
    """A perturbation for people.

    >>> column_title("gaussian:8/255"), column_title("downup:3+occlusion:20x70")
    ('σ=8/255', 'down-up 3 + occlusion 20×70')
    """
    parts = []
    for part in spec.split("+"):
        name, _, body = part.partition(":")
        body = re.sub(r"(?<=\d)x(?=\d)", "×", body).replace("..", "–")
        known = {
            "gaussian": f"σ={body}",
            "uniform": f"uniform ±{body}",
            "downup": f"down-up {body}",
        }
        parts.append(known.get(name, f"{name} {body}".strip()) if body else name)
    return " + ".join("clean" if part == "identity" else printable(part) for part in parts)


def sentence(table: Table, spec: str) -> str:
    """What one column says: who stands apart from the best, and who cannot be told from it."""
    cells = {
        label: table.cells[label, spec] for label in table.labels if (label, spec) in table.cells
    }
    order = sorted(cells, key=lambda label: cells[label].mean)
    best = order[-1]
    near = [label for label in order if cells[label].mark in ("best", "close")]
    far = [label for label in order if cells[label].mark == ""]
    untested = [label for label in order if cells[label].mark == "untested"]
    words = [f"{label} {table.percent(cells[label].mean)} %" for label in far]
    if len(near) == 1:
        words.append(f"best {best} {table.percent(cells[best].mean)} %")
    else:
        if len(near) == len(order):
            who = f"all {_count(len(near))} {table.by}s"
        elif len(near) > 2 and not untested:
            who = f"the other {_count(len(near))}"
        else:
            who = " and ".join(near) if len(near) == 2 else ", ".join(near)
        low, high = (table.percent(cells[near[i]].mean) for i in (0, -1))
        span = f"at {low} %" if low == high else f"between {low} and {high} %"
        words.append(f"{who} {span}, within noise of the best ({best})")
    words += [f"{x} {table.percent(cells[x].mean)} % (not tested)" for x in untested]
    title = column_title(spec)
    return f"{'On clean images' if title == 'clean' else f'At {title}'}: {'; '.join(words)}."


def summary(table: Table) -> list[str]:
    """Sentences from the table: clean images, the column that differs most, the caveat."""

    if len(table.labels) == 1:
        return []

    def gap(spec: str) -> float:
        means = [cell.mean for (_, s), cell in table.cells.items() if s == spec]
        return max(means) - min(means)

    chosen = [spec for spec in table.perturbations if column_title(spec) == "clean"]
    noisy = [spec for spec in table.perturbations if spec not in chosen]
    if noisy:
        chosen.append(max(noisy, key=gap))
    text = [sentence(table, spec) for spec in chosen]
    if table.by == "method" and table.seeds == 1:
        text.append("One training a method: another seed may change small differences.")
    return text


def _count(n: int) -> str:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[n] if n < len(words) else str(n)


def printable(text: str) -> str:
    """`text` on one line, with control characters (which could drive a terminal) taken out."""
    return "".join(c if c.isprintable() else " " for c in text)


# Looks.


def cell_text(table: Table, cell: Cell | None) -> str:
    """'93.1 ± 0.4', or with several trainings '93.1 ± 0.6 (0.4)'; '–' for a missing cell."""
    if cell is None:
        return "–"
    text = table.percent(cell.mean)
    if table.seeds == 1:
        return text if cell.draws_std is None else f"{text} ± {table.percent(cell.draws_std)}"
    if cell.seeds_std is not None:
        text += f" ± {table.percent(cell.seeds_std)}"
    return text if cell.draws_std is None else f"{text} ({table.percent(cell.draws_std)})"


def output() -> Console:
    """Where tables are printed: as wide as the terminal, and unbroken lines in a file or pipe."""
    return Console() if sys.stdout.isatty() else Console(width=250)


_SIGNS: dict[Mark, str] = {"best": "", "close": " ≈", "untested": " ?", "": ""}


def console(table: Table, width: int | None = None) -> RichTable:
    """For the terminal, the best in bold; turned on its side where it would not fit `width`."""
    upright = _console(table, table.labels, table.perturbations, turned=False)
    if width is None or Console(width=10_000).measure(upright).maximum <= width:
        return upright
    return _console(table, table.perturbations, table.labels, turned=True)


def _console(table: Table, down: Sequence[str], across: Sequence[str], turned: bool) -> RichTable:
    title = Text(table.title) if table.title else None
    rich_table = RichTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    rich_table.add_column("perturbation" if turned else table.by)
    for name in across:
        rich_table.add_column(Text(name if turned else column_title(name)), justify="right")
    for name in down:
        line = [Text(column_title(name) if turned else name)]
        for other in across:
            cell = table.cells.get((other, name) if turned else (name, other))
            sign = _SIGNS[cell.mark] if cell else ""
            style = "bold" if cell and cell.mark == "best" else ""
            line.append(Text(cell_text(table, cell) + sign, style=style))
        rich_table.add_row(*line)
    return rich_table


def markdown(table: Table) -> str:
    """A GitHub table with its notes; text from outside is escaped."""
    head = [table.by, *(_md(column_title(spec)) for spec in table.perturbations)]
    lines = [f"**{_md(table.title)}**", ""] if table.title else []
    lines += [_bars(head), _bars(["---", *("---:" for _ in table.perturbations)])]
    for label in table.labels:
        line = [_md(label)]
        for spec in table.perturbations:
            cell = table.cells.get((label, spec))
            text = cell_text(table, cell)
            mark: Mark = cell.mark if cell else ""
            line.append(f"**{text}**" if mark == "best" else text + _SIGNS[mark])
        lines.append(_bars(line))
    return "\n".join([*lines, "", *(f"{note}  " for note in table.notes())]).rstrip() + "\n"


def _bars(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md(text: str) -> str:
    """
    >>> print(_md("a|b <i> _c_"))
    a\\|b &lt;i&gt; \\_c\\_
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", text)


def csv_text(table: Table) -> str:
    """One line a cell, numbers as fractions in full precision; an empty field is 'not there'."""
    out = io.StringIO()
    names = ["mean", "draws_std", "draws", "seeds_std", "seeds", "mark", "p"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([table.by, "weights", "perturbation", *names, "behind", "low", "high", "n"])
    for label in table.labels:
        for spec in table.perturbations:
            cell = table.cells.get((label, spec))
            if cell is None:
                continue
            numbers = [getattr(cell, name) for name in names]
            behind = cell.behind or ("", "", "")
            writer.writerow([label, table.weights[label], spec, *numbers, *behind, table.n])
    return out.getvalue()


def latex(table: Table) -> str:
    """A booktabs table; text from outside is escaped."""
    columns = "l" + "r" * len(table.perturbations)
    lines = [r"\begin{table}", r"\centering"]
    caption = [f"{table.title}."] if table.title else []
    lines.append(rf"\caption{{{_tex(' '.join([*caption, *table.notes()]))}}}")
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines.append(_ampersands([table.by, *(_tex(column_title(s)) for s in table.perturbations)]))
    lines.append(r"\midrule")
    for label in table.labels:
        line = [_tex(label)]
        for spec in table.perturbations:
            cell = table.cells.get((label, spec))
            text = _tex(cell_text(table, cell))
            mark: Mark = cell.mark if cell else ""
            line.append(rf"\textbf{{{text}}}" if mark == "best" else text + _tex(_SIGNS[mark]))
        lines.append(_ampersands(line))
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


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
    "–": "--",
    **{c: "\\" + c for c in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in text)


WRITERS: dict[str, Callable[[Table], str]] = {".md": markdown, ".csv": csv_text, ".tex": latex}


def written(made: Sequence[Table], suffix: str) -> str:
    """Several tables in one file: .md and .tex one after the other, .csv under one header."""
    texts = [WRITERS[suffix](table) for table in made]
    if suffix == ".csv":
        return texts[0] + "".join(text.partition("\n")[2] for text in texts[1:])
    return "\n".join(texts)


def as_dict(table: Table) -> dict[str, Any]:
    """The table as plain values, for JSON."""
    cells = [
        {table.by: label, "weights": table.weights[label], "perturbation": spec, **asdict(cell)}
        for (label, spec), cell in table.cells.items()
    ]
    return {"title": table.title, "n": table.n, "cells": cells, "notes": table.notes()}
