"""docs/guide.md: its Python runs, and its commands are commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.lab import models
from noiseproof.lab.arguments import (
    CompareArguments,
    EvaluateArguments,
    PredictArguments,
    parsed,
    starting_point,
)
from noiseproof.lab.train import train
from noiseproof.perturb import parse
from tests.flat import Flat, digits

GUIDE = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_python_runs_on_a_trained_run(tmp_path, monkeypatch):
    monkeypatch.setitem(models.OWN, "flat", Flat)
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
    assert names["found"]["gaussian:0.1"].classes.shape == (3, 2)
    exported = torch.export.export(names["model"], (names["pixels"],))
    assert torch.allclose(exported.module()(names["pixels"]).softmax(1), names["chances"])


def test_the_commands_are_understood():
    lines = "\n".join(blocks("")).replace("\\\n", "").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("noiseproof")]
    assert len(commands) == 5
    for _, verb, *flags in commands:
        if verb == "compare":
            made = parsed(CompareArguments, verb, flags, starting_point(CompareArguments, flags))
            assert made.data.data == "photos/"
        elif verb == "predict":
            made = parsed(PredictArguments, verb, flags)
            assert (made.run, made.images, made.top) == ("runs/NAME", ("new/",), 3)
        else:
            made = parsed(EvaluateArguments, verb, flags)
            assert made.runs == ("runs/NAME",)
            assert all(parse(text) for text in made.perturb)
    with pytest.raises(SystemExit):
        parsed(EvaluateArguments, "evaluate", ["runs/NAME", "--perturbb", "x"])
