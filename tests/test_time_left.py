"""How long the rest of a comparison takes, by a clock that the test sets."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from noiseproof.lab.comparison import workers
from noiseproof.lab.comparison.jobs import ComparisonJob, JobResult
from noiseproof.lab.comparison.time_left import TimeLeft
from noiseproof.lab.config import Config, Method, Optim, Run
from noiseproof.lab.console import LiveBars, all_jobs
from noiseproof.lab.training.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def jobs(folder: Path) -> list[ComparisonJob]:
    """Two trainings of ten epochs with one and with two views of each image."""
    base = Config(optim=Optim(epochs=10))
    configs = [
        replace(base, method=Method(method), run=Run(output=str(folder), name=method))
        for method in ("normal", "both")
    ]
    return [ComparisonJob(config, ("clean",), 1, ("last",)) for config in configs]


def trained(folder: Path, name: str, epochs: int) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "metrics.csv").write_text("epoch\n" + "1\n" * epochs)


def test_the_time_left_follows_epochs_views_and_what_came_after_a_training(tmp_path: Path):
    clock = Clock()
    left = TimeLeft(jobs(tmp_path), 1, clock)
    left.start("normal")
    assert (left.seconds(), left.share()) == (None, 0.0)
    assert left.describe() == "0 of 2 runs done"
    trained(tmp_path, "normal", 5)
    clock.now = 50.0  # ten seconds per view and epoch: 50 s of training left, then 200, each + 30 %
    assert left.seconds() == 50 + 30 + 200 + 60
    trained(tmp_path, "normal", 10)
    clock.now = 100.0
    assert left.seconds() == 30 + 200 + 60
    clock.now = 140.0
    left.end("normal")  # 40 s after its training, which the other will take as well
    assert left.seconds() == 200 + 40
    assert left.share() == 140 / 380
    assert left.describe() == "1 of 2 runs done, about 4 min left for all"
    left.start("both")
    left.end("both")
    assert left.seconds() == 0


def test_a_run_that_is_already_trained_takes_only_what_follows(tmp_path: Path):
    clock, both = Clock(), jobs(tmp_path)
    for job in both:
        trained(tmp_path, job.name, 10)
    left = TimeLeft(both, 2, clock)
    left.start("normal")
    left.start("both")
    clock.now = 8.0
    left.end("normal")
    clock.now = 9.0
    assert left.seconds() == 0  # `both` should be done already


def test_the_live_view_shows_every_run_and_a_bar_for_all(tmp_path: Path):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    queue = jobs(tmp_path)
    console.print(workers._overview([], queue, TimeLeft(queue, 1)))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "both: waiting" in text
    assert "━" in text
    assert "0 of 2 runs done" in text


def test_runs_one_at_a_time_show_the_bar_for_all_below_their_own(tmp_path: Path, monkeypatch):
    shown: list[str] = []

    def run(self: ComparisonJob, *_: object) -> JobResult:
        trained(tmp_path, self.name, 5)
        console = Console(file=io.StringIO(), width=80, force_terminal=True)
        for bars in (Progress(self.config).bar, LiveBars()):  # of the training, and what follows
            console.print(*bars.get_renderables())
        shown.append(console.file.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
        return JobResult("done", "", 1.0)

    monkeypatch.setattr(ComparisonJob, "run", run)
    queue = jobs(tmp_path)
    datasets: Any = {job.config.data: None for job in queue}
    workers.run_jobs(queue, 1, tmp_path, Console(file=io.StringIO()), datasets)
    assert [text.count(f"{i} of 2 runs done, about") for i, text in enumerate(shown)] == [2, 2]
    assert "runs done" not in str(list(LiveBars().get_renderables()))


def test_a_bar_that_remains_does_not_show_the_other_runs():
    token = all_jobs.set(lambda: "0 of 2 runs done")
    try:
        bars = LiveBars(console=Console(file=io.StringIO()))
    finally:
        all_jobs.reset(token)
    assert "0 of 2 runs done" in bars.get_renderables()
    bars.stop()
    assert "0 of 2 runs done" not in bars.get_renderables()
