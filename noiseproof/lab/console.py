"""What is said on a terminal and in a log: lines about a run, bars, foretold times.

On a terminal a task has a bar; in a log it says every few seconds how far it is.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Pace", "lasting", "note", "printable", "task_bars", "terminal"]

_TIMED = 1.0  # seconds of work that tell how long the rest should take
_LONG = 60.0  # seconds from which a person is told beforehand
_PAUSE = 10.0  # seconds between two lines of a task, at least, and a tenth of what it has lasted


def printable(text: str) -> str:
    """`text` on one line, with control characters (which could drive a terminal) taken out."""
    return "".join(c if c.isprintable() else " " for c in text)


def terminal() -> Console:
    """Where tables are printed: as wide as the terminal, and unbroken lines in a file or pipe."""
    return Console() if sys.stdout.isatty() else Console(width=250)


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
