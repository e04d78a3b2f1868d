"""Jobs: one training each, and what follows it.

A job trains a run unless it is finished, resumes it where it stopped, evaluates it, and may do
more; `ComparisonJob` is that of a comparison. An error becomes the result of its job, and the other
jobs continue.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console

from noiseproof.lab.analysis.analyse import analyse, comparison_scope
from noiseproof.lab.config import Config, run_name, run_path
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.duplicates import Leak
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.files import describe
from noiseproof.lab.plugins import raised_by
from noiseproof.lab.runs import RunFolder, Weights, changed_settings
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.interrupt import raise_if_interrupted
from noiseproof.lab.training.train import train

Announce = Callable[[str], object]  # called with a line of text when a stage begins


class JobResult(NamedTuple):
    """How a job ended."""

    status: Literal["done", "diverged", "failed"]
    message: str  # of the error
    seconds: float  # of this call, for training, evaluation and analysis

    def describe(self, name: str) -> str:
        """A line about the job called `name`."""
        if self.status == "done":
            return f"{name}: done in {self.seconds:.1f} s"
        return f"{name}: {self.status} after {self.seconds:.1f} s: {self.message}"


@dataclass(frozen=True)
class Job(ABC):
    """A training and what follows it. Jobs are sent to worker processes by pickle."""

    config: Config

    @property
    def name(self) -> str:
        return run_name(self.config)

    def run(self, announce: Announce, dataset: Dataset | None = None) -> JobResult:
        """Does the work; an error becomes the result.

        Args:
            announce: called with a line of text when a stage begins.
            dataset: the data, if the caller has loaded it already.
        """
        start = time.perf_counter()
        if self.config.run.threads:
            torch.set_num_threads(self.config.run.threads)
        if torch.cuda.is_available():
            torch.compiler.reset()  # else runs in one process would add up to the compiler's limit
        try:
            self._work(announce, dataset)
            status, message = "done", ""
        except Diverged as error:
            status, message = "diverged", str(error)
        except Exception as error:
            raise_if_interrupted(error)
            status, message = "failed", str(error)
            if own := raised_by(error):
                message = own
            elif isinstance(error, OSError):
                message = describe(error)
            elif not isinstance(error, ValueError):  # a bug: the log needs more
                traceback.print_exc()
                message = f"{type(error).__name__}: {error}"
        return JobResult(status, message, time.perf_counter() - start)

    @abstractmethod
    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        """Does what has not been done before; arguments as for `run`."""


@dataclass(frozen=True)
class ComparisonJob(Job):
    """One run of a comparison: training, evaluation, analysis."""

    perturbations: tuple[str, ...]
    draws: int
    weights: tuple[Weights, ...]
    analyse: bool = False  # also measure curvature, geometry and bounds
    leaks: tuple[Leak, ...] = ()  # what the splits of the data share

    @property
    def path(self) -> Path:
        return run_path(self.config)

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        if is_finished(self.config):
            announce("already trained")
            run = RunFolder.open(self.path)
        else:
            epochs = self.config.optim.epochs
            announce(f"training, {epochs} epoch{'s' if epochs > 1 else ''}")
            run = train(self.config, leaks=self.leaks)
        dataset = run.dataset(dataset)
        announce(
            f"evaluating on {dataset.test.count:,} test images: {len(self.perturbations)} "
            f"perturbations, {self.draws} draws of each random one, {' and '.join(self.weights)} "
            "weights"
        )
        self.evaluate(run, self.weights, dataset)
        if self.analyse:
            scope = comparison_scope(dataset.size)
            announce(f"analysing {scope.describe(dataset.test.count)}")
            analyse(
                run,
                samples=scope.samples,
                parts=scope.parts,
                weights=run.default_weights(),
                device=self.config.run.device,
                dataset=dataset,
            )

    def evaluate(
        self,
        run: RunFolder,
        weights: Sequence[Weights],
        dataset: Dataset,
        progress: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The rows of `run` under the perturbations of the comparison; arguments as `evaluate`."""
        options: Any = {"draws": self.draws, "device": self.config.run.device, "progress": progress}
        return evaluate(run, self.perturbations, weights=weights, dataset=dataset, **options)


def is_finished(config: Config) -> bool:
    """Whether the run exists and is finished; ValueError if it has different settings."""
    path = run_path(config)
    if not (path / "config.json").is_file():
        return False
    run = RunFolder.open(path)
    if changes := changed_settings(run.config, config):
        raise ValueError(
            f"{path} was made with different settings: {'; '.join(changes)}; "
            "choose another --output or --name, or delete that folder"
        )
    return run.finished


def exit_status(results: Mapping[str, JobResult], console: Console) -> int:
    """0 if all jobs are done, 3 if some diverged, 1 if some failed; prints those that are not done.

    Args:
        results: the results of the jobs, by name.
        console: where to print.
    """
    unfinished = {name: result for name, result in results.items() if result.status != "done"}
    if not unfinished:
        return 0
    console.print(f"{len(unfinished)} of {len(results)} runs did not finish:", markup=False)
    for name, result in unfinished.items():
        console.print(f"  {result.describe(name)}", markup=False)
    if any(result.status == "failed" for result in unfinished.values()):
        console.print("Repeat the command to continue where they stopped.", markup=False)
    return 3 if all(result.status == "diverged" for result in unfinished.values()) else 1
