"""A real browser for tests: headless Chromium, as Debian packages it, driven by Selenium."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,900",
)  # fmt: skip


def start_browser(profile: Path) -> Any:
    """A driver with an empty page; skips the test if there is no browser."""
    if not CHROMIUM or not DRIVER:
        pytest.skip("NO BROWSER: chromium and chromedriver are missing, the page is NOT tested")
    selenium = pytest.importorskip("selenium", reason="NO SELENIUM: the page is NOT tested")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER, env=dict(os.environ)))
    driver.get("about:blank")  # else the new-tab page still loads parts of itself
    return driver


def show(browser: Any, *, width: int = 1280, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def all_of(browser: Any, css: str, script: str = "e => e.textContent") -> list[Any]:
    return browser.execute_script(
        f"return [...document.querySelectorAll(arguments[0])].map({script})", css
    )
