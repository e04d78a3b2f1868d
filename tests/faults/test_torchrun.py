"""Trainings of two processes that torchrun starts: one is killed, or both are interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.commands import errors

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


class Torchrun:
    """Two ranks that train for a long time, as a process group of their own."""

    def __init__(self, output: Path):
        self.output = output
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node=2", "-m", "noiseproof", "train", "--epochs=500"]
        words += ["--method=normal", "--output", str(output), "--name", "run", "--resume"]
        self.process = subprocess.Popen(
            words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def ranks(self) -> list[int]:
        """The process ids of the ranks, once both have started."""
        for _ in range(600):
            words = ["ps", "-o", "pid=", "--ppid", str(self.process.pid)]
            listed = subprocess.run(words, capture_output=True, text=True).stdout.split()
            if len(listed) == 2:
                return sorted(map(int, listed))
            time.sleep(0.1)
        raise AssertionError("the ranks did not start")

    def wait_until_it_trains(self) -> None:
        rows = self.output / "run" / "metrics.csv"
        for _ in range(1200):
            if rows.exists():
                return
            time.sleep(0.1)
        raise AssertionError("the training did not start")

    def end(self) -> tuple[str, float]:
        """What it printed, and how many seconds it took to end."""
        began = time.monotonic()
        _, err = self.process.communicate(timeout=120)
        return err, time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["starting", "training"])
def test_a_killed_rank_ends_the_other_within_thirty_seconds(tmp_path, rank, moment):
    torchrun, rng = Torchrun(tmp_path), random.Random(rank)
    ranks = torchrun.ranks()
    if moment == "training":
        torchrun.wait_until_it_trains()
    time.sleep(3 * rng.random())
    os.kill(ranks[rank], signal.SIGKILL)
    err, seconds = torchrun.end()
    assert seconds < 30
    lines = errors(err)
    assert len(lines) == 1 or (moment == "starting" and not lines), err
    assert err.count("Traceback") == 1, err  # that of torchrun itself


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_a_training_of_two_ranks(tmp_path, number):
    """Ctrl-C reaches the ranks twice: from the terminal, and from torchrun. A scheduler sends
    SIGTERM to torchrun."""
    torchrun = Torchrun(tmp_path)
    torchrun.ranks()
    torchrun.wait_until_it_trains()
    if number == signal.SIGINT:
        os.killpg(torchrun.process.pid, number)
    else:
        os.kill(torchrun.process.pid, number)
    err, seconds = torchrun.end()
    assert seconds < 30
    (line,) = errors(err)
    assert "stopped; to continue, repeat the torchrun command with --resume" in line
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
