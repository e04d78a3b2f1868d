"""The real commands in one folder: train, evaluate, compare. `tests/faults` kills and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from noiseproof.__main__ import main

TRAIN = ["train", "--data", "digits", "--epochs", "1", "--threads", "1", "--method", "both"]


def test_train_evaluate_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        """Runs a command in this process, which has paid for the imports; its output."""
        capsys.readouterr()
        assert main(list(words)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    # In a process of its own, as users have it: what other tests have loaded cannot matter.
    run(*TRAIN, "--name", "here")
    command = [sys.executable, "-m", "noiseproof", *TRAIN]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    here, own = (Path("runs", n, "model.safetensors") for n in ("here", "digits-both-s0"))
    assert own.read_bytes() == here.read_bytes()

    table = run("evaluate", "runs/digits-both-s0", "--perturb", "clean", "gaussian:0.3",
                "--draws", "2", "--weights", "last")  # fmt: skip
    lines = Path("runs/digits-both-s0/evaluation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(r["perturbation"], r["draw"]) for r in rows] == [
        ("clean", 0), ("gaussian:0.3", 0), ("gaussian:0.3", 1),
    ]  # fmt: skip
    assert f"{100 * rows[0]['value']:.1f}" in table

    compare = ["compare", "--data", "digits", "--epochs", "1", "--methods", "normal", "noisy"]
    compare += ["--draws", "1", "--jobs", "1", "--no-report"]
    first = run(*compare)
    folder = Path("runs/compare-digits")
    assert {p.name for p in folder.glob("table.*")} == {"table.md", "table.csv", "table.tex"}
    before = os.stat(folder / "normal-s0/model.safetensors").st_mtime_ns
    second = run(*compare)
    assert "already trained" in second
    assert "already trained" not in first
    assert os.stat(folder / "normal-s0/model.safetensors").st_mtime_ns == before
