"""One process at a time trains in a run folder, and a killed process leaves no lock behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from filelock import Timeout

from noiseproof.lab.files import folder_lock, process_lock, without_checksum
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits, resumed

# Holds the lock, as a training does that has forked a process to read images
HOLDER = """
import os, sys, time
from pathlib import Path
from noiseproof.lab.files import folder_lock
with folder_lock(Path(sys.argv[1])):
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
    refusal = rf"another process \(pid {holder.pid}\) is training in .*one: wait .* another --name"
    with pytest.raises(ValueError, match=refusal):  # it has no config.json yet
        train(config, progress=False)
    assert not (tmp_path / "one" / "config.json").exists()
    (tmp_path / "other").mkdir()
    other = digits(tmp_path, epochs=1, name="other")
    config_file = train(other, progress=False).path / "config.json"
    content = without_checksum(json.loads(config_file.read_text()))
    content["info"]["finished"] = False
    (tmp_path / "one" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=refusal):
        train(resumed(config), progress=False)
    assert not (tmp_path / "one" / "metrics.csv").exists()
    holder.kill()
    holder.wait()  # the process that it has forked is still there
    run = train(resumed(config), progress=False)
    assert run.finished
    assert [row["epoch"] for row in run.metrics()] == [1]
    assert not (run.path / ".lock").exists()


def test_the_lock_is_released_at_the_end_of_the_block(tmp_path):
    for _ in range(2):
        with folder_lock(tmp_path):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())
        assert not (tmp_path / ".lock").exists()
    with contextlib.suppress(KeyError), folder_lock(tmp_path):
        raise KeyError
    assert not (tmp_path / ".lock").exists()


def test_a_longer_process_id_of_a_killed_holder_is_replaced(tmp_path):
    (tmp_path / ".lock").write_text("123456789")
    with folder_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_nothing_is_refused_on_a_file_system_without_locks(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_lock(tmp_path), folder_lock(tmp_path), process_lock(tmp_path / "gpu.lock"):
        pass


def test_a_process_cannot_hold_the_same_lock_twice(tmp_path):
    with folder_lock(tmp_path):
        with pytest.raises(ValueError, match="this process is training in"), folder_lock(tmp_path):
            pass
        with pytest.raises(Timeout), process_lock(tmp_path / ".lock", wait=False):
            pass
        assert (tmp_path / ".lock").exists()
    with folder_lock(tmp_path):
        pass


def test_a_waiting_process_gets_the_lock_when_it_is_released(tmp_path):
    path = tmp_path / "gpu.lock"
    code = (
        "import sys; from pathlib import Path; from noiseproof.lab.files import process_lock\n"
        "print('ready', flush=True)\n"
        "with process_lock(Path(sys.argv[1])): print('locked', flush=True)"
    )
    with process_lock(path):
        waiting = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
    with waiting:
        assert waiting.stdout.read() == "locked\n"
    assert waiting.returncode == 0
