"""Many runs, made one at a time here or several at a time in processes of their own.

A job is one run: trained unless it is finished already, continued where it stopped, evaluated, and
whatever else its kind asks for; `Task` is that of a comparison.
Whatever goes wrong with it becomes its outcome, and the other jobs go on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from noiseproof.lab.analysis.analyse import analyse, comparison_scope
from noiseproof.lab.command import current_command, running
from noiseproof.lab.config import Config, run_name
from noiseproof.lab.console import print_status
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.runs import RunFolder, Weights, changed_settings
from noiseproof.lab.training.train import Diverged, train
from noiseproof.objectives import METHODS

__all__ = ["Announce", "Job", "Outcome", "Task", "attempt", "cores", "cost", "ending",
           "evaluated", "finished", "in_processes", "status"]  # fmt: skip


Announce = Callable[[str], object]  # called with a line of text when a stage begins


class Outcome(NamedTuple):
    """How one run ended; `seconds` is the time it took here, training and evaluation."""

    status: Literal["done", "diverged", "failed"]
    message: str
    seconds: float


class Job(Protocol):
    """What a worker process takes: picklable, with a name of its own."""

    @property
    def name(self) -> str: ...

    def work(self, announce: Announce, dataset: Dataset | None = None) -> Outcome: ...


class Task(NamedTuple):
    """One run to make, and how it is evaluated."""

    config: Config
    perturbations: tuple[str, ...]
    draws: int
    noise_seed: int
    weights: tuple[Weights, ...]
    analysed: bool = False  # also measure why: curvature, geometry, bounds

    @property
    def name(self) -> str:
        return run_name(self.config)

    @property
    def path(self) -> Path:
        return Path(self.config.run.output) / self.name

    def work(self, announce: Announce, dataset: Dataset | None = None) -> Outcome:
        return attempt(self.config, lambda: self._made(announce, dataset))

    def _made(self, announce: Announce, dataset: Dataset | None) -> None:
        if finished(self.config):
            announce("trained before")
            run = RunFolder.open(self.path)
        else:
            epochs = self.config.optim.epochs
            announce(f"training, {epochs} epoch{'s' if epochs > 1 else ''}")
            run = train(self.config)
        dataset = run.dataset(dataset)  # once for both stages
        announce(
            f"evaluating on {dataset.test.count:,} test images: {len(self.perturbations)} "
            f"perturbations, {self.draws} draws of each random one, {' and '.join(self.weights)} "
            "weights"
        )
        evaluated(self, run, self.weights, dataset)
        if self.analysed:
            scope = comparison_scope(dataset.size)
            announce(f"analysing {scope.describe(dataset.test.count)}")
            device = self.config.run.device
            analyse(run, samples=scope.samples, parts=scope.parts, device=device, dataset=dataset)


def finished(config: Config) -> bool:
    """Whether the run is there and done; ValueError if what is there was made by other settings."""
    path = Path(config.run.output) / run_name(config)
    if not (path / "config.json").is_file():
        return False
    run = RunFolder.open(path)
    if found := changed_settings(run.config, config):
        raise ValueError(
            f"{path} was made with other settings than are asked for: {'; '.join(found)}; "
            "give another --output or --name, or delete that folder"
        )
    return run.finished


def cores() -> int:
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def cost(config: Config) -> int:
    """Relative length of a training, in images through the network: the longest start first."""
    return config.optim.epochs * METHODS[config.method.method].num_views


def attempt(config: Config, make: Callable[[], object]) -> Outcome:
    """Makes the run (trains, continues or finds it, and evaluates); errors become an outcome."""
    start = time.perf_counter()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if torch.cuda.is_available():
        torch.compiler.reset()  # else the runs of one process add up to the compiler's limit
    try:
        make()
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
    """The body of a worker process: does job after job, the output of each in a log file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    parent = multiprocessing.parent_process()
    if parent is not None:  # a parent that is killed leaves nobody to end us
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    while (order := orders.recv()) is not None:
        job, log, command = order
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(file, number)  # also what is written below Python
            cast(Any, stream).reconfigure(line_buffering=True)
        os.close(file)

        def announce(text: str, name: str = job.name) -> None:
            print_status(name, text)
            orders.send(text)

        try:
            with running(command):
                orders.send(job.work(announce))
        except KeyboardInterrupt:  # asked to stop by SIGTERM, and the training is saved
            sys.exit(128 + signal.SIGTERM)


