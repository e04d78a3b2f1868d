"""From evaluation rows to one table of numbers: one row per method (or run), one column per
perturbation.

There are two standard deviations. `draws_std` is how much the accuracy of one trained model
varies with the noise draw that it is tested under; `seeds_std` is how much it varies with the
training. Only the second says whether another training would change the ranking.

A cell is marked "best" if its mean is the highest of its column, and "close" if it is not
significantly different from the best; the weights of the last and of the best epoch are ranked
separately. Significance is tested at the 5 % level, without correction for the number of
comparisons:

- over test images: the 95 % bootstrap interval of the difference from the best, on the same images
  under the same noise, contains 0. If both sides have a single prediction per image, McNemar's
  exact test must agree, since the bootstrap is overconfident when few images differ;
- over trainings, if both sides have two or more: Welch's t-test over the means of the trainings has
  p ≥ 0.05.

One test that does not reject is enough for "close"; a cell for which neither is possible is
"untested". The interval of a difference is Welch's over trainings if both sides have several, and
otherwise the one over images, which says nothing about other trainings.

Sentences about a table are in `evaluation.words`, its output formats in `evaluation.writers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import stats
from noiseproof.lab.runs import EvaluationRow
from noiseproof.perturb.text import is_clean

Correct = Callable[[str, str, str], "NDArray[Any] | None"]
"""(run, weights, perturbation) -> whether each prediction is right, draws x n; None if unknown."""
Mark = Literal["best", "close", "untested", ""]
Test = Literal["welch", "bootstrap", "mcnemar"]
_ABOVE_CHANCE = 0.05  # the same margin as in training: more than this under noise is learned

_Accuracies = dict[tuple[str, str], dict[int, float]]  # of one cell: by (run, weights), by draw


@dataclass(frozen=True)
class Cell:
    """One accuracy, as a fraction.

    Attributes:
        mean: over trainings, of the means over draws.
        draws_std: standard deviation over noise draws of one training; None for a single draw.
        draws: the most draws of a training.
        seeds_std: standard deviation over trainings; None for a single one.
        seeds: number of trainings.
        mark: how it compares with the best of its column; "" is significantly below it.
        behind: this minus the best, with the interval over what `over` says.
        p: the p-value of Welch's test or, without it, of McNemar's.
        tests: the tests against the best.
        unsure: those of them that do not reject equality.
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
        """What the interval of `behind` is sampled over."""
        return "trainings" if "welch" in self.tests else "test images"


@dataclass(frozen=True)
class Table:
    """Accuracies of methods or runs under perturbations.

    Attributes:
        title: of the table.
        by: what a label names.
        labels: one per row.
        perturbations: one per column, as text.
        cells: by (label, perturbation); a pair that was not evaluated is absent.
        weights: of each label, "last" or "best".
        n: number of test images.
        majority_share: share of the most frequent class among the test images, if known.
    """

    title: str
    by: Literal["method", "run"]
    labels: tuple[str, ...]
    perturbations: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    weights: Mapping[str, str]
    n: int
    majority_share: float | None = None

    @property
    def seeds(self) -> int:
        """The largest number of trainings of a cell."""
        return max(cell.seeds for cell in self.cells.values())

    @property
    def draws(self) -> int:
        """The largest number of noise draws of a training."""
        return max(cell.draws for cell in self.cells.values())

    @property
    def at_chance(self) -> tuple[str, ...]:
        """Labels that are no better than always predicting the most frequent class: on clean images
        they are not above it, and under no perturbation far above it."""
        if self.majority_share is None or self.majority_share >= 1.0:  # nothing to learn
            return ()
        limit = self.majority_share + 1e-9
        labels = []
        for label in self.labels:
            means = {spec: cell.mean for (x, spec), cell in self.cells.items() if x == label}
            clean = [mean for spec, mean in means.items() if is_clean(spec)]
            if clean and clean[0] <= limit and max(means.values()) <= limit + _ABOVE_CHANCE:
                labels.append(label)
        return tuple(labels)

    def column(self, spec: str, weights: str | None = None) -> dict[str, Cell]:
        """The cells under one perturbation, by label; of all `weights` or of these."""
        return {
            label: self.cells[label, spec]
            for label in self.labels
            if (label, spec) in self.cells and weights in (None, self.weights[label])
        }

    def widest_gap(self, weights: str | None = None) -> str | None:
        """The perturbation under which accuracies differ most, or under which the only label is
        least accurate; None if only clean images were tested, nothing differs, or all labels are at
        chance."""
        columns = {s: self.column(s, weights) for s in self.perturbations if not is_clean(s)}
        means = {s: [cell.mean for cell in cells.values()] for s, cells in columns.items() if cells}
        if not means:
            return None
        if sum(weights in (None, self.weights[label]) for label in self.labels) == 1:
            return min(means, key=lambda spec: means[spec][0])
        gaps = {spec: max(values) - min(values) for spec, values in means.items()}
        widest = max(gaps, key=lambda spec: gaps[spec])
        nothing_learned = len(self.at_chance) == len(self.labels)
        return None if nothing_learned or gaps[widest] < 1e-9 else widest

    def percent(self, value: float) -> str:
        """In %, with two decimals, or one for fewer than 1,000 images."""
        return f"{100 * value:.{1 if self.n < 1000 else 2}f}"


