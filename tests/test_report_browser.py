"""The report in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noiseproof.lab.report.page import report
from tests.browser import all_of, show
from tests.test_report import EVIL, analysed_runs


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return report(analysed_runs(folder, parts=("geometry", "theory")), folder)


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page, freshly loaded at 1280 px in the light theme, with empty storage."""
    show(browser, width=1280)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(page.as_uri())
    deadline = time.monotonic() + 30  # on a busy machine the script may run after `get` returns
    while not all_of(browser, "#confusion td") and time.monotonic() < deadline:
        time.sleep(0.05)
    yield browser
    browser.execute_script("try { localStorage.clear() } catch {}")
    browser.get("about:blank")  # a second visit to the same address can return before it loads


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
    drawn = all_of(opened, "img", broken)
    assert len(drawn) > 10
    assert all(drawn)


def test_the_slider_changes_images_and_predictions(opened: Any):
    def state() -> tuple[str, list[str], list[str], list[str]]:
        title = all_of(opened, "#level-name")[0]
        images = all_of(opened, ".card img", "e => e.src")
        return title, images, all_of(opened, ".card li"), all_of(opened, "#scores li")

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


def test_long_names_of_classes_leave_images_their_size_and_tables_on_a_phone(opened: Any):
    lengthen = "e => (e.textContent = 'x'.repeat(60), 1)"
    all_of(opened, ".card header b", lengthen)
    width = "e => e.getBoundingClientRect().width"
    assert set(all_of(opened, ".pixelated .card img", width)) == {96}
    show(opened, width=390)
    all_of(opened, ".card .says", lengthen)
    lines = "e => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight)"
    assert set(map(round, all_of(opened, ".card .name", lines))) == {1}  # not norma-l
    assert all_of(opened, "#weakest td:first-child", lengthen)
    assert all_of(opened, "#weakest .scroll", "e => e.scrollWidth <= e.clientWidth") == [True]


def test_another_family_of_perturbations_can_be_chosen(opened: Any):
    opened.execute_script(
        "const f = document.getElementById('family'); f.value = 1;"
        "f.dispatchEvent(new Event('change'))"
    )
    assert all_of(opened, "#level-name") == ["stripes 2×1"]
    assert all_of(opened, "#level", "e => e.max") == ["1"]


def test_a_click_on_a_header_sorts_the_table_both_ways(opened: Any):
    def column() -> list[float]:
        cells = "#results table tbody tr td:nth-child(3)"
        return all_of(opened, cells, "e => Number(e.dataset.value)")[:2]

    button = opened.find_elements("css selector", "#results table th button")[2]
    button.click()
    assert column() == sorted(column(), reverse=True)
    assert all_of(opened, "#results th[aria-sort=descending]") == ["σ=0.2"]
    button.click()
    assert column() == sorted(column())
    assert column()[0] != column()[1]
    button = opened.find_elements("css selector", "#results table th button")[0]
    button.click()
    assert all_of(opened, "#results table tbody tr th")[:2] == ["normal", "both"]


def test_the_confusion_follows_the_selectors(opened: Any):
    before = all_of(opened, "#confusion td")
    opened.execute_script(
        "const s = document.getElementById('subject'); s.value = 0;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert all_of(opened, "#confused-label")[0].startswith("normal, ")
    assert len(before) == 100
    assert before != all_of(opened, "#confusion td")
    assert len(all_of(opened, "#recall .dot")) == 20


def test_both_colour_schemes_render_and_the_button_switches(opened: Any):
    look = "return getComputedStyle(document.body).backgroundColor"
    shown = "e => getComputedStyle(e).display"
    light = opened.execute_script(look)
    assert set(all_of(opened, "figure .on-light", shown)) == {"block"}
    assert set(all_of(opened, "figure .on-dark", shown)) == {"none"}
    show(opened, scheme="dark")
    dark = opened.execute_script(look)
    assert dark != light
    assert set(all_of(opened, "figure .on-dark", shown)) == {"block"}
    assert set(all_of(opened, "figure .on-light", shown)) == {"none"}
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == light
    assert set(all_of(opened, "figure .on-light", shown)) == {"block"}
    show(opened, scheme="light")
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == dark
    assert set(all_of(opened, "figure .on-dark", shown)) == {"block"}


def test_a_class_named_as_markup_shows_as_text(opened: Any):
    assert EVIL[0] in all_of(opened, ".card header b")
    assert EVIL[1] in all_of(opened, "#confusion th")
    assert len(all_of(opened, "script")) == 2
    assert all_of(opened, "img[src='x']") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_does_not_scroll_sideways(opened: Any, width: int):
    show(opened, width=width)
    root = "return document.documentElement"
    assert opened.execute_script(f"{root}.scrollWidth") == opened.execute_script(
        f"{root}.clientWidth"  # the window less its scroll bar
    )


def test_why_is_folded_and_opens_where_a_link_leads_into_it(opened: Any):
    shown = "e => e.checkVisibility({contentVisibilityAuto: true})"
    assert all_of(opened, "#results table, #weakest table, #cards", shown) == [True] * 3
    assert all_of(opened, "#geometry", shown) == [False]
    opened.execute_script("location.hash = 'geometry'")
    deadline = time.monotonic() + 10
    while not all_of(opened, "#geometry", shown)[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all_of(opened, "#geometry", shown) == [True]


def test_a_phone_gets_figures_that_fit(opened: Any):
    show(opened, width=390)
    opened.execute_script("document.getElementById('why').open = true")
    widths = all_of(
        opened, "figure .on-light img", "e => [e.width, e.closest('.view').scrollWidth]"
    )
    assert len(widths) > 5
    assert all(0 < shown <= 340 and view <= 340 for shown, view in widths)


def test_on_a_phone_the_captions_of_wide_tables_stay_in_view(opened: Any):
    show(opened, width=390)
    opened.execute_script("document.getElementById('why').open = true")
    opened.execute_script("document.querySelectorAll('.scroll').forEach(e => e.scrollLeft = 999)")
    rectangle = "e => { const r = e.getBoundingClientRect(); return [r.left, r.right]; }"
    edges = all_of(opened, ".scroll caption", rectangle)
    assert len(edges) > 3
    assert all(left >= 0 and right <= 390 for left, right in edges)


def test_the_printed_page_is_light_and_whole(opened: Any):
    show(opened, scheme="dark")
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    look = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    shown = set(all_of(opened, "figure .on-light", "e => getComputedStyle(e).display"))
    hidden = set(all_of(opened, "#theme", "e => getComputedStyle(e).display"))
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert look == "rgb(253, 253, 251)"
    assert (shown, hidden) == ({"block"}, {"none"})


BROKEN_WORDS = """e => {
  const walker = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), broken = [];
  for (let node; (node = walker.nextNode()); )
    for (const word of node.data.matchAll(/[\\p{L}\\d.+]+/gu)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  return broken;
}"""


def test_words_numbers_and_names_are_not_broken_in_print(opened: Any):
    show(opened, width=718)  # of A4
    opened.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    lines = all_of(opened, ".results .mean", "e => e.getClientRects().length")
    names = all_of(opened, ".results tbody th", "e => getComputedStyle(e).whiteSpace")
    broken = all_of(opened, "table:not(.plain, .matrix) :is(th, td)", BROKEN_WORDS)
    right = max(all_of(opened, "table", "e => e.getBoundingClientRect().right"))
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert set(lines) == {1}
    assert set(names) == {"nowrap"}
    assert [word for cell in broken for word in cell] == []
    assert right <= 718
