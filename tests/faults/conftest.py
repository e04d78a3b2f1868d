"""Commands that can be interrupted, even if the tests were started in the background."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def ctrl_c():
    """Shells ignore Ctrl-C in the background, and commands would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
