"""Output on a terminal and in a log: status lines about a run, progress bars, time estimates."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_TIMED = 1.0  # seconds of work from which the rest is extrapolated
_LONG = 60.0  # seconds; shorter work is not announced
_PAUSE = 10.0  # minimum seconds between two log lines of a task; grows to a tenth of its duration
# Draws the progress of all jobs, while one of them runs in this process.
all_jobs: ContextVar[Callable[[], RenderableType] | None] = ContextVar("all_jobs", default=None)


def printable(text: str) -> str:
    """`text` on one line, without control characters, which a terminal might execute."""
    return "".join(c if c.isprintable() else " " for c in text)


def terminal() -> Console:
    """The console for tables: as wide as the terminal; lines in a file or pipe do not wrap."""
    return Console() if sys.stdout.isatty() else Console(width=250)


def print_plain(console: Console, text: str) -> None:
    """Prints text as it is: without markup, colours or line breaks of rich's own."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_status(name: str, text: str, bar: Bar | None = None) -> None:
    """Prints a line about a run to standard error.

    Args:
        name: of the run.
        text: what is happening to it.
        bar: a progress bar that is being shown; the line is printed above it.
    """
    line = f"{name}: {text}"
    if bar is not None and not bar.disable:
        print_plain(bar.console, line)
    else:
        # With its end, so that an interrupt cannot come between them
        print(f"{line}\n", end="", file=sys.stderr, flush=True)


def approximate_duration(seconds: float) -> str:
    """An estimated time, rounded.

    >>> [approximate_duration(seconds) for seconds in (12.3, 89, 200, 9000)]
    ['about 12 s', 'about 89 s', 'about 3 min', 'about 2.5 h']
    """
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


class TimeEstimate:
    """Announces once, early on, how long some work will take, if that is a minute or more.

    The first piece of work is not timed: it includes start-up costs.

    Args:
        total: the amount of work, in any unit.
        announce: called with the estimated seconds.
    """

    def __init__(self, total: float, announce: Callable[[float], object]):
        self.total, self.announce = total, announce
        self._done, self._announced = 0.0, False
        self._start: float | None = None

    def advance(self, amount: float) -> None:
        """Counts a finished piece of work of this size."""
        now = time.monotonic()
        if self._start is None:
            self._start, self.total = now, self.total - amount
            return
        self._done += amount
        elapsed = now - self._start
        if self._announced or elapsed < _TIMED:
            return
        self._announced = True
        if (seconds := elapsed / self._done * self.total) >= _LONG:
            self.announce(seconds)


class LiveBars(Bar):
    """Progress bars and, below them, the progress of the jobs that their work is a part of."""

    def __init__(self, *columns: Any, **options: Any):
        self._all_jobs = all_jobs.get()  # a thread draws them, which has no context
        # Twice a second: the files of all jobs are read each time.
        super().__init__(*columns, refresh_per_second=2, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self._all_jobs is not None:
            yield self._all_jobs()

    def stop(self) -> None:
        self._all_jobs = None  # a bar that remains says nothing about other jobs
        super().stop()


class _LogProgress(Bar):
    """Progress as occasional lines in a log; none for tasks that finish within seconds."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self._start = self._last_line = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_if_due(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_if_due(task_id)

    def _print_if_due(self, task_id: TaskID) -> None:
        task, now = self._tasks[task_id], time.monotonic()
        pause = max(_PAUSE, 0.1 * (now - self._start))
        if now - self._last_line >= pause and not task.finished:
            self._last_line = now
            print(f"{task.description}  {task.percentage:.0f} %", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bars(show: bool | None) -> Iterator[Bar]:
    """Progress bars on standard error, removed at the end.

    Args:
        show: True or False; None shows bars on a terminal and occasional lines elsewhere.
    """
    console = Console(stderr=True)
    if show is None and not console.is_terminal:
        yield _LogProgress()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with LiveBars(*columns, console=console, disable=show is False, transient=True) as bar:
        yield bar
