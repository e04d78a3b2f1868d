"""The demo: what it computes and, among the long tests, its page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from noiseproof.__main__ import main
from noiseproof.lab.config import Config, Method, Model, Optim, Run
from noiseproof.lab.deploy.demo import DRAWS, Demo, Shown, levels
from noiseproof.lab.evaluation.abstention import threshold_text
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.perturb import parse, register
from noiseproof.robustness import perturb_samples
from tests.browser import all_of, show

EVIL = "<b>zero</b>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    folder, trained = tmp_path_factory.mktemp("demo"), []
    for method in ("normal", "both"):
        config = Config(
            model=Model(feature_dim=16),
            method=Method(method, noise="gaussian:0.3"),
            optim=Optim(epochs=2, batch_size=32),
            run=Run(output=str(folder), name=f"{method}-s0", device="cpu"),
        )
        run = train(config, progress=False)
        run.info["classes"][0] = EVIL
        run.save_config()
        trained.append(run)
    return trained


@pytest.fixture(scope="module")
def demo(runs: list[RunFolder]) -> Demo:
    return Demo([str(run.path) for run in runs], abstain=0.3, device="cpu")


@pytest.mark.parametrize("size", [(1, 8, 8), (3, 40, 32)])
def test_every_level_of_every_kind_can_be_applied(size: tuple[int, int, int]):
    register("tint", lambda x, level: x * (1 - level), levels=(0, 1))
    kinds = levels("digits" if size[0] == 1 else "photos/", size)
    assert len(kinds) == 7 + 15 + 1
    for texts in kinds.values():
        assert texts[0] == "clean"
        assert len(texts) > 4
        assert all(parse(texts[i])(torch.rand(1, *size)).shape == (1, *size) for i in (1, -1))


def test_probabilities_are_means_over_the_draws_of_the_evaluation(demo: Demo):
    shown = demo.examples[3]
    text = demo.levels["Gaussian noise"][4]
    got = demo.probabilities(shown.image, "Gaussian noise")[1][4]
    images = demo.pixels(shown.image).expand(DRAWS, -1, -1, -1)
    noisy = perturb_samples(images, torch.arange(DRAWS), parse(text), 0, 0)
    expected = demo.contestants[1].model.classifier(noisy).softmax(1).mean(0)
    assert torch.allclose(got, expected, atol=1e-6)


def test_the_page_names_answers_truth_and_abstention_and_escapes_them(demo: Demo):
    html = demo.page(demo.examples[0], "Gaussian noise", 0)
    assert "&lt;b&gt;zero&lt;/b&gt;" in html
    assert EVIL not in html
    assert "Probability of the right class" in html
    assert "Answers from" in html
    unsure = demo.page(Shown(demo.examples[0].image, None), "Gaussian noise", 12)
    assert "the answer to the clean image" in unsure
    certain = min(contestant.lowest for contestant in demo.contestants)
    assert 0 < certain < 1
    lowest = demo.contestants[0].lowest
    object.__setattr__(demo.contestants[0], "lowest", 1.0)
    assert "no answer" in demo.page(demo.examples[0], "Gaussian noise", 12)
    object.__setattr__(demo.contestants[0], "lowest", lowest)


def test_the_threshold_of_each_model_is_printed(runs: list[RunFolder], capsys):
    lowest = Demo([str(runs[1].path)], abstain=0.3, device="cpu").contestants[0].lowest
    shown = threshold_text(lowest)
    assert f"both-s0: Answers from a probability of {shown}, chosen on" in capsys.readouterr().out


def test_models_of_other_classes_are_refused(runs: list[RunFolder], tmp_path: Path, capsys):
    other = RunFolder.open(shutil.copytree(runs[1].path, tmp_path / "other"))
    other.info["classes"][3] = "three"
    other.save_config()
    assert main(["demo", str(runs[0].path), str(other.path)]) == 2
    assert "the same classes and image size; those of other differ" in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_models_are_loaded(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert main(["demo", ".", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"--port {port} cannot be used: Address already in use; choose another" in error


@pytest.fixture(scope="module")
def address(runs: list[RunFolder], browser: Any) -> Iterator[str]:
    """The page of the command, in a process of its own: gradio warns, and leaves loops open."""
    folders = [str(run.path) for run in runs]
    command = [sys.executable, "-m", "noiseproof", "demo", *folders, "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        found = next(filter(None, (re.search(r"The demo is at (\S+)", line) for line in lines)))
        yield found[1]
        process.send_signal(signal.SIGINT)
    assert process.returncode in (0, 130)


@pytest.fixture
def opened(browser: Any, address: str) -> Any:
    show(browser, width=1280)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(address)
    wait(lambda: len(all_of(browser, ".np-card")) == 2)
    wait(lambda: len(all_of(browser, "#np-gallery button.thumbnail-item")) == 12)
    return browser


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the page did not change in 30 s"
        time.sleep(0.05)


def heading(page: Any) -> str:
    return all_of(page, "#np-heading")[0]


@pytest.mark.long
def test_nothing_but_this_machine_is_contacted(opened: Any, address: str):
    assert address.startswith("http://127.0.0.1:")
    assert opened.get_log("browser") == []
    events = [json.loads(e["message"])["message"] for e in opened.get_log("performance")]
    sent = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert address in sent
    assert [url for url in sent if not url.startswith((address, "data:"))] == []


@pytest.mark.long
def test_image_perturbation_and_level_can_be_chosen(opened: Any):
    assert heading(opened) == "σ=0.2"
    picture = all_of(opened, ".np-image img", "e => e.src")
    opened.find_elements("css selector", "#np-gallery button.thumbnail-item")[5].click()
    wait(lambda: all_of(opened, ".np-image span") == ["class: 5"])
    assert all_of(opened, ".np-image img", "e => e.src") != picture
    curves = all_of(opened, ".np polyline", "e => e.getAttribute('points')")
    slider = opened.find_element("css selector", "#np-level input[type=range]")
    slider.send_keys("\ue014\ue014")  # the right arrow, twice
    wait(lambda: heading(opened) == "σ=0.3")
    assert all_of(opened, ".np polyline", "e => e.getAttribute('points')") == curves
    opened.find_element("css selector", "#np-kind input").click()
    wait(lambda: len(all_of(opened, "#np-kind li")) == 22)
    opened.find_element("css selector", "#np-kind li[aria-label=Fog]").click()
    wait(lambda: heading(opened) == "fog 1")
    assert all_of(opened, "#np-level input[type=range]", "e => e.max") == ["5"]


@pytest.mark.long
def test_a_bad_upload_gives_a_message_and_a_good_one_an_answer(opened: Any, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("no pixels here")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "huge.png")
    Image.new("L", (1, 1)).save(tmp_path / "dot.png")
    Image.new("L", (20, 30), 200).save(tmp_path / "grey.png")
    upload = opened.find_element("css selector", "input[type=file]")
    for name, message in {
        "notes.txt": "notes.txt cannot be read: not an image",
        "dot.png": "dot.png cannot be read: it has one pixel",
        "huge.png": "huge.png cannot be read: it has more than 89 megapixels",
    }.items():
        upload.send_keys(str(tmp_path / name))
        wait(lambda message=message: any(message in x for x in all_of(opened, "[role=alert]")))
        assert all_of(opened, ".np-image span") == [f"class: {EVIL}"]  # still the first image
    upload.send_keys(str(tmp_path / "grey.png"))
    wait(lambda: all_of(opened, ".np-image span") == [])
    wait(lambda: all_of(opened, ".np-alert") == [])
    assert len(all_of(opened, ".np-answer")) == 2


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_does_not_scroll_sideways(opened: Any, width: int):
    show(opened, width=width)
    border = "e => e.offsetWidth - e.clientWidth"
    assert all_of(opened, "#np-gallery .grid-wrap", border) == [0]  # nor does it have a scroll bar
    root = "return document.documentElement"
    assert opened.execute_script(f"{root}.scrollWidth") <= opened.execute_script(
        f"{root}.clientWidth"
    )
