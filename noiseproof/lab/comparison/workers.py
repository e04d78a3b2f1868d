"""Runs jobs: one after the other here, several at a time in worker processes, or on a cluster.

A worker takes one job at a time. Its output goes to a log file; through its pipe it sends a text
when a stage begins, and the job's result at the end. Workers share the cores and the GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noiseproof.lab.command import current_command, running
from noiseproof.lab.comparison.gpu_sharing import environment_variables, shared_gpu
from noiseproof.lab.comparison.jobs import Job, JobResult
from noiseproof.lab.comparison.slurm import run_on_cluster
from noiseproof.lab.comparison.time_left import TimeLeft
from noiseproof.lab.config import Config, Data
from noiseproof.lab.console import all_jobs, print_plain, print_status
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.plugins import load_plugins, loaded_plugins
from noiseproof.objectives import METHODS

_PATIENCE = 30.0  # seconds for an interrupted training to write its checkpoint


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def share_cores(config: Config, count: int) -> Config:
    """The config with its share of the cores as threads, if `count` > 1 runs share them and the
    user has not set a number."""
    if count == 1 or config.run.threads:
        return config
    return replace(config, run=replace(config.run, threads=max(1, usable_cores() // count)))


def jobs_at_a_time(wanted: int | None, runs: int, device: str) -> int:
    """How many of `runs` trainings to do at a time: `wanted`, or one per core, or one on a GPU."""
    if wanted is None:
        wanted = 1 if device == "cuda" else usable_cores()
    if wanted < 1:
        raise ValueError(f"jobs must be at least 1, got {wanted}")
    return max(1, min(wanted, runs))


def run_jobs(
    jobs: Sequence[Job],
    count: int,
    folder: Path,
    console: Console,
    datasets: Mapping[Data, Dataset],
    cluster: Mapping[str, Any] | None = None,
) -> dict[str, JobResult]:
    """Runs all jobs, prints how each ended, and returns their results by name.

    Args:
        jobs: what to run.
        count: jobs at a time; 1 runs them in this process.
        folder: where workers write their logs, to FOLDER/logs.
        console: where to print.
        datasets: the data of the jobs, by their settings.
        cluster: parameters of SLURM jobs, which then run them.
    """
    if cluster is not None:
        return run_on_cluster(jobs, folder, console, cluster)
    if count > 1:
        # The longest first, so that none of them is left for the end.
        in_order = sorted(jobs, key=lambda job: -_relative_cost(job.config))
        device = chosen_device(jobs[0].config.run.device)
        with shared_gpu(device, count, lambda text: console.print(text, markup=False)):
            return run_in_workers(in_order, count, folder, console)
    results, left = dict[str, JobResult](), TimeLeft(jobs, 1)
    token = all_jobs.set(partial(_bar_of_all, left))
    try:
        for job in jobs:
            left.start(job.name)
            results[job.name] = job.run(partial(print_status, job.name), datasets[job.config.data])
            left.end(job.name)
            _print_result(job.name, results[job.name], left, console)
    finally:
        all_jobs.reset(token)
    return results


def _print_result(name: str, result: JobResult, left: TimeLeft, console: Console) -> None:
    """Prints how a job ended and, unless it is the last one, how far all of them are."""
    console.print(result.describe(name), markup=False)
    if left.seconds() != 0:
        console.print(left.describe(), markup=False, highlight=False)


def _relative_cost(config: Config) -> int:
    """Length of a training: how often the network sees each training image."""
    return config.optim.epochs * METHODS[config.method.method].num_views


def run_in_workers(
    jobs: Sequence[Job], count: int, folder: Path, console: Console
) -> dict[str, JobResult]:
    """The results of the jobs, run in `count` processes; arguments as for `run_jobs`."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    queue, results, left = list(jobs), dict[str, JobResult](), TimeLeft(jobs, count)
    busy: list[_Worker] = []
    # A library that torch calls on ARM reads its number of threads only here, when it is loaded.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count))
    with (
        environment_variables({"OMP_NUM_THREADS": threads}),
        Live(console=console, auto_refresh=False, transient=True) as live,
    ):
        idle = [_Worker() for _ in range(count)]
        try:
            while queue or busy:
                while queue and len(busy) < count:
                    idle = [worker for worker in idle if worker.process.is_alive()]
                    worker, job = idle.pop() if idle else _Worker(), queue.pop(0)
                    busy.append(worker)
                    left.start(job.name)
                    worker.start(job, folder / "logs" / f"{job.name}.log")
                    if not console.is_terminal:
                        text = f"{job.name}: started, log in {worker.log}"
                        console.print(text, markup=False, soft_wrap=True)
                wait([worker.pipe for worker in busy], timeout=0.5)
                for worker in list(busy):
                    result = worker.receive(console)
                    if result is None:
                        continue
                    busy.remove(worker)
                    if result.status == "failed":  # a GPU fault persists in its process
                        worker.process.terminate()
                    elif worker.process.is_alive():
                        idle.append(worker)
                    results[worker.name] = result
                    left.end(worker.name)
                    _print_result(worker.name, result, left, console)
                if console.is_terminal:
                    live.update(_overview(busy, queue, left), refresh=True)
        finally:
            for worker in busy:
                worker.process.terminate()
            for worker in (*busy, *idle):
                with contextlib.suppress(OSError):  # it has ended already
                    worker.pipe.send(None)  # it exits, and so do the processes of its loader
            if busy:
                text = "Stopping after the next checkpoint of each run; interrupt again to stop now"
                console.print(text, markup=False)
            deadline = time.monotonic() + _PATIENCE
            try:
                for worker in (*busy, *idle):
                    worker.process.join(max(0.0, deadline - time.monotonic()))
            finally:
                for worker in (*busy, *idle):
                    if worker.process.is_alive():
                        worker.process.kill()
    return results


