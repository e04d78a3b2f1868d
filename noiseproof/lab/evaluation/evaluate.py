"""Accuracy of a trained run under perturbations: one row for every perturbation and noise draw.

The noise of an image is keyed by (noise seed, perturbation, draw, place of the image in the test
set), so every run sees the same noise, whatever the batch size or the device, and two runs can be
compared image by image. Predictions are kept beside the rows for that purpose. What has been
evaluated before, with the same model file and the same test images, is not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from noiseproof.lab.command import command_record
from noiseproof.lab.console import (
    TimeEstimate,
    approximate_duration,
    print_status,
    progress_bars,
    terminal,
)
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation import stats, tables, writers
from noiseproof.lab.evaluation.predictions import (
    Predictions,
    Predictor,
    correct,
    key_of,
    predictions,
)
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import Perturbation
from noiseproof.perturb.text import is_clean, noise_levels, steps
from noiseproof.robustness import by_name

__all__ = ["Predictions", "correct", "evaluate", "evaluate_runs", "predictions"]

SCHEMA = 1
_FEW = 3  # draws that are proposed to those in a hurry: a mean with a spread
Row = dict[str, Any]


def evaluate(
    run: RunFolder,
    perturbations: Sequence[Perturbation | str],
    *,
    draws: int = 10,
    weights: Sequence[Weights] = ("last",),
    noise_seed: int = 0,
    device: str = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
    dataset: Dataset | None = None,
) -> list[Row]:
    """The rows of `run` for these perturbations, computed where they are not known yet.

    A deterministic perturbation has draw 0 alone. Of `weights`, those that the run has are taken.

    Args:
        batch_size: images at a time; by default as many as keep memory small.
        progress: show a progress bar; by default on a terminal, and lines elsewhere.
        dataset: the run's data, where the caller has loaded it already.
    """
    if not isinstance(run, RunFolder):
        mine = isinstance(run, nn.Module)
        remedy = "noiseproof.accuracy tests a model of your own" if mine else "RunFolder.open(path)"
        raise ValueError(f"evaluate takes a RunFolder, got {type(run).__name__}; {remedy}")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    asked = by_name(perturbations)
    have = _have(run, weights)
    dataset = run.dataset(dataset)

    where = chosen_device(device)
    rows: list[Row] = []
    every = {name: range(1 if p.deterministic else draws) for name, p in asked.items()}
    images = len(have) * dataset.test.count * sum(map(len, every.values()))
    kept: list[tuple[Tensor, Tensor]] = []
    sessions = [_Session(run, w, dataset, where, noise_seed, batch_size, kept) for w in have]
    first: dict[str, _Session] = {}  # by the weights themselves: the last may be the best
    for session in sessions:
        session.twin = first.get(session.hash)
        first.setdefault(session.hash, session)
    passes = sum(len(s.missing(n, d)) for s in first.values() for n, d in every.items())
    with progress_bars(progress) as bar:
        task = bar.add_task(f"{run.name}: evaluating", total=images)

        def foretell(seconds: float) -> None:
            if progress is not False:
                text = f"{passes} passes over {dataset.test.count:,} test images take"
                print_status(
                    run.name, f"{text} {approximate_duration(seconds)}{_sooner(asked, draws)}", bar
                )

        pace = TimeEstimate(passes * dataset.test.count, foretell)
        for session in sessions:
            for name, perturbation in asked.items():
                text = f"{run.name}: evaluating, {name}, {session.weights} weights"
                bar.update(task, description=text)
                rows += session.rows(
                    name,
                    perturbation,
                    every[name],
                    lambda done: bar.advance(task, done),
                    pace.advance,
                )
    return rows


def _sooner(asked: Mapping[str, Perturbation], draws: int) -> str:
    """What fewer draws would save; nothing where they are few already.

    >>> _sooner(by_name(["clean", "gaussian:0.1", "gaussian:0.2"]), 10)
    '; with --draws 3, 33 % of that'
    """
    random = sum(not p.deterministic for p in asked.values())
    share = (len(asked) + random * (_FEW - 1)) / (len(asked) + random * (draws - 1))
    return f"; with --draws {_FEW}, {100 * share:.0f} % of that" if share < 1 else ""


def _have(run: RunFolder, weights: Sequence[Weights]) -> list[Weights]:
    """Those of the weights that the run has; ValueError where there are none."""
    found: list[Weights] = [name for name in dict.fromkeys(weights) if run.has(name)]
    if not found:
        raise ValueError(run.missing_weights(" or ".join(weights)))
    return found


class _Session(Predictor):
    """One model on one device, with what is known of it already."""

    twin: _Session | None = None  # of the same weights under another name, evaluated before

    @cached_property
    def hash(self) -> str:
        return self.run.weights_hash(self.weights)

    @cached_property
    def known(self) -> dict[tuple[str, int], Row]:
        """The rows of this model on these images under this noise seed, by (perturbation, draw)."""
        mine = {"weights": self.weights, "noise_seed": self.noise_seed, "model": self.hash}
        mine |= {"fingerprint": self.dataset.fingerprint}
        rows = (row for row in self.run.evaluation() if mine.items() <= row.items())
        return {(row["perturbation"], row["draw"]): row for row in rows}

    def rows(
        self,
        name: str,
        perturbation: Perturbation,
        wanted: Sequence[int],
        tick: Callable[[int], object],
        worked: Callable[[int], object],
    ) -> list[Row]:
        """The rows of the wanted draws; those that are missing are computed and written.

        `tick` is told of every image that is done, `worked` of those that are computed now.
        """
        key = key_of(self.weights, name, self.noise_seed)
        stored = self._stored(key)
        todo = self.missing(name, wanted, stored)

        def both(images: int) -> None:
            tick(images)
            worked(images)

        made_before = len(wanted) if self.twin else len(wanted) - len(todo)
        tick(made_before * self.dataset.test.count)
        if todo:
            labels = self.dataset.test.labels.numpy()
            if self.twin is None:
                start = time.perf_counter()
                classes = self.predict(perturbation, todo, both)
                seconds = (time.perf_counter() - start) / len(todo)
                stored |= dict(zip(todo, classes, strict=True))
                made = {
                    d: self._row(name, d, float((stored[d] == labels).mean()), seconds)
                    for d in todo
                }
            else:
                same = self.twin._stored(key_of(self.twin.weights, name, self.noise_seed))
                stored |= {d: same[d] for d in todo}
                made = {d: {**self.twin.known[name, d], "weights": self.weights} for d in todo}
            self.run.save_predictions(  # before the rows, so that a row always has its predictions
                key,
                classes=np.stack([stored[d] for d in sorted(stored)]),
                labels=labels,
                draws=np.array(sorted(stored), dtype=np.int64),
                model=np.array(self.hash),
                fingerprint=np.array(self.dataset.fingerprint),
                perturbation=np.array(name),
                noise_seed=np.array(self.noise_seed),
            )
            # Predictions may have been lost, rows not.
            new = [row for draw, row in made.items() if (name, draw) not in self.known]
            self.run.append_evaluation(new)
            self.known |= {(name, row["draw"]): row for row in new}
        return [self.known[name, draw] for draw in wanted]

    def missing(
        self, name: str, wanted: Sequence[int], stored: Container[int] | None = None
    ) -> list[int]:
        """The draws that have no row, or none of the predictions that belong to it."""
        if stored is None:
            stored = self._stored(key_of(self.weights, name, self.noise_seed))
        return [d for d in wanted if d not in stored or (name, d) not in self.known]

    def _stored(self, key: str) -> dict[int, NDArray[Any]]:
        found = self.run.predictions(key)
        if found is None or str(found["model"]) != self.hash:
            return {}
        if str(found["fingerprint"]) != self.dataset.fingerprint:
            return {}
        return {
            int(d): classes for d, classes in zip(found["draws"], found["classes"], strict=True)
        }

    def _row(self, name: str, draw: int, value: float, seconds: float) -> Row:
        levels = noise_levels(name) if len(steps(name)) == 1 else ()
        return {
            "schema": SCHEMA,
            "run": self.run.name,
            "data": self.dataset.name,
            "fingerprint": self.dataset.fingerprint,
            "method": self.run.config.method.method,
            "seed": self.run.config.run.seed,
            "weights": self.weights,
            "model": self.hash,
            "perturbation": name,
            "level": 0.0 if is_clean(name) else levels[0] if len(levels) == 1 else None,
            "draw": draw,
            "noise_seed": self.noise_seed,
            "metric": "accuracy",
            "value": value,
            "n": self.dataset.test.count,
            "precision": self.precision,
            "device": self.device.type,
            "seconds": round(seconds, 4),
            **command_record(),
        }


def evaluate_runs(
    paths: Sequence[str | Path],
    perturb: Sequence[str] | None = None,
    draws: int = 10,
    weights: Sequence[Weights] = ("last",),
    noise_seed: int = 0,
    device: str = "auto",
    table: str | Path | None = None,
) -> None:
    """Evaluates runs, prints one table for all that share their test images, says where rows lie.

    `perturb` none takes the default suite of each run's data. `table` also writes the table, as
    .md, .csv or .tex; several tables (of different data) follow one another in it.
    """
    from noiseproof.lab.recipes import suite

    if table is not None and Path(table).suffix not in writers.WRITERS:
        raise ValueError(f"a table ends in {', '.join(writers.WRITERS)}, got {Path(table).name}")
    runs = {run.path: run for run in (RunFolder.open(Path(path)) for path in paths)}
    names = [run.name for run in runs.values()]
    labels = {r.name if names.count(r.name) == 1 else str(p): r for p, r in runs.items()}
    for run in runs.values():
        _have(run, weights)  # before the data, which can take long
    groups: dict[str, list[Row]] = {}
    guesses: dict[str, float] = {}
    out, loaded = terminal(), {}
    for label, run in labels.items():
        if run.config.data not in loaded:
            loaded = {run.config.data: run.dataset()}  # one dataset at a time
        dataset = loaded[run.config.data]
        specs = perturb or suite(run.config.data.data, dataset.size)
        rows = evaluate(
            run, specs, draws=draws, weights=weights, noise_seed=noise_seed, device=device,
            dataset=dataset,
        )  # fmt: skip
        groups.setdefault(dataset.fingerprint, []).extend({**row, "run": label} for row in rows)
        guesses[dataset.fingerprint] = stats.majority_share(dataset.test.labels)
        for missing in [w for w in weights if not run.has(w)]:
            out.print(f"{label} has no {missing} weights; they are left out.", markup=False)

    def known(label: str, chosen: str, spec: str) -> NDArray[np.bool_] | None:
        found = cast(Weights, chosen)
        return correct(labels[label], spec, weights=found, noise_seed=noise_seed, draws=draws)

    made = [
        tables.build(
            rows, by="run", correct=known, title=str(rows[0]["data"]), guess=guesses[fingerprint]
        )
        for fingerprint, rows in groups.items()
    ]
    for one in made:
        writers.show(one, out)
    if table is not None:
        path = Path(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(writers.written(made, path.suffix), encoding="utf-8")
        out.print(f"Table: {path}", markup=False)
    for run in runs.values():
        out.print(f"Rows: {run.path / 'evaluation.jsonl'}", markup=False, soft_wrap=True)
