"""The report in a real browser: headless Chromium, as Debian packages it, driven by Selenium."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noiseproof.lab.report.page import report
from tests.test_report import EVIL, analysed_runs

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("NO BROWSER: chromium and chromedriver are missing, the page is NOT tested")
    selenium = pytest.importorskip("selenium", reason="NO SELENIUM: the page is NOT tested")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER, env=dict(os.environ)))
    driver.get("about:blank")  # else the new-tab page still loads parts of itself
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return report(analysed_runs(folder, parts=("geometry", "theory")), folder)


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    """The page, freshly loaded at 1280 px in the light theme, with empty storage."""
    _show(browser, width=1280)
    browser.get_log("performance")
    browser.get(page.as_uri())
    browser.execute_script("try { localStorage.clear() } catch {}")
    browser.get("about:blank")  # a second visit to the same address can return before it loads
    browser.get_log("browser")
    browser.get(page.as_uri())
    deadline = time.monotonic() + 30  # on a busy machine the script may run after `get` returns
    while not _all(browser, "#confusion td") and time.monotonic() < deadline:
        time.sleep(0.05)
    return browser


def _show(browser: Any, *, width: int = 1280, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def _all(browser: Any, css: str, script: str = "e => e.textContent") -> list[Any]:
    return browser.execute_script(
        f"return [...document.querySelectorAll(arguments[0])].map({script})", css
    )


def _slide(browser: Any, level: int) -> None:
    browser.execute_script(
        "const s = document.getElementById('level'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        level,
    )


def test_nothing_is_written_to_the_console_and_no_request_leaves_the_page(opened: Any):
    _slide(opened, 1)
    assert opened.get_log("browser") == []
    events = [json.loads(e["message"])["message"] for e in opened.get_log("performance")]
    sent = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert sent  # the page itself: the log works
    assert [url for url in sent if not url.startswith(("file:", "data:"))] == []
    assert {url for url in sent if url.startswith("file:")} == {opened.current_url}
    fetched = opened.execute_script("return performance.getEntriesByType('resource').length")
    assert fetched == 0 or all(url.startswith(("file:", "data:")) for url in sent)


def test_every_image_is_drawn(opened: Any):
    broken = "e => e.complete && e.naturalWidth > 0"
    drawn = _all(opened, "img", broken)
    assert len(drawn) > 10
    assert all(drawn)


def test_the_slider_changes_images_and_predictions(opened: Any):
    def state() -> tuple[str, list[str], list[str], list[str]]:
        title = _all(opened, "#level-name")[0]
        images = _all(opened, ".card img", "e => e.src")
        return title, images, _all(opened, ".card li"), _all(opened, "#scores li")

    _slide(opened, 0)
    clean = state()
    _slide(opened, 2)
    noisy = state()
    assert (clean[0], noisy[0]) == ("clean", "σ=0.4")
    assert len(clean[1]) == 8
    assert all(a != b for a, b in zip(clean[1], noisy[1], strict=True))
    assert clean[2] != noisy[2]
    assert clean[3] != noisy[3]
    _slide(opened, 0)
    assert state() == clean


def test_another_family_of_perturbations_can_be_chosen(opened: Any):
    opened.execute_script(
        "const f = document.getElementById('family'); f.value = 1;"
        "f.dispatchEvent(new Event('change'))"
    )
    assert _all(opened, "#level-name") == ["stripes 2×1"]
    assert _all(opened, "#level", "e => e.max") == ["1"]


def test_a_click_on_a_header_sorts_the_table_both_ways(opened: Any):
    def column() -> list[float]:
        cells = "#results table tbody tr td:nth-child(3)"
        return _all(opened, cells, "e => Number(e.dataset.value)")[:2]

    button = opened.find_elements("css selector", "#results table th button")[2]
    button.click()
    assert column() == sorted(column(), reverse=True)
    assert _all(opened, "#results th[aria-sort=descending]") == ["σ=0.2"]
    button.click()
    assert column() == sorted(column())
    assert column()[0] != column()[1]
    button = opened.find_elements("css selector", "#results table th button")[0]
    button.click()
    assert _all(opened, "#results table tbody tr th")[:2] == ["normal", "both"]


def test_the_confusion_follows_the_selectors(opened: Any):
    before = _all(opened, "#confusion td")
    opened.execute_script(
        "const s = document.getElementById('subject'); s.value = 0;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert _all(opened, "#confused-label")[0].startswith("normal, ")
    assert len(before) == 100
    assert before != _all(opened, "#confusion td")
    assert len(_all(opened, "#recall .dot")) == 20


def test_both_colour_schemes_render_and_the_button_switches(opened: Any):
    look = "return getComputedStyle(document.body).backgroundColor"
    shown = "e => getComputedStyle(e).display"
    light = opened.execute_script(look)
    assert set(_all(opened, "figure .on-light", shown)) == {"block"}
    assert set(_all(opened, "figure .on-dark", shown)) == {"none"}
    _show(opened, scheme="dark")
    dark = opened.execute_script(look)
    assert dark != light
    assert set(_all(opened, "figure .on-dark", shown)) == {"block"}
    assert set(_all(opened, "figure .on-light", shown)) == {"none"}
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == light
    assert set(_all(opened, "figure .on-light", shown)) == {"block"}
    _show(opened, scheme="light")
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == dark
    assert set(_all(opened, "figure .on-dark", shown)) == {"block"}


def test_a_class_named_as_markup_shows_as_text(opened: Any):
    assert EVIL[0] in _all(opened, ".card header b")
    assert EVIL[1] in _all(opened, "#confusion th")
    assert len(_all(opened, "script")) == 2
    assert _all(opened, "img[src='x']") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_does_not_scroll_sideways(opened: Any, width: int):
    _show(opened, width=width)
    root = "return document.documentElement"
    assert opened.execute_script(f"{root}.scrollWidth") == opened.execute_script(
        f"{root}.clientWidth"  # the window less its scroll bar
    )


def test_the_printed_page_is_light_and_whole(opened: Any):
    _show(opened, scheme="dark")
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    look = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    shown = set(_all(opened, "figure .on-light", "e => getComputedStyle(e).display"))
    hidden = set(_all(opened, "#theme", "e => getComputedStyle(e).display"))
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert look == "rgb(253, 253, 251)"
    assert (shown, hidden) == ({"block"}, {"none"})
