"""Everything needed to go on with a run, in one file that is whole or not there.

`last.pt` is replaced atomically and the one before it is kept as `previous.pt`. Reading verifies
the checksums inside the file first: a damaged checkpoint is named, and the one before it used.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from noiseproof.lab.runs import SCHEMA, write_atomically


def save(folder: Path, state: dict[str, Any]) -> None:
    """Writes folder/last.pt; what was there becomes folder/previous.pt."""
    last, fresh = folder / "last.pt", folder / "next.pt"
    write_atomically(fresh, lambda file: torch.save({"schema": SCHEMA, **state}, file))
    if last.exists():
        os.replace(last, folder / "previous.pt")
    os.replace(fresh, last)


def load(folder: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest whole checkpoint, or None. `warn` is told of damaged ones.

    next.pt is whole where it exists: the program was stopped between two renames.
    """
    for name in ("next.pt", "last.pt", "previous.pt"):
        path = folder / name
        if not path.exists():
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise zipfile.BadZipFile(f"checksum of {damaged} is wrong")
            state = torch.load(path, weights_only=True, map_location="cpu")
        except (
            zipfile.BadZipFile,
            pickle.UnpicklingError,
            OSError,
            RuntimeError,
            EOFError,
        ) as error:
            warn(f"checkpoint {path} is damaged ({error}); trying the one before it")
            continue
        if state["schema"] > SCHEMA:
            raise ValueError(
                f"{path} was written by a newer noiseproof (its schema is {state['schema']}, "
                f"this one reads up to {SCHEMA}); please upgrade"
            )
        return state
    return None
