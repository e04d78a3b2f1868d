"""Files that are complete or absent, checksums in JSON, tensors and arrays from files that may be
hostile, and locks that end with the process that holds them."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

_UNPACKED = 1 << 30  # bytes that any archive may unpack to


def write_atomically(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Replaces `path` by a complete new file, or leaves it unchanged; OSError names the file.

    Temporary files of killed processes that were writing the same file are removed.

    Args:
        path: the file; missing folders are created.
        content: text, written as UTF-8; bytes; or a function that writes into an open binary file.
    """
    if isinstance(content, str):
        content = content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        # torch.save raises an error of its own about a write that failed
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno:
            raise OSError(cause.errno, cause.strerror, str(path)) from None
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not _is_running(leftover.name.split(".")[-2]):
            leftover.unlink(missing_ok=True)
    sync_folder(path.parent)


def _is_running(pid: str) -> bool:
    """Whether a process has the id `pid`; True where that cannot be found out."""
    if os.name == "nt" or not pid.isdecimal():  # on Windows, os.kill would end the process
        return True
    with contextlib.suppress(OSError):  # Linux lists zombies, which nobody has waited for
        if ") Z " in Path(f"/proc/{pid}/stat").read_text(errors="replace"):
            return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        return True
    return True


@contextlib.contextmanager
def appending(path: Path) -> Iterator[IO[str]]:
    """The file at `path`, open for appending text; OSError names it if the disk is full.

    Args:
        path: the file; line ends are written as they are given.
    """
    try:
        with open(path, "a", newline="", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def describe(error: OSError) -> str:
    """What went wrong with which file, and what to do about it where that is clear.

    >>> describe(OSError(errno.ENOSPC, "No space left on device", "runs/a/model.safetensors"))
    'No space left on device: runs/a/model.safetensors; make room on that disk'
    >>> describe(OSError(errno.EFBIG, "File too large", "a.pt"))
    'File too large: a.pt; raise the limit on the size of a file (ulimit -f), or use another disk'
    """
    text = error.strerror or str(error)
    if error.filename is not None:
        text += f": {os.fsdecode(error.filename)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text}; make room on that disk"
    if error.errno == errno.EFBIG:
        return f"{text}; raise the limit on the size of a file (ulimit -f), or use another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        folders = Path(os.fsdecode(error.filename or "")).parents
        inside = any((folder / "config.json").exists() for folder in list(folders)[:2])
        other = "copy the run to" if inside else "choose"
        return f"{text}; change the permissions, or {other} a folder that you may write to"
    return text


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """`content`, which JSON can hold, with the checksum that `without_checksum` verifies. It comes
    first: who edits the file may delete that line."""
    return {"crc32": _crc32(json.loads(json.dumps(content))), **content}  # as it will be read


def without_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """`content` without its checksum; ValueError if that is wrong. Content without one is returned
    as it is: older versions wrote none."""
    if "crc32" not in content:
        return content
    content = dict(content)
    if (recorded := content.pop("crc32")) != (actual := _crc32(content)):
        raise ValueError(
            f"its checksum is {actual}, but it records {recorded}; if you have edited it, delete "
            "its line `crc32`"
        )
    return content


def _crc32(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def sync_folder(path: Path) -> None:
    """Makes renames inside the folder survive a power cut."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def refuse_bomb(path: Path) -> None:
    """ValueError if the .npz file at `path` would unpack to more than 1 GiB and to more than a
    hundred times its size, as no photographs or predictions do."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(_UNPACKED, 100 * path.stat().st_size):
        raise ValueError(
            f"it would unpack to {unpacked / 1e9:,.1f} GB, more than a hundred times its size; if "
            "that is meant, write it with numpy.savez, uncompressed"
        )


def read_tensors(path: Path, *, verify: bool = False) -> Any:
    """What torch.save has written to `path`, on the CPU. ValueError if that is anything but tensors
    and plain values, since to unpickle other objects can run any code.

    Args:
        path: the file.
        verify: check its checksums first; a file of torch before 1.6, which has none, is refused.
    """
    import torch

    if verify or zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save does not compress
                raise ValueError(f"it would unpack to {unpacked / 1e6:,.0f} MB")
            if verify and (corrupt := archive.testzip()):
                raise zipfile.BadZipFile(f"wrong checksum of {corrupt}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats that are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(reason_not_loaded(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # it ends before torch expects it to
            raise
        raise ValueError(reason_not_loaded(error)) from error


def reason_not_loaded(error: Exception) -> str:
    """One line about an error of torch.load, which itself advises to load without protection."""
    if isinstance(error, (KeyError, EOFError)) or getattr(error, "errno", None) == errno.EINVAL:
        return "it is cut off, or torch.save has not written it"
    text = str(error).strip() or type(error).__name__
    if "weights_only" in text:
        return "it holds other objects than tensors, which could run any code and are never loaded"
    return text.splitlines()[0]


@contextlib.contextmanager
def process_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the operating system's lock on a file inside the block.

    The lock ends with the process, however it ends, and forked processes (which read images) do not
    inherit it. Where the system or the file system has no such locks, nothing is locked.

    Args:
        path: the file, which contains the process id inside the block and is then removed.
        wait: whether to wait for a process that holds the lock; if not, `filelock.Timeout` is
            raised.
    """
    lock = FileLock(path, fallback_to_soft=False, on_acquired=_write_pid)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise
    except OSError:  # there are no locks here
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have been deleted
            path.unlink()
        lock.release()


def _write_pid(file: int) -> None:
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Reserves a run folder, which is created if need be, for this process inside the block;
    ValueError names the process that is already training there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(process_lock(path, wait=False))
        except Timeout:
            pid = ""
            with contextlib.suppress(OSError):  # released meanwhile
                pid = path.read_text(errors="replace").strip()
            holder = f"another process (pid {pid})" if pid else "another process"
            raise ValueError(
                f"{'this process' if pid == str(os.getpid()) else holder} is training in {folder}: "
                "wait until it ends, or choose another --name"
            ) from None
        yield
