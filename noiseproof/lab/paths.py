"""Paths in a config: as they are recorded, to hold in every working directory and where a folder
was moved together with its data, and as they are shown.

>>> anchored(Config()) == Config()
True
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from noiseproof.lab.config import NAMED, Config

__all__ = ["anchored", "at_home", "beside", "found", "near"]


def anchored(config: Config) -> Config:
    """The config with absolute paths, so that a run is found its data from anywhere."""
    return _moved(config, lambda _, path: os.path.abspath(os.path.expanduser(path)))


def at_home(config: Config) -> Config:
    """The config with ~ written out: no shell does that in a file, nor in --flag=~/path."""
    config = _moved(config, lambda _, path: os.path.expanduser(path))
    return replace(config, run=replace(config.run, output=os.path.expanduser(config.run.output)))


def near(config: Config) -> Config:
    """The config with paths as one would type them here: relative where they lie below."""
    return _moved(config, lambda _, path: _relative(path))


def beside(config: Config, folder: Path) -> dict[str, str]:
    """Where the paths of an anchored config lie as seen from `folder`."""
    kept: dict[str, str] = {}

    def note(name: str, path: str) -> str:
        with contextlib.suppress(ValueError):  # on another drive
            kept[name] = os.path.relpath(path, folder.absolute())
        return path

    _moved(config, note)
    return kept


def found(config: Config, folder: Path, kept: Mapping[str, str]) -> Config:
    """The config with paths that are gone replaced by what lies at the same place from `folder`."""

    def look(name: str, path: str) -> str:
        other = os.path.normpath(folder.absolute() / kept[name]) if name in kept else path
        return other if not os.path.exists(path) and os.path.exists(other) else path

    return _moved(config, look)


def _relative(path: str) -> str:
    here = Path.cwd()
    if not Path(path).is_relative_to(here) or Path(path) == here:
        return path
    below = str(Path(path).relative_to(here))
    return os.path.join(".", below) if below in (*NAMED, "imagenet") else below


def _moved(config: Config, move: Callable[[str, str], str]) -> Config:
    data, weights = config.data, config.model.weights
    if data.data not in NAMED:
        data = replace(data, data=move("data", data.data))
    elif data.data != "digits":  # which lie nowhere
        data = replace(data, data_dir=move("data_dir", data.data_dir))
    if weights not in (None, "imagenet"):
        weights = move("weights", weights)
    return replace(config, data=data, model=replace(config.model, weights=weights))
