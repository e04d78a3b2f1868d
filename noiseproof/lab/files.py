"""Files that are whole or not there, and folders that one process at a time writes to.

The lock of a folder is the system's, on a file that names the process: it ends with the process,
however that ends, so that nothing is left to be cleared away after a kill. It belongs to the
process alone, not to those that it forks to read images. Where the system or the file system has no
such locks, nothing is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["Lock", "sync_folder", "write_atomically"]

_HELD = (errno.EACCES, errno.EAGAIN)
_mine: set[str] = set()  # the system gives a process what it holds already


def write_atomically(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Replaces `path` by what `write` puts into a file: all of it, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sees to it that renames inside the folder survive a power cut."""
    if os.name == "nt":  # which cannot open a folder
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Lock:
    """Inside the block `take` locks a folder; the end of the block gives it back."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1

    def take(self, folder: Path) -> None:
        """Locks `folder`, which is made if need be. ValueError names the process that has it."""
        if fcntl is None or self._path is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        if str(path.absolute()) in _mine:
            raise ValueError(f"this process is training in {folder} already")
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(file, 20).decode(errors="replace").strip()
                os.close(file)
                if error.errno not in _HELD:  # there are no locks here
                    return
                who = f"another process (pid {holder})" if holder else "another process"
                raise ValueError(
                    f"{who} is training in {folder}: wait until it is done, or give another --name"
                ) from None
            if _is(file, path):
                break
            os.close(file)  # its last owner has just removed it
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        self._path, self._file = path, file
        _mine.add(str(path.absolute()))

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # the folder may be gone
            self._path.unlink()
        os.close(self._file)
        _mine.discard(str(self._path.absolute()))
        self._path, self._file = None, -1


def _is(file: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
