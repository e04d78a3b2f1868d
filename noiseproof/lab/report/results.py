"""What a report stands on: runs on the same test images, their rows, tables and predictions.

Rows are taken of each run's present weights alone, of one noise seed, and of the draws that all
runs share, so that whatever is compared was measured on the same images under the same noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.config import METHODS, to_dict
from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import stats, tables
from noiseproof.lab.evaluation.predictions import predictions
from noiseproof.lab.paths import with_absolute_paths
from noiseproof.lab.runs import EvaluationRow, RunFolder, Weights
from noiseproof.perturb.text import ordered

__all__ = ["Results", "gather"]


@dataclass(frozen=True)
class Results:
    """Runs that may be compared. `groups` names, for each label of the tables, its runs."""

    runs: dict[str, RunFolder]
    by: Literal["method", "run"]
    groups: dict[str, list[str]]
    rows: dict[Weights, list[EvaluationRow]]
    tables: dict[Weights, tables.Table]
    noise_seed: int
    draws: dict[tuple[str, str], list[int]]  # by (weights, perturbation)

    @property
    def weights(self) -> Weights:
        """The weights that the report is about; the others have a table alone."""
        return next(iter(self.tables))

    @property
    def table(self) -> tables.Table:
        return self.tables[self.weights]

    @property
    def first(self) -> RunFolder:
        return next(iter(self.runs.values()))

    @property
    def classes(self) -> list[str]:
        return list(self.first.info["classes"])

    def run(self, label: str) -> RunFolder:
        """The run that stands for a label where one must: its first training."""
        return self.runs[self.groups[label][0]]

    def method(self, label: str) -> str:
        return self.run(label).config.method.method

    def classes_given(
        self, key: str, weights: Weights, spec: str
    ) -> tuple[NDArray, NDArray] | None:
        """(predicted classes of the shared draws, draws x n; labels), or None where not known."""
        found = predictions(self.runs[key], spec, weights=weights, noise_seed=self.noise_seed)
        if found is None:
            return None
        wanted = np.isin(found.draws, self.draws[weights, spec])
        return found.classes[wanted], found.labels

    def truth(self, weights: Weights) -> NDArray | None:
        """The labels of the test images, or None where no predictions are known."""
        pairs = dict.fromkeys((row["run"], row["perturbation"]) for row in self.rows[weights])
        found = (self.classes_given(key, weights, spec) for key, spec in pairs)
        return next((known[1] for known in found if known is not None), None)

    def confusion(self, label: str, spec: str) -> NDArray[np.int64] | None:
        """How often true class i was taken for class j, over the trainings and draws of a label."""
        count = len(self.classes)
        total = np.zeros((count, count), dtype=np.int64)
        for key in self.groups[label]:
            known = self.classes_given(key, self.weights, spec)
            if known is None:
                return None
            given, labels = known
            pairs = (labels * count + given.astype(np.int64)).ravel()
            total += np.bincount(pairs, minlength=count * count).reshape(count, count)
        return total

    def telling(self) -> str | None:
        """The perturbation at which the labels differ most (with one label, the one that costs
        most accuracy); None where only clean images were tested, nothing differs or all guess."""
        noisy = [spec for spec in self.table.perturbations if spec != "clean"]

        def gap(spec: str) -> float:
            means = [c.mean for (_, s), c in self.table.cells.items() if s == spec]
            return max(means) - min(means) if len(self.table.labels) > 1 else -means[0]

        widest = max(noisy, key=gap, default=None)
        if widest is None or len(self.table.labels) == 1:
            return widest
        blind = len(self.table.guessing) == len(self.table.labels)
        return None if blind or gap(widest) < 1e-9 else widest


def gather(runs: Sequence[RunFolder]) -> Results:
    """The results of `runs`; ValueError where they cannot stand in one report."""
    unique = {run.path.resolve(): run for run in runs}
    if not unique:
        raise ValueError("a report needs at least one run folder, got none")
    names = Counter(run.name for run in unique.values())
    in_order = sorted(unique.values(), key=_place)
    by: Literal["method", "run"] = "method" if _differ_by_seed_alone(in_order) else "run"
    if by == "run" and len(names) == len(in_order):
        keys = shortened([run.name for run in in_order])
    else:
        keys = [run.name if names[run.name] == 1 else str(run.path) for run in in_order]
    keyed = dict(zip(keys, in_order, strict=True))
    _same_test_images(keyed)
    found = {key: _rows(run) for key, run in keyed.items()}
    seeds = Counter(row["noise_seed"] for rows in found.values() for row in rows)
    for key, rows in found.items():
        if not rows and not keyed[key].has("last"):
            raise ValueError(keyed[key].missing_weights("last"))
        if not rows:
            raise ValueError(
                f"{keyed[key].path} has no evaluation of its present weights; "
                f"run `noiseproof evaluate {keyed[key].path}` first"
            )
    noise_seed = min(seeds, key=lambda seed: (-seeds[seed], seed))
    groups: dict[str, list[str]] = {}
    for key, run in keyed.items():
        label = printable(run.config.method.method if by == "method" else key)
        groups.setdefault(label, []).append(key)

    rows_of: dict[Weights, list[EvaluationRow]] = {}
    draws: dict[tuple[str, str], list[int]] = {}
    for weights in cast(tuple[Weights, ...], ("last", "best")):
        rows = [
            {**row, "run": key}
            for key in keyed
            for row in found[key]
            if row["weights"] == weights and row["noise_seed"] == noise_seed
        ]
        if rows:
            shared = _shared_draws(rows)
            draws |= {(weights, spec): sorted(numbers) for spec, numbers in shared.items()}
            rows = [row for row in rows if row["draw"] in shared[row["perturbation"]]]
            place = {s: i for i, s in enumerate(ordered(row["perturbation"] for row in rows))}
            key_place = {key: i for i, key in enumerate(keyed)}
            rows.sort(key=lambda r: (key_place[r["run"]], place[r["perturbation"]], r["draw"]))
            rows_of[weights] = rows
    results = Results(keyed, by, groups, rows_of, {}, noise_seed, draws)
    for weights, rows in rows_of.items():
        results.tables[weights] = _table(results, weights, rows)
    return results


def shortened(names: Sequence[str]) -> list[str]:
    """Names without the words at both ends that all of them share; a method's name stays.

    >>> shortened(["svhn-both-s0", "svhn-discriminative-s0", "svhn-discriminative-code-s0"])
    ['both', 'discriminative', 'discriminative-code']
    >>> shortened(["svhn-both-s0", "svhn-both-s1"]), shortened(["first", "second"])
    (['both-s0', 'both-s1'], ['first', 'second'])
    """
    words = [name.split("-") for name in names]
    for end in (0, -1):
        while len(names) > 1 and all(len(w) > 1 for w in words):
            shared = {w[end] for w in words}
            if len(shared) > 1 or shared & set(METHODS):
                break
            words = [w[1:] if end == 0 else w[:-1] for w in words]
    return ["-".join(w) for w in words]


def _place(run: RunFolder) -> tuple[int, int, int, str]:
    """Methods in the order in which they are always listed, then seeds; the plain name first."""
    method, seed = run.config.method.method, run.config.run.seed
    return list(METHODS).index(method), seed, len(run.name), str(run.path)


def _same_test_images(runs: dict[str, RunFolder]) -> None:
    prints = {key: run.info.get("fingerprint") for key, run in runs.items()}
    first = next(iter(prints))
    for key, value in prints.items():
        if value != prints[first]:
            raise ValueError(
                "the runs of one report must share their test images: "
                f"{first} has fingerprint {prints[first]}, {key} has {value}"
            )


def _rows(run: RunFolder) -> list[EvaluationRow]:
    """The accuracies of the run's present weights."""
    models = {w: run.weights_hash(w) for w in cast(Any, ("last", "best")) if run.has(w)}
    return [
        row
        for row in run.evaluation()
        if row["metric"] == "accuracy"
        and models.get(row["weights"]) == row["model"]
        and row["fingerprint"] == run.info.get("fingerprint")
    ]


