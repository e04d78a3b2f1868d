"""The paths in a config: absolute as recorded, relative as shown.

Only the paths of the data, the weights and a file that makes the network change; names such as
cifar10 and imagenet are not paths.

>>> with_absolute_paths(Config()) == Config()
True
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from noiseproof.lab.config import NAMED, Config


def with_absolute_paths(config: Config) -> Config:
    """The config with absolute paths, so that a run finds its data from any working directory."""
    return _with_paths(config, lambda path: os.path.abspath(os.path.expanduser(path)))


def with_home_expanded(config: Config) -> Config:
    """The config with ~ expanded, --output too: no shell does so in a file or in --flag=~/path."""
    config = _with_paths(config, os.path.expanduser)
    return replace(config, run=replace(config.run, output=os.path.expanduser(config.run.output)))


def with_relative_paths(config: Config) -> Config:
    """The config with paths below the working directory as a user would type them there."""
    return _with_paths(config, _relative)


def _relative(path: str) -> str:
    here = Path.cwd()
    if not Path(path).is_relative_to(here) or Path(path) == here:
        return path
    below = str(Path(path).relative_to(here))
    return os.path.join(".", below) if below in (*NAMED, "imagenet") else below


def _with_paths(config: Config, change: Callable[[str], str]) -> Config:
    data, weights = config.data, config.model.weights
    if data.data not in NAMED:
        data = replace(data, data=change(data.data))
    elif data.data != "digits":  # which are part of scikit-learn
        data = replace(data, data_dir=change(data.data_dir))
    if (data.group or "").lower().endswith(".csv"):
        data = replace(data, group=change(data.group or ""))
    if weights not in (None, "imagenet"):
        weights = change(weights)
    model = config.model.model
    if ".py:" in model:
        model = change(model)
    return replace(config, data=data, model=replace(config.model, model=model, weights=weights))
