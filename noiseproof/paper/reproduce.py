"""Runs an experiment of the paper and keeps what came out of each row as one small file a run.

Rows are run one after the other, or several side by side in processes of their own. What is
finished is not trained again, what was interrupted is resumed, and a row that fails does not stop
the others. A record holds the config, seed, commit, versions, device, time, and the accuracy of
every draw; `publish` makes the tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from noiseproof.lab.config import Config, did_you_mean, run_name, to_dict
from noiseproof.paper.experiments import EXPERIMENTS

if TYPE_CHECKING:
    from noiseproof.lab.comparison.jobs import Announce, Outcome
    from noiseproof.lab.data.datasets import Dataset

SCHEMA = 1


class Reproduction(NamedTuple):
    """What came of an experiment: the records of the rows that were done, and the exit status."""

    records: list[Path]
    status: int  # 0: all well; 3: some rows diverged; 1: some failed otherwise


class RowJob(NamedTuple):
    """One row to run, evaluate and record; `lab.jobs` runs it, here or in a process of its own."""

    experiment: str
    row: str
    config: Config
    short: bool
    draws: int
    results: str
    jobs: int = 1  # how many rows share the machine
    along: int = 0  # epochs between two looks at the test images; 0: none

    @property
    def name(self) -> str:
        return run_name(self.config)

    @property
    def path(self) -> Path:
        """The record."""
        return Path(self.results) / self.experiment / f"{self.name}.json"

    def work(self, announce: Announce, dataset: Dataset | None = None) -> Outcome:
        from noiseproof.lab.comparison.jobs import attempt

        return attempt(self.config, lambda: self._done(announce, dataset))

    def _done(self, announce: Announce, dataset: Dataset | None) -> None:
        from noiseproof.lab.evaluation.evaluate import evaluate
        from noiseproof.lab.files import write_atomically
        from noiseproof.lab.training.train import train
        from noiseproof.paper import epoch_choice as along

        experiment = EXPERIMENTS[self.experiment]()
        looking = along.Along(self.along, experiment.suite) if self.along else None
        run = train(self.config, each_epoch=looking)
        chosen: Any = experiment.weights if run.has(experiment.weights) else "last"  # pyright: ignore[reportArgumentType]
        announce(f"evaluating, {len(experiment.suite)} perturbations")
        rows = evaluate(
            run, experiment.suite, draws=self.draws, weights=(chosen,),
            device=self.config.run.device, dataset=dataset,
        )  # fmt: skip
        found = record(self.experiment, self.row, self.short, run, rows, chosen)
        found["jobs"] = self.jobs
        if seen := along.rows(run):
            found["along"] = seen
        text = json.dumps(found, indent=1) + "\n"
        write_atomically(self.path, text)


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
    """Trains and evaluates the rows of experiment `name` (those in `only`), and records them.

    data: another place of the data, such as a .npz file or a folder.
    weights: a local file of pretrained weights, where they cannot be downloaded (road).
    jobs: rows at a time; on a GPU they share it (`lab.sharing`), on a CPU its cores.
    along: every so many epochs, look at the test images too (`recipes.along`).
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    todo = []
    for row, config in planned(name, only, epochs, seed).items():
        place = replace(config.data, data=data or config.data.data, data_dir=data_dir)
        where = replace(config.run, output=output, device=cast(Any, device))
        model = replace(config.model, weights=weights or config.model.weights)
        config = replace(config, data=place, model=model, run=where)
        todo.append(RowJob(name, row, config, epochs is not None, draws, results, along=along))

    from noiseproof.lab.comparison.jobs import ending, finished, status
    from noiseproof.lab.console import print_status, terminal
    from noiseproof.lab.data.datasets import load_dataset

    out = terminal()
    waiting = sum(not finished(job.config) for job in todo)
    # Before the rows: downloaded once, and errors come early.
    loaded = {place: load_dataset(place) for place in {job.config.data for job in todo}}
    jobs = max(1, min(jobs, waiting))
    if jobs > 1:
        outcomes = _side_by_side(todo, jobs, device, Path(output))
    else:
        outcomes = {}
        for job in todo:
            outcomes[job.name] = job.work(partial(print_status, job.name), loaded[job.config.data])
            out.print(ending(job.name, outcomes[job.name]), markup=False)
    done = [job.path for job in todo if outcomes[job.name].status == "done"]
    return Reproduction(done, status(outcomes, out))


def _side_by_side(
    todo: Sequence[RowJob], jobs: int, device: str, folder: Path
) -> dict[str, Outcome]:
    """The rows in `jobs` processes that share cores and GPU, the longest first."""
    from noiseproof.lab.comparison.gpu_sharing import shared_gpu
    from noiseproof.lab.comparison.jobs import cores, cost, in_processes
    from noiseproof.lab.console import terminal
    from noiseproof.lab.device import chosen_device

    out = terminal()
    threads = max(1, cores() // jobs)
    shared = [
        job._replace(
            config=replace(job.config, run=replace(job.config.run, threads=threads)), jobs=jobs
        )
        for job in sorted(todo, key=lambda job: -cost(job.config))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    out.print(f"{len(todo)} rows in {folder}, {jobs} at a time", markup=False)
    with shared_gpu(chosen_device(device), jobs, lambda text: out.print(text, markup=False)):
        return in_processes(shared, jobs, folder, out)


def planned(
    name: str, only: Sequence[str] = (), epochs: int | None = None, seed: int = 0
) -> dict[str, Config]:
    """The configs of an experiment's rows, by row; arguments as for `reproduce`."""
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


def record(
    name: str, row: str, short: bool, run: Any, rows: Sequence[dict[str, Any]], weights: str
) -> dict[str, Any]:
    """What one run measured, and all it depends on."""
    accuracy: dict[str, list[float]] = {}
    for r in rows:
        accuracy.setdefault(r["perturbation"], []).append(100 * r["value"])
    config = to_dict(run.config)
    for private in ("output", "name", "resume"):  # where it ran, not what ran
        config["run"].pop(private)
    config["data"].pop("data_dir")
    config["data"]["data"] = Path(config["data"]["data"]).name
    if config["model"]["weights"]:
        config["model"]["weights"] = Path(config["model"]["weights"]).name
    metrics = run.metrics()
    return {
        "schema": SCHEMA,
        "experiment": name,
        "row": row,
        "shortened": short,
        "seed": run.config.run.seed,
        "epochs": run.config.optim.epochs,
        "weights": weights,
        "seconds": round(run.info["seconds"], 1),
        "samples": run.info["samples"],
        "fingerprint": run.info["fingerprint"],
        "engine": run.info["engine"],
        "precision": run.info["precision"],
        "environment": run.info["environment"],
        "last_epoch": metrics[-1] if metrics else {},
        **({"best": run.info["best"]} if weights == "best" else {}),  # its epoch
        "accuracy": {
            spec: {
                "mean": round(fmean(values), 4),
                "std": round(stdev(values), 4) if len(values) > 1 else None,
                "draws": [round(v, 4) for v in values],
            }
            for spec, values in accuracy.items()
        },
        "config": config,
    }
