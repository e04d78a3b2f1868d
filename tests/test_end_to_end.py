"""The real commands in one folder: train, kill, resume, evaluate, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from noiseproof.__main__ import main

FLAGS = ["--data", "digits", "--epochs", "3", "--threads", "1", "--checkpoint-minutes", "0"]
TRAIN = ["train", *FLAGS, "--method", "both"]
WHOLE = [*TRAIN, "--name", "whole"]


def train_and_kill(folder: Path) -> None:
    """Trains to the end, then again in the same process, which is killed once the second training
    has written a checkpoint."""
    checkpoint = folder / "runs/digits-both-s0/checkpoints/last.pt"
    code = f"from noiseproof.__main__ import main; main({WHOLE}); main({TRAIN})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -9, "the run ended before it could be killed"


def test_train_kill_resume_evaluate_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        """Runs a command in this process, which has paid for the imports; its output."""
        capsys.readouterr()
        assert main(list(words)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    train_and_kill(tmp_path)
    killed, whole = (Path("runs", n, "model.safetensors") for n in ("digits-both-s0", "whole"))
    assert not killed.exists()
    # In a process of its own, as users have it: what other tests have loaded cannot matter.
    command = [sys.executable, "-m", "noiseproof", *TRAIN, "--resume"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert killed.read_bytes() == whole.read_bytes()

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
