"""Paths in a config: as they are recorded, to hold in every working directory, and as they are
shown.

>>> anchored(Config()) == Config()
True
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from noiseproof.lab.config import NAMED, Config

__all__ = ["anchored", "at_home", "near"]


def anchored(config: Config) -> Config:
    """The config with absolute paths, so that a run is found its data from anywhere."""
    return _moved(config, lambda path: os.path.abspath(os.path.expanduser(path)))


def at_home(config: Config) -> Config:
    """The config with ~ written out: no shell does that in a file, nor in --flag=~/path."""
    config = _moved(config, lambda path: os.path.expanduser(path))
    return replace(config, run=replace(config.run, output=os.path.expanduser(config.run.output)))


def near(config: Config) -> Config:
    """The config with paths as one would type them here: relative where they lie below."""
    return _moved(config, lambda path: _relative(path))


def _relative(path: str) -> str:
    here = Path.cwd()
    if not Path(path).is_relative_to(here) or Path(path) == here:
        return path
    below = str(Path(path).relative_to(here))
    return os.path.join(".", below) if below in (*NAMED, "imagenet") else below


def _moved(config: Config, move: Callable[[str], str]) -> Config:
    data, weights = config.data, config.model.weights
    if data.data not in NAMED:
        data = replace(data, data=move(data.data))
    elif data.data != "digits":  # which lie nowhere
        data = replace(data, data_dir=move(data.data_dir))
    if weights not in (None, "imagenet"):
        weights = move(weights)
    return replace(config, data=data, model=replace(config.model, weights=weights))
