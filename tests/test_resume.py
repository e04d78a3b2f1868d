"""A run killed at any moment resumes to the weights it would have had, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from noiseproof.cli import main as cli
from noiseproof.lab import runs
from noiseproof.lab.device import make_fabric
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training import checkpoint
from noiseproof.lab.training import interrupt as interrupts
from noiseproof.lab.training import session as sessions
from noiseproof.lab.training.interrupt import StopRequest, uninterrupted
from noiseproof.lab.training.session import Session
from noiseproof.lab.training.train import train
from tests.flat import Dropped, Flat, digits, resumed

TIMES = {"seconds", "images_per_second"}


@pytest.fixture
def flat(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    yield
    torch.set_num_threads(threads)


def rows(run):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in run.metrics()]


def assert_same(run, other):
    for name in ("model.safetensors", "best.safetensors"):
        assert (run.path / name).read_bytes() == (other.path / name).read_bytes()
    assert rows(run) == rows(other)
    assert run.info["best"] == other.info["best"]


class Killed(BaseException):
    """Stands for a kill, which cannot be caught."""


def train_until(config, position, monkeypatch):
    """Trains until the step at `position` = (epoch, step) is about to start."""
    advance_session = Session.advance

    def advance(self):
        if (self.epoch, self.step) == position:
            raise Killed
        return advance_session(self)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "advance", advance)
        with pytest.raises(Killed):
            train(config, progress=False)


EVERYTHING = {
    "method": "discriminative", "opt": "adamw", "lr": 0.003, "ema_decay": 0.9, "clip_grad": 1.0,
    "smoothing": 0.1, "ramp_epochs": 1.5, "views": "independent",
    "augment": "crop-flip+trivial+cutmix",
}  # fmt: skip


@pytest.mark.parametrize("settings", [{"method": "normal"}, EVERYTHING], ids=["sgd", "everything"])
@pytest.mark.parametrize("dropout", [False, True])
def test_a_run_killed_inside_and_between_epochs_ends_with_the_same_weights(
    tmp_path, monkeypatch, flat, settings, dropout
):
    """With dropout, torch's own generator is a part of the run too."""
    monkeypatch.setitem(BACKBONES, "flat", Dropped if dropout else Flat)
    monkeypatch.setattr(sessions, "_STRIDE", 5)
    whole = train(digits(tmp_path / "whole", **settings), progress=False)
    config = digits(tmp_path / "parts", checkpoint_minutes=1e-9, **settings)
    train_until(config, (0, 10), monkeypatch)
    train_until(resumed(config), (1, 0), monkeypatch)
    train_until(resumed(config), (2, 15), monkeypatch)
    torch.rand(3)  # the generator's state in between does not matter
    leftover = tmp_path / "parts" / "one" / "checkpoints" / ".next.pt.1.tmp"
    leftover.touch()
    assert_same(train(resumed(config), progress=False), whole)
    assert not leftover.exists()


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_weights(
    tmp_path, monkeypatch, flat
):
    whole = train(digits(tmp_path / "whole"), progress=False)
    config = digits(tmp_path / "parts")

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(runs.RunFolder, "save_weights", killed)
        with pytest.raises(Killed):
            train(config, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "advance", lambda _: pytest.fail("it trained again"))
        assert_same(train(resumed(config), progress=False), whole)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises, even if the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(config, position, monkeypatch, *signals):
    """Trains, and receives signals after the stride that starts at `position` = (epoch, step)."""
    advance_session = Session.advance

    def advance(self):
        start, means = (self.epoch, self.step), advance_session(self)
        for number in signals if start == position else ():
            os.kill(os.getpid(), number)
        return means

    with monkeypatch.context() as patch:
        patch.setattr(Session, "advance", advance)
        with pytest.raises(KeyboardInterrupt):
            train(config, progress=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_run_saves_first_and_loses_nothing(
    tmp_path, monkeypatch, flat, capsys, number
):
    monkeypatch.setattr(sessions, "_STRIDE", 5)
    before = signal.getsignal(number)
    whole = train(digits(tmp_path / "whole"), progress=False)
    config = digits(tmp_path / "parts")  # no checkpoint is due for minutes
    folder = tmp_path / "parts" / "one" / "checkpoints"
    last = Session(config, make_fabric(config)).loader.steps // 5 * 5
    for position, saved in (((0, 5), (0, 10)), ((1, last), (2, 0))):  # inside and after an epoch
        interrupt(resumed(config), position, monkeypatch, number)
        assert "interrupt again to stop immediately" in capsys.readouterr().err
        state = checkpoint.load(folder, print)
        assert state is not None
        assert (state["epoch"], state["step"]) == saved
        assert signal.getsignal(number) == before
    assert_same(train(resumed(config), progress=False), whole)


@pytest.mark.usefixtures("ctrl_c")
def test_a_run_that_is_interrupted_twice_stops_immediately(tmp_path, monkeypatch, flat):
    monkeypatch.setattr(interrupts, "_SAME", 0.0)  # one need not wait
    config = digits(tmp_path)
    interrupt(config, (0, 0), monkeypatch, signal.SIGINT, signal.SIGTERM)
    assert not checkpoint.exists(tmp_path / "one" / "checkpoints")


def test_a_signal_after_the_last_step_stops_what_would_follow(tmp_path, monkeypatch, flat):
    """In a comparison, the evaluation."""
    finish = runs.RunFolder.finish

    def interrupted(self, **facts):
        os.kill(os.getpid(), signal.SIGTERM)
        finish(self, **facts)

    monkeypatch.setattr(runs.RunFolder, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(digits(tmp_path), progress=False)
    assert runs.RunFolder.open(tmp_path / "one").finished


@pytest.mark.usefixtures("ctrl_c")
def test_signals_within_a_second_count_as_one(tmp_path, monkeypatch, flat):
    """Ctrl-C reaches a process of torchrun from the terminal, and again from torchrun."""
    interrupt(digits(tmp_path), (0, 0), monkeypatch, signal.SIGINT, signal.SIGINT)
    assert checkpoint.exists(tmp_path / "one" / "checkpoints")


def test_metrics_are_restored_from_the_checkpoint(tmp_path, monkeypatch, flat):
    """A power cut may have taken the last rows, which are not synced to the disk one by one."""
    whole = train(digits(tmp_path / "whole"), progress=False)
    config = digits(tmp_path / "parts", checkpoint_minutes=0)
    train_until(config, (2, 0), monkeypatch)
    file = tmp_path / "parts" / "one" / "metrics.csv"
    file.write_text(file.read_text().replace("0.", "1."))
    assert_same(train(resumed(config), progress=False), whole)


def test_checkpoints_of_older_versions_are_resumed(tmp_path, monkeypatch, flat):
    """They do not hold the metrics and the number of processes."""
    whole = train(digits(tmp_path / "whole"), progress=False)
    config = digits(tmp_path / "parts", checkpoint_minutes=0)
    train_until(config, (2, 0), monkeypatch)
    folder = tmp_path / "parts" / "one" / "checkpoints"
    state = checkpoint.load(folder, print)
    assert state is not None
    del state["metrics"], state["ranks"]
    checkpoint.save(folder, state)
    with open(tmp_path / "parts" / "one" / "metrics.csv", "a") as file:
        file.write("3,0.1")
    assert_same(train(resumed(config), progress=False), whole)


def test_a_missing_checkpoint_is_reported(tmp_path, monkeypatch, flat, capsys):
    for minutes, interval in (
        (5.0, "every 5 minutes, see --checkpoint-minutes"),
        (0.0, "every epoch"),
    ):
        config = digits(tmp_path / str(minutes), epochs=1, checkpoint_minutes=minutes)
        train_until(config, (0, 1), monkeypatch)
        assert "no checkpoint yet" not in capsys.readouterr().err
        train(resumed(config), progress=True)
        err = capsys.readouterr().err
        assert "one: no checkpoint yet, starting from the beginning" in err
        assert interval in err
        assert "resuming" not in err


def test_an_unfinished_run_is_refused_with_the_command_that_continues_it(
    tmp_path, monkeypatch, flat, capsys
):
    monkeypatch.chdir(tmp_path)
    train_until(digits("my runs", checkpoint_minutes=0.0), (2, 0), monkeypatch)
    run = runs.RunFolder.open("my runs/one")
    capsys.readouterr()
    for verb in ("evaluate", "report", "analyse"):
        assert cli.run([verb, "my runs/one"]) == 2
        message = capsys.readouterr().err
        assert "the training in my runs/one is not finished (2 of 3 epochs)" in message
        command = shlex.split(message.partition("resume it with: ")[2])
    assert command[0] == "noiseproof"
    assert cli.run(command[1:]) == 0
    assert "resuming at epoch 3, step 0" in capsys.readouterr().err
    assert runs.RunFolder.open(run.path).finished


def test_ignored_signals_stay_ignored_and_other_threads_have_none():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopRequest(print) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not stop.received
    finally:
        signal.signal(signal.SIGTERM, before)

    def in_thread():
        with StopRequest(print):
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = []
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_signal_waits_for_the_end_of_an_import():
    imported = []

    def interrupted_import() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            imported.append("triton")

    with pytest.raises(KeyboardInterrupt):
        interrupted_import()
    assert imported == ["triton"]


def test_sigterm_interrupts_a_command(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)

    def compare(argv: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setitem(cli.VERBS, "compare", cli.Verb("", compare))
    assert cli.run(["compare"]) == 130
    assert "stopped; the same command continues" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_error_that_follows_a_signal_is_no_bug(number, monkeypatch, capsys):
    """As numpy fails, if its import is interrupted: it catches that, and calls itself for ever."""

    def compare(argv: list[str]) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        raise RecursionError

    monkeypatch.setitem(cli.VERBS, "compare", cli.Verb("", compare))
    assert cli.run(["compare"]) == 130
    message = "noiseproof: stopped; the same command continues where this one stopped\n"
    assert capsys.readouterr().err == message


def test_a_run_without_a_checkpoint_starts_from_the_beginning(tmp_path, monkeypatch, flat):
    whole = train(digits(tmp_path / "whole"), progress=False)
    config = digits(tmp_path / "parts")
    train_until(config, (2, 0), monkeypatch)
    assert not checkpoint.exists(tmp_path / "parts" / "one" / "checkpoints")
    assert_same(train(resumed(config), progress=False), whole)


def test_a_different_number_of_threads_is_warned_about(tmp_path, monkeypatch, flat, capsys):
    config = digits(tmp_path, checkpoint_minutes=0, epochs=2)
    train_until(config, (1, 0), monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    train(resumed(config))
    assert (
        "warning: the run used 1 CPU threads so far and continues with 7" in capsys.readouterr().err
    )


def test_checkpoints_are_written_by_the_clock_and_take_a_limited_share_of_the_time(
    tmp_path, monkeypatch, flat
):
    now = [0.0]
    saved: list[tuple[int, int, float]] = []
    monkeypatch.setattr(sessions, "_STRIDE", 5)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    advance_session = Session.advance

    def advance(self):
        now[0] += 10.0  # a stride takes ten seconds
        return advance_session(self)

    def save(folder, state):
        saved.append((state["epoch"], state["step"], now[0]))
        now[0] += 1.0  # and a checkpoint one, so that they are at least 50 seconds apart

    monkeypatch.setattr(Session, "advance", advance)
    monkeypatch.setattr(checkpoint, "save", save)
    train(digits(tmp_path, epochs=10, checkpoint_minutes=0.5), progress=False)
    times = [at for _, _, at in saved]
    assert times[0] == pytest.approx(30.0)
    gaps = [b - a for a, b in pairwise(times[:-1])]  # the last is always written
    assert all(50 <= gap <= 62 for gap in gaps)
    assert any(step for _, step, _ in saved)  # inside epochs too
    assert saved[-1][:2] == (10, 0)


def test_zero_minutes_save_once_per_epoch(tmp_path, monkeypatch, flat):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda _, state: saved.append(state["epoch"]))
    train(digits(tmp_path, checkpoint_minutes=0), progress=False)
    assert saved == [1, 2, 3]


# damage


@pytest.fixture
def saved(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(
            tmp_path, {"epoch": 0, "step": step, "weights": torch.full((500,), float(step))}
        )
    return tmp_path


def read(folder) -> tuple[Any, list[str]]:
    warned: list[str] = []
    return checkpoint.load(folder, warned.append), warned


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other(path: Path) -> None:
    torch.save([1, 2], path)


def test_the_newest_checkpoint_is_loaded_and_the_one_before_is_kept(saved):
    state, warned = read(saved)
    assert (state["step"], warned) == (3, [])
    assert torch.equal(state["weights"], torch.full((500,), 3.0))
    assert sorted(p.name for p in saved.iterdir()) == ["last.pt", "previous.pt"]
    (saved / "last.pt").unlink()
    assert read(saved)[0]["step"] == 2


@pytest.mark.parametrize("damage", [cut, flip, empty, other])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(saved, damage):
    damage(saved / "last.pt")
    state, (warning,) = read(saved)
    assert state["step"] == 2
    assert f"{saved / 'last.pt'} (" in warning
    assert "is damaged; resuming from previous.pt" in warning
    assert "\n" not in warning


def test_no_flipped_bit_changes_what_is_loaded(saved):
    """Either it is detected, or it is in a part of the file without meaning."""
    content = (saved / "last.pt").read_bytes()
    rng = random.Random(0)
    detected = 0
    for _ in range(150):
        broken = bytearray(content)
        broken[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (saved / "last.pt").write_bytes(broken)
        state, warned = read(saved)
        expected = 2.0 if warned else 3.0
        detected += bool(warned)
        assert torch.equal(state["weights"], torch.full((500,), expected))
    assert detected > 75


def test_when_both_are_damaged_both_are_named(saved):
    cut(saved / "last.pt")
    flip(saved / "previous.pt")
    with pytest.raises(ValueError, match=r"all .* damaged: .*last\.pt.*previous\.pt.* Delete"):
        read(saved)


def test_a_save_killed_between_its_renames_loses_nothing(saved, monkeypatch):
    """After each of the three renames, in turn."""
    real = checkpoint.os.replace
    for allowed in (1, 2, 3):
        calls = []

        def replace(a, b, calls=calls, allowed=allowed):
            if len(calls) == allowed:
                raise Killed
            calls.append(b)
            real(a, b)

        step = 10 + allowed
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", replace)
            if allowed < 3:
                with pytest.raises(Killed):
                    checkpoint.save(saved, {"epoch": 0, "step": step})
            else:
                checkpoint.save(saved, {"epoch": 0, "step": step})
        state, warned = read(saved)
        assert (state["step"], warned) == (step, [])


def test_a_checkpoint_of_a_newer_version_is_refused(saved, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", 99)
        checkpoint.save(saved, {"epoch": 0, "step": 4})
    with pytest.raises(ValueError, match=r"last\.pt was written by a newer noiseproof.*99"):
        read(saved)


def test_code_in_a_checkpoint_is_not_executed(saved):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"schema": 1, "x": Evil()}, saved / "last.pt")
    state, warned = read(saved)
    assert (state["step"], len(warned)) == (2, 1)


def test_training_resumes_from_the_checkpoint_before_a_damaged_one(
    tmp_path, monkeypatch, flat, capsys
):
    whole = train(digits(tmp_path / "whole"), progress=False)
    config = digits(tmp_path / "parts", checkpoint_minutes=0)
    train_until(config, (2, 0), monkeypatch)
    flip(tmp_path / "parts" / "one" / "checkpoints" / "last.pt")
    run = train(resumed(config))
    err = capsys.readouterr().err
    assert "last.pt" in err
    assert "is damaged" in err
    assert "resuming at epoch 2, step 0" in err
    assert_same(run, whole)
