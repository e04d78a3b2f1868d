"""Many methods and seeds under one budget, and the table that compares them.

Every method is trained with the same settings and seeds into OUTPUT/compare-DATA/METHOD-sSEED, then
evaluated on the same images under the same noise. Finished runs are not trained again, unfinished
ones continue, so the same command can be repeated until it is done.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from noiseproof.lab import data, tables
from noiseproof.lab.config import METHODS, Config, MethodName, run_name, to_dict
from noiseproof.lab.evaluate import correct, evaluate, show
from noiseproof.lab.runs import RunFolder, Weights, environment, write_atomically
from noiseproof.lab.train import Diverged, changed, train
from noiseproof.recipes.suites import suite

__all__ = ["Outcome", "compare", "plan"]

SCHEMA = 1


class Outcome(NamedTuple):
    """How one run ended; `seconds` is the time it took here, training and evaluation."""

    status: Literal["done", "diverged", "failed"]
    message: str
    seconds: float


class Task(NamedTuple):
    """One run to make, and how it is evaluated."""

    config: Config
    perturbations: tuple[str, ...]
    draws: int
    noise_seed: int
    weights: tuple[Weights, ...]

    @property
    def name(self) -> str:
        return run_name(self.config)

    @property
    def path(self) -> Path:
        return Path(self.config.run.output) / self.name


def compare(
    base: Config,
    methods: Sequence[str] = tuple(METHODS),
    seeds: int = 1,
    jobs: int | None = None,
    draws: int = 10,
    noise_seed: int = 0,
) -> int:
    """Trains, evaluates, prints and writes the comparison; the exit status says how it went.

    0: all well; 3: some runs diverged; 1: some failed otherwise. The others are finished and
    compared all the same.

    Args:
        base: the settings that all share; `run.name` renames the folder compare-DATA.
        seeds: trainings a method, with seeds `base.run.seed`, + 1, ...
        jobs: runs at a time; by default one for each core, or one on a GPU.
    """
    started = time.perf_counter()
    out = tables.output()
    dataset = data.load(
        base.data
    )  # before the jobs: so it is downloaded once and errors come early
    perturbations = tuple(suite(base.data.data, dataset.size))
    weights: tuple[Weights, ...] = ("last", "best") if dataset.validation else ("last",)
    configs = plan(base, methods, seeds)
    waiting = [c for c in configs if not _finished(c)]
    jobs = _jobs(base, jobs, len(waiting))
    if jobs > 1 and not base.run.threads:
        share = max(1, _cores() // jobs)
        configs = [_with(c, threads=share) for c in configs]
    tasks = [Task(c, perturbations, draws, noise_seed, weights) for c in configs]
    folder = tasks[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    already = f" ({len(tasks) - len(waiting)} trained before)" if len(waiting) < len(tasks) else ""
    out.print(f"{len(tasks)} runs in {folder}{already}, {jobs} at a time", markup=False)

    if jobs > 1:
        outcomes = _in_processes(tasks, jobs, folder, out)
    else:
        outcomes = {}
        for task in tasks:
            out.print(f"{task.name}:", markup=False)
            outcomes[task.name] = _work(task, dataset)
            out.print(_ending(task.name, outcomes[task.name]), markup=False)
    runs = {t.name: RunFolder.open(t.path) for t in tasks if outcomes[t.name].status == "done"}
    made = [
        _table(
            tasks[0], {name: run for name, run in runs.items() if run.has(chosen)}, chosen, dataset
        )
        for chosen in weights
        if any(run.has(chosen) for run in runs.values())
    ]
    for table in made:
        show(table, out, summary=False)

    times = _training_seconds(runs)
    if times:
        listed = ", ".join(f"{method} {seconds:.1f} s" for method, seconds in times.items())
        beside = f", {jobs} runs side by side" if jobs > 1 else ""
        out.print(f"Time of one training: {listed}{beside}.", markup=False, highlight=False)
    facts = {
        "schema": SCHEMA,
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
        "runs": [_facts(task, outcomes[task.name], runs.get(task.name)) for task in tasks],
        "config": to_dict(base),
        "environment": environment(_device(base)),
        "tables": [tables.as_dict(table) for table in made],
        "summary": tables.summary(made[0]) if made else [],
    }
    _write(folder / "comparison.json", json.dumps(facts, indent=2) + "\n")
    for suffix in tables.WRITERS if made else ():
        _write(folder / f"table{suffix}", tables.written(made, suffix))
    if made:
        out.print(f"Tables: {folder / 'table'}.md, .csv, .tex", markup=False, soft_wrap=True)
        for line in tables.summary(made[0]):
            out.print(line, markup=False, highlight=False)
    return _status(outcomes, out)


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


def _finished(config: Config) -> bool:
    """Whether the run is there and done; ValueError if what is there was made by other settings."""
    path = Path(config.run.output) / run_name(config)
    if not (path / "config.json").is_file():
        return False
    run = RunFolder.open(path)
    if found := changed(run.config, config):
        raise ValueError(
            f"{path} was made with other settings than are asked for: {'; '.join(found)}; "
            "give another --output or --name, or delete that folder"
        )
    return run.finished


def _cores() -> int:
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _device(config: Config) -> str:
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return auto if config.run.device == "auto" else config.run.device


def _jobs(base: Config, jobs: int | None, runs: int) -> int:
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs is None:
        jobs = 1 if _device(base) == "cuda" else _cores()
    return max(1, min(jobs, runs))


def _work(task: Task, dataset: data.Dataset | None = None) -> Outcome:
    """Trains (or continues, or finds finished) and evaluates one run; errors become an outcome."""
    start = time.perf_counter()
    try:
        run = RunFolder.open(task.path) if _finished(task.config) else train(task.config)
        _evaluated(task, run, task.weights, dataset)
        status, message = "done", ""
    except Diverged as error:
        status, message = "diverged", str(error)
    except Exception as error:  # the other runs go on; the traceback goes to the log
        status, message = "failed", str(error)
        if not isinstance(error, ValueError):  # not what a user can mend
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
    return Outcome(status, message, time.perf_counter() - start)


def _child(orders: Connection) -> None:
    """The body of a worker process: does task after task, the output of each in a log file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    parent = multiprocessing.parent_process()
    if parent is not None:  # a parent that is killed leaves nobody to end us
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    while (order := orders.recv()) is not None:
        task, log = order
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(file, number)  # also what is written below Python
            cast(Any, stream).reconfigure(line_buffering=True)
        os.close(file)
        if task.config.run.threads:
            torch.set_num_threads(task.config.run.threads)
        orders.send(_work(task))


