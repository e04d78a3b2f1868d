"""The guide, README.md, deploy.md, cluster.md: the guide's Python runs, all commands are valid."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.__main__ import main
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
README = (ROOT / "README.md").read_text()
DEPLOY = (ROOT / "docs" / "deploy.md").read_text()
CLUSTER = (ROOT / "docs" / "cluster.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_python_runs_on_a_trained_run(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    monkeypatch.chdir(tmp_path)
    config = digits("runs", epochs=1, device="cpu")
    train(replace(config, run=replace(config.run, name="NAME")))
    Path("new").mkdir()
    for i in (1, 2):
        Image.new("L", (9 + i, 8), 80 * i).save(f"new/000{i}.jpg")
    names: dict = {}
    for block in blocks("python"):
        exec(block, names)
    assert names["chances"].shape == (2, 10)
    assert len(names["names"]) == 2
    assert names["features"].shape == (2, 8)
    assert not names["model"].training
    assert {row["perturbation"] for row in names["rows"]} == {"clean", "gaussian:0.1"}
    assert 0 <= names["worst"]["value"] <= 1
    assert names["right"].shape == (3, 540)
    assert isinstance(names["always"], np.floating)
    assert names["results"]["gaussian:0.1"].classes.shape == (3, 2)
    assert names["probabilities"].shape == (10, 2, 10)
    assert names["rain"](torch.rand(3, 8, 8), 0.5).shape == (3, 8, 8)
    exported = torch.export.export(names["model"], (names["pixels"],))
    assert torch.allclose(exported.module()(names["pixels"]).softmax(1), names["chances"])


def commands() -> list[str]:
    """All commands of the four pages, in blocks and in the text."""
    found = []
    for page in (README, GUIDE, DEPLOY, CLUSTER):
        texts, blocks = page.split("```")[::2], page.split("```")[1::2]
        for block in blocks:
            found += [
                ln for ln in block.replace("\\\n", "").splitlines() if ln.startswith("noiseproof")
            ]
        words = re.findall(r"`([^`]*?noiseproof [^`]*)`", "".join(texts))
        found += [text for text in words if len(text.split()) > 2]  # else a verb's name
    # "…" stands for words of the reader's own
    return list(dict.fromkeys(c for c in found if "…" not in c))


@pytest.mark.parametrize("command", commands())
def test_the_commands_are_understood(command, tmp_path, monkeypatch):
    """They are parsed and validated, up to the call of a stage."""
    runs = (
        "runs/NAME",
        "runs/compare-digits/normal-s0",
        "runs/compare-digits/both-s0",
        "runs/compare-photos",
        "runs/NAME-renormalised",
        "runs/NAME-calibrated",
        "runs/A",
        "runs/B",
    )
    for folder in ("photos", "new", "CIFAR-10-C", *runs):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "new.npz").touch()
    (tmp_path / "srun").touch(0o755)  # a login node of a cluster
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "groups.csv").touch()
    for name in ("net.pt", "resnet.pt", "lite.pt"):
        (tmp_path / name).touch()
    (tmp_path / "network.py").write_text("def make():\n    pass\n")
    (tmp_path / "rain.py").write_text(next(b for b in blocks("python") if "register(" in b))
    monkeypatch.chdir(tmp_path)
    called = []

    def work(result):
        return lambda *args, **kwargs: called.append(args) or result

    lab, paper = "noiseproof.lab", "noiseproof.paper"
    # First: it imports others by name
    monkeypatch.setattr(f"{lab}.comparison.tune.tune", work(0))
    for name in (
        "evaluation.evaluate.evaluate_runs",
        "evaluation.certificates.certify_runs",
        "evaluation.attacks.attack_runs",
        "analysis.analyse.analyse_runs",
        "report.page.report_runs",
        "training.renormalise.renormalise_path",
        "evaluation.temperature.calibrate_path",
        "deploy.export.export_run",
        "deploy.card.write_card",
        "deploy.demo.demo_runs",
    ):
        monkeypatch.setattr(f"{lab}.{name}", work(None))
    monkeypatch.setattr(f"{lab}.comparison.compare.compare", work(0))
    monkeypatch.setattr(f"{lab}.evaluation.predict.predict_paths", work(0))
    monkeypatch.setattr(f"{paper}.reproduce.reproduce", work(([1], 0)))
    monkeypatch.setattr(f"{paper}.tables.section", lambda *_: "")
    monkeypatch.setattr(f"{paper}.tables.sources", lambda *_: "")
    # Last, when all modules that import it by name have been imported
    trained = SimpleNamespace(path=Path("runs/NAME"))
    monkeypatch.setattr(f"{lab}.training.train.train", work(trained))
    words = shlex.split(command, comments=True)
    verb = words[words.index("noiseproof") + 1]
    assert main(words[words.index("noiseproof") + 1 :]) == 0
    assert len(called) == (verb != "list") * (len(words) - 2 if verb == "card" else 1)


def test_all_commands_were_found():
    texts = " ".join(commands())
    assert len(commands()) >= 12
    for verb in (
        "train",
        "tune",
        "evaluate",
        "predict",
        "compare",
        "analyse",
        "certify",
        "report",
        "renormalise",
        "reproduce",
        "export",
        "card",
        "demo",
        "list",
    ):
        assert f"noiseproof {verb}" in texts
