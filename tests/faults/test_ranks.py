"""Trainings of two processes: one is killed, both are interrupted, or their number changes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from noiseproof.cli import main as cli
from noiseproof.lab.config import Config
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training import session as sessions
from noiseproof.lab.training.session import Session
from noiseproof.lab.training.train import train
from tests.faults.commands import CONTEXT, errors
from tests.flat import Flat, digits, resumed

TIMES = ("seconds", "images_per_second")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def config(output: Path | str, name: str) -> Config:
    """Three epochs of 14 steps, with a checkpoint every 5 steps."""
    return digits(output, name=name, amp="float64", batch_size=80, checkpoint_minutes=1e-9)


def train_until(config: Config, position: tuple[int, int], stop) -> None:
    """Trains until the step at `position` = (epoch, step) is about to start, and calls `stop`."""
    advance = Session.advance

    def stopping(self):
        if (self.epoch, self.step) == position:
            stop()
        return advance(self)

    Session.advance = stopping
    try:
        train(config, progress=True)
    except KeyboardInterrupt:
        pass
    finally:
        Session.advance = advance


def interrupt() -> None:
    raise KeyboardInterrupt


def rank_program(rank: int, port: int, output: str) -> None:
    """The program of a rank, the second of which is killed at last; prints to ranks.err."""
    os.dup2(os.open(f"{output}/ranks.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, 2, 2, port)), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    BACKBONES["flat"], sessions._STRIDE = Flat, 5
    train(resumed(config(output, "1 to 2")), progress=True)
    train_until(config(output, "2 to 1"), (1, 5), interrupt)

    def die() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def killed(_: list[str]) -> int:
        train_until(config(output, "killed"), (1, 5), die)
        return 0

    cli.VERBS["train"] = cli.Verb("", killed)
    sys.exit(cli.run(["train"]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The output folder of one process: a whole training and the first part of another."""
    output = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        patch.setattr(sessions, "_STRIDE", 5)
        train(config(output, "whole"), progress=False)
        train_until(config(output, "1 to 2"), (1, 5), interrupt)
        yield output


@pytest.fixture(scope="module")
def two(alone):
    """Two processes, which have continued and begun trainings in that folder, what they printed,
    and how long it took until both had ended after one was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [CONTEXT.Process(target=rank_program, args=(i, port, str(alone))) for i in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    ended = time.time() - (alone / "killed" / "checkpoints" / "last.pt").stat().st_mtime
    return [process.exitcode for process in ranks], (alone / "ranks.err").read_text(), ended


def test_when_one_rank_is_killed_the_other_ends_with_one_line(two):
    codes, err, seconds = two
    assert codes == [1, -signal.SIGKILL], err
    assert seconds < 30
    (line,) = errors(err)
    assert "the connection to another process of this training is lost" in line
    assert "to continue, repeat the torchrun command with --resume" in line
    assert "Traceback" not in err, err


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", ["1 to 2", "2 to 1", "killed"])
def test_a_training_continues_with_another_number_of_ranks(alone, name, capsys):
    """Without batch-norm and dropout, whose results depend on the number, to the same weights."""
    run = train(resumed(config(alone, name)), progress=True)
    if name != "1 to 2":
        warning = "the run used 2 processes so far and continues with 1: its weights will differ"
        assert warning in capsys.readouterr().err
    for file in ("model.safetensors", "best.safetensors"):
        weights, expected = load_file(run.path / file), load_file(alone / "whole" / file)
        for key in expected:
            assert torch.allclose(weights[key], expected[key], rtol=0, atol=1e-9), key
    whole = RunFolder.open(alone / "whole")
    for row, other in zip(run.metrics(), whole.metrics(), strict=True):
        values = {key: value for key, value in row.items() if key not in TIMES}
        assert values == pytest.approx({key: other[key] for key in values}, rel=1e-6)


def test_more_ranks_are_warned_about(two):
    warning = "the run used 1 process so far and continues with 2: its weights will differ"
    assert two[1].count(warning) == 1


# Whole commands


class Torchrun:
    """Two ranks that train for a long time, as a process group of their own."""

    def __init__(self, output: Path):
        self.output = output
        words = [*TORCHRUN, "-m", "noiseproof", "train", "--epochs", "500", "--method", "normal"]
        words += ["--output", str(output), "--name", "run", "--resume"]
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


@pytest.mark.long
@pytest.mark.timeout(900)
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


@pytest.mark.long
@pytest.mark.timeout(900)
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
