"""Checkpoints: everything needed to resume a run, in one file that is complete or absent.

`last.pt` is replaced atomically, and its predecessor is kept as `previous.pt`. Loading verifies the
checksums inside the file first: if a checkpoint is damaged, its predecessor is used, with a
warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from noiseproof.lab.files import read_tensors, sync_folder, write_atomically
from noiseproof.lab.runs import SCHEMA, check_schema

# Newest first. next.pt exists, and is complete, only if a save was killed between two renames.
_NAMES = ("next.pt", "last.pt", "previous.pt")


def save(folder: Path, state: dict[str, Any]) -> None:
    """Writes `state` to folder/last.pt; the previous last.pt becomes previous.pt."""
    last, fresh = folder / "last.pt", folder / "next.pt"
    write_atomically(fresh, lambda file: torch.save({"schema": SCHEMA, **state}, file))
    if last.exists():
        os.replace(last, folder / "previous.pt")
    os.replace(fresh, last)
    sync_folder(folder)


def exists(folder: Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return any((folder / name).exists() for name in _NAMES)


def load(folder: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest undamaged checkpoint, or None if none was ever written; `warn` is called with a
    message for each damaged one. If all are damaged, ValueError names them."""
    damaged: list[str] = []
    for name in _NAMES:
        path = folder / name
        if not path.exists():
            continue
        try:
            state = _read(path)
        except Exception as error:  # damage surfaces as whatever it happens to break
            reason = str(error).strip() or type(error).__name__
            damaged.append(f"{path} ({reason.splitlines()[0]})")  # torch's errors fill pages
            continue
        check_schema(path, state["schema"])
        for description in damaged:
            warn(f"checkpoint {description} is damaged; resuming from {name}, the one before it")
        return state
    if damaged:
        raise ValueError(
            f"all checkpoints are damaged: {', '.join(damaged)}. Delete {folder.parent} to train "
            "again from the beginning, or choose another --name"
        )
    return None


def _read(path: Path) -> dict[str, Any]:
    state = read_tensors(path, verify=True)
    numbers = ("schema", "epoch", "step")
    if not isinstance(state, dict) or not all(type(state.get(name)) is int for name in numbers):
        raise ValueError("not a checkpoint of a run")
    return state
