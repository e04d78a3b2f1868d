"""Many methods and seeds under one budget, and the table that compares them.

Every method is trained with the same settings and seeds into OUTPUT/compare-DATA/METHOD-sSEED, then
evaluated on the same images under the same noise. Finished runs are not trained again, unfinished
ones continue, so the same command can be repeated until it is done.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.analysis.analyse import comparison_scope
from noiseproof.lab.command import command_record
from noiseproof.lab.comparison.gpu_sharing import shared_gpu
from noiseproof.lab.comparison.jobs import (
    Outcome,
    Task,
    cores,
    cost,
    ending,
    evaluated,
    finished,
    in_processes,
    status,
)
from noiseproof.lab.config import METHODS, Config, MethodName, run_name, to_dict
from noiseproof.lab.console import print_status, terminal
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.device import chosen_device, environment, precision
from noiseproof.lab.evaluation import stats, tables, words, writers
from noiseproof.lab.evaluation.predictions import correct
from noiseproof.lab.files import write_atomically
from noiseproof.lab.recipes import suite
from noiseproof.lab.report.page import report_runs
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.lab.training.progress import dataset_summary

__all__ = ["Outcome", "compare", "plan"]

SCHEMA = 1


def compare(
    base: Config,
    methods: Sequence[str] = tuple(METHODS),
    seeds: int = 1,
    jobs: int | None = None,
    draws: int = 10,
    noise_seed: int = 0,
    report: bool = True,
) -> int:
    """Trains, evaluates, prints and writes the comparison; the exit status says how it went.

    0: all well; 3: some runs diverged; 1: some failed otherwise. The others are finished and
    compared all the same.

    Args:
        base: the settings that all share; `run.name` renames the folder compare-DATA.
        seeds: trainings a method, with seeds `base.run.seed`, + 1, ...
        jobs: runs at a time; by default one for each core, or one on a GPU.
        report: also analyse the first training of each method, and write report.html.
    """
    started = time.perf_counter()
    out = terminal()
    precision(base, chosen_device(base.run.device).type)  # refused once, not in every run
    dataset = load_dataset(base.data)  # before the jobs: downloaded once, and errors come early
    perturbations = tuple(suite(base.data.data, dataset.size))
    weights: tuple[Weights, ...] = ("last", "best") if dataset.validation else ("last",)
    configs = plan(base, methods, seeds)
    waiting = [c for c in configs if not finished(c)]
    jobs = _jobs(base, jobs, len(waiting))
    if jobs > 1 and not base.run.threads:
        share = max(1, cores() // jobs)
        configs = [_with(c, threads=share) for c in configs]
    tasks = [
        Task(c, perturbations, draws, noise_seed, weights, report and c.run.seed == base.run.seed)
        for c in configs
    ]
    folder = tasks[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    already = f" ({len(tasks) - len(waiting)} trained before)" if len(waiting) < len(tasks) else ""
    out.print(
        f"{dataset.name}: {dataset_summary(dataset)}", markup=False, highlight=False, soft_wrap=True
    )
    out.print(f"{len(tasks)} runs in {folder}{already}, {jobs} at a time", markup=False)

    if jobs > 1:
        # The longest first, so that no job is left with one of them at the end.
        order = sorted(tasks, key=lambda task: -cost(task.config))
        where = chosen_device(base.run.device)
        with shared_gpu(where, jobs, lambda text: out.print(text, markup=False)):
            outcomes = in_processes(order, jobs, folder, out)
    else:
        outcomes = {}
        for task in tasks:
            out.print(f"{task.name}:", markup=False)
            outcomes[task.name] = task.work(partial(print_status, task.name), dataset)
            out.print(ending(task.name, outcomes[task.name]), markup=False)
    runs = {t.name: RunFolder.open(t.path) for t in tasks if outcomes[t.name].status == "done"}
    made = [
        _table(
            tasks[0], {name: run for name, run in runs.items() if run.has(chosen)}, chosen, dataset
        )
        for chosen in weights
        if any(run.has(chosen) for run in runs.values())
    ]
    for table in made:
        writers.show(table, out, sentences=False)

    scope = comparison_scope(dataset.size) if report else None
    times = _training_seconds(runs)
    if times:
        listed = ", ".join(f"{method} {seconds:.1f} s" for method, seconds in times.items())
        beside = f", {jobs} runs side by side" if jobs > 1 else ""
        out.print(f"Time of one training: {listed}{beside}.", markup=False, highlight=False)
    facts = {
        "schema": SCHEMA,
        **command_record(),
        "data": dataset.name,
        "fingerprint": dataset.fingerprint,
        "methods": list(methods),
        "seeds": sorted({c.run.seed for c in configs}),
        "draws": draws,
        "noise_seed": noise_seed,
        "perturbations": list(perturbations),
        "jobs": jobs,
        "seconds": time.perf_counter() - started,
        "training_seconds": times,
        "analysis": scope._asdict() if scope else None,
        "runs": [_facts(task, outcomes[task.name], runs.get(task.name)) for task in tasks],
        "config": to_dict(base),
        "environment": environment(chosen_device(base.run.device)),
        "tables": [writers.as_dict(table) for table in made],
        "summary": words.summary(made[0]) if made else [],
    }
    _write(folder / "comparison.json", json.dumps(facts, indent=2) + "\n")
    for suffix in writers.WRITERS if made else ():
        _write(folder / f"table{suffix}", writers.written(made, suffix))
    if made:
        out.print(f"Tables: {folder / 'table'}.md, .csv, .tex", markup=False, soft_wrap=True)
        for line in words.summary(made[0]):
            out.print(line, markup=False, highlight=False)
    if scope and runs:
        if line := scope.omission(dataset.test.count):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        report_runs([run.path for run in runs.values()], folder)
    return status(outcomes, out)


def plan(base: Config, methods: Sequence[str], seeds: int) -> list[Config]:
    """The configs of all runs; one seed after the other, so that an early stop compares methods.

    >>> [run_name(c) for c in plan(Config(), ["normal", "both"], 2)]
    ['normal-s0', 'both-s0', 'normal-s1', 'both-s1']
    """
    unknown = [m for m in methods if m not in METHODS]
    if unknown or not methods:
        raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {unknown or 'none'}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    first = base.run.seed
    plain = run_name(_with(base, name=None)).removesuffix(f"-{base.method.method}-s{first}")
    folder = str(Path(base.run.output) / (base.run.name or f"compare-{plain}"))
    return [
        dataclasses.replace(
            _with(base, output=folder, name=f"{method}-s{seed}", seed=seed, resume=True),
            method=dataclasses.replace(base.method, method=cast(MethodName, method)),
        )
        for seed in range(first, first + seeds)
        for method in dict.fromkeys(methods)
    ]


def _with(config: Config, **changes: Any) -> Config:
    """The config with other settings of its group `run`."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


