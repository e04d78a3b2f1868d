"""The command line being run, so that whatever it writes can record how it was made.

Runs, evaluation rows, analyses and comparisons hold it as "command"; a report prints it. A call
from Python records nothing.

>>> with running("noiseproof evaluate runs/a"):
...     command_record()
{'command': 'noiseproof evaluate runs/a'}
>>> command_record()
{}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_command: ContextVar[str | None] = ContextVar("command", default=None)


@contextlib.contextmanager
def running(command: str | None) -> Iterator[None]:
    """Inside the block, `command` is what gets recorded; None records nothing.

    Args:
        command: the whole line, quoted for a shell.
    """
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def current_command() -> str | None:
    """The command line being run; None in a call from Python."""
    return _command.get()


def command_record() -> dict[str, str]:
    """The current command as an entry for a JSON object; empty in a call from Python."""
    command = current_command()
    return {} if command is None else {"command": command}
