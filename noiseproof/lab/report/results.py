"""The results that a report shows: runs with the same test images, their rows, tables and
predictions.

Only rows of each run's current weights count, of one noise seed, and of the draws that all runs
share, so that everything is compared on the same images under the same noise.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.config import METHODS, to_dict
from noiseproof.lab.console import printable
from noiseproof.lab.data.datasets import same_images
from noiseproof.lab.evaluation import severities, stats, tables, words
from noiseproof.lab.evaluation.evaluate import baseline_label
from noiseproof.lab.evaluation.predictions import stored_predictions
from noiseproof.lab.paths import with_absolute_paths
from noiseproof.lab.runs import (
    DERIVED,
    EvaluationRow,
    RunFolder,
    Weights,
    shared_weights,
    training_seconds,
)
from noiseproof.perturb.text import ordered

By = Literal["method", "run"]


@dataclass(frozen=True)
class Results:
    """Runs that can be compared.

    Args:
        runs: by a key that is unique among them.
        by: whether a label of the tables is a method or a run.
        groups: the keys of the runs of each label.
        rows: the rows behind the tables; their "run" is the key.
        noise_seed: seed of the noise.
        draws: the draws that all runs share, by (weights, perturbation).
        tables: of the last and of the best epoch, if evaluated. The report is about the first: the
            weights of most runs, of two with as many the ones that `shared_weights` chooses.
    """

    runs: dict[str, RunFolder]
    by: By
    groups: dict[str, list[str]]
    rows: dict[Weights, list[EvaluationRow]]
    noise_seed: int
    draws: dict[tuple[Weights, str], list[int]]
    tables: dict[Weights, tables.Table]

    @property
    def weights(self) -> Weights:
        """The weights that the report is about; the others only have a table."""
        return next(iter(self.tables))

    @property
    def table(self) -> tables.Table:
        """The table that the report is about."""
        return self.tables[self.weights]

    @property
    def first(self) -> RunFolder:
        """The first run, for facts that all runs share."""
        return next(iter(self.runs.values()))

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return list(self.first.info["classes"])

    @property
    def perturbations(self) -> list[str]:
        """All perturbations that a run was tested under, in order."""
        return list(dict.fromkeys(row["perturbation"] for row in self.rows[self.weights]))

    @property
    def data_name(self) -> str:
        return str(self.rows[self.weights][0]["data"])

    @cached_property
    def training_seconds(self) -> dict[str, float]:
        """The mean duration of a training of each label, if it was recorded."""
        groups = {label: [self.runs[k] for k in keys] for label, keys in self.groups.items()}
        return training_seconds(groups)

    def run(self, label: str) -> RunFolder:
        """The first training of a label, for what is shown of one training only."""
        return self.runs[self.groups[label][0]]

    def predictions(self, key: str, weights: str, spec: str) -> tuple[NDArray, NDArray] | None:
        """(classes predicted in the shared draws, draws x n; true labels, n), or None if they are
        not stored."""
        which = cast(Weights, weights)
        seed = self.noise_seed
        stored = stored_predictions(self.runs[key], spec, weights=which, noise_seed=seed)
        if stored is None:
            return None
        return stored.classes[np.isin(stored.draws, self.draws[which, spec])], stored.labels

    def correct(self, key: str, weights: str, spec: str) -> NDArray[np.bool_] | None:
        """Whether each prediction is right, draws x n, or None if they are not stored."""
        stored = self.predictions(key, weights, spec)
        return None if stored is None else stored[0] == stored[1]

    def true_labels(self, weights: Weights) -> NDArray | None:
        """The true labels of the test images, or None if no predictions are stored."""
        specs = [spec for other, spec in self.draws if other == weights]
        stored = (self.predictions(key, weights, spec) for key in self.runs for spec in specs)
        return next((labels for _, labels in filter(None, stored)), None)

    def confusion(self, label: str, spec: str) -> NDArray[np.int64] | None:
        """The confusion matrix of a label under one perturbation, summed over trainings, draws and
        the severities of a corruption: rows are true classes, columns predicted ones. None if
        predictions are missing."""
        count = len(self.classes)
        total = np.zeros((count, count), dtype=np.int64)
        for key, name in itertools.product(self.groups[label], severities.members(spec)):
            stored = self.predictions(key, self.weights, name)
            if stored is None:
                return None
            predicted, labels = stored
            pairs = (labels * count + predicted.astype(np.int64)).ravel()
            total += np.bincount(pairs, minlength=count * count).reshape(count, count)
        return total


def gather(runs: Sequence[RunFolder], baseline: str | Path | None = None) -> Results:
    """The results of `runs`, a run folder given twice counting once; ValueError if they cannot be
    compared.

    Args:
        runs: evaluated run folders.
        baseline: the one that corruption errors are relative to; by default the only one of method
            normal.
    """
    if not runs:
        raise ValueError("a report needs at least one run folder, got none")
    keyed, by = _keyed(runs)
    fingerprint = _shared_fingerprint(keyed)
    current = {key: _current_rows(run) for key, run in keyed.items()}
    seeds = Counter(row["noise_seed"] for rows in current.values() for row in rows)
    noise_seed = min(seeds, key=lambda seed: (-seeds[seed], seed))  # the most frequent

    rows: dict[Weights, list[EvaluationRow]] = {}
    draws: dict[tuple[Weights, str], list[int]] = {}
    for weights in cast(tuple[Weights, ...], ("last", "best")):
        selected = [
            {**row, "run": key, "fingerprint": fingerprint}
            for key, key_rows in current.items()
            for row in key_rows
            if row["weights"] == weights and row["noise_seed"] == noise_seed
        ]
        if selected:
            shared = _shared_draws(selected)
            draws |= {(weights, spec): sorted(numbers) for spec, numbers in shared.items()}
            selected = [row for row in selected if row["draw"] in shared[row["perturbation"]]]
            rows[weights] = _in_order(selected, list(keyed))

    groups: dict[str, list[str]] = {}
    for key, run in keyed.items():
        label = printable(run.config.method.method if by == "method" else key)
        groups.setdefault(label, []).append(key)
    results = Results(keyed, by, groups, rows, noise_seed, draws, tables={})
    base = baseline_label({x: [keyed[k] for k in keys] for x, keys in groups.items()}, baseline)
    chosen = shared_weights(runs)

    def rank(weights: Weights) -> tuple[int, bool]:
        return -len({row["run"] for row in rows[weights]}), weights != chosen

    in_order = sorted(rows, key=rank)
    return replace(results, tables={name: _table(results, name, base) for name in in_order})


def _keyed(runs: Sequence[RunFolder]) -> tuple[dict[str, RunFolder], By]:
    """The runs in order of method and seed, by unique keys, and what the labels name."""
    unique = sorted({run.path.resolve(): run for run in runs}.values(), key=_order)
    by: By = "method" if _differ_only_by_seed(unique) else "run"
    names = [run.name for run in unique]
    if by == "run" and len(set(names)) == len(names):
        keys = without_shared_words(names)
    else:
        keys = [run.name if names.count(run.name) == 1 else str(run.path) for run in unique]
    return dict(zip(keys, unique, strict=True)), by


def _order(run: RunFolder) -> tuple[int, int, int, str]:
    """Methods in their usual order, then seeds; of several names, the shortest first."""
    method, seed = run.config.method.method, run.config.run.seed
    return list(METHODS).index(method), seed, len(run.name), str(run.path)


def _differ_only_by_seed(runs: Iterable[RunFolder]) -> bool:
    """True if all runs of a method are trainings with the same settings and different seeds, which
    may be averaged. A run derived from another one is not one of its method."""
    settings: dict[str, dict[str, Any]] = {}
    seen: set[tuple[str, int]] = set()
    for run in runs:
        method, seed = run.config.method.method, run.config.run.seed
        groups = to_dict(with_absolute_paths(run.config))
        del groups["run"]
        for name in ("data_dir", "workers", "follow_links"):
            del groups["data"][name]
        different = settings.setdefault(method, groups) != groups or (method, seed) in seen
        if different or not run.info.keys().isdisjoint(DERIVED):
            return False
        seen.add((method, seed))
    return True


def without_shared_words(names: Sequence[str]) -> list[str]:
    """Names without the words at either end that all share; a method's name stays.

    >>> without_shared_words(["svhn-both-s0", "svhn-noisy-s0", "svhn-noisy-old-s0"])
    ['both', 'noisy', 'noisy-old']
    >>> without_shared_words(["svhn-both-s0", "svhn-both-s1"])
    ['both-s0', 'both-s1']
    >>> without_shared_words(["first", "second"])
    ['first', 'second']
    """
    words = [name.split("-") for name in names]
    for end in (0, -1):
        while len(names) > 1 and all(len(w) > 1 for w in words):
            shared = {w[end] for w in words}
            if len(shared) > 1 or shared & set(METHODS):
                break
            words = [w[1:] if end == 0 else w[:-1] for w in words]
    return ["-".join(w) for w in words]


def _shared_fingerprint(runs: dict[str, RunFolder]) -> str:
    """The fingerprint of the test images; ValueError if the runs do not share them."""
    fingerprints = {key: str(run.info.get("fingerprint")) for key, run in runs.items()}
    first = max(fingerprints, key=lambda key: len(fingerprints[key]))  # older ones say less
    for key, fingerprint in fingerprints.items():
        if not same_images(fingerprint, fingerprints[first]):
            raise ValueError(
                "the runs of one report must share their test images: "
                f"{first} has fingerprint {fingerprints[first]}, {key} has {fingerprint}. Write a "
                "report for each set of images"
            )
    return fingerprints[first]


def _current_rows(run: RunFolder) -> list[EvaluationRow]:
    """The accuracies of the run's current weights; ValueError if there are none."""
    hashes = {weights: run.weights_hash(weights) for weights in run.available_weights}
    rows = [
        row
        for row in run.evaluation()
        if "model" in row
        and row["metric"] == "accuracy"
        and hashes.get(row["weights"]) == row["model"]
        and row.get("fingerprint") == run.info.get("fingerprint")
    ]
    if not rows:
        run.require("last")
        raise ValueError(
            f"{run.path} has no evaluation of its current weights; "
            f"run `noiseproof evaluate {run.path}` first"
        )
    return rows


