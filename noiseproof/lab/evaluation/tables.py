"""From evaluation rows to one table of numbers: one row per method (or run), one column per
perturbation.

There are two standard deviations. `draws_std` is how much the accuracy of one trained model
varies with the noise draw that it is tested under; `seeds_std` is how much it varies with the
training. Only the second says whether another training would change the ranking.

A cell is marked "best" if its mean is the highest of its column, "close" if it is not significantly
different from the best, and "" if it is significantly below it; the weights of the last and of the
best epoch are ranked separately. The level is 5 % for each column as a whole: if all methods are
equally accurate, at most 5 % of columns have a cell that is called worse. Differences from the best
have 95 % intervals that hold for the column as a whole, too, and exclude 0 exactly if the cell is
called worse. The comparisons are those of `evaluation.stats`:

- over test images, which needs the predictions of both sides. It says nothing about other
  trainings;
- over trainings, which needs two or more trainings of both sides.

If both are possible, a difference must be significant in both, and the interval is the wider one.
If neither is possible, the cell is "untested".

Sentences about a table are in `evaluation.words`, its output formats in `evaluation.writers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import severities, stats
from noiseproof.lab.evaluation.calibration import mean_scores
from noiseproof.lab.evaluation.stats import Correct
from noiseproof.lab.runs import EvaluationRow
from noiseproof.perturb.text import is_clean

Mark = Literal["best", "close", "untested", ""]
Test = Literal["games-howell", "tukey-kramer"]
"""Over trainings and over test images."""
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
        behind: this minus the best.
        interval_over: what the interval of `behind` is sampled over.
        p: the p-value for equality with the best, for the column as a whole; of two tests, the
            larger one.
        tests: the tests against the best.
        unsure: those of them that do not reject equality.
        calibration: mean ECE, NLL and Brier score, by the keys of a row; an infinite NLL is None.
            Empty if a row has none.
        classes: mean macro-F1 and recall of each class, if the test images are unbalanced; None if
            a row has none.
    """

    mean: float
    draws_std: float | None
    draws: int
    seeds_std: float | None
    seeds: int
    mark: Mark = ""
    behind: stats.Difference | None = None
    interval_over: Literal["trainings", "test images"] | None = None
    p: float | None = None
    tests: tuple[Test, ...] = ()
    unsure: tuple[Test, ...] = ()
    calibration: Mapping[str, float | None] = field(default_factory=dict)
    classes: stats.ClassScores | None = None


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
        baseline: of each label, the label that its corruption errors are relative to; empty if
            there is none.
    """

    title: str
    by: Literal["method", "run"]
    labels: tuple[str, ...]
    perturbations: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    weights: Mapping[str, str]
    n: int
    majority_share: float | None = None
    baseline: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """The perturbations without the means of single corruptions, which have their own table."""
        return tuple(spec for spec in self.perturbations if spec not in severities.MEANS)

    @property
    def corruptions(self) -> tuple[str, ...]:
        """The mean over all corruptions and that of each; empty if they were not tested."""
        return tuple(s for s in self.perturbations if s == severities.ALL or s in severities.MEANS)

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

    def drop(self, label: str, spec: str) -> float | None:
        """The accuracy that a label loses against clean images; None if one is unknown."""
        clean = next((self.cells.get((label, s)) for s in self.perturbations if is_clean(s)), None)
        cell = self.cells.get((label, spec))
        return None if clean is None or cell is None else clean.mean - cell.mean

    def corruption_error(self, label: str, spec: str) -> float | None:
        """The error of a label over the severities of a corruption, divided by that of its
        baseline; of all corruptions, the mean of these (Hendrycks and Dietterich, 2019). None if
        the baseline is unknown or makes no error."""
        if spec == severities.ALL:
            errors = [self.corruption_error(label, mean) for mean in severities.MEANS]
            known = [error for error in errors if error is not None]
            return float(np.mean(known)) if len(known) == len(errors) else None
        cell, base = (
            self.cells.get((x, spec)) if x else None for x in (label, self.baseline.get(label))
        )
        return (1 - cell.mean) / (1 - base.mean) if cell and base and base.mean < 1 else None

    def percent(self, value: float) -> str:
        """In %, with two decimals, or one for fewer than 1,000 images."""
        decimals = 1 if self.n < 1000 else 2
        return f"{round(100 * value, decimals) + 0.0:.{decimals}f}"  # no -0.0


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
    rows_of: dict[tuple[str, str], dict[tuple[str, str], dict[int, EvaluationRow]]] = {}
    weights_of: dict[str, str] = {}
    perturbations: dict[str, None] = {}
    shared: dict[str, set[Any]] = {"fingerprint": set(), "noise_seed": set(), "n": set()}
    for row in rows:
        run, weights, spec = str(row["run"]), str(row["weights"]), str(row["perturbation"])
        label = printable(str(row[by])) + (f" ({weights} epoch)" if both_weights else "")
        weights_of[label], perturbations[spec] = weights, None
        by_run = rows_of.setdefault((label, spec), {})
        by_run.setdefault((run, weights), {})[int(row["draw"])] = row
        for name, values in shared.items():
            values.add(row[name])
    if not rows_of:
        raise ValueError("a table needs at least one evaluation row, got none")
    for name, values in shared.items():
        if len(values) > 1:
            different = ", ".join(sorted(map(str, values)))
            raise ValueError(f"rows of one table must have the same {name}, got {different}")
    accuracies: dict[tuple[str, str], _Accuracies] = {
        key: {
            run: {draw: float(row["value"]) for draw, row in by_draw.items()}
            for run, by_draw in by_run.items()
        }
        for key, by_run in rows_of.items()
    }
    cells = {key: _cell(by_run) for key, by_run in accuracies.items()}
    for key, by_run in rows_of.items():
        trainings = [mean_scores(list(by_draw.values())) for by_draw in by_run.values()]
        each = [row.get("class_scores") for by_draw in by_run.values() for row in by_draw.values()]
        known = [stats.ClassScores(**scores) for scores in each if scores]
        cells[key] = replace(
            cells[key],
            calibration=mean_scores(trainings),
            classes=stats.mean_class_scores(known) if len(known) == len(each) else None,
        )
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


def with_baseline(table: Table, name: str) -> Table:
    """The table with corruption errors relative to one method or run, for each weights relative to
    the same weights of it, if it has them.

    Args:
        table: the table.
        name: of the baseline; without its corruptions, a table has no corruption errors.
    """
    name = printable(name)
    named = (name, *(f"{name} ({weights} epoch)" for weights in ("last", "best")))
    tested = [label for label in named if (label, severities.ALL) in table.cells]
    by_weights = {table.weights[label]: label for label in tested}
    first = next(iter(by_weights.values()), None)
    if first is None:
        return table
    labels = {label: by_weights.get(table.weights[label], first) for label in table.labels}
    return replace(table, baseline=labels)


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
    """What the tests use of a cell.

    Attributes:
        means: the accuracy of each training.
        per_image: the share of correct predictions for each image; None if some are unknown.
        predictions: the number of predictions per image.
    """

    means: list[float]
    per_image: NDArray[Any] | None
    predictions: int


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
        arrays = [correct(*run, key[1]) if correct else None for run in by_run]
        known = [array for array in arrays if array is not None and len(array)]
        if len(known) < len(arrays):
            return _Sample(means, None, 0)
        per_image = np.mean([array.mean(axis=0) for array in known], axis=0)
        return _Sample(means, per_image, sum(map(len, known)))

    best = max(keys, key=lambda key: cells[key].mean)
    best_sample = sample(best)
    for key in keys:
        behind = cells[key].mean - cells[best].mean
        if abs(behind) < 1e-9:  # the same up to rounding
            cells[key] = replace(cells[key], mark="best")
        else:
            cells[key] = _compared(cells[key], behind, sample(key), best_sample, len(keys))


def _compared(cell: Cell, behind: float, sample: _Sample, best: _Sample, groups: int) -> Cell:
    """The cell with its difference from the best of `groups` cells and the outcome of the tests."""
    results: dict[Test, tuple[stats.Difference, float] | None] = {
        "games-howell": stats.compare_trainings(sample.means, best.means, groups=groups)
    }
    if sample.per_image is not None and best.per_image is not None:
        predictions = min(sample.predictions, best.predictions)
        results["tukey-kramer"] = stats.compare_images(
            sample.per_image, best.per_image, predictions=predictions, groups=groups
        )
    tested = {test: result for test, result in results.items() if result}
    if not tested:
        return replace(cell, mark="untested")
    intervals = {test: interval for test, (interval, _) in tested.items()}
    widest = max(intervals, key=lambda test: intervals[test].high - intervals[test].low)
    low, high = min(x.low for x in intervals.values()), max(x.high for x in intervals.values())
    difference = stats.Difference(behind, low, high)
    return replace(
        cell,
        mark="close" if difference.contains_zero else "",
        behind=difference,
        interval_over="trainings" if widest == "games-howell" else "test images",
        p=max(p for _, p in tested.values()),
        tests=tuple(tested),
        unsure=tuple(test for test, interval in intervals.items() if interval.contains_zero),
    )