def _jobs(base: Config, jobs: int | None, runs: int) -> int:
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs is None:
        jobs = 1 if chosen_device(base.run.device).type == "cuda" else cores()
    return max(1, min(jobs, runs))


def _table(
    task: Task, runs: Mapping[str, RunFolder], weights: Weights, dataset: Dataset
) -> tables.Table:
    """The table of these runs, evaluated as `task` was; what they have computed is read."""
    rows = [
        row for run in runs.values() for row in evaluated(task, run, (weights,), dataset, False)
    ]

    def known(name: str, chosen: str, spec: str) -> NDArray[np.bool_] | None:
        noise, which = task.noise_seed, cast(Weights, chosen)
        return correct(runs[name], spec, weights=which, noise_seed=noise, draws=task.draws)

    which = "after the last epoch" if weights == "last" else "of the best epoch by validation"
    guess = stats.majority_share(dataset.test.labels)
    title = f"{dataset.name}, weights {which}"
    return tables.build(rows, correct=known, title=title, guess=guess)


def _training_seconds(runs: Mapping[str, RunFolder]) -> dict[str, float]:
    """Mean over seeds of the time that a training took, as the runs recorded it."""
    found: dict[str, list[float]] = {}
    for run in runs.values():
        seconds = run.info.get("seconds")
        if isinstance(seconds, (int, float)):
            found.setdefault(run.config.method.method, []).append(float(seconds))
    return {method: sum(values) / len(values) for method, values in found.items()}


def _facts(task: Task, outcome: Outcome, run: RunFolder | None) -> dict[str, Any]:
    return {
        "run": task.name,
        "method": task.config.method.method,
        "seed": task.config.run.seed,
        **outcome._asdict(),
        "training_seconds": run.info.get("seconds") if run else None,
        "environment": run.info.get("environment") if run else None,
    }


def _write(path: Path, text: str) -> None:
    write_atomically(path, text)
