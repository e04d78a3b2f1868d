"""What each verb of the command line takes: its flags are fields, their help the docstrings.

How words become these is in `noiseproof.cli.parsing`. This file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import tyro

from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.recipes import DEFAULT, RECIPES
from noiseproof.paper.experiments import EXPERIMENTS

PartName = Literal[
    "curvature", "steps", "counts", "surface", "embedding", "separation", "geometry", "theory"
]


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
