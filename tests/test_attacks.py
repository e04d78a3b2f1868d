"""`noiseproof evaluate --attack`, and the report's section on the worst case."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from noiseproof.__main__ import main
from noiseproof.adversarial import pgd
from noiseproof.lab.evaluation import attacks as module
from noiseproof.lab.evaluation.attacks import FILE, attack, attack_rows
from noiseproof.lab.evaluation.certificates import Smoothing, certify
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.page import report
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.lab.validate import read_attack
from tests.flat import Flat, digits


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "flat", Flat)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        run = train(digits(tmp_path_factory.mktemp("trained"), epochs=2), progress=False)
        evaluate(run, ["clean"], device="cpu", progress=False)
        return run


@pytest.fixture
def run(trained: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(trained.path, tmp_path / "one")
    return RunFolder.open(tmp_path / "one")


def rows_of(run: RunFolder, *attacks: str) -> list[dict[str, Any]]:
    return attack(run, attacks, device="cpu", progress=False)


def test_rows_hold_the_accuracy_with_and_without_the_attack(run):
    (row,) = rows_of(run, "l2:0.25")
    test, model = run.dataset().test, run.model()
    x = test.images.float() / 255
    worst = pgd(model, x, test.labels, "l2", 0.25)
    with torch.no_grad():
        clean, attacked = (model(images).argmax(1) == test.labels for images in (x, worst))
    assert row["clean"] == clean.double().mean()
    assert row["value"] == pytest.approx(attacked.double().mean().item(), abs=0.003)  # rounding
    assert row["value"] < row["clean"]
    assert row["n"] == test.count
    assert run.evaluation()[0]["metric"] != row["metric"]
    assert len(run.evaluation()) == 1  # rows of attacks are apart from those of noise


def test_nothing_is_attacked_twice(run, monkeypatch):
    rows = rows_of(run, "l2:0.1", "linf:8/255")
    monkeypatch.setattr(module, "pgd", None)  # raises if called
    assert rows_of(run, "linf:8/255", "L2:0.1", "l2:1/10") == rows[::-1]
    assert list(attack_rows(run, "last")) == ["l2:0.1", "linf:8/255"]
    path = run.path / FILE
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=f"line 2 of .*{FILE} is damaged"):
        attack_rows(run, "last")
    with pytest.raises(TypeError):  # the damaged row is measured again
        rows_of(run, "linf:8/255")
    assert list(attack_rows(run, "last")) == ["l2:0.1"]


def test_the_command_prints_one_line_per_attack(run, capsys):
    command = f"evaluate {run.path} --attack linf:8/255 l2:0.25 --weights last --device cpu"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    for name, row in attack_rows(run, "last").items():
        assert f"{100 * row['value']:.1f} % correct under attack {name}" in out
    assert "they are upper limits" in out
    assert len(run.evaluation()) == 1  # alone, no noise


@pytest.mark.parametrize("text", ["l1:0.1", "linf", "l2:", "l2:-1", "l2:0", "l2:1/0", "linf:0.1x"])
def test_what_is_no_attack_is_refused(text):
    with pytest.raises(ValueError, match="attack"):
        read_attack(text)


def test_a_distance_of_pixels_above_1_suggests_255():
    with pytest.raises(ValueError, match=r"did you mean 8/255\?"):
        read_attack("linf:8")
    assert read_attack("l2:2").epsilon == 2


def test_no_image_can_change_further_than_from_black_to_white(run, capsys):
    command = f"evaluate {run.path} --weights last --device cpu --attack"
    assert main([*command.split(), "l2:1000"]) == 2  # the images are 1 x 8 x 8
    expected = "the distance of l2:1000 must be above 0 and at most 8, the distance from black to"
    assert f"{expected} white of images of 1 x 8 x 8" in capsys.readouterr().err
    assert not (run.path / FILE).exists()
    assert main([*command.split(), "l2:1000", "--perturb", "gaussian:0.1"]) == 2
    assert "gaussian:0.1" not in (run.path / "evaluation.jsonl").read_text()
    assert main([*command.split(), "l2:8"]) == 0


@pytest.mark.parametrize("flag", ["--table t.md", "--calibration"])
def test_flags_that_attacks_would_ignore_are_refused(run, capsys, flag: str):
    assert main(f"evaluate {run.path} --attack l2:0.1 {flag}".split()) == 2
    assert f"{flag.split()[0]} is for tests under noise, not --attack" in capsys.readouterr().err


def test_other_images_are_not_attacked(run, capsys, tmp_path):
    command = f"evaluate {run.path} --attack l2:0.1 --data cifar10"
    assert main(command.split()) == 2
    assert "leave out --data" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_the_report_says_what_was_not_measured(run):
    page = report([run], run.path).read_text()
    assert 'id="worst-case"' not in page
    assert "which was not measured here" in page


def test_the_report_shows_what_was_measured(run):
    (row,) = rows_of(run, "l2:0.25")
    smoothing = Smoothing(0.2, samples=60, selection=10, alpha=0.01)
    certify(run, smoothing, every=60, device="cpu", progress=False)
    page = report([run], run.path).read_text()
    assert 'id="worst-case"' in page
    assert "which was not measured here" not in page
    assert (
        f"at most 0.25 in L2: <code>discriminative</code>\xa0{100 * row['value']:.1f}\xa0%" in page
    )
    assert "60 samples, α\xa00.01, 9 test images" in page
    assert (run.path / "figures" / "certified-accuracy-0.2.svg").exists()