def _differ_by_seed_alone(runs: Iterable[RunFolder]) -> bool:
    """Whether runs of one method are trainings of the same settings, so that they may be pooled."""
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        groups = to_dict(with_absolute_paths(run.config))
        mine = {group: values for group, values in groups.items() if group != "run"}
        mine["data"] = {k: v for k, v in mine["data"].items() if k not in ("data_dir", "workers")}
        if settings.setdefault(run.config.method.method, mine) != mine:
            return False
    pairs = [(run.config.method.method, run.config.run.seed) for run in runs]
    return len(set(pairs)) == len(pairs)


def _shared_draws(rows: Sequence[EvaluationRow]) -> dict[str, set[int]]:
    """For each perturbation, the draws that every run has which was tested under it."""
    by_run: dict[str, dict[str, set[int]]] = {}
    for row in rows:
        by_run.setdefault(row["perturbation"], {}).setdefault(row["run"], set()).add(row["draw"])
    return {spec: set.intersection(*each.values()) for spec, each in by_run.items()}


def _table(results: Results, weights: Weights, rows: Sequence[EvaluationRow]) -> tables.Table:
    def correct(key: str, chosen: str, spec: str) -> NDArray[np.bool_] | None:
        known = results.classes_given(key, cast(Weights, chosen), spec)
        return None if known is None else known[0] == known[1]

    which = "after the last epoch" if weights == "last" else "of the best epoch by validation"
    title = f"{rows[0]['data']}, weights {which}"
    truth = results.truth(weights)
    guess = None if truth is None else stats.majority_share(truth)
    return tables.build(rows, by=results.by, correct=correct, title=title, guess=guess)
