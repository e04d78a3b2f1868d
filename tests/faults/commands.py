"""Commands in processes of their own, which can be killed, interrupted, or run out of disk space.

They are forked from a server that has imported torch, so that a command starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from noiseproof.cli import main
from noiseproof.lab.comparison import workers
from noiseproof.lab.models.classifier import BACKBONES
from tests.flat import Flat

T = TypeVar("T")

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.faults.commands", "noiseproof.lab.comparison.compare", "noiseproof.lab.training.train",
     "lightning.fabric", "sklearn.datasets"]
)  # fmt: skip
_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate")
# What Python prints, and cannot be kept from, if a method of ZipFile is interrupted
_INCOMPLETE = re.compile(
    r"^Exception ignored [^\n]*<function ZipFile\.__del__.*?^(?:Attribute|Value)Error: [^\n]*\n",
    re.S | re.M,
)


class KillAt(NamedTuple):
    """A process kills itself a moment after its `event`th access to the files of `folder`."""

    folder: str
    event: int
    delay: float = 0.0  # seconds


class Ended(NamedTuple):
    """How a command ended."""

    status: int  # negative: the signal that ended it
    err: str
    file_events: int  # accesses to the files of `KillAt.folder`

    @property
    def lines(self) -> list[str]:
        """The errors that it printed."""
        return errors(self.err)


def errors(text: str) -> list[str]:
    """The lines that begin with the name of the program: its errors."""
    return [line for line in text.splitlines() if line.startswith(("noiseproof: ", "noiseproof ("))]


class Command:
    """`noiseproof` with the words `argv`, running.

    Args:
        argv: the words after `noiseproof`.
        err: file for stderr and stdout.
        kill: when it kills itself, if at all.
    """

    def __init__(
        self,
        argv: Sequence[str],
        err: Path,
        kill: KillAt | None = None,
    ):
        self.err = err
        self._events = CONTEXT.Value("i", 0)
        self._ready = CONTEXT.Event()
        arguments = (list(argv), str(err), kill, self._events, self._ready)
        self.process: BaseProcess = CONTEXT.Process(target=_run, args=arguments)
        self.process.start()
        assert self._ready.wait(120)

    def send(self, number: signal.Signals, seconds: float) -> bool:
        """Sends a signal after some seconds; False if the command has ended by then."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            assert self.process.pid is not None
            os.kill(self.process.pid, number)
            return True
        return False

    def wait(self, seconds: float = 120) -> Ended:
        """How it ended; the processes that it had started must end within ten seconds of it."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s"
        assert self.process.pid is not None
        deadline = time.monotonic() + 10
        while _is_running(self.process.pid):
            assert time.monotonic() < deadline, "a worker outlives its command"
            time.sleep(0.02)
        text = _INCOMPLETE.sub("", self.err.read_text(errors="replace"))
        return Ended(self.process.exitcode, text, self._events.value)


def _is_running(group: int) -> bool:
    """Whether a process of the group runs; one that has ended may wait to be collected."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            state, _, number = file.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False


def run(argv: Sequence[str], err: Path, kill: KillAt | None = None) -> Ended:
    """Runs a command to its end; arguments as `Command`."""
    return Command(argv, err, kill).wait()


def _run(argv, err, kill, events, ready) -> None:
    os.setsid()  # a process group of its own
    file = os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _make_small()
    if kill is not None:
        sys.addaudithook(_killer(kill, events))
    ready.set()
    sys.exit(main.run(argv))


def _killer(kill: KillAt, events) -> Callable[[str, tuple], None]:
    process = os.getpid()

    def hook(event: str, args: tuple) -> None:
        if (
            event in _FILE_EVENTS
            and str(args[0]).startswith(kill.folder)
            and os.getpid() == process
        ):
            events.value += 1
            if events.value == kill.event:
                if kill.delay:
                    threading.Timer(kill.delay, os.kill, (process, signal.SIGKILL)).start()
                else:
                    os.kill(process, signal.SIGKILL)

    return hook


def _make_small() -> None:
    """A step takes 1 ms, and the workers of a comparison are forked instead of importing torch."""
    BACKBONES["small_cnn"] = Flat
    fork = multiprocessing.get_context("fork")
    workers.multiprocessing.get_context = lambda method=None: fork  # pyright: ignore


# Disks


def in_child(function: Callable[..., T], *arguments: object) -> T:
    """The result of a function of this module, called in a process forked from the server."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *arguments).result()


def on_a_full_disk(
    argv: Sequence[str], folder: Path, rooms: Sequence[int]
) -> list[tuple[Ended, Ended]] | str:
    """Runs a command that writes to `folder`/disk while only some room is left there, and again
    after room has been made. Runs end up in `folder`/ROOM. If this system does not permit that, the
    reason is returned.

    Args:
        argv: the words of a training, without its folder.
        folder: where the disk is mounted.
        rooms: free bytes, one run for each.
    """
    disk = folder / "disk"
    if reason := _mount_disk(disk):
        return reason
    ends = []
    for room in rooms:
        words = [*argv, "--output", str(disk), "--name", str(room)]
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - room))
        first = run(words, folder / "err")
        filler.unlink()
        ends.append((first, run(words, folder / "err")))
        shutil.move(disk / str(room), folder)
    return ends


def on_a_read_only_disk(commands: Sequence[Sequence[str]], folder: Path) -> list[Ended] | str:
    """Runs the first command, which fills `folder`/disk, and the others when nothing can be written
    there any more. The reason if this system does not permit that."""
    if reason := _mount_disk(folder / "disk"):
        return reason
    first, *others = commands
    assert run(first, folder / "err").status == 0
    subprocess.run(["mount", "-o", "remount,ro", str(folder / "disk")], check=True)
    return [run(argv, folder / "err") for argv in others]


def _mount_disk(disk: Path) -> str:
    """Mounts a disk of 8 MB that only this process and its children see, as root or, where the
    system permits it, as any user; else returns the reason."""
    _start_commands_here()
    newns, newuser, uid, gid = 0x20000, 0x10000000, os.geteuid(), os.getegid()
    if shutil.which("mount") is None:
        return "there is no mount command"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(newns | (newuser if uid else 0)):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    disk.mkdir()
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=8m", "none", str(disk)]):
        mounted = subprocess.run(["mount", *words], capture_output=True, text=True)
        if mounted.returncode:
            return mounted.stderr.strip()
    return ""


def as_an_ordinary_user(commands: Sequence[Sequence[str]], err: Path) -> list[Ended]:
    """Runs commands without the right of root to ignore permissions."""
    _start_commands_here()
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)  # of the capabilities of this process
    assert ctypes.CDLL(None).capset(version, (ctypes.c_uint32 * 6)()) == 0  # none are left
    return [run(argv, err) for argv in commands]


def _start_commands_here() -> None:
    """Commands become children of this process instead of the server."""
    global CONTEXT
    CONTEXT = multiprocessing.get_context("fork")
