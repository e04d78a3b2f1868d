"""Runs an experiment of the paper and writes one record per row of its table.

Rows run one after the other, or several at a time in worker processes. Finished rows are not
trained again, interrupted ones continue, and a row that fails does not stop the others.

A record is a JSON file, RESULTS/EXPERIMENT/RUN.json: what a training measured, and all it depends
on. It holds the config, seed, commit, versions, device and time, and the accuracy of every noise
draw; paths on the machine are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from noiseproof.lab.comparison.jobs import Announce, Job, exit_status, is_finished
from noiseproof.lab.comparison.workers import jobs_at_a_time, run_jobs
from noiseproof.lab.config import Config, did_you_mean, from_dict, to_dict
from noiseproof.lab.console import terminal
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.lab.training.train import train
from noiseproof.paper.epoch_choice import EpochTests, read_epoch_tests
from noiseproof.paper.experiments import EXPERIMENTS, ReproduceArguments

SCHEMA = 1
_COPIED = ("samples", "fingerprint", "engine", "precision", "environment")  # from the run


@dataclass(frozen=True)
class RowJob(Job):
    """One row to train, evaluate and record."""

    row: str
    arguments: ReproduceArguments
    jobs: int  # rows at a time

    @property
    def path(self) -> Path:
        """The file of the record."""
        return Path(self.arguments.results) / self.arguments.experiment / f"{self.name}.json"

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        experiment, along = EXPERIMENTS[self.arguments.experiment](), self.arguments.along
        tests = EpochTests(along, experiment.suite) if along else None
        run = train(self.config, each_epoch=tests)
        weights: Weights = experiment.weights if run.has(experiment.weights) else "last"
        announce(f"evaluating, {len(experiment.suite)} perturbations")
        options: Any = {"draws": self.arguments.draws, "device": self.arguments.device}
        rows = evaluate(run, experiment.suite, weights=(weights,), dataset=dataset, **options)
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
            "experiment": self.arguments.experiment,
            "row": self.row,
            "shortened": self.arguments.epochs is not None,
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


def reproduce(arguments: ReproduceArguments) -> tuple[list[Path], int]:
    """Trains, evaluates and records the rows of an experiment. Returns the records of the rows that
    are done, and the exit status: 0 if all rows are done, 3 if some diverged, 1 if some failed."""
    configs = planned(arguments)
    waiting = sum(not is_finished(config) for config in configs.values())
    count = jobs_at_a_time(arguments.jobs, waiting, arguments.device)
    # Before the rows: downloads once, and errors come early.
    datasets = {data: load_dataset(data) for data in {config.data for config in configs.values()}}
    todo = [RowJob(config, row, arguments, count) for row, config in configs.items()]
    console = terminal()
    outcomes = run_jobs(todo, count, Path(arguments.output), console, datasets)
    done = [job.path for job in todo if outcomes[job.name].status == "done"]
    return done, exit_status(outcomes, console)


def planned(arguments: ReproduceArguments) -> dict[str, Config]:
    """The configs of an experiment, by row."""
    name, only, epochs = arguments.experiment, arguments.only, arguments.epochs
    rows = EXPERIMENTS[name](epochs).rows
    for row in only:
        if row not in rows:
            expected = ", ".join(rows) + did_you_mean(row, rows)
            raise ValueError(f"{name} has no row {row!r}; expected {expected}")
    shared = {key: getattr(arguments, key) for key in ("seed", "data_dir", "output", "device")}
    plan = {}
    for row, config in rows.items():
        if only and row not in only:
            continue
        slug = row.replace("=", "").replace(" ", "-")
        changes = {
            "name": f"{name}-{slug}{f'-e{epochs}' if epochs else ''}-s{arguments.seed}",
            "resume": True,
            "data": arguments.data or config.data.data,
            "weights": arguments.weights or config.model.weights,
        }
        plan[row] = from_dict(shared | changes, config)
    return plan
