"""The arguments of each command: fields are flags, and their docstrings are the help.

A docstring is one line: help would show its indentation. `noiseproof.cli.parsing` fills these
classes from words. Those of `reproduce` are in `noiseproof.paper.experiments`. Nothing here imports
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import tyro

from noiseproof.lab.config import Comparison, Config, Launcher
from noiseproof.lab.evaluation.suites import SuiteName
from noiseproof.lab.recipes import DEFAULT, RECIPES

SUITES: tuple[str, ...] = get_args(SuiteName)

PartName = Literal[
    "curvature",
    "steps",
    "counts",
    "surface",
    "embedding",
    "separation",
    "geometry",
    "abstention",
    "theory",
]


Plugin = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE [FILE ...]")]


@dataclass(frozen=True)
class Defaults:
    """Settings without a flag come from the file, or else from the recipe for the data."""

    recipe: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(RECIPES) + "}")] = DEFAULT
    """Settings that suit the data; see `noiseproof list recipes`."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """YAML file of settings, named like the flags, or the config.json of a run."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class TrainArguments(Config):
    """Train one model and write it to a run folder."""

    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True)
class CompareArguments(TrainArguments):
    """Train several methods, test them under the same noise, and write tables and a report."""

    comparison: Comparison = field(default_factory=Comparison)


@dataclass(frozen=True)
class TuneArguments(TrainArguments):
    """Make a trained classifier robust in a few epochs; prints its accuracy before and after."""

    network: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = ""
    """File with the state dict of the network --model, or FILE.py:FUNCTION, which returns it."""
    launcher: Launcher = "processes"
    """Train here, or as a job of a SLURM cluster, from a login node."""
    slurm: tuple[str, ...] = ()
    """For slurm: partition=gpu time=60 (minutes) gpus=1 cpus=8 memory=32 (GB) account=me."""


@dataclass(frozen=True)
class EvaluateArguments:
    """Test trained models under perturbations and print a table."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders; that of a comparison stands for all its runs."""
    perturb: tuple[str, ...] = ()
    """Perturbations, such as gaussian:8/255 or fog:3; by default those of --suite noise."""
    attack: tuple[str, ...] = ()
    """Adversarial attacks on about 500 images, such as linf:2/255 or l2:0.25, instead of noise."""
    suite: Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(SUITES)}}}")] = None
    """noise: levels for the data; paper: the paper's; c: 15 corruptions; sensor: cameras; all."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """Labelled images to test on instead: a folder, .npz file, dataset, or CIFAR-10-C's arrays."""
    class_map: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NEW=CLASS")] = ()
    """Classes of --data by the runs' names, such as hound=dog; hound= leaves its images out."""
    draws: int | None = None
    """Draws of each random perturbation; by default 10, but 1 for the corruptions of a suite."""
    weights: tuple[Literal["last", "best"], ...] = ("last", "best")
    """Weights of the last epoch, of the best epoch by validation if the run has them, or both."""
    noise_seed: int = 0
    """Seed of the noise, which is the same for all runs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    table: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table to this file: .md, .csv or .tex."""
    calibration: bool = False
    """Also show calibration error, likelihood and Brier score; repeats tests that lack them."""
    baseline: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Run that corruption errors are relative to; by default the only one of method normal."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class PredictArguments:
    """Classify new images, which are read like those that the model was trained on."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, that of a comparison, a name in weights/, or hf://USER/MODEL."""
    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE [IMAGE ...]")
    ]
    """Image files, or folders that are searched for images."""
    weights: Literal["last", "best"] | None = None
    """Last epoch, or best by validation; default best if chosen on 1,000 images or more."""
    top: int = 1
    """Number of classes per image, most probable first."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write all of this to a .csv file: file, rank, class, probability."""
    abstain: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Answer only where the error, estimated on validation images, is below this: 0.05, say."""
    tolerance: bool = False
    """Also find by bisection the strongest Gaussian noise that keeps an answer in 9 of 10 draws."""
    noise_seed: int = 0
    """Seed of the noise of --tolerance."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    plugin: Plugin = ()
    """FILE.py:FUNCTION of a run whose network comes from one."""


