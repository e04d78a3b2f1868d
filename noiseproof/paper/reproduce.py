"""Runs an experiment of the paper and writes one record per row of its table.

Rows run one after the other, or several at a time in worker processes. Finished rows are not
trained again, interrupted ones continue, and a row that fails does not stop the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from noiseproof.lab.comparison.jobs import (
    Announce,
    JobResult,
    catch_errors,
    exit_status,
    is_finished,
)
from noiseproof.lab.comparison.workers import run_jobs, share_cores
from noiseproof.lab.config import Config, did_you_mean, run_name
from noiseproof.lab.console import terminal
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import Weights
from noiseproof.lab.training.train import train
from noiseproof.paper.epoch_choice import EpochTests, read_epoch_tests
from noiseproof.paper.experiments import EXPERIMENTS
from noiseproof.paper.records import make_record


class Reproduction(NamedTuple):
    """The records of the rows that are done, and the exit status: 0 if all rows are done, 3 if
    some diverged, 1 if some failed."""

    records: list[Path]
    status: int


class RowJob(NamedTuple):
    """One row to train, evaluate and record."""

    experiment: str
    row: str
    config: Config
    shortened: bool  # fewer epochs than the experiment asks for
    draws: int
    results: str
    jobs: int = 1  # rows at a time
    along: int = 0  # epochs between two tests during training; 0: none

    @property
    def name(self) -> str:
        return run_name(self.config)

    @property
    def path(self) -> Path:
        """The file of the record."""
        return Path(self.results) / self.experiment / f"{self.name}.json"

    def run(self, announce: Announce, dataset: Dataset | None = None) -> JobResult:
        """Trains, evaluates and records the row; arguments as for `ComparisonJob.run`."""
        return catch_errors(self.config, lambda: self._run(announce, dataset))

    def _run(self, announce: Announce, dataset: Dataset | None) -> None:
        experiment = EXPERIMENTS[self.experiment]()
        tests = EpochTests(self.along, experiment.suite) if self.along else None
        run = train(self.config, each_epoch=tests)
        weights: Weights = experiment.weights if run.has(experiment.weights) else "last"
        announce(f"evaluating, {len(experiment.suite)} perturbations")
        rows = evaluate(
            run, experiment.suite, draws=self.draws, weights=(weights,),
            device=self.config.run.device, dataset=dataset,
        )  # fmt: skip
        record = make_record(
            self.experiment, self.row, run, rows, weights=weights, shortened=self.shortened
        )
        record["jobs"] = self.jobs
        if along := read_epoch_tests(run):
            record["along"] = along
        write_atomically(self.path, json.dumps(record, indent=1) + "\n")


def reproduce(
    name: str,
    *,
    only: Sequence[str] = (),
    epochs: int | None = None,
    seed: int = 0,
    data: str | None = None,
    data_dir: str = "data",
    weights: str | None = None,
    output: str = "runs",
    results: str = "results",
    device: str = "auto",
    draws: int = 10,
    jobs: int = 1,
    along: int = 0,
) -> Reproduction:
    """Trains, evaluates and records the rows of an experiment.

    Args:
        name: the experiment, one of `EXPERIMENTS`.
        only: the rows to run; by default all.
        epochs: a shorter training; by default that of the experiment.
        seed: seed of the trainings.
        data: other data, such as a .npz file or a folder.
        data_dir: folder of cifar10 and svhn.
        weights: a file of pretrained weights, if they cannot be downloaded (road).
        output: folder for run folders.
        results: folder for records.
        device: auto, cpu or cuda.
        draws: draws of each random perturbation.
        jobs: rows at a time; they share the cores or the GPU.
        along: test every so many epochs during training (`epoch_choice`); 0: never.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    configs = {}
    for row, config in planned(name, only, epochs, seed).items():
        configs[row] = replace(
            config,
            data=replace(config.data, data=data or config.data.data, data_dir=data_dir),
            model=replace(config.model, weights=weights or config.model.weights),
            run=replace(config.run, output=output, device=cast(Any, device)),
        )
    count = max(1, min(jobs, sum(not is_finished(config) for config in configs.values())))
    # Before the rows: downloads once, and errors come early.
    datasets = {data: load_dataset(data) for data in {config.data for config in configs.values()}}
    todo = [
        RowJob(
            name, row, share_cores(config, count), epochs is not None, draws, results, count, along
        )
        for row, config in configs.items()
    ]
    console = terminal()
    outcomes = run_jobs(todo, count, Path(output), console, datasets)
    done = [job.path for job in todo if outcomes[job.name].status == "done"]
    return Reproduction(done, exit_status(outcomes, console))


def planned(
    name: str, only: Sequence[str] = (), epochs: int | None = None, seed: int = 0
) -> dict[str, Config]:
    """The configs of an experiment, by row; arguments as for `reproduce`."""
    rows = EXPERIMENTS[name](epochs).rows
    for row in only:
        if row not in rows:
            expected = ", ".join(rows) + did_you_mean(row, rows)
            raise ValueError(f"{name} has no row {row!r}; expected {expected}")
    plan = {}
    for row, config in rows.items():
        if only and row not in only:
            continue
        slug = row.replace("=", "").replace(" ", "-")
        run = f"{name}-{slug}{f'-e{epochs}' if epochs else ''}-s{seed}"
        plan[row] = replace(config, run=replace(config.run, name=run, seed=seed, resume=True))
    return plan