def _shared_draws(rows: Sequence[EvaluationRow]) -> dict[str, set[int]]:
    """For each perturbation, the draws of all runs that were tested under it."""
    by_run: dict[str, dict[str, set[int]]] = {}
    for row in rows:
        by_run.setdefault(row["perturbation"], {}).setdefault(row["run"], set()).add(row["draw"])
    return {spec: set.intersection(*draws.values()) for spec, draws in by_run.items()}


def _in_order(rows: Sequence[EvaluationRow], keys: Sequence[str]) -> list[EvaluationRow]:
    """Rows by run, then from clean to strongly perturbed, then by draw."""
    specs = ordered(row["perturbation"] for row in rows)

    def rank(row: EvaluationRow) -> tuple[int, int, int]:
        return keys.index(row["run"]), specs.index(row["perturbation"]), row["draw"]

    return sorted(rows, key=rank)


def _table(results: Results, weights: Weights, baseline: str | None) -> tables.Table:
    rows, labels = results.rows[weights], results.true_labels(weights)
    table = tables.build(
        severities.averaged(rows),
        by=results.by,
        correct=severities.averaged_correct(results.correct),
        title=words.table_title(rows[0]["data"], weights),
        majority_share=None if labels is None else stats.majority_share(labels),
    )
    return tables.with_baseline(table, baseline) if baseline else table
