"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from noiseproof.lab import plugins
from noiseproof.perturb.text import REGISTERED


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Perturbations that a test registers, or runs a plugin for, are its own."""
    monkeypatch.setattr(plugins, "_loaded", {})
    yield
    REGISTERED.clear()
