"""The progress of a set of jobs, and how long the rest will take.

Trainings are followed by the rows of their metrics.csv, one per epoch. An epoch takes a time in
proportion to the views that a method has of each image; what follows a training (evaluation,
analysis) takes as long as it took for the jobs that are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noiseproof.lab.comparison.jobs import Job
from noiseproof.lab.config import run_path
from noiseproof.lab.console import approximate_duration
from noiseproof.objectives import METHODS

_AFTER = 0.3  # of a training: what follows it, before one was seen


@dataclass
class _Followed:
    """A job with the times at which it started, was trained, and ended."""

    job: Job
    started: float | None = None
    trained: float | None = None
    ended: float | None = None
    resumed: int = 0  # epochs that were trained before it started

    @property
    def total(self) -> int:
        """Epochs of the training."""
        return self.job.config.optim.epochs

    @property
    def epochs(self) -> int:
        """Epochs that are trained."""
        path = run_path(self.job.config) / "metrics.csv"
        rows = path.read_bytes().count(b"\n") - 1 if path.is_file() else 0
        return min(max(0, rows), self.total)

    def work(self, epochs: int) -> int:
        """The work in so many epochs: how often the network sees each training image."""
        return epochs * METHODS[self.job.config.method.method].num_views


class TimeLeft:
    """Follows jobs.

    Args:
        jobs: all of them.
        count: how many run at a time.
        clock: seconds; for tests.
    """

    def __init__(
        self, jobs: Sequence[Job], count: int, clock: Callable[[], float] = time.perf_counter
    ):
        self._jobs = {job.name: _Followed(job) for job in jobs}
        self.count, self._clock, self._start = count, clock, clock()

    def start(self, name: str) -> None:
        """Records that a job starts."""
        job = self._jobs[name]
        job.started, job.resumed = self._clock(), job.epochs

    def end(self, name: str) -> None:
        """Records that a job has ended, whether it succeeded or failed."""
        self._jobs[name].ended = self._clock()

    def seconds(self) -> float | None:
        """The time that is left for all jobs; None before the first epoch of a training."""
        now, paces, afters = self._clock(), [], []
        epochs = {name: job.epochs for name, job in self._jobs.items()}
        for name, job in self._jobs.items():
            if job.started is None:
                continue
            end = job.ended or now
            if job.trained is None and epochs[name] == job.total:
                job.trained = job.started if job.resumed == epochs[name] else end
            if work := job.work(epochs[name] - job.resumed):
                paces.append(((job.trained or end) - job.started) / work)
            if job.ended and job.trained is not None:
                afters.append(job.ended - job.trained)
        unfinished = {name: job for name, job in self._jobs.items() if job.ended is None}
        waiting = {name: job.total - epochs[name] for name, job in unfinished.items()}
        if not paces and any(waiting.values()):
            return None
        pace = sum(paces) / len(paces) if paces else 0.0
        left = []
        for name, job in unfinished.items():
            whole = job.work(job.total) * pace
            after = sum(afters) / len(afters) if afters else _AFTER * whole
            spent = now - job.trained if job.trained is not None else 0.0
            left.append(job.work(waiting[name]) * pace + max(0.0, after - spent))
        return max(sum(left) / self.count, *left) if left else 0.0

    def share(self) -> float:
        """How much of the whole time has passed, from 0 to 1; 0 while that is unknown."""
        left, passed = self.seconds(), self._clock() - self._start
        return 0.0 if left is None else passed / max(1e-9, passed + left)

    def describe(self) -> str:
        """How many jobs are done, and the time that is left."""
        done, left = sum(job.ended is not None for job in self._jobs.values()), self.seconds()
        text = f"{done} of {len(self._jobs)} runs done"
        return text if left is None else f"{text}, {approximate_duration(left)} left for all"
