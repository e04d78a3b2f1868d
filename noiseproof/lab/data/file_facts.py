"""What is known about the files of a folder of images before they are read: sizes, kinds of pixels,
hashes. Measured in parallel, with a progress bar, and cached.

The facts of a large folder are kept in the user's cache folder, under a key of each file's path,
length and times, so that the next command measures only files that are new or have changed. Memory
holds the names and 49 bytes per file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from noiseproof.lab.data.images import file_progress, for_each, is_transparent, rgb
from noiseproof.lab.files import write_atomically

# Bits of a file's flags. DEEP: 16 bits per channel. TURNED: width and height are those of the
# upright image. VERIFIED: PNGs by their checksums, JPEGs by their end.
TRANSPARENT, DEEP, FRAMES, TURNED, VERIFIED = 1, 2, 4, 8, 16
Facts = NDArray[np.void]
_RECORD = np.dtype(
    [("key", "u8"), ("height", "u4"), ("width", "u4"), ("flags", "u1"), ("sha256", "u1", 32)]
)
_MANY = 5000  # files from which processes measure them, and a cache keeps the result
_CHUNK = 500  # files per task of a process
_RECENT = 2 * 10**9  # nanoseconds: a file this new may still change without a change of its times


def file_facts(
    paths: Sequence[str], root: str, *, verify: bool, exact: bool
) -> tuple[Facts, dict[int, str]]:
    """A record per file: height, width and flags; and what is wrong with those that cannot be read,
    by position.

    Args:
        paths: image files.
        root: the folder that they are in, which the cache belongs to.
        verify: also check what can be checked without decoding whole files, so that a streamed
            training does not fail hours later.
        exact: whether heights and widths must be those of the upright image. A PNG must be decoded
            for that, since it may end with its EXIF data.
    """
    facts = _cached(paths, root)
    needed = VERIFIED * verify | TURNED * exact
    missing = np.flatnonzero((facts["width"] == 0) | (facts["flags"] & needed != needed))
    errors: dict[int, str] = {}
    measure = partial(_measure, verify=verify, exact=exact)
    for positions, (measured, wrong) in _in_chunks("checking", measure, paths, missing):
        for name in ("height", "width", "flags"):
            facts[name][positions] = measured[name]
        errors |= {int(positions[i]): message for i, message in wrong.items()}
    if len(missing):
        _save(facts, root)
    return facts, errors


def file_hashes(paths: Sequence[str], root: str) -> list[bytes]:
    """The SHA-256 of the bytes of each file; OSError if one cannot be read.

    Args:
        paths: the files.
        root: the folder that they are in, which the cache belongs to.
    """
    facts = _cached(paths, root)
    missing = np.flatnonzero(~facts["sha256"].any(axis=1))
    for positions, hashes in _in_chunks("hashing", _hashes, paths, missing):
        facts["sha256"][positions] = hashes
    if len(missing):
        stored = _load(root)
        _save(np.concatenate([facts, stored[~np.isin(stored["key"], facts["key"])]]), root)
    return [row.tobytes() for row in facts["sha256"]]


def _measure(paths: Sequence[str], *, verify: bool, exact: bool) -> tuple[Facts, dict[int, str]]:
    facts = np.zeros(len(paths), _RECORD)

    def measure(position: int, image: Image.Image) -> None:
        kinds = {
            TRANSPARENT: is_transparent(image),
            DEEP: image.mode.startswith("I") or ";16" in str(getattr(image, "tile", "")),
            FRAMES: image.format != "MPO" and getattr(image, "is_animated", False),
            TURNED: exact or image.format != "PNG",
            VERIFIED: verify,
        }
        known = kinds[TURNED] or "exif" in image.info
        on_its_side = known and image.getexif().get(0x0112) in (5, 6, 7, 8)
        width, height = reversed(image.size) if on_its_side else image.size
        if verify and not exact and image.format == "PNG":
            image.verify()
        elif verify and image.format in ("JPEG", "MPO") and not _has_end(paths[position]):
            image.load()  # fails if the file is truncated
        elif image.mode in ("F", "I"):
            rgb(image, "white")  # fails if the range of its values is unknown
        flags = sum(bit for bit, holds in kinds.items() if holds)
        facts[position] = (0, height, width, flags, 0)

    return facts, for_each(paths, measure, threads=1 if get_worker_info() else None)


def _has_end(path: str) -> bool:
    """Whether a JPEG ends with its end marker; one with more data after it may be complete too."""
    with open(path, "rb") as file:
        file.seek(-2, os.SEEK_END)
        return file.read() == b"\xff\xd9"


def _hashes(paths: Sequence[str]) -> NDArray[np.uint8]:
    digests = b"".join(hashlib.sha256(Path(path).read_bytes()).digest() for path in paths)
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def _keys(paths: Sequence[str]) -> NDArray[np.uint64]:
    """A hash of name, length and times of each file; 0 for those that have only just changed, or
    are not there."""
    now, keys = time.time_ns(), np.zeros(len(paths), np.uint64)
    for i, path in enumerate(paths):
        try:
            stat = os.stat(path)
        except OSError:
            continue
        if now - max(stat.st_mtime_ns, stat.st_ctime_ns) > _RECENT:
            text = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
            digest = hashlib.blake2b(os.fsencode(text), digest_size=8).digest()
            keys[i] = int.from_bytes(digest, "little")
    return keys


# In parallel


class _Chunks(Dataset[Any]):
    """`function(paths)` for parts of the paths, in the worker processes of a DataLoader."""

    def __init__(self, function: Callable[[list[str]], Any], paths: Sequence[str]):
        # One flat array: with strings, reference counting would make forked workers copy pages.
        self.paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.function = function

    def __getitem__(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any]:
        return positions, self.function([os.fsdecode(path) for path in self.paths[positions]])


def _unchanged(item: Any) -> Any:
    return item


def _in_chunks(
    what: str,
    function: Callable[[list[str]], Any],
    paths: Sequence[str],
    positions: NDArray[np.int64],
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """Some positions and `function` of the paths there, until all of `positions` are done."""
    if len(positions) < _MANY:
        if len(positions):
            yield positions, function([paths[int(i)] for i in positions])
        return
    cores = os.cpu_count() or 1
    loader = DataLoader(
        _Chunks(function, paths),
        batch_size=None,
        sampler=np.array_split(positions, -(-len(positions) // _CHUNK)),  # pyright: ignore[reportArgumentType]
        num_workers=cores if cores > 1 else 0,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # not the global one for the workers' seeds
    )
    with file_progress(f"{what} {len(positions):,} files", len(positions)) as advance:
        for done, result in loader:
            yield done, result
            advance(len(done))


# The cache


def _file(root: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:16]
    return Path(base) / "noiseproof" / "folders" / f"{name}.npy"


def _load(root: str) -> Facts:
    """The cached records of a folder, sorted by key; none if there are none, or not readable."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        facts = np.load(_file(root), allow_pickle=False)
        if facts.dtype == _RECORD and facts.ndim == 1:
            return facts
    return np.zeros(0, _RECORD)


def _cached(paths: Sequence[str], root: str) -> Facts:
    """The records of the files as far as they are cached, zeros for others, with the files' keys if
    there are so many files that they are worth caching."""
    facts = np.zeros(len(paths), _RECORD)
    if len(paths) < _MANY:
        return facts
    keys = np.zeros(len(paths), np.uint64)
    for positions, part in _in_chunks("listing", _keys, paths, np.arange(len(paths))):
        keys[positions] = part
    stored = _load(root)
    if len(stored):
        found = np.searchsorted(stored["key"], keys).clip(max=len(stored) - 1)
        known = (stored["key"][found] == keys) & (keys != 0)
        facts[known] = stored[found[known]]
    facts["key"] = keys
    return facts


def _save(facts: Facts, root: str) -> None:
    """Replaces the cached records of a folder, if its cache can be written."""
    facts = facts[facts["key"] != 0]
    facts = facts[np.argsort(facts["key"])]
    if len(facts):
        with contextlib.suppress(OSError):
            write_atomically(_file(root), lambda file: np.save(file, facts))
