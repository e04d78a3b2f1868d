"""Jobs on a cluster, with submitit's local executor in place of SLURM."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from rich.console import Console

from noiseproof.__main__ import main
from noiseproof.lab.command import running
from noiseproof.lab.comparison import slurm
from noiseproof.lab.config import Comparison, Config, from_dict
from noiseproof.lab.validate import slurm_parameters

submitit = pytest.importorskip("submitit")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="submitit needs POSIX signals")


class Result(NamedTuple):
    """A JobResult for processes that import little."""

    status: str

    def describe(self, name: str) -> str:
        return f"{name}: {self.status}"


@dataclass(frozen=True)
class Attempts:
    """A job that gets a signal in its first attempt, and is done in the second."""

    name: str
    folder: Path
    signal: int = 0

    def run(self, announce: Callable[[str], object]) -> Result:
        attempt = self.folder / self.name
        announce(f"attempt {1 + attempt.exists()}")
        if not attempt.exists():
            attempt.touch()
            os.kill(os.getpid(), self.signal)
            time.sleep(60)
        return Result("done")


def run(todo: list[Attempts], *settings: str) -> dict[str, Any]:
    parameters: Any = slurm_parameters("slurm", settings)
    return slurm.run_on_cluster(cast(Any, todo), todo[0].folder, Console(), parameters)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_CLUSTER", "local")
    monkeypatch.setattr(slurm, "_INTERVAL", 0.1)
    monkeypatch.setattr(submitit.LocalJob, "_results_timeout_s", 0)


@pytest.mark.usefixtures("local")
def test_a_preempted_job_continues_and_one_that_dies_is_named_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preempted = Attempts("preempted", tmp_path, signal.SIGUSR2)
    results = run([preempted, Attempts("killed", tmp_path, signal.SIGKILL)])
    assert results["preempted"].status == "done"
    assert results["killed"].status == "failed"
    printed = capsys.readouterr().out
    assert "killed: failed after" in printed
    log = Path(results["killed"].message.partition("; see ")[2])
    assert log.parent == tmp_path / "logs" / "slurm"
    assert "killed: attempt 1" in log.read_text()
    assert f"log in {log}\n" in printed


@pytest.mark.usefixtures("local")
def test_an_interrupt_cancels_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    started: list[Any] = []
    submit = submitit.AutoExecutor.submit_array

    def submit_array(*arguments: Any) -> list[Any]:
        started.extend(submit(*arguments))
        return started

    monkeypatch.setattr(submitit.AutoExecutor, "submit_array", submit_array)
    clock = SimpleNamespace(sleep=interrupt, perf_counter=time.perf_counter)
    monkeypatch.setattr(slurm, "time", clock)
    # Jobs inherit that it is ignored, as it is if a shell runs the tests in the background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run([Attempts("a", tmp_path)])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "Cancelled the SLURM jobs of a" in capsys.readouterr().out
    assert started[0]._process.wait(30) != 0


@pytest.mark.long
@pytest.mark.usefixtures("local")
def test_a_comparison_on_a_cluster_has_the_folders_of_one_in_processes(tmp_path: Path) -> None:
    from noiseproof.lab.comparison import compare

    settings = {"output": str(tmp_path), "epochs": 1, "threads": 1, "device": "cpu"}
    base = from_dict(settings, Config())
    comparison = Comparison(("normal",), draws=1, report=False, launcher="slurm")
    with running("noiseproof compare"):
        assert compare.compare(base, comparison) == 0
    folder = tmp_path / "compare-digits"
    info = json.loads((folder / "normal-s0" / "config.json").read_text())
    assert info["info"]["command"] == "noiseproof compare"
    assert json.loads((folder / "comparison.json").read_text())["runs"][0]["status"] == "done"
    assert (folder / "table.md").is_file()
    assert "epoch 1/1" in next((folder / "logs" / "slurm").glob("*.out")).read_text()


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an sbatch on PATH that keeps a copy of its script and refuses it."""
    for name, line in {
        "srun": "",
        "sbatch": 'cp "$1" "$0.sh"; echo "invalid partition" >&2; exit 1',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_settings_reach_sbatch_and_its_refusal_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path, monkeypatch)
    settings = ["partition=gpu", "time=120", "gpus=1", "memory=16", "jobs=2", "account=me"]
    with pytest.raises(ValueError, match=r"(?s)sbatch refused the jobs: .*invalid partition"):
        run([Attempts(name, tmp_path) for name in "abc"], *settings)
    script = (tmp_path / "sbatch.sh").read_text()
    for option in ("partition=gpu", "time=120", "gpus-per-node=1", "mem=16GB", "account=me"):
        assert f"#SBATCH --{option}\n" in script
    assert "#SBATCH --array=0-2%2\n" in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--slurm partition=gpu", "--slurm is for --launcher slurm"),
        ("--launcher slurm --slurm gpu", "such as partition=gpu, got 'gpu'"),
        ("--launcher slurm --slurm time=2h", "time must be a whole number, got '2h'"),
        ("--launcher slurm", "needs srun and sbatch"),
    ],
)
@pytest.mark.parametrize("verb", ["compare", "reproduce cifar10", "tune net.pt --model resnet18"])
def test_a_cluster_that_is_not_there_or_not_described_right_is_refused(
    verb: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), *words.split()]) == 2
    assert message in capsys.readouterr().err
