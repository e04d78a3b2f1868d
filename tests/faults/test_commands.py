"""Commands that are killed or interrupted at any moment, or that cannot write.

Nothing is lost beyond the last checkpoint: the same command then ends with the same bytes as one
that was not disturbed. Errors are one line that says what to do.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
from tests.faults.commands import (
    CONTEXT,
    Command,
    Ended,
    KillAt,
    as_an_ordinary_user,
    errors,
    in_child,
    on_a_full_disk,
    on_a_read_only_disk,
    run,
)
from tests.flat import Flat, digits, resumed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses signals and mounts of Linux")

LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
TRAIN = ["train", "--epochs", "3", "--batch-size", "16", "--method", "normal", "--threads", "1",
         "--resume", "--checkpoint-minutes", "1e-9", "--ema-decay", "0.9"]  # fmt: skip
COMPARE = ["compare", "--methods", "normal", "both", "--epochs", "2", "--jobs", "2", "--draws", "2",
           "--checkpoint-minutes", "1e-9", "--no-report"]  # fmt: skip
OTHER = {"seconds", "images_per_second", "command"}  # what may differ


def folder_of(output: Path) -> list[str]:
    return ["--output", str(output), "--name", "run"]


def comparable(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in OTHER} for row in rows]


def assert_same(path: Path, other: Path) -> None:
    """Weights and rows of two runs are equal, and nothing temporary is left."""
    run, expected = RunFolder.open(path), RunFolder.open(other)
    for name in ("model.safetensors", "best.safetensors"):
        assert (path / name).read_bytes() == (other / name).read_bytes()
    assert comparable(run.metrics()) == comparable(expected.metrics())
    assert run.info["best"] == expected.info["best"]
    assert [file.name for file in path.rglob(".*.tmp")] == []


def assert_same_comparison(folder: Path, other: Path) -> None:
    """Runs, evaluations, predictions and tables of two comparisons are equal."""
    for name in ("normal-s0", "both-s0"):
        assert_same(folder / name, other / name)
        run, expected = RunFolder.open(folder / name), RunFolder.open(other / name)
        rows = [{json.dumps(row) for row in comparable(r.evaluation())} for r in (run, expected)]
        assert rows[0] == rows[1]
        assert len(run.evaluation()) == len(expected.evaluation())
        files = sorted(file.stem for file in (other / name / "predictions").iterdir())
        assert files == sorted(file.stem for file in (folder / name / "predictions").iterdir())
        for key in files:
            arrays, wanted = run.predictions(key), expected.predictions(key)
            assert arrays is not None
            assert wanted is not None
            assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)
    assert (folder / "table.csv").read_text() == (other / "table.csv").read_text()


def assert_one_line(ended: Ended, status: int, *parts: str) -> None:
    """The command ended with this status and one line about it that contains `parts`."""
    assert "Traceback" not in ended.err, ended.err
    assert ended.status == status, ended.err
    (line,) = ended.lines
    for part in parts:
        assert part in line


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The output of a training and of a comparison that nothing disturbs, and of how many seconds
    and accesses to files they are made."""
    output = tmp_path_factory.mktemp("whole")
    lengths = {}
    for argv in (TRAIN, COMPARE):
        target, words = output / argv[0], [*argv, *folder_of(output / argv[0])]
        command = Command(words, output / "err", KillAt(str(target), -1))
        began = time.monotonic()  # after the start of the server that commands are forked from
        ended = command.wait()
        assert ended.status == 0, ended.err
        lengths[argv[0]] = (time.monotonic() - began, ended.file_events)
    return output, lengths


# SIGKILL


def disturb(
    argv: list[str], output: Path, times: int, disturbed: Callable[[list[str], int], Ended]
) -> None:
    """Disturbs a command `times` times, then lets it finish; when it finishes before, it starts
    over. `disturbed` runs the command, given its words and how often it was disturbed so far."""
    words, done = [*argv, *folder_of(output)], 0
    while done < times:
        if disturbed(words, done).status:
            done += 1
        else:
            shutil.rmtree(output)
    ended = run(words, output.parent / "err")
    assert ended.status == 0, ended.err


def kill(argv: list[str], output: Path, length: tuple[float, int], kills: int) -> None:
    """Kills a command, every other time when it accesses a file, and repeats it."""
    rng, seconds, events = random.Random(kills), *length

    def killed(words: list[str], done: int) -> Ended:
        if done % 2:
            event = rng.randrange(1, events + 1)
            delay = rng.choice([0.0, rng.uniform(0, 0.01)])
            ended = run(words, output.parent / "err", KillAt(str(output), event, delay))
        else:
            command = Command(words, output.parent / "err")
            command.send(signal.SIGKILL, rng.uniform(0.02, 0.7) * seconds)
            ended = command.wait()
        assert ended.status in (0, -signal.SIGKILL), ended.err
        assert "Traceback" not in ended.err
        return ended

    disturb(argv, output, kills, killed)


def interrupt(argv: list[str], output: Path, seconds: float, signals: int, line: str) -> None:
    """Sends Ctrl-C and SIGTERM in turn to a command, which saves, prints `line` and ends."""
    rng = random.Random(0)

    def interrupted(words: list[str], done: int) -> Ended:
        command = Command(words, output.parent / "err")
        command.send((signal.SIGINT, signal.SIGTERM)[done % 2], rng.uniform(0.05, 0.5) * seconds)
        ended = command.wait(25)  # a worker that does not stop is killed after 30 seconds
        if ended.status:
            assert_one_line(ended, 130, line)
        return ended

    # No checkpoint is due for minutes
    disturb(["5" if word == "1e-9" else word for word in argv], output, signals, interrupted)


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=LONG)])
def test_a_training_killed_at_random_moments_ends_with_the_same_bytes(whole, tmp_path, kills):
    output, lengths = whole
    kill(TRAIN, tmp_path / "out", lengths["train"], kills)
    assert_same(tmp_path / "out" / "run", output / "train" / "run")


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=LONG)])
def test_a_comparison_killed_at_random_moments_ends_with_the_same_bytes(whole, tmp_path, kills):
    """Its two workers end with it."""
    output, lengths = whole
    kill(COMPARE, tmp_path / "out", lengths["compare"], kills)
    assert_same_comparison(tmp_path / "out" / "run", output / "compare" / "run")


