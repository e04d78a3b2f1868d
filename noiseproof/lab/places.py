"""Paths in a config: as they are recorded, to hold in every working directory, and as shown.

>>> anchored(Config()) == Config()
True
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from noiseproof.lab.config import Config

__all__ = ["anchored", "near"]

_NAMED = ("digits", "cifar10", "svhn")


def anchored(config: Config) -> Config:
    """The config with absolute paths, so that a run is found its data from anywhere."""
    return _moved(config, lambda path: os.path.abspath(os.path.expanduser(path)))


def near(config: Config) -> Config:
    """The config with paths as one would type them here: relative where they lie below."""
    return _moved(config, _relative)


def _relative(path: str) -> str:
    here = Path.cwd()
    inside = Path(path).is_relative_to(here) and Path(path) != here
    return str(Path(path).relative_to(here)) if inside else path


def _moved(config: Config, move: Callable[[str], str]) -> Config:
    data, weights = config.data, config.model.weights
    if data.data not in _NAMED:
        data = replace(data, data=move(data.data))
    elif data.data != "digits":  # which lie nowhere
        data = replace(data, data_dir=move(data.data_dir))
    if weights not in (None, "imagenet"):
        weights = move(weights)
    return replace(config, data=data, model=replace(config.model, weights=weights))
