"""From words on the command line to settings: flags over a YAML file over a recipe.

Flags are the fields of `noiseproof.cli.arguments`, turned into a parser by tyro. This file does not
import torch.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from noiseproof.cli.arguments import CompareArguments, Comparison, Defaults, TrainArguments
from noiseproof.lab.config import GROUPS, Config, fitted, from_dict
from noiseproof.lab.paths import at_home
from noiseproof.lab.recipes import DEFAULT, RECIPES, recipe, shortened

__all__ = ["has_flag", "parsed", "rank", "settings", "starting_point"]

T = TypeVar("T")
Training = TypeVar("Training", bound=TrainArguments)


def parsed(kind: type[T], verb: str, argv: list[str], default: T | None = None) -> T:
    """The verb's arguments. Help and mistakes end in SystemExit, and rank 0 alone prints them."""
    return tyro.cli(
        kind,
        prog=f"noiseproof {verb}",
        args=argv,
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=rank() == 0,
    )


def starting_point(kind: type[Training], argv: list[str]) -> Training:
    """The arguments before any flag: what the recipe gives for the data, then the YAML file.

    Recipe, file and data are looked up in `argv` before it is parsed, since they decide the
    defaults that parsing needs and help shows.
    """
    file = _value(argv, "config")
    values = _read(file) if file else {}
    name = _value(argv, "recipe") or values.get("recipe", DEFAULT)
    if not isinstance(name, str):
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    values.pop("recipe", None)
    more = _of_comparison(values)
    if more and not issubclass(kind, CompareArguments):
        raise ValueError(
            f"--config {file}: {', '.join(more)}: of compare, not of train; expected what "
            "`noiseproof train --help` lists, such as method"
        )
    data = _value(argv, "data") or from_dict(values).data.data
    config = from_dict(values, recipe(name, data))
    own: dict[str, Any] = {"comparison": Comparison(**more)} if more else {}
    return kind(**_groups(config), defaults=Defaults(recipe=name, config=file), **own)


def _of_comparison(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the settings of a comparison, which are no training's, out of a file's values."""
    inside = values.pop("comparison", {})
    if not isinstance(inside, dict):
        raise ValueError(f"comparison must hold settings as `name: value`, got {inside!r}")
    known = _comparison()
    if strange := [key for key in inside if key not in known]:
        raise ValueError(f"comparison has no {strange[0]!r}; expected {', '.join(known)}")
    mine = {key: values.pop(key) for key in list(values) if key in known} | inside
    return {name: fitted(Comparison, name, value, name) for name, value in mine.items()}


def _comparison() -> list[str]:
    return [f.name for f in fields(Comparison)]


def settings(arguments: TrainArguments, argv: list[str]) -> Config:
    """The config among the arguments."""
    config = at_home(Config(**_groups(arguments)))
    if has_flag(argv, "decay-milestones") and config.optim.sched != "multistep":
        raise ValueError(
            f"--decay-milestones has no effect with --sched {config.optim.sched}; "
            "expected --sched multistep"
        )
    if (config.model.weights or "").lower() == "none":  # None, written as users do
        config = replace(config, model=replace(config.model, weights=None))
    if config.optim.sched == "multistep" and not _gives_milestones(arguments, argv):
        ready = recipe(arguments.defaults.recipe, config.data.data)
        marks = shortened(ready, config.optim.epochs).optim.decay_milestones
        config = replace(config, optim=replace(config.optim, decay_milestones=marks))
    return config


def _gives_milestones(arguments: TrainArguments, argv: list[str]) -> bool:
    """Whether a flag or the file names them; those of a recipe, which the config of a run has, too,
    move with the epochs."""
    if has_flag(argv, "decay-milestones"):
        return True
    file = arguments.defaults.config
    values = _read(file) if file else {}
    values = {k: v for k, v in values.items() if k not in ("recipe", "comparison", *_comparison())}
    grouped = values.get("optim")
    names = [*values, *(grouped if isinstance(grouped, dict) else ())]
    if not any(str(name).replace("-", "_") == "decay_milestones" for name in names):
        return False
    ready = recipe(arguments.defaults.recipe, arguments.data.data)
    written = from_dict(values, ready).optim
    return written.decay_milestones != shortened(ready, written.epochs).optim.decay_milestones


def has_flag(argv: list[str], flag: str) -> bool:
    """Whether --flag is among the words, with hyphens or underscores.

    >>> has_flag(["--batch_size=3"], "batch-size")
    True
    """
    return any(word.partition("=")[0].replace("_", "-") == f"--{flag}" for word in argv)


def rank(name: str = "RANK") -> int:
    """RANK or LOCAL_RANK, as torchrun sets them; 0 where there is one process."""
    return int(os.environ.get(name) or 0)


def _value(argv: list[str], flag: str) -> str | None:
    """The last value of --flag, in either form; none where it is missing, which parsing tells.

    >>> _value(["--data", "svhn", "--data=cifar10"], "data")
    'cifar10'
    """
    found = None
    for word, after in zip(argv, [*argv[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        if name == f"--{flag}" and (equals or not after.startswith("--")):
            found = value if equals else after
    return found


def _groups(config: Config) -> dict[str, Any]:
    return {group: getattr(config, group) for group in GROUPS}


def _read(file: str) -> dict[str, Any]:
    """The settings in a YAML file, or in a run's config.json, where they are under "config"."""
    import yaml

    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--config {file} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} must hold settings as `name: value`, got {values!r}")
    return values["config"] if isinstance(values.get("config"), dict) else values
