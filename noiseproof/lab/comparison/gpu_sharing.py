"""One GPU for several training processes at a time, through CUDA MPS if it is installed.

Without MPS, kernels of different processes take turns on a GPU, however small they are; with it
they run concurrently. The price is that a GPU fault in one process ends the work of the others.
No process is limited to a share of the multiprocessors (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): that
would be faster, but with such a limit kernels have skipped images.
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

_CONTROL = "nvidia-cuda-mps-control"
_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_START_LIMIT, _CLIENT_LIMIT, _QUIT_LIMIT = 20.0, 60.0, 20.0  # seconds

# Creates a CUDA context and exits: if the daemon starts but its server does not, every client
# fails. This runs in a process of its own, since the parent must not become a client.
_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
index = int(sys.argv[1])
code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
sys.exit(f"CUDA error {code}" if code else 0)
"""


@contextlib.contextmanager
def shared_gpu(device: torch.device, jobs: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Processes started inside the block share `device` through an MPS daemon.

    Two variables in `os.environ` point them to it. They must end before the block does, and nothing
    in the block may use CUDA in this process for the first time. If the variables are set already,
    the user's daemon is used and left running. If MPS is not available, the block runs
    without it.

    Args:
        device: the GPU; on a CPU nothing happens.
        jobs: processes at a time; for one, nothing happens.
        warn: called with the reason if MPS is not available.
    """
    if jobs < 2 or device.type != "cuda" or _VARIABLES[0] in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            variables = stack.enter_context(_daemon(device.index or 0))
        except _Unavailable as reason:
            warn(f"The runs take turns on the GPU: {reason}.")
            variables = {}
        with environment_variables(variables):
            yield


@contextlib.contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables in `os.environ` for the block, and for processes started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Unavailable(Exception):
    """Why MPS is not available."""


@contextlib.contextmanager
def _daemon(index: int) -> Iterator[dict[str, str]]:
    """Runs a daemon in a new folder during the block, and yields the variables that point to it."""
    control = shutil.which(_CONTROL)
    if control is None:
        raise _Unavailable(f"{_CONTROL} (CUDA MPS) is not on PATH")
    # Not in TMPDIR, which may be long: the path of a unix socket has at most 107 characters.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mps-", dir=parent))
    variables: dict[str, str] = {name: str(folder) for name in _VARIABLES}
    environment = {**os.environ, **variables}
    # Numbers are for the clients: the daemon would renumber the GPUs, and they would do so again.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if any(word.strip().isdigit() for word in visible):
        del environment["CUDA_VISIBLE_DEVICES"]
    output = folder / "output.txt"
    try:
        _call([control, "-d"], environment, output, _START_LIMIT)
        client = [sys.executable, "-c", _CLIENT, str(index)]
        _call(client, {**os.environ, **variables}, output, _CLIENT_LIMIT)
        yield variables
    finally:
        with contextlib.suppress(_Unavailable):  # it has already ended, or never started
            _call([control], environment, output, _QUIT_LIMIT, "quit\n")
        shutil.rmtree(folder, ignore_errors=True)


def _call(
    command: list[str], environment: Mapping[str, str], output: Path, limit: float, text: str = ""
) -> None:
    """Runs a command with `text` as its input; _Unavailable if it fails or takes too long.

    Output goes to a file, since a daemon would keep a pipe open. The command gets a session of its
    own, so that Ctrl-C does not reach the daemon.
    """
    name = "a first CUDA context" if command[0] == sys.executable else Path(command[0]).name
    try:
        with output.open("w") as file:
            done = subprocess.run(
                command, env=environment, input=text, stdout=file, stderr=subprocess.STDOUT,
                timeout=limit, start_new_session=True, text=True,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"{name} did not answer in {limit:g} s") from None
    except OSError as error:
        raise _Unavailable(f"{name} could not be run ({error.strerror or error})") from None
    if done.returncode:
        lines = output.read_text(errors="replace").strip().splitlines()
        last_line = f": {lines[-1][:200]}" if lines else ""
        raise _Unavailable(f"{name} failed with exit code {done.returncode}{last_line}")
