"""Runs an experiment of the paper and writes one record per row of its table and seed.

Rows run one after the other, several at a time in worker processes, or on a cluster. Finished rows
are not trained again, interrupted ones continue, and a row that fails does not stop the others.
Rows that differ only in what follows the training share one.

A record is a JSON file, RESULTS/EXPERIMENT/RUN.json: what a training measured, and all it depends
on. It holds the config, seed, commit, versions, device and time, and the accuracy of every noise
draw; paths on the machine are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from noiseproof.lab.comparison.jobs import Announce, Job, exit_status, is_finished
from noiseproof.lab.comparison.workers import jobs_at_a_time, run_jobs, share_cores
from noiseproof.lab.config import Config, did_you_mean, from_dict, to_dict
from noiseproof.lab.console import terminal
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.calibration import mean_scores
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.files import with_checksum, write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.lab.training.renormalise import renormalise
from noiseproof.lab.training.train import train
from noiseproof.lab.validate import slurm_parameters, validate
from noiseproof.paper.epoch_choice import EpochTests, read_epoch_tests
from noiseproof.paper.experiments import EXPERIMENTS, ReproduceArguments

SCHEMA = 1
_COPIED = ("samples", "fingerprint", "engine", "precision", "environment")  # from the run


@dataclass(frozen=True)
class RowJob(Job):
    """One training, and the rows to evaluate and record from it."""

    rows: tuple[str, ...]
    arguments: ReproduceArguments
    jobs: int  # trainings at a time

    def record_path(self, row: str) -> Path:
        """The file of the record of a row."""
        folder = Path(self.arguments.results) / self.arguments.experiment
        return folder / f"{_run_name(self.arguments, row, self.config.run.seed)}.json"

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        experiment, along = EXPERIMENTS[self.arguments.experiment](), self.arguments.along
        tests = EpochTests(along, experiment.suite) if along else None
        run = train(self.config, each_epoch=tests)
        weights: Weights = experiment.weights if run.has(experiment.weights) else "last"
        options: Any = {"device": self.arguments.device, "dataset": run.dataset(dataset)}
        for row in self.rows:
            tested = run
            if row in experiment.renormalised:
                noise, name = experiment.renormalised[row].noise, self.record_path(row).stem
                tested = renormalise(run, noise=noise, name=name, overwrite=True, **options)
            count = len(experiment.suite) + len(experiment.once)
            announce(f"evaluating {row}, {count} perturbations")
            rows: list[Any] = []
            for suite, draws in ((experiment.suite, self.arguments.draws), (experiment.once, 1)):
                if suite:
                    rows += evaluate(tested, suite, draws=draws, weights=(weights,), **options)
            record = self.record(row, tested, rows, weights)
            text = json.dumps(with_checksum(record), indent=1) + "\n"
            write_atomically(self.record_path(row), text)

    def record(
        self, row: str, run: RunFolder, rows: Sequence[dict[str, Any]], weights: Weights
    ) -> dict[str, Any]:
        """The record of a row.

        Args:
            row: its name.
            run: its finished run.
            rows: its evaluation, one row per perturbation and draw.
            weights: which weights were evaluated.
        """
        accuracy: dict[str, list[float]] = {}
        for test in rows:
            accuracy.setdefault(test["perturbation"], []).append(100 * test["value"])
        metrics, along = run.metrics(), read_epoch_tests(run)
        return {
            "schema": SCHEMA,
            "experiment": self.arguments.experiment,
            "row": row,
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
            **_calibration(rows),
            "config": _config_without_paths(run.config),
            "jobs": self.jobs,
            **_statistics(run),
            **({"along": along} if along else {}),
        }


def _calibration(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means over draws of ECE, NLL and Brier score under each perturbation; empty for rows of
    older versions."""
    by_spec: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_spec.setdefault(row["perturbation"], []).append(row)
    means = {spec: mean_scores(tests) for spec, tests in by_spec.items()}
    return {"calibration": means} if means and all(means.values()) else {}


def _statistics(run: RunFolder) -> dict[str, Any]:
    """What a renormalised run's batch-norm statistics come from; empty for other runs."""
    facts = run.info.get("renormalised")
    if facts is None:
        return {}
    return {"renormalised": {key: facts[key] for key in ("noise", "batches", "views")}}


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
    rows_of: dict[Config, list[str]] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for row, config in planned(replace(arguments, seed=seed)).items():
            rows_of.setdefault(config, []).append(row)
    waiting = [config for config in rows_of if not is_finished(config)]
    for config in waiting:
        validate(config)
    # The same number however many are left: runs that are continued keep their share of the cores.
    cluster = slurm_parameters(arguments.launcher, arguments.slurm)
    if cluster is None:  # its machines may have other devices
        chosen_device(arguments.device)  # an error appears once, not in every row
    together = 1 if cluster else jobs_at_a_time(arguments.jobs, len(rows_of), arguments.device)
    count = together if waiting else 1
    # Before the rows: downloads once, and errors come early.
    datasets = {data: load_dataset(data) for data in {config.data for config in rows_of}}
    todo = [
        RowJob(share_cores(config, together), tuple(rows), arguments, count)
        for config, rows in rows_of.items()
    ]
    console = terminal()
    if not waiting:
        cluster = None
    outcomes = run_jobs(todo, count, Path(arguments.output), console, datasets, cluster)
    finished = [job for job in todo if outcomes[job.name].status == "done"]
    done = [job.record_path(row) for job in finished for row in job.rows]
    return done, exit_status(outcomes, console)


def planned(arguments: ReproduceArguments) -> dict[str, Config]:
    """The configs of the trainings of an experiment with one seed, by row. A renormalised row has
    that of the row it is made from."""
    name, only = arguments.experiment, arguments.only
    experiment = EXPERIMENTS[name](arguments.epochs)
    for row in only:
        if row not in experiment.rows:
            expected = ", ".join(experiment.rows) + did_you_mean(row, experiment.rows)
            raise ValueError(f"{name} has no row {row!r}; expected {expected}")
    names = ("seed", "data_dir", "follow_links", "output", "device")
    shared = {name: getattr(arguments, name) for name in names}
    plan = {}
    for row, config in experiment.rows.items():
        if only and row not in only:
            continue
        source = experiment.renormalised.get(row)
        trained = source.row if source else row
        changes = {
            "name": _run_name(arguments, trained, arguments.seed),
            "resume": True,
            "data": arguments.data or config.data.data,
            "weights": arguments.weights or config.model.weights,
        }
        plan[row] = from_dict(shared | changes, config)
    return plan


def _run_name(arguments: ReproduceArguments, row: str, seed: int) -> str:
    """The name of the run folder of a row, and of its record."""
    slug = row.replace("=", "").replace(" ", "-")
    epochs = f"-e{arguments.epochs}" if arguments.epochs else ""
    return f"{arguments.experiment}-{slug}{epochs}-s{seed}"
