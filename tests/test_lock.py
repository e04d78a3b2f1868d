"""Two processes do not train in one run folder; a process that is killed leaves no lock behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from noiseproof.lab.files import Lock
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits, resumed

# Holds the lock, as a training does that has forked a process to read images
HOLDER = """
import os, sys, time
from pathlib import Path
from noiseproof.lab.files import Lock
lock = Lock()
lock.take(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "one")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path, monkeypatch, holder):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    config = digits(tmp_path, epochs=1)
    told = rf"another process \(pid {holder.pid}\) is training in .*one: wait .* another --name"
    with pytest.raises(ValueError, match=told):  # it has no config.json yet
        train(config, progress=False)
    assert not (tmp_path / "one" / "config.json").exists()
    (tmp_path / "other").mkdir()
    begun = digits(tmp_path, epochs=1, name="other")
    config_file = train(begun, progress=False).path / "config.json"
    text = config_file.read_text().replace('"finished": true', '"finished": false')
    (tmp_path / "one" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        train(resumed(config), progress=False)
    assert not (tmp_path / "one" / "metrics.csv").exists()
    holder.kill()
    holder.wait()  # the process that it has forked is still there
    run = train(resumed(config), progress=False)
    assert run.finished
    assert [row["epoch"] for row in run.metrics()] == [1]
    assert not (run.path / ".lock").exists()


def test_the_end_of_the_block_gives_the_folder_back(tmp_path):
    for _ in range(2):
        with Lock() as lock:
            lock.take(tmp_path)
            lock.take(tmp_path)  # it has it
            assert (tmp_path / ".lock").read_text() == str(os.getpid())
        assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("kind", ["none", "refused"])
def test_without_locks_nothing_is_refused(tmp_path, monkeypatch, kind):
    from noiseproof.lab import files as module

    class Unlockable:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def lockf(*_):
            raise OSError(95, "not supported")

    monkeypatch.setattr(module, "fcntl", None if kind == "none" else Unlockable)
    with Lock() as lock:
        lock.take(tmp_path)


def test_a_process_cannot_take_its_own_lock_twice(tmp_path):
    with Lock() as first:
        first.take(tmp_path)
        with Lock() as second, pytest.raises(ValueError, match="this process"):
            second.take(tmp_path)
        assert (tmp_path / ".lock").exists()
    with Lock() as again:
        again.take(tmp_path)
