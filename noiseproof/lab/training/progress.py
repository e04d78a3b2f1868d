"""What a person sees while a run is made: a live bar on a terminal, lines elsewhere.

A training has a line an epoch; evaluation and analysis say every few seconds how far they are.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from noiseproof.lab.config import Config, run_name
from noiseproof.lab.evaluation.writers import printable

if TYPE_CHECKING:
    from noiseproof.lab.data.datasets import Dataset
    from noiseproof.lab.training.session import Session

_CLASSES = 8  # so many are named
_TERMS = ("loss", "ce", "compact", "margin", "norm", "noisy", "noisy_ce", "stability")
_TIMED = 1.0  # seconds of work that tell how long the rest should take
_LONG = 60.0  # seconds from which a person is told beforehand
_PAUSE = 10.0  # seconds between two lines of a task, at least, and a tenth of what it has lasted


class Progress:
    """Reports of one run. `wanted`: None shows a bar on terminals, True plain lines, False nothing.

    Ranks other than the first say nothing.
    """

    def __init__(self, first_rank: bool, wanted: bool | None, config: Config):
        self.silent = not first_rank or wanted is False
        self.console = Console(stderr=True)
        self.config, self.name = config, run_name(config)
        self.bar: Bar | None = None
        self.validation = ""
        if not self.silent and wanted is None and sys.stderr.isatty():
            self.bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=self.console,
            )

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=self.config.optim.epochs, facts="")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar:
            self.bar.stop()

    def note(self, text: str) -> None:
        if self.silent:
            return
        line = f"{self.name}: {text}"
        if self.bar:  # above the bar, which a plain print would tear
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def step(self, session: Session, means: dict[str, float]) -> None:
        """Called every few dozen steps with the means of the epoch so far."""
        if not self.bar:
            return
        images = int(means["images"])
        done = session.epoch + session.step / session.loader.steps
        facts = [_terms(means)]
        if session.epoch_seconds > 0:
            facts.insert(0, f"{images / session.epoch_seconds:,.0f} img/s")
        self.bar.update(self.task, completed=done, facts="  ".join([*facts, self.validation]))

    def epoch(self, row: dict[str, Any]) -> None:
        """Called after each epoch with its row of metrics."""
        if "val_accuracy" in row:
            self.validation = f"val {row['val_accuracy']:.2%}"
        if "val_noisy_accuracy" in row:
            self.validation += f"  noisy {row['val_noisy_accuracy']:.2%}"
        if self.silent or self.bar:
            return
        validation = f"  {self.validation}" if self.validation else ""
        self.note(
            f"epoch {row['epoch']}/{self.config.optim.epochs}  {_terms(row)}"
            f"  train {row['train_accuracy']:.2%}{validation}"
            f"  lr {row['lr']:.2g}  {row['images_per_second']:,.0f} img/s"
        )


def counted(data: Dataset) -> str:
    """How many images are for what, where they come from, and the classes."""
    parts = [f"{data.train.count:,} images to train"]
    if data.validation is not None:
        parts.append(f"{data.validation.count:,} to validate ({data.validation_from})")
    source = f" ({data.test_from})" if data.test_from else ""
    names, more = data.classes[:_CLASSES], len(data.classes) - _CLASSES
    classes = printable(", ".join(names)) + (f" and {more} more" if more > 0 else "")
    return f"{', '.join(parts)}, {data.test.count:,} to test{source}; classes {classes}"


def _terms(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {values[name]:.3f}" for name in _TERMS if name in values)


def note(name: str, text: str, bar: Bar | None = None) -> None:
    """A line about a run: what is done with it now; above the bar, where one is shown."""
    line = f"{name}: {text}"
    if bar is not None and not bar.disable:
        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        print(line, file=sys.stderr, flush=True)


def lasting(seconds: float) -> str:
    """A time as a person says it, for what is reckoned and not measured.

    >>> lasting(12.3), lasting(89), lasting(200), lasting(9000)
    ('about 12 s', 'about 89 s', 'about 3 min', 'about 2.5 h')
    """
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


class Pace:
    """Tells once, early on, how long `total` units of work should take, where that is long.

    The first unit of work is not timed: it is not like the others.
    """

    def __init__(self, total: float, tell: Callable[[float], object]):
        self.total, self.tell = total, tell
        self._done, self._told = 0.0, False
        self._began: float | None = None

    def __call__(self, done: float) -> None:
        """Called after every piece of work with its size."""
        now = time.monotonic()
        if self._began is None:
            self._began, self.total = now, self.total - done
            return
        self._done += done
        elapsed = now - self._began
        if self._told or elapsed < _TIMED:
            return
        self._told = True
        if (seconds := elapsed / self._done * self.total) >= _LONG:
            self.tell(seconds)


class _Lines(Bar):
    """Tasks as lines, for logs: one every few seconds, none where all is done sooner."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self._began = self._told = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._perhaps(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._perhaps(task_id)

    def _perhaps(self, task_id: TaskID) -> None:
        task, now = self._tasks[task_id], time.monotonic()
        if now - self._told >= max(_PAUSE, 0.1 * (now - self._began)) and not task.finished:
            self._told = now
            print(f"{task.description}  {task.percentage:.0f} %", file=sys.stderr, flush=True)


@contextlib.contextmanager
def task_bars(wanted: bool | None) -> Iterator[Bar]:
    """Bars for evaluation and analysis; None shows them on a terminal, and lines elsewhere."""
    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield _Lines()
        return
    shown = wanted is not False
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not shown, transient=True) as bar:
        yield bar
