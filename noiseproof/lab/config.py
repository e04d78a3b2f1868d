"""The settings of one training run: five small groups of plain values.

This file needs the standard library alone, so that a wrong command is answered before torch is
imported. A config is frozen; `dataclasses.replace` makes another. Defaults that suit a dataset come
from `noiseproof.lab.recipes`; the values here are those of the embedded digits.

>>> config = Config(optim=Optim(epochs=3))
>>> from_dict(to_dict(config)) == config
True
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

METHODS = {
    "normal": "cross-entropy on clean images",
    "noisy": "cross-entropy on noisy images alone",
    "both": "cross-entropy on clean and noisy images together",
    "stability": "clean cross-entropy + distance between clean and noisy features",
    "discriminative": "clean cross-entropy + compact, well-separated classes, noise held inside",
}
BASELINES = ("both", "normal")  # whose training time others are compared with, if they were trained
STAGED = ("normal", "discriminative")  # analysed stage by stage, not only at the features

NAMED = ("digits", "cifar10", "svhn")  # data that are called by a name; others by a path

DATASETS: dict[str, str] = {
    "digits": "1,797 handwritten digits, 8 x 8 grey, embedded in scikit-learn: no download",
    "cifar10": "60,000 photographs in 10 classes, 32 x 32 colour; downloaded to --data-dir",
    "svhn": "99,289 house-number digits, 32 x 32 colour; downloaded to --data-dir",
    "PATH/": "a folder of images: train/ beside val/ or test/, or one folder a class",
    "PATH.npz": "arrays train_images, train_labels, test_images, test_labels [, classes]",
}

MODELS: dict[str, str] = {
    "small_cnn": "four small convolutions, for the digits",
    "resnet18": "ResNet-18 for 32 x 32 images: 3 x 3 stem, no max-pool, as in the paper",
    "mobilenet_v3_small": "MobileNetV3 small, 2.5 million parameters; for photographs",
    "mobilenet_v3_large": "MobileNetV3 large, 5.5 million parameters; for photographs",
    "mobilenet_v2": "MobileNetV2, 3.5 million parameters; for photographs",
    "NAME": "any torchvision classifier by its name, such as efficientnet_b0",
    "timm:NAME": "any model of timm, where timm is installed",
}

MethodName = Literal["normal", "noisy", "both", "stability", "discriminative"]


@dataclass(frozen=True)
class Data:
    """What is learnt from."""

    data: str = "digits"
    """digits, cifar10, svhn, a folder of images (one folder a class), or a .npz file."""
    data_dir: str = "data"
    """Where cifar10 and svhn lie, or are downloaded to."""
    download: bool = True
    """Download cifar10 or svhn when they are missing."""
    val_share: float = 0.1
    """Share of the training data kept for validation; 0 keeps none."""
    val_noise: str | None = None
    """Look at the validation images under this perturbation too, and call that epoch the best whose
    clean and noisy accuracy have the highest mean; none looks at clean images alone."""
    test_share: float = 0.2
    """Share kept for testing, where a folder has no test part of its own."""
    split_seed: int = 0
    """Seed of both splits; apart from --seed, so that seeds share their test images."""
    img_size: tuple[int, int] | None = None
    """Height and width to which an image folder is resized; its first image's when not given."""
    augment: Literal["none", "crop", "crop-flip", "road"] = "none"
    """Training augmentation: padded crop, with horizontal flip, or the paper's road recipe."""
    storage: Literal["auto", "memory", "stream"] = "auto"
    """Keep images on the device, or stream them from files; auto keeps up to 2 GiB."""
    workers: int = 4
    """Processes that read and augment streamed images."""


@dataclass(frozen=True)
class Model:
    """What learns."""

    model: str = "small_cnn"
    """small_cnn, resnet18 (32 x 32), any torchvision name, or timm:NAME."""
    feature_dim: int = 64
    """Size of the penultimate layer, where the loss works."""
    weights: str | None = None
    """'imagenet', or a local file of backbone weights; none trains from scratch."""


@dataclass(frozen=True)
class Method:
    """What is minimised."""

    method: MethodName = "discriminative"
    """normal, noisy, both, stability or discriminative."""
    noise: str = "gaussian:0.2"
    """Perturbation of the training images, as text: gaussian:0.06, gaussian:0..0.1, ..."""
    views: Literal["paired", "independent"] = "paired"
    """Noise on the same crop as the clean image, or on a crop of its own (as the authors' code)."""
    batch_norm: Literal["apart", "together"] = "apart"
    """Of stability and discriminative: clean and noisy images apart, or mixed as in both."""
    radius: float = 0.5
    """Features nearer than this to their class centroid cost nothing."""
    margin: float = 5.0
    """Distance that a centroid must keep from every decision boundary."""
    compact_weight: float = 1.0
    """Weight of compactness."""
    margin_weight: float = 1.0
    """Weight of the margin."""
    norm_weight: float = 1e-3
    """Weight of the centroids' norms."""
    noisy_weight: float = 1.0
    """Weight of the alignment of noisy features."""
    noisy_ce_weight: float = 0.0
    """Weight of cross-entropy on noisy logits; 0 in the paper."""
    centroid_momentum: float = 0.9
    """Share of the old centroid kept at each step."""
    centroids: Literal["partial", "naive", "momentum"] = "partial"
    """Which centroid the terms use."""
    margin_over: Literal["max", "mean"] = "max"
    """Hardest rival class, or the mean over rivals."""
    stability_weight: float = 1.0
    """Weight of stability training's distance."""
    ramp_epochs: float = 0.0
    """Epochs over which the pull of stability or of the constraints rises to its weight."""
    smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""

    @property
    def uses_noise(self) -> bool:
        """Whether the method trains on noisy images."""
        return self.method != "normal"