# SIGTERM and Ctrl-C


@pytest.mark.parametrize("signals", [2, pytest.param(20, marks=LONG)])
def test_an_interrupted_training_says_how_to_continue(whole, tmp_path, signals):
    output, lengths = whole
    line = f"stopped; to continue: noiseproof {shlex.join(TRAIN)}".replace("1e-9", "5")
    interrupt(TRAIN, tmp_path / "out", lengths["train"][0], signals, line)
    assert_same(tmp_path / "out" / "run", output / "train" / "run")


@pytest.mark.parametrize("signals", [1, pytest.param(10, marks=LONG)])
def test_an_interrupted_comparison_says_how_to_continue(whole, tmp_path, signals):
    output, lengths = whole
    line = "stopped; the same command continues"
    interrupt(COMPARE, tmp_path / "out", lengths["compare"][0], signals, line)
    assert_same_comparison(tmp_path / "out" / "run", output / "compare" / "run")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path):
    """In an interpreter of its own, from its first line to the first steps of training."""
    words = [sys.executable, "-m", "noiseproof", *TRAIN, *folder_of(tmp_path / "out")]
    rng, began = random.Random(0), time.monotonic()
    subprocess.run(words, capture_output=True, check=True)
    length = time.monotonic() - began
    words += ["--name", "longer", "--epochs", "100"]  # which no trial finishes
    for trial in range(20):
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        time.sleep(rng.uniform(0.05, 0.8) * length)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert "Traceback" not in err, f"trial {trial}: {err}"
        # Python itself ends by the signal if that came inside exec(); shells make 130 of both
        assert process.returncode in (130, -signal.SIGINT), f"trial {trial}: {err}"


# Disks


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=LONG)])
def test_a_full_disk_is_one_line_and_the_training_continues(whole, tmp_path, count):
    output, _ = whole
    files = [file for file in (output / "train" / "run").rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    rng = random.Random(count)
    rooms = sorted(round(size * (i + rng.random()) / count) for i in range(count))
    ends = in_child(on_a_full_disk, TRAIN, tmp_path, rooms)
    if isinstance(ends, str):
        pytest.skip(f"no disk of our own: {ends}")
    for room, (first, second) in zip(rooms, ends, strict=True):
        assert_one_line(first, 1, "No space left on device: ", "make room", "--resume")
        assert second.status == 0, second.err
        assert_same(tmp_path / str(room), output / "train" / "run")


@pytest.mark.long
def test_a_read_only_disk_is_one_line(tmp_path):
    disk, run = ["--output", str(tmp_path / "disk")], str(tmp_path / "disk" / "run")
    commands = [[*TRAIN, *disk, "--name", "run"], [*TRAIN, *disk, "--name", "other"],
                ["evaluate", run, "--perturb", "clean"], ["analyse", run, "--parts", "surface",
                 "--samples", "10"], [*COMPARE, *disk]]  # fmt: skip
    ends = in_child(on_a_read_only_disk, commands, tmp_path)
    if isinstance(ends, str):
        pytest.skip(f"no disk of our own: {ends}")
    for argv, ended in zip(commands[1:], ends, strict=True):
        advice = "copy the run to a folder" if argv[1] == run else "choose a folder"
        assert_one_line(ended, 1, "Read-only file system", str(tmp_path / "disk"), advice)


def test_a_folder_without_write_permission_is_one_line(whole, tmp_path):
    """If a run is in it, a copy can be evaluated."""
    theirs = Path(shutil.copytree(whole[0] / "train", tmp_path / "theirs"))
    for path in (theirs, *theirs.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    commands = [[*words, "--output", str(theirs)] for words in (TRAIN, COMPARE)]
    run = str(theirs / "run")
    commands += [
        ["evaluate", run, "--perturb", "clean"],
        ["certify", run, "--sigma", "0.1", "--every", "50"],
    ]
    ends = in_child(as_an_ordinary_user, commands, tmp_path / "err")
    for argv, ended in zip(commands, ends, strict=True):
        advice = "copy the run to a folder" if argv[1] == run else "choose a folder"
        assert_one_line(ended, 1, "Permission denied", str(theirs), advice)


# Two ranks, started as torchrun starts them


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


def stop_here() -> None:
    raise KeyboardInterrupt


def rank_program(rank: int, port: int, output: str) -> None:
    """The program of a rank, the second of which is killed at last; prints to ranks.err."""
    os.dup2(os.open(f"{output}/ranks.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, 2, 2, port)), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    BACKBONES["flat"], sessions._STRIDE = Flat, 5
    train(resumed(config(output, "1 to 2")), progress=True)
    train_until(config(output, "2 to 1"), (1, 5), stop_here)

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
        train_until(config(output, "1 to 2"), (1, 5), stop_here)
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
        values = {key: value for key, value in row.items() if key not in OTHER}
        assert values == pytest.approx({key: other[key] for key in values}, rel=1e-6)


def test_more_ranks_are_warned_about(two):
    warning = "the run used 1 process so far and continues with 2: its weights will differ"
    assert two[1].count(warning) == 1
