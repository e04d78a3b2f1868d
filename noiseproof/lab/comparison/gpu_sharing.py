"""One GPU for several training processes at a time, through CUDA MPS where it is installed.

Without MPS the kernels of different processes take turns on a GPU, however small they are; with it
they run side by side. The price is that a fault on the GPU in one process ends what the others do.
No process gets a share of the multiprocessors of its own (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): that
would be faster, but on a share kernels were seen to leave out images.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

__all__ = ["shared_gpu"]

_CONTROL = "nvidia-cuda-mps-control"
_PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_START, _TRY, _QUIT = 20.0, 60.0, 20.0  # seconds that each may take

# A process of its own makes a context and ends: the daemon may start where its server does not, and
# then every program that asks it fails. The parent itself must not become its client.
_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
index = int(sys.argv[1])
code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
sys.exit(f"CUDA error {code}" if code else 0)
"""


@contextlib.contextmanager
def shared_gpu(device: torch.device, jobs: int, say: Callable[[str], None]) -> Iterator[None]:
    """Processes that are started inside the block share `device` through an MPS daemon of theirs.

    They find it by two variables in `os.environ`, and must have ended when the block does; nothing
    in the block may use CUDA in this process for the first time. A daemon that the variables name
    already is left alone, and used. On a CPU, and for one job, nothing happens. Where MPS cannot be
    had, `say` gets a line with the reason, and the block runs without.
    """
    if jobs < 2 or device.type != "cuda" or _PLACES[0] in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            places = stack.enter_context(_daemon(device.index or 0))
        except _Unavailable as reason:
            say(f"The runs take turns on the GPU: {reason}.")
            places = {}
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class _Unavailable(Exception):
    """Why there is no MPS."""


@contextlib.contextmanager
def _daemon(index: int) -> Iterator[dict[str, str]]:
    """A daemon in a fresh folder, as the variables that lead to it; it is gone after the block."""
    control = shutil.which(_CONTROL)
    if control is None:
        raise _Unavailable(f"{_CONTROL} (CUDA MPS) is not on PATH")
    # Not in TMPDIR, which may be long: the path of a unix socket has at most 107 characters.
    short = "/tmp" if os.access("/tmp", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mps-", dir=short))
    places: dict[str, str] = {name: str(folder) for name in _PLACES}
    environment = {**os.environ, **places}
    # Numbers are meant for the clients: the daemon would count the GPUs anew, and they once more.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if any(word.strip().isdigit() for word in chosen):
        del environment["CUDA_VISIBLE_DEVICES"]
    output = folder / "output.txt"
    try:
        _call([control, "-d"], environment, output, _START)
        client = [sys.executable, "-c", _CLIENT, str(index)]
        _call(client, {**os.environ, **places}, output, _TRY)
        yield places
    finally:
        with contextlib.suppress(_Unavailable):  # it has ended by itself, or never begun
            _call([control], environment, output, _QUIT, "quit\n")
        shutil.rmtree(folder, ignore_errors=True)


def _call(
    command: list[str], environment: Mapping[str, str], output: Path, limit: float, said: str = ""
) -> None:
    """Runs the command. Its output goes to a file: a daemon would hold a pipe open, and us with it.

    In a session of its own, so that Ctrl-C reaches the workers' parent and not the daemon.
    """
    name = "a first CUDA context" if command[0] == sys.executable else Path(command[0]).name
    try:
        with output.open("w") as file:
            done = subprocess.run(
                command, env=environment, input=said, stdout=file, stderr=subprocess.STDOUT,
                timeout=limit, start_new_session=True, text=True,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"{name} did not answer in {limit:g} s") from None
    except OSError as error:
        raise _Unavailable(f"{name} could not be run ({error.strerror or error})") from None
    if done.returncode:
        lines = output.read_text(errors="replace").strip().splitlines()
        told = f": {lines[-1][:200]}" if lines else ""
        raise _Unavailable(f"{name} failed with exit code {done.returncode}{told}")
