"""Everything needed to go on with a run, in one file that is whole or not there.

`last.pt` is replaced atomically and the one before it is kept as `previous.pt`. Reading verifies
the checksums inside the file first: a damaged checkpoint is named, and the one before it used.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from noiseproof.lab.files import sync_folder, write_atomically
from noiseproof.lab.runs import SCHEMA, check_schema

# The newest first. next.pt is there, and whole, where a save was stopped between two renames.
_NAMES = ("next.pt", "last.pt", "previous.pt")


def save(folder: Path, state: dict[str, Any]) -> None:
    """Writes folder/last.pt; what was there becomes folder/previous.pt."""
    last, fresh = folder / "last.pt", folder / "next.pt"
    write_atomically(fresh, lambda file: torch.save({"schema": SCHEMA, **state}, file))
    if last.exists():
        os.replace(last, folder / "previous.pt")
    os.replace(fresh, last)
    sync_folder(folder)


def exists(folder: Path) -> bool:
    return any((folder / name).exists() for name in _NAMES)


def load(folder: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest whole checkpoint, or None where none was ever written.

    `warn` is told of damaged ones; where all are damaged, ValueError names them.
    """
    damaged: list[str] = []
    for name in _NAMES:
        path = folder / name
        if not path.exists():
            continue
        try:
            state = _read(path)
        except Exception as error:  # damage comes to light as whatever it happens to break
            damaged.append(f"{path} ({_reason(error)})")
            continue
        check_schema(path, state["schema"])
        for found in damaged:
            warn(f"checkpoint {found} is damaged; going on from {name}, the one before it")
        return state
    if damaged:
        raise ValueError(
            f"all checkpoints are damaged: {', '.join(damaged)}. Delete {folder.parent} to train "
            "anew, or give another --name"
        )
    return None


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        wrong = archive.testzip()
    if wrong:
        raise zipfile.BadZipFile(f"checksum of {wrong} is wrong")
    state = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(state, dict) or not isinstance(state.get("schema"), int):
        raise ValueError("it is no checkpoint of a run")
    return state


def _reason(error: BaseException) -> str:
    """The first line of what went wrong: torch's errors go on for a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
