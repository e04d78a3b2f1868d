"""Commands that are killed or interrupted at any moment, or that cannot write.

Nothing is lost beyond the last checkpoint: the same command then ends with the same bytes as one
that was not disturbed. Errors are one line that says what to do.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from noiseproof.lab.runs import RunFolder
from tests.faults.commands import (
    Command,
    Ended,
    KillAt,
    as_an_ordinary_user,
    in_child,
    on_a_full_disk,
    on_a_read_only_disk,
    run,
)

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
    assert [file.name for file in path.rglob(".*")] == []


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
        ended = command.wait()
        if ended.status:
            assert_one_line(ended, 130, line)
        return ended

    # No checkpoint is due for minutes
    disturb(["5" if word == "1e-9" else word for word in argv], output, signals, interrupted)


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=LONG)])
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


def test_a_read_only_disk_is_one_line(tmp_path):
    disk, run = ["--output", str(tmp_path / "disk")], str(tmp_path / "disk" / "run")
    commands = [[*TRAIN, *disk, "--name", "run"], [*TRAIN, *disk, "--name", "other"],
                ["evaluate", run, "--perturb", "clean"], ["analyse", run, "--parts", "surface",
                 "--samples", "10"], [*COMPARE, *disk]]  # fmt: skip
    ends = in_child(on_a_read_only_disk, commands, tmp_path)
    if isinstance(ends, str):
        pytest.skip(f"no disk of our own: {ends}")
    for ended in ends:
        assert_one_line(ended, 1, "Read-only file system", str(tmp_path / "disk"), "choose")


def test_a_folder_without_write_permission_is_one_line(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o555)
    commands = [[*words, "--output", str(tmp_path / "theirs")] for words in (TRAIN, COMPARE)]
    for ended in in_child(as_an_ordinary_user, commands, tmp_path / "err"):
        assert_one_line(ended, 1, "Permission denied", str(tmp_path / "theirs"), "choose")
