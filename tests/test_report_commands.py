"""A report prints the commands that its results record, and a general form where there is none."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from noiseproof.__main__ import main
from noiseproof.cli.arguments import TrainArguments
from noiseproof.cli.parsing import parse_training
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.provenance import commands
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from tests.flat import Flat

TRAIN = "--data digits --model flat --feature-dim 8 --epochs 1 --device cpu"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in a folder with a space in its name, trained, evaluated and analysed by commands."""
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TRAIN.split(), "--output", "my runs", "--name", "a"]) == 0
    assert main(["evaluate", "my runs/a", "--perturb", "clean", "--draws", "2"]) == 0
    assert main(["analyse", "my runs/a", "--parts", "geometry", "--samples", "20"]) == 0
    return Path("my runs/a")


def printed(run: Path) -> list[str]:
    return commands(gather([RunFolder.open(run)]), Path("out"))


def test_each_command_is_recorded_as_typed_and_names_its_recipe(made: Path):
    expected = [
        f"noiseproof train --recipe robust {TRAIN} --output 'my runs' --name a",
        "noiseproof evaluate 'my runs/a' --perturb clean --draws 2",
        "noiseproof analyse 'my runs/a' --parts geometry --samples 20",
    ]
    assert printed(made) == [*expected, "noiseproof report 'my runs/a' --output out"]
    # A command that finds everything done replaces no record, and one that adds rows adds itself.
    for draws in (2, 3):
        assert main(["evaluate", str(made), "--perturb", "gaussian:0.1", f"--draws={draws}"]) == 0
    new = [f"noiseproof evaluate 'my runs/a' --perturb gaussian:0.1 --draws={d}" for d in (2, 3)]
    assert printed(made)[1:4] == [expected[1], *new]


@pytest.mark.usefixtures("undrawn")
def test_the_report_prints_its_own_command(made: Path):
    assert main(["report", str(made), "--title", "Ours & theirs"]) == 0
    page = (made / "report.html").read_text()
    assert "noiseproof report &#39;my runs/a&#39; --title &#39;Ours &amp; theirs&#39;" in page


def test_runs_without_a_record_get_commands_that_hold_every_setting(made: Path):
    run = RunFolder.open(made)
    del run.info["command"]
    run.save_config()
    for file in (made / "evaluation.jsonl", made / "analysis" / "analysis.json"):
        text = file.read_text().replace('"command"', '"other"')
        file.write_text(re.sub(r'"crc32": "\w+",', "", text))  # else the file counts as damaged
    train, *others = printed(made)
    words = shlex.split(train)
    assert words[:2] == ["noiseproof", "train"]
    config = parse_training(TrainArguments, "train", words[2:])[1]
    assert config.run.name == "a-again"
    assert (config.data, config.model, config.method, config.optim) == (
        *(run.config.data, run.config.model, run.config.method, run.config.optim),
    )
    assert others == [
        "noiseproof evaluate 'my runs/a' --perturb clean --draws 1 --noise-seed 0",
        "noiseproof analyse 'my runs/a'",
        "noiseproof report 'my runs/a' --output out",
    ]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_comparison_is_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int):
    monkeypatch.chdir(tmp_path)
    words = f"--epochs 1 --methods normal both --draws 1 --no-report --jobs {jobs}"
    assert main(["compare", *words.split()]) == 0
    folder = Path("runs/compare-digits")
    line = f"noiseproof compare --recipe robust {words}"
    assert json.loads((folder / "comparison.json").read_text())["command"] == line
    runs = [RunFolder.open(folder / name) for name in ("normal-s0", "both-s0")]
    last = f"noiseproof report {folder}/normal-s0 {folder}/both-s0 --output {folder}"
    assert commands(gather(runs), folder) == [line, last]