@dataclass(frozen=True)
class Optim:
    """How it is minimised."""

    epochs: int = 40
    """Passes over the training data."""
    batch_size: int = 64
    """Images a step, over all devices together."""
    opt: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimiser; sgd is with Nesterov momentum."""
    lr: float = 0.05
    """Learning rate (the peak, where the schedule has one)."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 5e-4
    """Weight decay."""
    sched: Literal["constant", "multistep", "cosine", "onecycle"] = "onecycle"
    """Course of the learning rate."""
    decay_milestones: tuple[int, ...] = ()
    """Epochs at which multistep decays; a recipe's move in proportion with --epochs."""
    decay_rate: float = 0.2
    """Factor of each such decay."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from 0 before multistep, cosine or constant."""
    clip_grad: float = 0.0
    """Largest gradient norm; 0 does not clip."""
    ema_decay: float = 0.0
    """Decay of a running mean of the weights, used for testing; 0 keeps none."""


@dataclass(frozen=True)
class Run:
    """Where and on what it runs."""

    seed: int = 0
    """Seed of weights, order, augmentation and noise."""
    output: str = "runs"
    """Folder that run folders are made in."""
    name: str | None = None
    """Name of the run folder; DATA-METHOD-sSEED when not given."""
    resume: bool = False
    """Continue the run in that folder where it stopped; start it if there is none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    amp: Literal["auto", "no", "bf16", "fp16", "float64"] = "auto"
    """Arithmetic; auto is bf16 on a GPU that has it and plain float32 elsewhere."""
    engine: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How a step is executed; auto takes the fastest that fits."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    sync_bn: bool = False
    """Batch-norm statistics over the whole batch of all processes, on GPUs; else each process takes
    them from its own share, and several do not train to the weights of one."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; 0 writes one every epoch."""
    tensorboard: bool = False
    """Also write TensorBoard logs."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    optim: Optim = field(default_factory=Optim)
    run: Run = field(default_factory=Run)


GROUPS: dict[str, type] = {
    "data": Data,
    "model": Model,
    "method": Method,
    "optim": Optim,
    "run": Run,
}


def run_name(config: Config) -> str:
    """The folder's name: what was given, or data-method-seed."""
    if config.run.name:
        return config.run.name
    data = config.data.data.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".npz")
    if data in ("", ".", ".."):  # the folder that one stands in has a name, too
        data = os.path.basename(os.path.abspath(config.data.data))
    return f"{data}-{config.method.method}-s{config.run.seed}"


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain dictionaries, for JSON or YAML."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], base: Config | None = None) -> Config:
    """A config from nested or flat values over `base`; unknown names are refused with a suggestion.

    Names may have hyphens, as flags do.

    >>> from_dict({"lr": 0.1, "batch-size": 32}).optim.lr
    0.1
    """
    config = base or Config()
    changes: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in GROUPS and (isinstance(value, dict) or not _has(GROUPS[name], name)):
            if not isinstance(value, dict | None):
                raise ValueError(f"{name} must hold settings as `name: value`, got {value!r}")
            for inner_key, inner in (value or {}).items():  # a group may be left empty
                field_name = str(inner_key).replace("-", "_")
                shown = f"{name}.{field_name}"
                changes[name][field_name] = fitted(GROUPS[name], field_name, inner, shown)
        else:
            group = next((g for g, cls in GROUPS.items() if _has(cls, name)), None)
            if group is None:
                raise ValueError(_unknown(name))
            changes[group][name] = fitted(GROUPS[group], name, value, name)
    return Config(**{g: dataclasses.replace(getattr(config, g), **c) for g, c in changes.items()})


def _has(cls: type, name: str) -> bool:
    return any(f.name == name for f in dataclasses.fields(cls))


def _unknown(name: str) -> str:
    names = [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]
    near = difflib.get_close_matches(name.split(".")[-1], names, 1)
    return f"no setting is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def fitted(cls: type, name: str, value: Any, shown: str) -> Any:
    """`value` as the field's type (a list becomes a tuple, an int a float), or ValueError."""
    if not _has(cls, name):
        raise ValueError(_unknown(shown))
    kind = typing.get_type_hints(cls)[name]
    options = typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)
    for option in options:
        with contextlib.suppress(ValueError):
            return _as(option, value)
    raise ValueError(f"{shown} must be {' or '.join(map(_described, options))}, got {value!r}")


def _as(kind: Any, value: Any) -> Any:
    """`value` as the plain type, Literal or tuple `kind`, or ValueError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        # YAML reads a bare no as false; where "no" may be chosen, that is what was meant.
        value = "no" if value is False else value
        if isinstance(value, str) and value in arguments:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(_as(k, v) for k, v in zip(kinds, value, strict=True))
    elif kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return float(value)  # from text too: YAML reads 1e-3, which has no point, as text
    elif kind is type(None) and value is None:
        return None
    elif kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError


def _described(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(arguments)
    if origin is tuple:
        inner = _described(arguments[0])
        return f"a list of {inner}" if arguments[-1] is Ellipsis else f"{len(arguments)} {inner}"
    return "null" if kind is type(None) else kind.__name__


_UNIONS = (typing.Union, types.UnionType)