@dataclass(frozen=True)
class AnalyseArguments:
    """Measure why models are robust: curvature, geometry of classes, bounds, embeddings."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders; that of a comparison stands for all its runs."""
    parts: tuple[PartName, ...] = get_args(PartName)
    """Parts to measure; the parts that they depend on are measured too."""
    samples: int | None = None
    """Maximum number of test images; by default all."""
    probes: int = 20
    """Random directions of the curvature estimate."""
    step: float = 1e-2
    """Step of its finite differences, in normalised coordinates: 1e-5 to 10."""
    draws: int = 10
    """Noisy copies of each image."""
    noise: tuple[str, ...] = ()
    """Perturbations; by default the run's training noise, as Gaussian and as uniform noise."""
    stages: Literal["auto", "none", "all"] = "auto"
    """Embed the features of every stage: for one normal and one discriminative run, none or all."""
    weights: Literal["last", "best"] | None = None
    """Last epoch, or best by validation; default best if chosen on 1,000 images or more."""
    seed: int = 0
    """Seed of samples, noise, probes and t-SNE."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class CertifyArguments:
    """Certify by randomised smoothing that no small change of an image changes its class."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders; that of a comparison stands for all its runs."""
    sigma: float
    """Standard deviation of the Gaussian noise, in pixel units, such as 0.12 or 0.25."""
    samples: int = 1000
    """Noisy copies of each image that estimate the probability of its class."""
    selection: int = 100
    """Noisy copies, besides those, that select the class."""
    alpha: float = 0.001
    """Probability with which a certificate may be wrong."""
    every: int | None = None
    """Certify every N-th test image; by default about 500 images."""
    weights: Literal["last", "best"] | None = None
    """Last epoch, or best by validation; default best if chosen on 1,000 images or more."""
    noise_seed: int = 0
    """Seed of the noise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    plugin: Plugin = ()
    """FILE.py:FUNCTION of a run whose network comes from one."""


@dataclass(frozen=True)
class ReportArguments:
    """Write one HTML file about trained models: tables, curves, gallery, analysis, provenance."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Evaluated run folders that share their test images, or that of a comparison."""
    output: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the report; by default that of the run or of the comparison."""
    title: str | None = None
    """Title of the page."""
    baseline: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Run that corruption errors are relative to; by default the only one of method normal."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class CalibrateArguments:
    """Divide a model's logits by a temperature fitted on validation images; writes a new run."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; it is not changed."""
    noise: tuple[str, ...] = ("clean",)
    """Perturbations of the validation images; one temperature for all: clean gaussian:0.1."""
    output: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder in which the new run folder is created; by default that of the run."""
    name: str | None = None
    """Name of the new run folder; by default RUN-calibrated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class RenormaliseArguments:
    """Estimate the batch-norm statistics of a trained model again; writes a new run folder."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; it is not changed."""
    noise: tuple[str, ...] = ()
    """Perturbations of the training images, mixed if several; by default the training noise."""
    images: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of images to use instead, as they are; labels are not needed."""
    batches: int = 100
    """Largest number of batches, each with as many images as in training."""
    output: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder in which the new run folder is created; by default that of the run."""
    name: str | None = None
    """Name of the new run folder; by default RUN-renormalised."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class ExportArguments:
    """Write a trained model for other programs, checked against torch and timed."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, that of a comparison, a name in weights/, or hf://USER/MODEL."""
    format: Literal["onnx", "torch-export", "safetensors"] = "onnx"
    """onnx: one .onnx file; torch-export: one .pt2 file; safetensors: a folder to share."""
    input: Literal["float", "bytes"] = "float"
    """Pixels that the file takes: floats in [0, 1], or bytes."""
    size: Literal["fixed", "any"] | None = None
    """Images of the training size, or of any, resized in the graph; default any for image files."""
    half: bool = False
    """For safetensors: store weights in 16 bits, which halves the file."""
    output: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """File or folder to write; by default in RUN/export/."""
    weights: Literal["last", "best"] | None = None
    """Last epoch, or best by validation; default best if chosen on 1,000 images or more."""
    plugin: Plugin = ()
    """FILE.py:FUNCTION of a run whose network comes from one."""


@dataclass(frozen=True)
class CardArguments:
    """Write a model card, README.md, into run folders: use, robustness, training."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders, evaluated first for the table of accuracies; of a comparison, all its runs."""
    plugin: Plugin = ()
    """FILE.py:FUNCTION of a run whose network comes from one."""


@dataclass(frozen=True)
class DemoArguments:
    """Show models on a local web page: choose an image and a perturbation, slide its level."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders of the same classes or that of a comparison, names in weights/, or hf://USER/MODEL."""
    abstain: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Answer only where the error, estimated on validation images, is below this: 0.05, say."""
    port: int | None = None
    """Port of the page; by default the first free one from 7860."""
    browser: bool = False
    """Open the page in the default browser."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""


@dataclass(frozen=True)
class ListArguments:
    """List what can be chosen."""

    what: Annotated[
        Literal[
            "all",
            "methods",
            "models",
            "datasets",
            "augmentations",
            "perturbations",
            "recipes",
            "experiments",
        ],
        tyro.conf.Positional,
    ] = "all"
    """all, methods, models, datasets, augmentations, perturbations, recipes or experiments."""
    plugin: Plugin = ()
    """Python files that register perturbations, or FILE.py:FUNCTION, which returns a network."""
