"""Compares methods: trains each with the same settings and seeds, tests all under the same noise.

Runs go to OUTPUT/compare-DATA/METHOD-sSEED. Finished runs are not trained again and unfinished ones
continue, so the same command can be repeated until all is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from noiseproof.lab.analysis.analyse import comparison_scope
from noiseproof.lab.command import command_record
from noiseproof.lab.comparison.jobs import ComparisonJob, JobResult, exit_status, is_finished
from noiseproof.lab.comparison.workers import jobs_at_a_time, run_jobs, share_cores
from noiseproof.lab.config import METHODS, Comparison, Config, run_name, run_path, to_dict
from noiseproof.lab.console import print_plain, terminal
from noiseproof.lab.data.datasets import Dataset, leaks_of, load_dataset, with_read_size
from noiseproof.lab.data.duplicates import leak_hint, recorded_leaks
from noiseproof.lab.device import chosen_device, environment, precision
from noiseproof.lab.evaluation import stats, tables, words, writers
from noiseproof.lab.evaluation.predictions import correct
from noiseproof.lab.files import write_atomically
from noiseproof.lab.models.classifier import with_input_size
from noiseproof.lab.recipes import suite
from noiseproof.lab.report.decision import next_commands, save_decision
from noiseproof.lab.report.page import report_runs
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import (
    RunFolder,
    Weights,
    shared_weights,
    training_seconds,
    with_recorded_input,
)
from noiseproof.lab.training.memory import check_start, memory_note
from noiseproof.lab.training.progress import dataset_summary, training_summary
from noiseproof.lab.validate import slurm_parameters
from noiseproof.objectives import METHODS as OBJECTIVES

SCHEMA = 1


def compare(base: Config, comparison: Comparison) -> int:
    """Trains, evaluates, prints and writes a comparison, and returns an exit status.

    0: all runs are done; 3: some diverged; 1: some failed. The other runs are compared anyway.

    Args:
        base: the settings that all runs share; `run.name` renames the folder compare-DATA.
        comparison: what to compare.
    """
    start = time.perf_counter()
    console = terminal()
    device = chosen_device(base.run.device)
    cluster = slurm_parameters(comparison.launcher, comparison.slurm)
    if cluster is None:  # its machines may have other devices
        precision(base, device.type)  # an error appears once, not in every run
    base = _with_input_size(base, plan(base, comparison))
    dataset = load_dataset(base.data)  # before the jobs: downloads once, and errors come early
    base = replace(base, data=with_read_size(base.data, dataset))
    configs = plan(base, comparison)
    unfinished = [config for config in configs if not is_finished(config)]
    # The same number however many are left: runs that are continued keep their share of the cores.
    together = 1 if cluster else jobs_at_a_time(comparison.jobs or None, len(configs), device.type)
    count = together if unfinished else 1
    leaks = tuple(leaks_of(dataset, base.data)) if unfinished else ()
    todo = [
        ComparisonJob(
            config,
            tuple(suite(base.data.data, dataset.size)),
            comparison.draws,
            ("last", "best") if dataset.validation else ("last",),
            analyse=comparison.report and config.run.seed == base.run.seed,
            leaks=leaks,
        )
        for config in (share_cores(config, together) for config in configs)
    ]
    folder = todo[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    done = len(todo) - len(unfinished)
    already = f" ({done} already trained)" if done else ""
    training = training_summary(base, [config.method.method for config in configs])
    for line in (f"{dataset_summary(dataset)}; {training}", *dataset.notes):
        print_plain(console, f"{dataset.name}: {line}")
    needed = None
    if unfinished and cluster is None:
        largest = max(unfinished, key=lambda config: OBJECTIVES[config.method.method].num_views)
        needed = check_start(largest, dataset, device=device.type, jobs=count)
    if leaks:  # before hours of training
        for line in (*(f"warning: {leak}" for leak in leaks), leak_hint(base.data.group)):
            print_plain(console, f"{dataset.name}: {line}")
    if not unfinished:
        cluster = None
    how = "as SLURM jobs" if cluster else f"{count} at a time"
    memory = f"{note} each" if (note := memory_note(needed)) else ""
    print_plain(console, f"{len(todo)} runs in {folder}{already}, {how}{memory}")
    results = run_jobs(todo, count, folder, console, {base.data: dataset}, cluster)

    runs = {j.name: RunFolder.open(j.path) for j in todo if results[j.name].status == "done"}
    compared = _tables(todo[0], runs, dataset)
    for table in compared[:1]:
        writers.show(table, console, sentences=False)
    by_method: dict[str, list[RunFolder]] = {}
    for run in runs.values():
        by_method.setdefault(run.config.method.method, []).append(run)
    seconds = training_seconds(by_method)
    if seconds:
        times = ", ".join(f"{method} {value:.1f} s" for method, value in seconds.items())
        parallel = f", {count} runs at a time" if count > 1 else ""
        print_plain(console, f"Time per training: {times}{parallel}.")
    scope = comparison_scope(dataset.size) if comparison.report else None
    facts = {
        "schema": SCHEMA,
        **command_record(),
        "data": dataset.name,
        "fingerprint": dataset.fingerprint,
        "methods": list(dict.fromkeys(comparison.methods)),
        "seeds": sorted({config.run.seed for config in configs}),
        "draws": comparison.draws,
        "noise_seed": 0,  # the default of an evaluation
        "perturbations": list(todo[0].perturbations),
        "jobs": count,
        "seconds": time.perf_counter() - start,
        "training_seconds": seconds,
        "analysis": scope._asdict() if scope else None,
        "runs": [_run_facts(job, results[job.name], runs.get(job.name)) for job in todo],
        "config": to_dict(base),
        "environment": environment(device),
        "tables": [writers.as_dict(table) for table in compared],
        "summary": [
            sentence
            for table in compared[:1]
            for sentences in (words.chance_warnings, words.main_sentences, words.training_caveat)
            for sentence in sentences(table)
        ],
    }
    write_atomically(folder / "comparison.json", json.dumps(facts, indent=2) + "\n")
    if compared:
        _write_tables(folder, compared, console)
    if scope and runs:
        if omission := scope.omission(dataset.test.count):
            print_plain(console, omission)
        report_runs([run.path for run in runs.values()], folder)
    if runs:
        first = next(iter(runs.values()))
        for leak in () if leaks else recorded_leaks(first.info):  # of runs trained before
            print_plain(console, f"\nWarning: {leak}")
        _print_decision(list(runs.values()), folder, console)
    return exit_status(results, console)


def _print_decision(runs: Sequence[RunFolder], folder: Path, console: Console) -> None:
    """Prints what to take and the commands that come next."""
    decision = save_decision(gather(runs), folder)
    if isinstance(decision, str):
        print_plain(console, f"\nNothing can be recommended: {decision}.")
        return
    print_plain(console, "\nRecommendation")
    for sentence in decision.sentences:
        print_plain(console, f"  {sentence}")
    print_plain(console, "Next")
    for command in next_commands(decision, folder):
        print_plain(console, f"  {command}")


def plan(base: Config, comparison: Comparison) -> list[Config]:
    """The configs of all runs, seed by seed, so that the methods can be compared even if it is
    stopped early. Arguments as for `compare`.

    >>> [run_name(c) for c in plan(Config(), Comparison(("normal", "both"), seeds=2))]
    ['normal-s0', 'both-s0', 'normal-s1', 'both-s1']
    """
    methods, seeds = comparison.methods, comparison.seeds
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {unknown or 'none'}")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    first = base.run.seed
    unnamed = replace(base, run=replace(base.run, name=None))
    data = run_name(unnamed).removesuffix(f"-{base.method.method}-s{first}")
    folder = str(Path(base.run.output) / (base.run.name or f"compare-{data}"))
    return [
        replace(
            base,
            method=replace(base.method, method=method),
            run=replace(base.run, output=folder, name=f"{method}-s{seed}", seed=seed, resume=True),
        )
        for seed in range(first, first + seeds)
        for method in dict.fromkeys(methods)
    ]


def _with_input_size(base: Config, configs: Sequence[Config]) -> Config:
    """The config with the image size of a run that exists, or else of the pretrained weights."""
    for config in configs:
        path = run_path(config)
        if (path / "config.json").is_file():
            return with_recorded_input(base, RunFolder.open(path).config)
    return with_input_size(base)


def _tables(
    job: ComparisonJob, runs: Mapping[str, RunFolder], dataset: Dataset
) -> list[tables.Table]:
    """A table for each kind of weights that a run has, of evaluations like that of `job`. The first
    has the weights that are recommended and deployed."""

    def correct_images(name: str, chosen: str, spec: str) -> NDArray[np.bool_] | None:
        return correct(runs[name], spec, weights=cast(Weights, chosen), draws=job.draws)

    built = []
    deployed = shared_weights(runs.values())
    share = stats.majority_share(dataset.test.labels)
    for weights in sorted(job.weights, key=lambda weights: weights != deployed):
        chosen = [run for run in runs.values() if run.has(weights)]
        rows = [row for run in chosen for row in job.evaluate(run, (weights,), dataset, False)]
        title = words.table_title(dataset.name, weights)
        if rows:
            table = tables.build(rows, correct=correct_images, title=title, majority_share=share)
            built.append(table)
    return built


def _run_facts(job: ComparisonJob, result: JobResult, run: RunFolder | None) -> dict[str, Any]:
    return {
        "run": job.name,
        "method": job.config.method.method,
        "seed": job.config.run.seed,
        **result._asdict(),
        "training_seconds": run.info.get("seconds") if run else None,
        "environment": run.info.get("environment") if run else None,
    }


def _write_tables(folder: Path, compared: list[tables.Table], console: Console) -> None:
    for suffix in writers.WRITERS:
        write_atomically(folder / f"table{suffix}", writers.written(compared, suffix))
    others = "".join(f"; also {table.title}" for table in compared[1:])
    print_plain(console, f"Tables: {folder / 'table'}.md, .csv, .tex{others}")
    for line in words.main_sentences(compared[0]):
        print_plain(console, line)
