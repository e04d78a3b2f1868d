"""From words on the command line to settings: flags over a YAML file over a recipe.

Flags are the fields of the config, turned into a parser by tyro, with the fields' docstrings as
help. This file does not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import tyro

from noiseproof.lab.config import GROUPS, Config, MethodName, fitted, from_dict
from noiseproof.recipes import DEFAULT, RECIPES, recipe
from noiseproof.recipes.experiments import EXPERIMENTS, shortened

PartName = Literal[
    "curvature", "steps", "counts", "surface", "embedding", "separation", "geometry", "theory"
]
T = TypeVar("T")
Training = TypeVar("Training", bound="TrainArguments")


@dataclass(frozen=True)
class Defaults:
    """Where values come from that no flag gives: the recipe for the data, then the file."""

    recipe: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(RECIPES) + "}")] = DEFAULT
    """Ready settings for the data; see `noiseproof list recipes`."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """YAML file of settings, named as the flags; it may name data and recipe too, and for compare
    methods, seeds, jobs, draws and report. The config.json of a run serves as well."""


@dataclass(frozen=True)
class TrainArguments(Config):
    """Train one model into a run folder."""

    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True)
class Comparison:
    """What is compared; each method is trained with each seed, under the same settings."""

    methods: tuple[MethodName, ...] = get_args(MethodName)
    """Methods to train; --method is not used here."""
    seeds: int = 1
    """Trainings of each method, with seeds from --seed upwards."""
    jobs: int = 0
    """Trainings at a time; 0 takes what suits the machine. They share the cores, and a GPU through
    CUDA MPS where that is installed."""
    draws: int = 10
    """Draws of each random perturbation in the evaluation."""
    report: bool = True
    """Also analyse the first training of each method and write report.html."""


@dataclass(frozen=True)
class CompareArguments(TrainArguments):
    """Train several methods, test them under the same noise, and write the table."""

    comparison: Comparison = field(default_factory=Comparison)


@dataclass(frozen=True)
class EvaluateArguments:
    """Test finished runs under perturbations and print one table."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders."""
    perturb: tuple[str, ...] = ()
    """Perturbations, such as gaussian:8/255 or downup:3; the dataset's own suite when none."""
    draws: int = 10
    """Draws of each random perturbation."""
    weights: tuple[Literal["last", "best"], ...] = ("last", "best")
    """Weights of the last epoch, of the best by validation where a run has them, or both."""
    noise_seed: int = 0
    """Seed of the noise, which is the same for every run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    table: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table to this file: .md, .csv or .tex."""


@dataclass(frozen=True)
class PredictArguments:
    """Name the likeliest class of new images, read as those that the run was trained on."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE [IMAGE ...]")
    ]
    """Image files, or folders with images in them or in folders below."""
    weights: Literal["last", "best"] | None = None
    """Weights of the last epoch or the best by validation; the best, if there, when not given."""
    top: int = 1
    """So many classes of each image, the likeliest first."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write them to this .csv file: file, rank, class, probability."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""


@dataclass(frozen=True)
class AnalyseArguments:
    """Measure why runs are robust: curvature, geometry, bounds, embeddings."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders."""
    parts: tuple[PartName, ...] = get_args(PartName)
    """Parts to measure; one that another needs is made as well."""
    samples: int | None = None
    """At most so many test images; all when not given."""
    probes: int = 20
    """Random directions of the curvature estimate."""
    step: float = 1e-2
    """Step of its finite differences, in normalised coordinates."""
    draws: int = 10
    """Noisy copies of each image."""
    noise: tuple[str, ...] = ()
    """Perturbations; the run's training noise, Gaussian and uniform, when none."""
    stages: Literal["auto", "none", "all"] = "auto"
    """Embed the features of every stage: of one normal and one discriminative run, of none, all."""
    weights: Literal["last", "best"] = "last"
    """Weights of the last epoch, or of the best by validation."""
    seed: int = 0
    """Seed of samples, noise, probes and t-SNE."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""


@dataclass(frozen=True)
class ReportArguments:
    """Gather runs into one HTML file: table, curves, gallery, analysis, how it was made."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders that share their test images and are evaluated."""
    output: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the report; that of the run or comparison when not given."""
    title: str | None = None
    """Title of the page."""


@dataclass(frozen=True)
class ReproduceArguments:
    """Run one of the paper's experiments and write its table beside the paper's numbers."""

    experiment: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="{" + ",".join(EXPERIMENTS) + "}")
    ]
    """The experiment."""
    only: tuple[str, ...] = ()
    """Rows to run, such as normal both; all when none are named."""
    epochs: int | None = None
    """A shorter schedule, scaled; its rows are named so and kept apart."""
    seed: int = 0
    """Seed of the trainings."""
    data: str | None = None
    """Another place of the data: a .npz file, or a folder of images (road needs one)."""
    data_dir: str = "data"
    """Where cifar10 and svhn lie, or are downloaded to."""
    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Pretrained weights of road's network, where they cannot be downloaded."""
    output: str = "runs"
    """Folder that run folders are made in."""
    results: str = "results"
    """Folder that the records go to."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    draws: int = 10
    """Draws of each random perturbation."""
    jobs: int = 1
    """Rows at a time; they share the cores, and a GPU through CUDA MPS where it is installed."""
    along: int = 0
    """Also test every so many epochs (0: never), to show what choosing the epoch on the test images
    would be worth. Nothing is chosen by it."""


@dataclass(frozen=True)
class ListArguments:
    """What can be chosen, with a line of help each."""

    what: Annotated[
        Literal["all", "methods", "models", "datasets", "perturbations", "recipes", "experiments"],
        tyro.conf.Positional,
    ] = "all"
    """What to list."""


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
    known = [f.name for f in fields(Comparison)]
    if strange := [key for key in inside if key not in known]:
        raise ValueError(f"comparison has no {strange[0]!r}; expected {', '.join(known)}")
    mine = {key: values.pop(key) for key in list(values) if key in known} | inside
    return {name: fitted(Comparison, name, value, name) for name, value in mine.items()}


def settings(arguments: TrainArguments, argv: list[str]) -> Config:
    """The config among the arguments."""
    config = Config(**_groups(arguments))
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
    """Whether a flag or the file names them; those of a recipe move with the epochs."""
    if has_flag(argv, "decay-milestones"):
        return True
    file = arguments.defaults.config
    values = _read(file) if file else {}
    grouped = values.get("optim")
    names = [*values, *(grouped if isinstance(grouped, dict) else ())]
    return any(str(name).replace("-", "_") == "decay_milestones" for name in names)


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
