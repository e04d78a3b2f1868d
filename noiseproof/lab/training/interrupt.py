"""How a training stops on Ctrl-C or SIGTERM: after a checkpoint, not in the middle of a step.

The signals (a scheduler sends SIGTERM before it reclaims a machine) set a flag. The training loop
reads it every few dozen steps, saves, and raises KeyboardInterrupt. A second signal interrupts
immediately, unless it comes within a second: under torchrun, a process gets Ctrl-C from the
terminal and again from torchrun.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

_SAME = 1.0  # seconds in which several signals count as one


class StopRequest:
    """Inside the block the first signal sets `received` and calls `notify` with a message; a later
    one raises KeyboardInterrupt.

    Signals that are ignored stay ignored. Outside the main thread, where Python has no signals,
    nothing happens.
    """

    def __init__(
        self,
        notify: Callable[[str], None],
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ):
        self.received, self.interrupted, self._since = False, False, -_SAME
        self._notify, self._signals = notify, signals
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = True, time.monotonic()
            text = "stopping after the next checkpoint; interrupt again to stop immediately"
            with contextlib.suppress(RuntimeError):  # the signal interrupted another print
                self._notify(text)
        elif time.monotonic() - self._since >= _SAME:
            self.interrupted = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A block that a signal interrupts only at its end, for importing libraries that do not survive
    KeyboardInterrupt: triton aborts the process."""
    with StopRequest(lambda _: None) as request:
        yield
    if request.received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """A block in which SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that cleanup runs.

    An error after a signal becomes KeyboardInterrupt, too: a package whose import or function was
    interrupted can catch that and fail in its own way.
    """
    _command.received = True  # so the next signal interrupts immediately
    with _command:
        try:
            yield
        except Exception as error:
            raise_if_interrupted(error)
            raise
        finally:
            _command.interrupted = False


def raise_if_interrupted(error: Exception) -> None:
    """KeyboardInterrupt if a signal has interrupted `signals_as_interrupt`: it caused `error`."""
    if _command.interrupted:
        raise KeyboardInterrupt from error


_command = StopRequest(print)
