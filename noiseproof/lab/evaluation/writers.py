"""How a table looks: its words, and the terminal, Markdown, CSV and LaTeX.

The numbers and marks come from `evaluation.tables`. Text from outside (names of runs, methods and
data) is escaped in every form, and can neither drive a terminal nor be read as markup.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from noiseproof.lab.evaluation.tables import Cell, Mark, Table


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


def sentence(table: Table, spec: str, weights: str | None = None) -> str:
    """What one column says: who stands apart from the best, and who cannot be told from it.

    Of a table of both weights, those of the last epoch and of the best are spoken of apart.
    """
    cells = {
        label.removesuffix(f" ({weights} epoch)"): table.cells[label, spec]
        for label in table.labels
        if (label, spec) in table.cells and weights in (None, table.weights[label])
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
            who = f"{'the' if len(near) == 2 else 'all'} {_count(len(near))} {table.by}s"
        elif len(near) > 2 and not untested:
            who = f"the other {_count(len(near))}"
        else:
            who = " and ".join(near) if len(near) == 2 else ", ".join(near)
        low, high = (table.percent(cells[near[i]].mean) for i in (0, -1))
        span = f"at {low} %" if low == high else f"between {low} and {high} %"
        few = min(cells[label].seeds for label in near) == 2
        told = "not told from" if few else "within noise of"
        words.append(f"{who} {span}, {told} the best ({best})")
    words += [f"{x} {table.percent(cells[x].mean)} % (not tested)" for x in untested]
    title = column_title(spec)
    where = "On clean images" if title == "clean" else f"At {title}"
    if weights:
        where = f"Weights of the {weights} epoch, {where[0].lower()}{where[1:]}"
    return f"{where}: {'; '.join(words)}."


def summary(table: Table) -> list[str]:
    """Sentences from the table: clean images, the column that differs most, the caveat: a test
    between two trainings and two has so little to go by that it can miss thirty points."""

    kinds = dict.fromkeys(table.weights.values())
    text = [line for kind in kinds for line in _sentences(table, kind, len(kinds) > 1)]
    if not text:
        return []
    if table.by == "method" and table.seeds == 1:
        text.append("One training a method: another seed may change small differences.")
    if table.by == "method" and table.seeds == 2:
        text.append(
            "Two trainings a method tell little: three or more (--seeds) tell methods apart."
        )
    return text


def _sentences(table: Table, weights: str, apart: bool) -> list[str]:
    """Those about the labels of these weights; none where a label is alone."""
    labels = [label for label in table.labels if table.weights[label] == weights]
    if len(labels) == 1:
        return []
    means = {
        spec: [table.cells[x, spec].mean for x in labels if (x, spec) in table.cells]
        for spec in table.perturbations
    }
    gaps = {spec: max(values) - min(values) for spec, values in means.items() if values}
    chosen = [spec for spec in gaps if column_title(spec) == "clean"]
    noisy = [spec for spec in gaps if spec not in chosen]
    if noisy:
        chosen.append(max(noisy, key=lambda spec: gaps[spec]))
    return [sentence(table, spec, weights if apart else None) for spec in chosen]


def _count(n: int) -> str:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[n] if n < len(words) else str(n)


def printable(text: str) -> str:
    """`text` on one line, with control characters (which could drive a terminal) taken out."""
    return "".join(c if c.isprintable() else " " for c in text)


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


def show(table: Table, out: Console, *, sentences: bool = True) -> None:
    """Prints a table, its notes and, where asked for, its sentences."""
    out.print()
    out.print(console(table, out.width))
    for line in [*table.notes(), *(summary(table) if sentences else ())]:
        out.print(line, markup=False, highlight=False)


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
    of_best = ["behind", "low", "high", "interval_over"]
    writer.writerow([table.by, "weights", "perturbation", *names, *of_best, "n"])
    for label in table.labels:
        for spec in table.perturbations:
            cell = table.cells.get((label, spec))
            if cell is None:
                continue
            numbers = [getattr(cell, name) for name in names]
            behind = [*cell.behind, cell.over] if cell.behind else [""] * len(of_best)
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