def _overview(busy: Sequence[_Worker], queue: Sequence[Job], left: TimeLeft) -> RenderableType:
    """A line about each job that is not done, and a bar for all jobs with the time left."""
    now = time.perf_counter()
    lines = [f"{w.name}: {now - w.started:.0f} s  {w.stage}" for w in busy]
    lines += [f"{job.name}: waiting" for job in queue]
    return Group(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), _bar_of_all(left))


def _bar_of_all(left: TimeLeft) -> RenderableType:
    """A bar for all jobs with the time left."""
    whole = Table.grid(padding=(0, 1))
    whole.add_row(ProgressBar(1.0, left.share(), width=30), Text(left.describe(), no_wrap=True))
    return whole


class _Worker:
    """A process that runs one job at a time, and imports torch once for all of them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        # Not a daemon: its data loader may start processes.
        self.process = context.Process(target=_work, args=(other_end,))
        self.process.start()
        other_end.close()
        self.name, self.log, self.stage, self.started = "", Path(), "", 0.0  # of the current job

    def start(self, job: Job, log: Path) -> None:
        self.name, self.log, self.stage, self.started = job.name, log, "", time.perf_counter()
        with contextlib.suppress(ConnectionError):  # it was killed: `receive` reports that
            self.pipe.send((job, str(log), current_command(), loaded_plugins()))

    def receive(self, console: Console) -> JobResult | None:
        """The result of the job, or None while it runs; stages that have started are printed."""
        try:
            while self.pipe.poll():
                message: str | JobResult = self.pipe.recv()
                if isinstance(message, JobResult):
                    return message
                self.stage = message
                if not console.is_terminal:
                    print_plain(console, f"{self.name}: {message}")
        except (EOFError, ConnectionError):  # the process was killed, or ran out of memory
            self.process.join()
            message = f"the process ended with exit code {self.process.exitcode}; see {self.log}"
            return JobResult("failed", message, time.perf_counter() - self.started)
        return None


def _work(pipe: Connection) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler, if forked from it
    parent = multiprocessing.parent_process()
    if parent is not None:  # exits if the parent is killed
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    while (order := pipe.recv()) is not None:
        job, log, command, plugins = cast(tuple[Job, str, str | None, tuple[str, ...]], order)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(file, number)  # redirects what is written below Python, too
            cast(Any, stream).reconfigure(line_buffering=True)
        os.close(file)

        def announce(text: str, name: str = job.name) -> None:
            print_status(name, text)
            pipe.send(text)

        try:
            load_plugins(plugins)
            with running(command):
                pipe.send(job.run(announce))
        except KeyboardInterrupt:  # SIGTERM; the training has been saved
            sys.exit(128 + signal.SIGTERM)
