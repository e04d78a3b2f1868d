"""A training that is asked to stop ends where it can be continued, and not in the middle of a step.

Ctrl-C, and the SIGTERM that a scheduler sends before it takes a machine away, are noted; the
training loop looks at `asked` after every stride, saves, and raises KeyboardInterrupt. Whoever does
not want to wait for that asks a second time.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Stop", "terminable"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside the block the signals set `asked`, and `say` gets a line; the second one interrupts.

    A signal that is ignored stays so. Outside the main thread Python has no signals, and nothing
    happens.
    """

    def __init__(self, say: Callable[[str], None]):
        self.asked = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with contextlib.suppress(RuntimeError):  # it came while something else was being printed
            self._say("stopping as soon as a checkpoint is written; once more to stop at once")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside the block SIGTERM is an interrupt like Ctrl-C, so that what is begun is cleared up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
