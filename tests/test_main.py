"""The command as a process: what it imports, its exit status, and closed pipes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "noiseproof"]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *start, *words], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--help", 0),
        ("train --data cifar10 --help", 0),
        ("compare --help", 0),
        ("list", 0),
        ("train --epochs 0", 2),
        ("train --epocs 1", 2),
        ("evaluate no/such/run", 2),
        ("predict . no/such.jpg", 2),
    ],
)
def test_torch_is_not_imported_for_help_or_for_an_invalid_setting(
    command: str, status: int
) -> None:
    code = """
import sys
from noiseproof.__main__ import main
status = main(sys.argv[1:])
heavy = {"torch", "torchvision", "numpy", "lightning"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else status)
"""
    done = run(*command.split(), code=code)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_the_module_runs_as_a_command() -> None:
    done = run("train", "--lr", "-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "noiseproof: --lr must be above 0, got -1.0\n"


def test_an_interrupt_while_the_command_line_is_imported_is_one_line() -> None:
    code = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "tyro":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from noiseproof.__main__ import main
sys.exit(main(["--help"]))
"""
    done = run(code=code)
    assert (done.returncode, done.stderr) == (130, "noiseproof: stopped\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    code = """
import os, sys
from noiseproof.__main__ import main
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.exit(main(["list"]))
"""
    done = run(code=code)
    assert done.returncode == 1
    assert done.stderr == "noiseproof: No space left on device; make room on that disk\n"


def test_without_the_lab_libraries_the_command_says_what_to_install() -> None:
    code = """
import sys
sys.modules["tyro"] = None
from noiseproof.__main__ import main
sys.exit(main(["--help"]))
"""
    done = run(code=code)
    assert done.returncode == 2
    assert "needs tyro" in done.stderr
    assert "pip install 'noiseproof[lab]'" in done.stderr


def test_a_reader_that_closes_the_pipe_is_not_an_error() -> None:
    code = """
import os, sys
from noiseproof.__main__ import main
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
sys.exit(main(["list"]))
"""
    done = run(code=code)
    assert (done.returncode, done.stderr) == (0, "")
