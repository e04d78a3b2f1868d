"""Sharing a GPU, with a script in place of nvidia-cuda-mps-control."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from noiseproof.lab.comparison import gpu_sharing
from noiseproof.lab.comparison.gpu_sharing import shared_gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
NOTES = """#!/bin/sh
echo "flags=$*;input=$(cat);pipe=$CUDA_MPS_PIPE_DIRECTORY;log=$CUDA_MPS_LOG_DIRECTORY;\
gpus=${CUDA_VISIBLE_DEVICES-all}" >> "$NOTES"
"""


class Fake:
    """Stands in for nvidia-cuda-mps-control: logs its calls, then runs the commands of `then`."""

    def __init__(self, folder: Path):
        self.notes, self.script = folder / "notes.txt", folder / "nvidia-cuda-mps-control"
        self.then("")

    def then(self, commands: str) -> None:
        self.script.write_text(NOTES + commands)
        self.script.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, str]]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [dict(word.split("=", 1) for word in line.split(";")) for line in lines]


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Fake:
    fake = Fake(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(fake.notes))
    monkeypatch.setattr(gpu_sharing, "_CLIENT", "")  # there may be no GPU
    for name in (PIPE, LOG, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return fake


def seen_by_a_child() -> list[str]:
    code = f"import os; print(os.environ.get({PIPE!r})); print(os.environ.get({LOG!r}))"
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_processes_of_the_block_get_a_daemon_that_ends_with_it(fake, monkeypatch):
    monkeypatch.setenv(LOG, "logs")
    warnings: list[str] = []
    with shared_gpu(CUDA, 2, warnings.append):
        (start,) = fake.calls
        folder = start["pipe"]
        assert Path(folder).is_dir()
        assert len(folder) < 40
        assert seen_by_a_child() == [folder, folder]
    assert fake.calls == [
        {"flags": "-d", "input": "", "pipe": folder, "log": folder, "gpus": "all"},
        {"flags": "", "input": "quit", "pipe": folder, "log": folder, "gpus": "all"},
    ]
    assert PIPE not in os.environ
    assert os.environ[LOG] == "logs"
    assert not Path(folder).exists()
    assert warnings == []


def test_an_error_in_the_block_ends_the_daemon_too(fake):
    with pytest.raises(KeyboardInterrupt), shared_gpu(CUDA, 2, pytest.fail):
        raise KeyboardInterrupt
    assert [call["input"] for call in fake.calls] == ["", "quit"]
    assert PIPE not in os.environ
    assert LOG not in os.environ
    assert not Path(fake.calls[0]["pipe"]).exists()


@pytest.mark.parametrize(
    ("visible", "passed"), [("1", "all"), ("0, 2", "all"), ("GPU-5f", "GPU-5f")]
)
def test_the_daemon_does_not_renumber_the_gpus_of_its_clients(fake, monkeypatch, visible, passed):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with shared_gpu(CUDA, 2, pytest.fail):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert [call["gpus"] for call in fake.calls] == [passed, passed]


def warning_without_mps(fake: Fake) -> str:
    """The warning of a block that runs without MPS, and leaves nothing behind."""
    warnings: list[str] = []
    with shared_gpu(CUDA, 2, warnings.append):
        assert PIPE not in os.environ
    assert not any(Path(call["pipe"]).exists() for call in fake.calls)
    (line,) = warnings
    assert line.startswith("The runs take turns on the GPU: ")
    return line


def test_a_daemon_that_fails_gives_a_warning(fake):
    fake.then("echo no permission; exit 3")
    assert "nvidia-cuda-mps-control failed with exit code 3: no permission" in warning_without_mps(
        fake
    )


def test_a_daemon_that_hangs_gives_a_warning(fake, monkeypatch):
    monkeypatch.setattr(gpu_sharing, "_START_LIMIT", 0.5)
    monkeypatch.setattr(gpu_sharing, "_QUIT_LIMIT", 0.5)
    fake.then("exec sleep 60")
    began = time.monotonic()
    assert "nvidia-cuda-mps-control did not answer in 0.5 s" in warning_without_mps(fake)
    assert time.monotonic() - began < 20


def test_a_daemon_whose_server_fails_gives_a_warning(fake, monkeypatch):
    monkeypatch.setattr(gpu_sharing, "_CLIENT", "import sys; sys.exit('CUDA error 805')")
    assert "a first CUDA context failed with exit code 1: CUDA error 805" in warning_without_mps(
        fake
    )
    assert [call["input"] for call in fake.calls] == ["", "quit"]


def test_a_damaged_daemon_gives_a_warning(fake):
    fake.script.write_bytes(b"\x7fELF")
    assert "nvidia-cuda-mps-control could not be run" in warning_without_mps(fake)


def test_a_background_process_that_keeps_the_output_open_does_not_block(fake):
    fake.then('[ "$1" = -d ] && { sleep 5 & }\nexit 0')
    began = time.monotonic()
    with shared_gpu(CUDA, 2, pytest.fail):
        assert time.monotonic() - began < 4


def test_a_missing_mps_gives_a_warning(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "nvidia-cuda-mps-control (CUDA MPS) is not on PATH" in warning_without_mps(fake)


def test_a_daemon_of_the_user_is_left_running(fake, monkeypatch):
    monkeypatch.setenv(PIPE, "/theirs")
    with shared_gpu(CUDA, 2, pytest.fail):
        assert os.environ[PIPE] == "/theirs"
        assert LOG not in os.environ
    assert os.environ[PIPE] == "/theirs"
    assert fake.calls == []


@pytest.mark.parametrize(("device", "jobs"), [(CUDA, 1), (CPU, 2)])
def test_one_job_or_a_cpu_needs_no_daemon(fake, device, jobs):
    with shared_gpu(device, jobs, pytest.fail):
        assert PIPE not in os.environ
    assert fake.calls == []


def test_the_client_reports_errors_of_cuda():
    done = subprocess.run(
        [sys.executable, "-c", gpu_sharing._CLIENT, "0"], capture_output=True, text=True
    )
    if torch.cuda.is_available():
        assert done.returncode == 0
    else:
        assert done.returncode == 1
        assert "libcuda.so.1" in done.stderr or "CUDA error" in done.stderr
