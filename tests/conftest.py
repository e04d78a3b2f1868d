"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from noiseproof.lab import plugins
from noiseproof.lab.report.figure_files import FigureWriter, ReportFigure
from noiseproof.perturb.text import REGISTERED
from tests.browser import start_browser


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Perturbations that a test registers, or runs a plugin for, are its own."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_installed", set())
    yield
    REGISTERED.clear()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium with a fresh profile; skips the test if there is none."""
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a report's words: its figures are not drawn, which takes most of the time."""

    def embed(_: FigureWriter, figure: ReportFigure) -> dict[str, Any]:
        texts = {"name": figure.name, "alt": figure.plain_alt, "caption": figure.caption}
        return {
            **texts,
            "light": "data:,",
            "dark": "data:,",
            "narrow": None,
            "width": 1,
            "height": 1,
        }

    monkeypatch.setattr(FigureWriter, "embed", embed)
    monkeypatch.setattr(FigureWriter, "write", lambda *_: None)  # those that are files alone