class _Worker:
    """A process that takes one job at a time; importing torch is paid once for all its jobs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon: it may have loader processes of its own.
        self.process = context.Process(target=_child, args=(theirs,))
        self.process.start()
        theirs.close()
        self.name, self.log, self.start, self.stage = "", Path(), 0.0, ""  # of the job in hand

    def begin(self, job: Job, log: Path) -> None:
        self.name, self.log, self.start, self.stage = job.name, log, time.perf_counter(), ""
        self.pipe.send((job, str(log), current_command()))

    def outcome(self, out: Console) -> Outcome | None:
        """How the job ended, or None while it goes on; stages that have begun are printed."""
        try:
            while self.pipe.poll():
                message: str | Outcome = self.pipe.recv()
                if isinstance(message, Outcome):
                    return message
                self.stage = message
                if not out.is_terminal:
                    out.print(f"{self.name}: {message}", markup=False, highlight=False)
        except (EOFError, ConnectionError):  # it died without a word: killed, or out of memory
            self.process.join()
            message = f"the process ended with exit code {self.process.exitcode}; see {self.log}"
            return Outcome("failed", message, time.perf_counter() - self.start)
        return None

    def line(self) -> str:
        """The job in hand and its stage."""
        return f"{self.name}: {time.perf_counter() - self.start:.0f} s  {self.stage}"


def in_processes(todo: Sequence[Job], jobs: int, folder: Path, out: Console) -> dict[str, Outcome]:
    """The outcomes by name, `jobs` at a time in processes of their own; logs go to FOLDER/logs."""
    with _openmp(max(1, cores() // jobs)):
        return _in_processes(todo, jobs, folder, out)


@contextlib.contextmanager
def _openmp(threads: int) -> Iterator[None]:
    """Processes started inside have so many threads from the beginning, unless the user has said
    how many: a library that torch calls on ARM heeds nothing else."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(threads)
    try:
        yield
    finally:
        del os.environ[name]


def _in_processes(todo: Sequence[Job], jobs: int, folder: Path, out: Console) -> dict[str, Outcome]:
    (folder / "logs").mkdir(exist_ok=True)
    queue, outcomes = list(todo), dict[str, Outcome]()
    busy: list[_Worker] = []
    idle = [_Worker() for _ in range(jobs)]
    with Live(console=out, auto_refresh=False, transient=True) as live:
        try:
            while queue or busy:
                while queue and len(busy) < jobs:
                    worker, job = idle.pop() if idle else _Worker(), queue.pop(0)
                    busy.append(worker)
                    worker.begin(job, folder / "logs" / f"{job.name}.log")
                    if not out.is_terminal:
                        out.print(f"{job.name}: started, log in {worker.log}", markup=False)
                wait([worker.pipe for worker in busy], timeout=0.5)
                for worker in list(busy):
                    if outcome := worker.outcome(out):
                        busy.remove(worker)
                        if outcome.status == "failed":  # a fault of the GPU stays in a process
                            worker.process.terminate()
                        elif worker.process.is_alive():
                            idle.append(worker)
                        outcomes[worker.name] = outcome
                        out.print(ending(worker.name, outcome), markup=False)
                if out.is_terminal:
                    lines = [w.line() for w in busy] + [f"{job.name}: waiting" for job in queue]
                    text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
                    live.update(text, refresh=True)
        finally:
            for worker in idle:
                with contextlib.suppress(OSError):  # it is gone already
                    worker.pipe.send(None)  # ends by itself, with its loader's processes
            for worker in busy:
                worker.process.terminate()
            for worker in (*busy, *idle):
                worker.process.join(5)
                if worker.process.is_alive():
                    worker.process.kill()
    return outcomes


def ending(name: str, outcome: Outcome) -> str:
    if outcome.status == "done":
        return f"{name}: done in {outcome.seconds:.1f} s"
    return f"{name}: {outcome.status} after {outcome.seconds:.1f} s: {outcome.message}"


def status(outcomes: Mapping[str, Outcome], out: Console) -> int:
    """The exit status (0: all well; 3: some diverged; 1: some failed), and a line for each bad."""
    bad = {name: o for name, o in outcomes.items() if o.status != "done"}
    if not bad:
        return 0
    out.print(f"{len(bad)} of {len(outcomes)} runs are not in the table:", markup=False)
    for name, outcome in bad.items():
        out.print(f"  {ending(name, outcome)}", markup=False)
    return 3 if all(o.status == "diverged" for o in bad.values()) else 1


def evaluated(
    task: Task,
    run: RunFolder,
    weights: Sequence[Weights],
    dataset: Dataset | None,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    device, noise = task.config.run.device, task.noise_seed
    return evaluate(
        run, task.perturbations, draws=task.draws, weights=weights, noise_seed=noise,
        device=device, dataset=dataset, progress=progress,
    )  # fmt: skip