def build(
    rows: Iterable[EvaluationRow],
    *,
    by: Literal["method", "run"] = "method",
    correct: Correct | None = None,
    title: str = "",
    majority_share: float | None = None,
) -> Table:
    """The table of `rows`, labels and perturbations in order of appearance.

    Among rows with the same run, weights, perturbation and draw, the last counts. If there are rows
    of both weights, each gets its own label: "normal (last epoch)" and "normal (best epoch)".

    Args:
        rows: as in evaluation.jsonl, with the same test images and noise seed.
        by: whether a label is a method, with all its trainings, or a run.
        correct: looks up predictions, for tests over images; by default there are none.
        title: of the table.
        majority_share: share of the most frequent class among the test images.
    """
    rows = list(rows)
    both_weights = len({row["weights"] for row in rows}) > 1
    accuracies: dict[tuple[str, str], _Accuracies] = {}
    weights_of: dict[str, str] = {}
    perturbations: dict[str, None] = {}
    shared: dict[str, set[Any]] = {"fingerprint": set(), "noise_seed": set(), "n": set()}
    for row in rows:
        run, weights, spec = str(row["run"]), str(row["weights"]), str(row["perturbation"])
        label = printable(str(row[by])) + (f" ({weights} epoch)" if both_weights else "")
        weights_of[label], perturbations[spec] = weights, None
        by_run = accuracies.setdefault((label, spec), {})
        by_run.setdefault((run, weights), {})[int(row["draw"])] = float(row["value"])
        for name, values in shared.items():
            values.add(row[name])
    if not accuracies:
        raise ValueError("a table needs at least one evaluation row, got none")
    for name, values in shared.items():
        if len(values) > 1:
            different = ", ".join(sorted(map(str, values)))
            raise ValueError(f"rows of one table must have the same {name}, got {different}")
    cells = {key: _cell(by_run) for key, by_run in accuracies.items()}
    for spec in perturbations:
        for weights in dict.fromkeys(weights_of.values()):
            keys = [(x, spec) for x in weights_of if weights_of[x] == weights]
            _mark(cells, accuracies, [key for key in keys if key in cells], correct)
    return Table(
        title=printable(title),
        by=by,
        labels=tuple(weights_of),
        perturbations=tuple(perturbations),
        cells=cells,
        weights=weights_of,
        n=int(shared["n"].pop()),
        majority_share=majority_share,
    )


def _cell(accuracies: _Accuracies) -> Cell:
    trainings = [stats.mean_std(list(by_draw.values())) for by_draw in accuracies.values()]
    over_trainings = stats.mean_std([training.mean for training in trainings])
    return Cell(
        mean=over_trainings.mean,
        draws_std=stats.pooled_std([training.std for training in trainings]),
        draws=max(training.n for training in trainings),
        seeds_std=over_trainings.std,
        seeds=over_trainings.n,
    )


class _Sample(NamedTuple):
    """What the tests use of a cell: the mean of each training, and whether its predictions are
    right, draws x n (None if some are unknown)."""

    means: list[float]
    correct: list[NDArray[Any]] | None


def _mark(
    cells: dict[tuple[str, str], Cell],
    accuracies: Mapping[tuple[str, str], _Accuracies],
    keys: Sequence[tuple[str, str]],
    correct: Correct | None,
) -> None:
    """Compares the cells at `keys`, all of one column, with the best of them."""
    if not keys:
        return

    def sample(key: tuple[str, str]) -> _Sample:
        by_run = accuracies[key]
        means = [stats.mean_std(list(by_draw.values())).mean for by_draw in by_run.values()]
        known = [correct(*run, key[1]) if correct else None for run in by_run]
        arrays = [array for array in known if array is not None]
        return _Sample(means, arrays if len(arrays) == len(known) else None)

    best = max(keys, key=lambda key: cells[key].mean)
    best_sample = sample(best)
    for key in keys:
        if cells[key].mean == cells[best].mean:
            cells[key] = replace(cells[key], mark="best")
        else:
            cells[key] = _compared(cells[key], sample(key), best_sample)


def _compared(cell: Cell, sample: _Sample, best: _Sample) -> Cell:
    """The cell with its difference from the best and the outcome of the tests."""
    behind: stats.Difference | None = None
    p: float | None = None
    rejects: dict[Test, bool] = {}
    if sample.correct is not None and best.correct is not None:
        first, second = (
            np.stack([a.mean(axis=0) for a in s]) for s in (sample.correct, best.correct)
        )
        behind = stats.paired_bootstrap(first, second)
        rejects["bootstrap"] = not behind.contains_zero
        if all(len(s) == 1 and len(s[0]) == 1 for s in (sample.correct, best.correct)):
            p = stats.mcnemar_exact(sample.correct[0][0], best.correct[0][0])
            rejects["mcnemar"] = p < stats.LEVEL
    if min(len(sample.means), len(best.means)) > 1:
        behind, p = stats.welch(sample.means, best.means)
        rejects["welch"] = p < stats.LEVEL
    unsure = tuple(test for test in rejects if not rejects[test])
    mark: Mark = "untested" if not rejects else "close" if unsure else ""
    return replace(cell, mark=mark, behind=behind, p=p, tests=tuple(rejects), unsure=unsure)