class _Worker:
    """A process that takes one task at a time; importing torch is paid once for all its tasks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon: it may have loader processes of its own.
        self.process = context.Process(target=_child, args=(theirs,))
        self.process.start()
        theirs.close()
        self.name, self.log, self.start = "", Path(), 0.0  # of the task in hand

    def begin(self, task: Task, log: Path) -> None:
        self.name, self.log, self.start = task.name, log, time.perf_counter()
        self.pipe.send((task, str(log)))

    def outcome(self) -> Outcome | None:
        """How the task ended, or None while it goes on."""
        if not self.pipe.poll():
            return None
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):  # it died without a word: killed, or out of memory
            self.process.join()
            message = f"the process ended with exit code {self.process.exitcode}; see {self.log}"
            return Outcome("failed", message, time.perf_counter() - self.start)

    def line(self) -> str:
        """The task in hand and the last line of its log."""
        said = ""
        if self.log.exists():
            with open(self.log, "rb") as file:
                file.seek(max(0, self.log.stat().st_size - 2000))
                said = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        said = tables.printable(said.removeprefix(f"{self.name}: "))[:100]
        return f"{self.name}: {time.perf_counter() - self.start:.0f} s  {said}"


def _in_processes(
    tasks: Sequence[Task], jobs: int, folder: Path, out: Console
) -> dict[str, Outcome]:
    """The outcomes of all tasks, `jobs` at a time in processes of their own."""
    (folder / "logs").mkdir(exist_ok=True)
    queue, outcomes = list(tasks), dict[str, Outcome]()
    busy: list[_Worker] = []
    idle = [_Worker() for _ in range(jobs)]
    with Live(console=out, auto_refresh=False, transient=True) as live:
        try:
            while queue or busy:
                while queue and len(busy) < jobs:
                    worker, task = idle.pop() if idle else _Worker(), queue.pop(0)
                    busy.append(worker)
                    worker.begin(task, folder / "logs" / f"{task.name}.log")
                    if not out.is_terminal:
                        out.print(f"{task.name}: started, log in {worker.log}", markup=False)
                wait([worker.pipe for worker in busy], timeout=0.5)
                for worker in list(busy):
                    if outcome := worker.outcome():
                        busy.remove(worker)
                        if worker.process.is_alive():
                            idle.append(worker)
                        outcomes[worker.name] = outcome
                        out.print(_ending(worker.name, outcome), markup=False)
                if out.is_terminal:
                    lines = [w.line() for w in busy] + [f"{task.name}: waiting" for task in queue]
                    text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
                    live.update(text, refresh=True)
        finally:
            for worker in (*busy, *idle):
                worker.process.terminate()
            for worker in (*busy, *idle):
                worker.process.join(5)
                if worker.process.is_alive():
                    worker.process.kill()
    return outcomes


def _ending(name: str, outcome: Outcome) -> str:
    if outcome.status == "done":
        return f"{name}: done in {outcome.seconds:.1f} s"
    return f"{name}: {outcome.status} after {outcome.seconds:.1f} s: {outcome.message}"


def _table(
    task: Task, runs: Mapping[str, RunFolder], weights: Weights, dataset: data.Dataset
) -> tables.Table:
    """The table of these runs, evaluated as `task` was; what they have computed is read."""
    rows = [row for run in runs.values() for row in _evaluated(task, run, (weights,), dataset)]

    def known(name: str, chosen: str, spec: str) -> NDArray[np.bool_] | None:
        noise, which = task.noise_seed, cast(Weights, chosen)
        return correct(runs[name], spec, weights=which, noise_seed=noise, draws=task.draws)

    which = "after the last epoch" if weights == "last" else "of the best epoch by validation"
    return tables.build(rows, correct=known, title=f"{dataset.name}, weights {which}")


def _evaluated(
    task: Task, run: RunFolder, weights: Sequence[Weights], dataset: data.Dataset | None
) -> list[dict[str, Any]]:
    device, noise = task.config.run.device, task.noise_seed
    return evaluate(
        run, task.perturbations, draws=task.draws, weights=weights, noise_seed=noise,
        device=device, dataset=dataset,
    )  # fmt: skip


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
    write_atomically(path, lambda file: cast(None, file.write(text.encode())))


def _status(outcomes: Mapping[str, Outcome], out: Console) -> int:
    bad = {name: o for name, o in outcomes.items() if o.status != "done"}
    if not bad:
        return 0
    out.print(f"{len(bad)} of {len(outcomes)} runs are not in the table:", markup=False)
    for name, outcome in bad.items():
        out.print(f"  {_ending(name, outcome)}", markup=False)
    return 3 if all(o.status == "diverged" for o in bad.values()) else 1
