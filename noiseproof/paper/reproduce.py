"""Runs an experiment of the paper and writes one record per row of its table.

Rows run one after the other, or several at a time in worker processes. Finished rows are not
trained again, interrupted ones continue, and a row that fails does not stop the others.

A record is a JSON file, RESULTS/EXPERIMENT/RUN.json: what a training measured, and all it depends
on. It holds the config, seed, commit, versions, device and time, and the accuracy of every noise
draw; paths of the machine are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, cast

from noiseproof.lab.comparison.jobs import Announce, Job, exit_status, is_finished
from noiseproof.lab.comparison.workers import jobs_at_a_time, run_jobs
from noiseproof.lab.config import Config, did_you_mean, to_dict
from noiseproof.lab.console import terminal
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.lab.training.train import train
from noiseproof.paper.epoch_choice import EpochTests, read_epoch_tests
from noiseproof.paper.experiments import EXPERIMENTS

SCHEMA = 1
_COPIED = ("samples", "fingerprint", "engine", "precision", "environment")  # from the run


class Reproduction(NamedTuple):
    """The records of the rows that are done, and the exit status: 0 if all rows are done, 3 if
    some diverged, 1 if some failed."""

    records: list[Path]
    status: int


@dataclass(frozen=True)
class RowJob(Job):
    """One row to train, evaluate and record."""

    experiment: str
    row: str
    shortened: bool  # fewer epochs than the experiment asks for
    draws: int
    results: str
    jobs: int = 1  # rows at a time
    along: int = 0  # epochs between two tests during training; 0: none

    @property
    def path(self) -> Path:
        """The file of the record."""
        return Path(self.results) / self.experiment / f"{self.name}.json"

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        experiment = EXPERIMENTS[self.experiment]()
        tests = EpochTests(self.along, experiment.suite) if self.along else None
        run = train(self.config, each_epoch=tests)
        weights: Weights = experiment.weights if run.has(experiment.weights) else "last"
        announce(f"evaluating, {len(experiment.suite)} perturbations")
        device = self.config.run.device
        rows = evaluate(
            run, experiment.suite, draws=self.draws, weights=(weights,), device=device,
            dataset=dataset,
        )  # fmt: skip
        record = self.record(run, rows, weights)
        write_atomically(self.path, json.dumps(record, indent=1) + "\n")

    def record(
        self, run: RunFolder, rows: Sequence[dict[str, Any]], weights: Weights
    ) -> dict[str, Any]:
        """The record of the finished run.

        Args:
            run: the run.
            rows: its evaluation, one row per perturbation and draw.
            weights: which weights were evaluated.
        """
        accuracy: dict[str, list[float]] = {}
        for row in rows:
            accuracy.setdefault(row["perturbation"], []).append(100 * row["value"])
        metrics, along = run.metrics(), read_epoch_tests(run)
        return {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "row": self.row,
            "shortened": self.shortened,
            "seed": run.config.run.seed,
            "epochs": run.config.optim.epochs,
            "weights": weights,
            "seconds": round(run.info["seconds"], 1),
            **{name: run.info[name] for name in _COPIED},
            "last_epoch": metrics[-1] if metrics else {},
            **({"best": run.info["best"]} if weights == "best" else {}),  # with its epoch
            "accuracy": {
                spec: {
                    "mean": round(fmean(values), 4),
                    "std": round(stdev(values), 4) if len(values) > 1 else None,
                    "draws": [round(value, 4) for value in values],
                }
                for spec, values in accuracy.items()
            },
            "config": _config_without_paths(run.config),
            "jobs": self.jobs,
            **({"along": along} if along else {}),
        }


def _config_without_paths(config: Config) -> dict[str, dict[str, Any]]:
    values = to_dict(config)
    for setting in ("output", "name", "resume"):
        values["run"].pop(setting)
    values["data"].pop("data_dir")
    values["data"]["data"] = Path(values["data"]["data"]).name
    if values["model"]["weights"]:
        values["model"]["weights"] = Path(values["model"]["weights"]).name
    return values


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
    configs = {}
    for row, config in planned(name, only, epochs, seed).items():
        configs[row] = replace(
            config,
            data=replace(config.data, data=data or config.data.data, data_dir=data_dir),
            model=replace(config.model, weights=weights or config.model.weights),
            run=replace(config.run, output=output, device=cast(Any, device)),
        )
    waiting = sum(not is_finished(config) for config in configs.values())
    count = jobs_at_a_time(jobs, waiting, device)
    # Before the rows: downloads once, and errors come early.
    datasets = {data: load_dataset(data) for data in {config.data for config in configs.values()}}
    todo = [
        RowJob(config, name, row, epochs is not None, draws, results, count, along)
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
