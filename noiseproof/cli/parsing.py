"""From words on the command line to settings: flags override a YAML file, which overrides a recipe.

Flags are the fields of `noiseproof.cli.arguments`, turned into a parser by tyro. The settings in a
file become flags too, so that one parser checks types and reports errors. This module does
not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import reprlib
import sys
from dataclasses import asdict, replace
from typing import Any, TypeVar

import tyro

from noiseproof.cli.arguments import CompareArguments, Defaults, TrainArguments
from noiseproof.cli.help import help_text
from noiseproof.lab.config import (
    GROUPS,
    PAPER_METHODS,
    UNTRAINED,
    Config,
    did_you_mean,
    from_dict,
    to_dict,
)
from noiseproof.lab.data.counts import training_images
from noiseproof.lab.files import without_checksum
from noiseproof.lab.paths import with_home_expanded
from noiseproof.lab.recipes import DEFAULT, paper, recipe, robust_epochs
from noiseproof.lab.validate import is_folder

T = TypeVar("T")
Training = TypeVar("Training", bound=TrainArguments)

_TAGS = [f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")]
_LONGEST_FILE = 1_000_000  # characters; PyYAML needs a minute for them
# As YAML writes them; in lower case.
_TRUE, _FALSE, _NULL = ("true", "yes", "on"), ("false", "no", "off"), ("null", "~", "")


def parse(kind: type[T], verb: str, argv: list[str], default: T | None = None) -> T:
    """The arguments of a command. Help and invalid flags raise SystemExit; only rank 0 prints them.

    Args:
        kind: class of the arguments.
        verb: the command, for usage lines.
        argv: the words after the command.
        default: arguments to start from; by default the defaults of `kind`.
    """
    if help := help_text(kind, verb, argv, default):
        if rank() == 0:
            print(help)
        raise SystemExit(0)
    try:
        return tyro.cli(
            kind,
            prog=f"noiseproof {verb}",
            args=argv,
            default=tyro.MISSING_NONPROP if default is None else default,
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=rank() == 0,
            add_help=False,
        )
    except SystemExit:  # tyro has printed the error
        command, _, file = verb.partition(" ")
        where = f"This is in {file}. " if file else ""
        if rank() == 0:
            print(f"{where}All flags: noiseproof {command} --help-all", file=sys.stderr)
        raise


def parse_training(
    kind: type[Training], verb: str, argv: list[str], default: str = DEFAULT
) -> tuple[Training, Config]:
    """The arguments of a command that trains, and the config they describe; arguments as `parse`,
    but `default` names a recipe.

    File, recipe, data, epochs and the number of training images are looked up before `argv` is
    parsed, since they decide the defaults that parsing needs and help shows.
    """
    file = _value(argv, "config")
    in_file = _file_flags(kind, file) if file else {}
    if has_flag(argv, "augment"):  # which replaces both
        in_file.pop("noisy_augment", None)
    words = _joined(in_file)
    given = [*words, *argv]
    name = _value(given, "recipe") or default
    data = _value(given, "data") or Config().data.data
    _check_img_size(argv)
    weights, model = _value(given, "weights"), _value(given, "model")
    pretrained = weights.lower() != "none" if weights else model not in UNTRAINED
    config = recipe(name, data, _number(given, "epochs"), pretrained=pretrained)
    more_epochs = ""
    if name == default == "robust" and not has_flag(given, "epochs"):  # not to tune
        config, more_epochs = _with_enough_epochs(config, given)
    paired = _value(given, "views") == "paired"
    if paired or has_flag(given, "augment"):  # the recipe's belongs to its --augment
        config = from_dict({"noisy_augment": None}, config)
    # A run's config.json holds the milestones that its recipe gave, always those of the paper: they
    # still move with --epochs.
    own = paper(data, _number(words, "epochs")).optim.decay_milestones
    if own and in_file.get("decay_milestones") == ["--decay-milestones", *map(str, own)]:
        moved = paper(data, _number(given, "epochs")).optim.decay_milestones
        in_file["decay_milestones"] = ["--decay-milestones", *map(str, moved)]
    start = kind(**_groups(config), defaults=Defaults(recipe=name, config=file))
    if isinstance(start, CompareArguments):
        methods = tuple(dict.fromkeys((*PAPER_METHODS, config.method.method)))
        start = replace(start, comparison=replace(start.comparison, methods=methods))
    if in_file:
        start = parse(kind, f"{verb} --config {file}", _joined(in_file), start)
    arguments = parse(kind, verb, argv, start)
    config = with_home_expanded(Config(**_groups(arguments)))
    if has_flag(argv, "decay-milestones") and config.optim.sched != "multistep":
        raise ValueError(
            f"--decay-milestones has no effect with --sched {config.optim.sched}; "
            "expected --sched multistep"
        )
    if has_flag(argv, "test-share") and not is_folder(config.data.data):
        raise ValueError(
            f"--test-share has no effect with --data {config.data.data}, which has its own test "
            "split; leave it out"
        )
    for flag in ("radius", "margin"):
        if has_flag(argv, flag) and config.method.relative and kind is not CompareArguments:
            raise ValueError(
                f"--{flag} has no effect with --method spheres; expected --spheres-{flag}, "
                "or --method discriminative"
            )
    if (config.model.weights or "").lower() == "none":  # None, as users write it
        config = replace(config, model=replace(config.model, weights=None))
    if config.data.img_size == "native":  # None, as users write it
        config = replace(config, data=replace(config.data, img_size=None))
    if more_epochs and rank() == 0:
        print(more_epochs, file=sys.stderr)
    return arguments, config


def _with_enough_epochs(config: Config, argv: list[str]) -> tuple[Config, str]:
    """The config of `robust` with the epochs that suit the number of training images, and if they
    are more than usual, a sentence that says why."""
    values: dict[str, Any] = {"data_dir": _value(argv, "data-dir") or config.data.data_dir}
    for name in ("val_share", "train_share"):
        with contextlib.suppress(ValueError):  # not given, or reported by parsing
            values[name] = float(_value(argv, name.replace("_", "-")) or "")
    usual, images = config.optim.epochs, training_images(from_dict(values, config).data)
    epochs = robust_epochs(images) if images else usual
    if epochs == usual:
        return config, ""
    return from_dict({"epochs": epochs}, config), (
        f"{epochs} epochs instead of {usual}, since there are few training images; "
        "--epochs sets another number"
    )


def has_flag(argv: list[str], flag: str) -> bool:
    """Whether --flag is among the words, with hyphens or underscores.

    >>> has_flag(["--batch_size=3"], "batch-size")
    True
    """
    return any(word.partition("=")[0].replace("_", "-") == f"--{flag}" for word in argv)


def rank(name: str = "RANK") -> int:
    """RANK or LOCAL_RANK, as set by torchrun; 0 if there is only one process."""
    return int(os.environ.get(name) or 0)


def _value(argv: list[str], flag: str) -> str | None:
    """The last value of --flag; None if it has none, which parsing reports.

    >>> _value(["--data_dir", "a", "--data-dir=b"], "data-dir")
    'b'
    """
    last = None
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == f"--{flag}" and (equals or not following.startswith("--")):
            last = value if equals else following
    return last


def _check_img_size(argv: list[str]) -> None:
    """ValueError if --img-size has none of its possible values. Parsing would report three errors,
    one for each type that these can have."""
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") != "--img-size":
            continue
        values = [value] * bool(equals) + argv[i + 1 :]
        if values[:1] in (["auto"], ["native"], ["None"]):
            continue
        if len(values) < 2 or not all(side.lstrip("-").isdecimal() for side in values[:2]):
            given = itertools.takewhile(lambda word: not word.startswith("--"), values)
            raise ValueError(
                "--img-size must be auto, native, or a height and a width such as 224 224, got "
                f"{' '.join(given) or 'no value'}"
            )


def _number(argv: list[str], flag: str) -> int | None:
    """The last value of --flag if it is a positive integer; parsing and validation check others."""
    text = _value(argv, flag) or ""
    return int(text) or None if text.isdecimal() else None


def _groups(config: Config) -> dict[str, Any]:
    return {group: getattr(config, group) for group in GROUPS}


def _joined(flags: dict[str, list[str]]) -> list[str]:
    return [word for words in flags.values() for word in words]


def _file_flags(kind: type[TrainArguments], file: str) -> dict[str, list[str]]:
    """The settings in a file by name, each as the words of a flag: ["--img-size", "32", "32"]."""
    groups = asdict(kind())
    for name in ("config", "plugin"):  # a file cannot name another, nor have one run
        del groups["defaults"][name]
    defaults: dict[str, Any] = {}
    for name, group in groups.items():
        defaults |= group if isinstance(group, dict) else {name: group}
    flags: dict[str, list[str]] = {}
    for key, value in _read(file).items():
        group = key.replace("-", "_")
        if isinstance(value, dict) and group in groups:
            for name, inner in value.items():
                flags |= _flag(file, name, inner, groups[group])
        elif value or group not in groups:  # a group may be empty
            flags |= _flag(file, key, value, defaults)
    return flags


def _flag(file: str, key: str, value: Any, known: dict[str, Any]) -> dict[str, list[str]]:
    """One setting by name, as the words of its flag.

    `known` holds the settings that are possible here, with their defaults.
    """
    name, flag, text = key.replace("-", "_"), key.replace("_", "-"), str(value).lower()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"--config {file}: there is no setting {name!r}{hint}")
    items = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(item, (dict, list, tuple)) for item in items):
        raise ValueError(f"--config {file}: {name} must be a value or a list of values")
    if items is value:
        return {name: [f"--{flag}", *map(str, value)]}
    if not isinstance(known[name], bool):
        return {name: [f"--{flag}={'None' if text in _NULL else value}"]}
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"--config {file}: {name} must be true or false, got {value!r}")
    return {name: [f"--{flag}" if text in _TRUE else f"--no-{flag}"]}


def _plain_loader() -> Any:
    """A loader of plain YAML: lists, dictionaries and text. Tags are refused, which run code in
    other loaders, and so are aliases of lists, of which a few lines can unfold to gigabytes."""
    import yaml

    class PlainLoader(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                if isinstance(self.anchors.get(event.anchor), yaml.CollectionNode):
                    self._refuse(event, f"the alias *{event.anchor}")
            elif event.tag is not None and event.tag not in _TAGS:
                self._refuse(event, f"the tag {event.tag!r}")
            return super().compose_node(parent, index)

        def _refuse(self, event: Any, what: str) -> None:
            raise yaml.MarkedYAMLError(
                problem=f"only plain values are allowed, not {what}", problem_mark=event.start_mark
            )

    return PlainLoader


def _read(file: str) -> dict[str, Any]:
    """The settings in a YAML file, as text, or all settings of a run from its config.json. Settings
    that an older run does not have get their defaults, not those of a recipe."""
    import yaml

    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            raise ValueError(f"--config {file} is longer than 1 MB; expected a file of settings")
        values = yaml.load(text, _plain_loader())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--config {file} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise ValueError(f"--config {file} is not valid YAML: {reason}{where}") from None
    except RecursionError:
        raise ValueError(f"--config {file} is nested too deeply; expected settings") from None
    if values is None and file.endswith(".json"):
        raise ValueError(f"--config {file} is empty; expected the config.json of a run")
    if values is None:
        return {}
    if not isinstance(values, dict):
        got = reprlib.repr(values)
        raise ValueError(f"--config {file} must hold settings as `name: value`, got {got}")
    is_run = isinstance(values.get("config"), dict)
    if is_run and "crc32" in values:
        try:
            without_checksum(json.loads(text))
        except ValueError as error:
            raise ValueError(f"--config {file} is damaged: {error}") from None
    return to_dict(from_dict(values["config"])) if is_run else values
