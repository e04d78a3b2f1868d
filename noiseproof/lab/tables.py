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
How a table looks is in `noiseproof.lab.render`, whose names are also names of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab import stats
from noiseproof.lab.render import (
    WRITERS,
    cell_text,
    column_title,
    console,
    csv_text,
    latex,
    markdown,
    output,
    printable,
    sentence,
    summary,
    written,
)

__all__ = [
    "LEVEL",
    "WRITERS",
    "Cell",
    "Correct",
    "Mark",
    "Row",
    "Table",
    "as_dict",
    "build",
    "cell_text",
    "column_title",
    "console",
    "csv_text",
    "latex",
    "markdown",
    "output",
    "printable",
    "sentence",
    "summary",
    "written",
]

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


def as_dict(table: Table) -> dict[str, Any]:
    """The table as plain values, for JSON."""
    cells = [
        {table.by: label, "weights": table.weights[label], "perturbation": spec, **asdict(cell)}
        for (label, spec), cell in table.cells.items()
    ]
    return {"title": table.title, "n": table.n, "cells": cells, "notes": table.notes()}
