"""Runs jobs on a SLURM cluster: one SLURM job for each, submitted and followed by submitit.

Run folders, logs and submitit's files must be in folders that all nodes share. A job that reaches
its time limit, or is preempted, goes back to the queue and continues from its last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from noiseproof.lab.command import current_command, running
from noiseproof.lab.console import print_plain, print_status
from noiseproof.lab.plugins import load_plugins, loaded_plugins

if TYPE_CHECKING:
    from noiseproof.lab.comparison.jobs import Job, JobResult

_CLUSTER = "slurm"  # submitit's name for it; "local" runs jobs as processes of this machine
_REQUEUES = 100  # after a time limit; a training may need several
_INTERVAL = 1.0  # seconds between looks at the jobs


@dataclass(frozen=True)
class _Task:
    """What a node does; sent to it by pickle."""

    job: Job
    command: str | None
    plugins: tuple[str, ...]

    def __call__(self) -> JobResult:
        load_plugins(self.plugins)
        with running(self.command):
            return self.job.run(partial(print_status, self.job.name))

    def checkpoint(self) -> Any:
        """What submitit puts back into the queue: the same, since a job resumes its run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_on_cluster(
    jobs: Sequence[Job], folder: Path, console: Console, parameters: Mapping[str, Any]
) -> dict[str, JobResult]:
    """Submits all jobs, waits for them, prints how each ended, and returns the results by name.
    If it is interrupted, unfinished jobs are cancelled.

    Args:
        jobs: what to run.
        folder: where submitit keeps its files and logs, in FOLDER/logs/slurm.
        console: where to print.
        parameters: settings of the jobs, as `noiseproof.lab.validate.slurm_parameters` reads them.
    """
    from submitit import AutoExecutor
    from submitit.core.utils import FailedJobError

    logs = folder.absolute() / "logs" / "slurm"
    executor = AutoExecutor(logs, _CLUSTER, slurm_max_num_timeout=_REQUEUES)
    executor.update_parameters(**parameters)
    tasks = [_Task(job, current_command(), loaded_plugins()) for job in jobs]
    start = time.perf_counter()
    results: dict[str, JobResult] = {}
    try:
        submitted = executor.submit_array(tasks)
    except FailedJobError as error:
        raise ValueError(f"sbatch refused the jobs: {error}") from None
    waiting = dict(zip((job.name for job in jobs), submitted, strict=True))
    for name, job in waiting.items():
        print_plain(
            console, f"{name}: submitted as SLURM job {job.job_id}, log in {job.paths.stdout}"
        )
    try:
        states: dict[str, str] = {}
        while waiting:
            for name, job in list(waiting.items()):
                if job.done():
                    results[name] = _result(job, time.perf_counter() - start)
                    del waiting[name]
                    print_plain(console, results[name].describe(name))
                elif (state := job.state) != states.get(name):
                    states[name] = state
                    print_plain(console, f"{name}: {state.lower()}")
            time.sleep(_INTERVAL if waiting else 0)
    finally:
        for job in waiting.values():
            job.cancel(check=False)
        if waiting:
            print_plain(console, f"Cancelled the SLURM jobs of {', '.join(waiting)}")
    return results


def _result(job: Any, seconds: float) -> JobResult:
    """How a job that is over has ended."""
    from submitit.core.utils import UncompletedJobError

    from noiseproof.lab.comparison.jobs import JobResult

    try:
        return job.result()
    except UncompletedJobError:  # killed, out of memory, or it could not start
        message = f"SLURM job {job.job_id} ended as {job.state} without a result"
        return JobResult("failed", f"{message}; see {job.paths.stdout}", seconds)
