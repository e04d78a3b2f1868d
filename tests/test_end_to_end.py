"""The real command in a folder of its own: train, kill, resume, evaluate, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

FLAGS = ["--data", "digits", "--epochs", "4", "--threads", "1", "--checkpoint-minutes", "0"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "noiseproof", *words]


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(command(*words), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_kill_resume_evaluate_compare(tmp_path):
    with subprocess.Popen(
        command("train", *FLAGS, "--method", "both"), cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as process:
        checkpoint = tmp_path / "runs/digits-both-s0/checkpoints/last.pt"
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -9, "the run ended before it could be killed"
    assert not (tmp_path / "runs/digits-both-s0/model.safetensors").exists()
    run(tmp_path, "train", *FLAGS, "--method", "both", "--resume")
    run(tmp_path, "train", *FLAGS, "--method", "both", "--name", "whole")
    killed, whole = (
        tmp_path / "runs" / n / "model.safetensors" for n in ("digits-both-s0", "whole")
    )
    assert killed.read_bytes() == whole.read_bytes()

    shown = run(tmp_path, "evaluate", "runs/digits-both-s0", "--perturb", "clean", "gaussian:0.3",
                "--draws", "2", "--weights", "last")  # fmt: skip
    lines = (tmp_path / "runs/digits-both-s0/evaluation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(r["perturbation"], r["draw"]) for r in rows] == [
        ("clean", 0), ("gaussian:0.3", 0), ("gaussian:0.3", 1),
    ]  # fmt: skip
    assert f"{100 * rows[0]['value']:.1f}" in shown

    words = ["compare", "--data", "digits", "--epochs", "1", "--methods", "normal", "noisy"]
    words += ["--draws", "1", "--jobs", "1", "--no-report"]
    first = run(tmp_path, *words)
    folder = tmp_path / "runs/compare-digits"
    assert {p.name for p in folder.glob("table.*")} == {"table.md", "table.csv", "table.tex"}
    before = os.stat(folder / "normal-s0/model.safetensors").st_mtime_ns
    second = run(tmp_path, *words)
    assert "trained before" in second
    assert "trained before" not in first
    assert os.stat(folder / "normal-s0/model.safetensors").st_mtime_ns == before
