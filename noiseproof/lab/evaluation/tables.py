"""From evaluation rows to one table: methods (or runs) down, perturbations across.

Two spreads are kept apart. `draws_std` says how much the accuracy of one trained model moves with
the noise it happens to be tested under; `seeds_std` says how much it moves with the training. Only
the second tells whether another training would give another order.

A cell is marked "best" where its mean is the highest of its column, and "close" where it cannot be
told from the best; the weights of the last and of the best epoch are ranked apart. The rule, at the
5 % level and with no correction for the number of comparisons:

- images: the 95 % bootstrap interval of the difference to the best, on the same images under the
  same noise, contains 0. Where both sides gave one prediction an image, McNemar's exact test must
  agree, since the bootstrap is too sure of itself when few images differ;
- trainings, where both sides have two or more: Welch's t-test over the trainings' means has
  p ≥ 0.05.

One "cannot tell" is enough for "close"; a cell with neither kind of evidence is "untested". The
interval of a difference is Welch's over trainings where both sides have several, and else that over
images, which says nothing of other trainings.

What a table says in words is in `evaluation.words`, how it looks in `evaluation.writers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import stats
from noiseproof.lab.runs import EvaluationRow
from noiseproof.perturb.text import is_clean

__all__ = ["LEVEL", "Cell", "Correct", "Mark", "Table", "Test", "build"]

Correct = Callable[[str, str, str], "NDArray[Any] | None"]
"""(run, weights, perturbation) -> right or wrong, draws x n, or None where it is not known."""
Mark = Literal["best", "close", "untested", ""]
Test = Literal["welch", "bootstrap", "mcnemar"]
LEVEL = 0.05
_GUESS = 0.05  # above the most frequent class, as `train` has it: more under noise is no guessing


@dataclass(frozen=True)
class Cell:
    """One accuracy, as a fraction. `behind` is this minus the best, with the interval of `over`;
    `tests` are those against the best, and `unsure` those of them that cannot tell the two apart.
    """

    mean: float
    draws_std: float | None
    draws: int
    seeds_std: float | None
    seeds: int
    mark: Mark = ""
    behind: stats.Difference | None = None
    p: float | None = None
    tests: tuple[Test, ...] = ()
    unsure: tuple[Test, ...] = ()

    @property
    def over(self) -> Literal["trainings", "test images"]:
        """What the interval of `behind` samples."""
        return "trainings" if "welch" in self.tests else "test images"


@dataclass(frozen=True)
class Table:
    """`cells[label, perturbation]`; a pair that was not evaluated is absent.

    `guess` is the share of the most frequent class among the test images, where it is known.
    """

    title: str
    by: Literal["method", "run"]
    labels: tuple[str, ...]
    perturbations: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    weights: Mapping[str, str]
    n: int
    guess: float | None = None

    @property
    def seeds(self) -> int:
        """The most trainings behind one cell."""
        return max(cell.seeds for cell in self.cells.values())

    @property
    def draws(self) -> int:
        """The most noise draws behind one training of a cell."""
        return max(cell.draws for cell in self.cells.values())

    @property
    def guessing(self) -> tuple[str, ...]:
        """Labels that always answering the most frequent class would equal: on clean images they
        are not above it, and under no perturbation far above."""
        if self.guess is None or self.guess >= 1.0:  # a single class can only be guessed
            return ()
        most, found = self.guess + 1e-9, []
        for label in self.labels:
            means = {spec: cell.mean for (x, spec), cell in self.cells.items() if x == label}
            clean = [mean for spec, mean in means.items() if is_clean(spec)]
            if clean and clean[0] <= most and max(means.values()) <= most + _GUESS:
                found.append(label)
        return tuple(found)

    def percent(self, value: float) -> str:
        """In %, with two decimals, or one where fewer than 1,000 images support it."""
        return f"{100 * value:.{1 if self.n < 1000 else 2}f}"


def build(
    rows: Iterable[EvaluationRow],
    *,
    by: Literal["method", "run"] = "method",
    correct: Correct | None = None,
    title: str = "",
    guess: float | None = None,
) -> Table:
    """The table of `rows`, labels and perturbations in the order in which they first appear.

    A repeated (run, weights, perturbation, draw) counts once, with its last value. Where rows of
    both weights are given, each gets a line of its own: "normal (last epoch)" and "normal (best
    epoch)". `guess` is the share of the most frequent class among the test images.
    """
    rows = list(rows)
    mixed = len({row["weights"] for row in rows}) > 1
    values: dict[tuple[str, str], dict[tuple[str, str], dict[int, float]]] = {}
    labels: dict[str, str] = {}
    perturbations: dict[str, None] = {}
    seen: dict[str, set[Any]] = {"fingerprint": set(), "noise_seed": set(), "n": set()}
    for row in rows:
        label = printable(str(row[by]))
        if mixed:
            label += f" ({row['weights']} epoch)"
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
        for weights in dict.fromkeys(labels.values()):
            rivals = [x for x in labels if labels[x] == weights and (x, spec) in cells]
            if rivals:
                _mark(cells, values, spec, rivals, correct)
    n = int(seen["n"].pop())
    return Table(printable(title), by, tuple(labels), tuple(perturbations), cells, labels, n, guess)


def _cell(by_run: dict[tuple[str, str], dict[int, float]]) -> Cell:
    each = [stats.mean_std(list(values.values())) for values in by_run.values()]
    over = stats.mean_std([s.mean for s in each])
    spread = stats.pooled_std([s.std for s in each])
    return Cell(over.mean, spread, max(s.n for s in each), over.std, over.n)


def _mark(
    cells: dict[tuple[str, str], Cell],
    values: Mapping[tuple[str, str], Mapping[tuple[str, str], Mapping[int, float]]],
    spec: str,
    labels: Sequence[str],
    correct: Correct | None,
) -> None:
    """Writes the marks of one column into `cells`, among these labels."""
    top = max(cells[label, spec].mean for label in labels)
    best = next(label for label in labels if cells[label, spec].mean == top)

    def images(label: str) -> list[NDArray[Any]] | None:
        """Right or wrong, draws x n, of every training behind the cell."""
        found = [correct(*run, spec) if correct else None for run in values[label, spec]]
        return None if any(x is None for x in found) else [x for x in found if x is not None]

    def means(label: str) -> list[float]:
        return [stats.mean_std(list(v.values())).mean for v in values[label, spec].values()]

    best_images = images(best)
    for label in labels:
        cell = cells[label, spec]
        if cell.mean == top:
            cells[label, spec] = replace(cell, mark="best")
            continue
        behind: stats.Difference | None = None
        p: float | None = None
        verdicts: dict[Test, bool] = {}  # True: cannot be told apart
        mine = images(label)
        if mine is not None and best_images is not None:
            first, second = (np.stack([x.mean(axis=0) for x in s]) for s in (mine, best_images))
            behind = stats.paired_bootstrap(first, second)
            verdicts["bootstrap"] = behind.contains_zero
            if all(len(s) == 1 and len(s[0]) == 1 for s in (mine, best_images)):
                p = stats.mcnemar_exact(mine[0][0], best_images[0][0]).p
                verdicts["mcnemar"] = p >= LEVEL
        if min(cell.seeds, cells[best, spec].seeds) > 1:
            behind, p = stats.welch(means(label), means(best), 1 - LEVEL)
            verdicts["welch"] = p >= LEVEL
        unsure = tuple(test for test in verdicts if verdicts[test])
        mark: Mark = "untested" if not verdicts else "close" if unsure else ""
        cells[label, spec] = replace(
            cell, mark=mark, behind=behind, p=p, tests=tuple(verdicts), unsure=unsure
        )
