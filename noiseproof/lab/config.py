"""The settings of one training run, in five groups of plain values.

This module needs only the standard library, so that an invalid command fails before torch is
imported. A config is frozen; `dataclasses.replace` changes a copy. Defaults that suit a dataset
come from `noiseproof.lab.recipes`; the values here are those for the digits.

>>> config = Config(optim=Optim(epochs=3))
>>> from_dict(to_dict(config)) == config
True
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_type_hints

METHODS = {
    "normal": "cross-entropy on clean images",
    "noisy": "cross-entropy on noisy images only",
    "both": "cross-entropy on clean and noisy images together",
    "stability": "clean cross-entropy + distance between clean and noisy features",
    "discriminative": "clean cross-entropy + compact, well-separated classes, under noise too",
    "spheres": "both + compact, well-separated classes relative to the features' norm",
    "augmix": "clean cross-entropy + the same prediction for two AugMix versions; no noise",
}
STAGED = ("normal", "discriminative")  # analysed stage by stage, not only at the features

DATASETS: dict[str, str] = {
    "digits": "1,797 handwritten digits, 8 x 8 grey; part of scikit-learn, no download",
    "cifar10": "60,000 photographs in 10 classes, 32 x 32 colour; downloaded to --data-dir",
    "cifar100": "60,000 photographs in 100 classes, 32 x 32 colour; downloaded to --data-dir",
    "svhn": "99,289 house-number digits, 32 x 32 colour; downloaded to --data-dir",
    "fashion_mnist": "70,000 pieces of clothing, 28 x 28 grey; downloaded to --data-dir",
    "gtsrb": "39,270 traffic signs in 43 classes, 48 x 48 colour; downloaded to --data-dir",
    "imagenette": "13,394 photographs in 10 classes, 128 x 128 colour; downloaded to --data-dir",
    "eurosat": "27,000 satellite images in 10 classes, 64 x 64 colour; downloaded to --data-dir",
    "PATH/": "a folder of images: train/ and val/ or test/, or one folder per class",
    "PATH.npz": "arrays {train,test}_{images,labels}; optionally val_{images,labels} and classes",
}
NAMED = tuple(name for name in DATASETS if not name.startswith("PATH"))  # all others are paths

MODELS: dict[str, str] = {
    "small_cnn": "four small convolutions, for the digits",
    "resnet18": "ResNet-18 for 32 x 32 images: 3 x 3 stem, no max-pool, as in the paper",
    "mobilenet_v3_small": "MobileNetV3 small, 2.5 million parameters; for photographs",
    "mobilenet_v3_large": "MobileNetV3 large, 5.5 million parameters; for photographs",
    "mobilenet_v2": "MobileNetV2, 3.5 million parameters; for photographs",
    "NAME": "any torchvision classifier by its name, such as efficientnet_b0",
    "timm:NAME": "any timm model, if timm is installed",
}

UNTRAINED = ("small_cnn", "resnet18")  # networks without ImageNet weights

AUGMENTATIONS: dict[str, str] = {  # of noiseproof.augment, joined by + in --augment
    "none": "unchanged images",
    "crop": "padded with black by an eighth of the shorter side, and cropped back at random",
    "crop-flip": "crop, and mirrored half of the time",
    "road": "the paper's for photographs: colours, rotation, perspective, mirrored",
    "trivial": "TrivialAugment: one of 14 operations at random strength",
    "erase": "random erasing: a black rectangle in half of the images",
    "cutout": "a black square of half the shorter side",
    "augmix": "AugMix: a mixture of the image with three augmented versions of it",
    "hybrid": "HybridAugment: half of the images get the high frequencies of others of the batch",
    "mixup": "at the end: half of the images are blended with others of the batch, labels too",
    "cutmix": "at the end: half of the images get a rectangle of another, and a share of its label",
}
MIXINGS = ("mixup", "cutmix")  # only at the end of --augment

MethodName = Literal["normal", "noisy", "both", "stability", "discriminative", "spheres", "augmix"]
PAPER_METHODS: tuple[MethodName, ...] = ("normal", "noisy", "both", "stability", "discriminative")
Launcher = Literal["processes", "slurm"]
NOISELESS = ("normal", "augmix")  # methods that train without noise


@dataclass(frozen=True)
class Data:
    """Which images to train and test on."""

    data: str = "digits"
    """A name, see `noiseproof list datasets`; a folder with one folder per class; a .npz file."""
    data_dir: str = "data"
    """Folder of the datasets that are known by name; they are downloaded to it."""
    download: bool = True
    """Download a dataset that is not in that folder."""
    val_share: float = 0.1
    """Share of training images held out for validation if there is no such split; 0 for none."""
    train_share: float = 1.0
    """Share of the other training images to train on, of each class; the rest is not used."""
    balance: bool = False
    """Train on equally many images of each class, repeating those of rare classes."""
    val_noise: str | None = None
    """Also validate under this perturbation; the best epoch then has the best mean of the two."""
    test_share: float = 0.2
    """Share of a folder's images held out for testing, unless it has its own test split."""
    split_seed: int = 0
    """Seed of both splits; separate from --seed, so that all seeds share their test images."""
    group: str | None = None
    """Keep images of a scene in one split: regular expression on file names, folder, or a .csv."""
    dedupe: bool = False
    """Keep near-duplicates in a folder in one split, for training if they are in several."""
    img_size: tuple[int, int] | Literal["auto", "native"] | None = None
    """Height and width of a folder's images; auto: the weights' own or up to 224; native: as is."""
    crop_share: float | None = None
    """Crop the centre with this share of the shorter side; without it images are stretched."""
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """How files are resized; auto uses that of the weights."""
    background: Literal["white", "black"] = "white"
    """Colour behind transparent pixels."""
    augment: str = "none"
    """Names joined by +, such as crop-flip+trivial+cutmix; see `noiseproof list augmentations`."""
    noisy_augment: str | None = None
    """Augmentation of the noisy view, of methods with two; needs --views independent."""
    storage: Literal["auto", "memory", "stream"] = "auto"
    """Keep images in device memory, or stream them from files; auto keeps up to 2 GiB."""
    workers: int = 4
    """Processes that read streamed images."""
    follow_links: bool = False
    """Follow links that lead out of the folder of images."""


@dataclass(frozen=True)
class Model:
    """The network."""

    model: str = "small_cnn"
    """small_cnn, resnet18 (32 x 32), any torchvision name, or timm:NAME."""
    feature_dim: int = 64
    """Size of the penultimate layer, to which the loss applies."""
    weights: str | None = None
    """'imagenet', or a file of backbone weights; none trains from scratch."""
    head: Literal["new", "own"] = "new"
    """A new classifier on top of the network, or the network's own, with all of its weights."""
    mean: tuple[float, ...] | None = None
    """For tune: means that its images were normalised with; default: those of its library."""
    std: tuple[float, ...] | None = None
    """For tune: standard deviations, likewise."""


@dataclass(frozen=True)
class Method:
    """The training objective."""

    method: MethodName = "discriminative"
    """normal, noisy, both, stability, discriminative, spheres or augmix."""
    noise: str = "gaussian:0.2"
    """Perturbation of the training images: gaussian:0.06, gaussian:0..0.1, gaussian:0..0.1@0.8."""
    views: Literal["paired", "independent"] = "paired"
    """Add noise to the crop of the clean image, or to a second one (as in the authors' code)."""
    batch_norm: Literal["apart", "together"] = "apart"
    """Clean and noisy images in separate batches, or in one, as `both` has them."""
    radius: float = 0.5
    """Features closer than this to their class centroid cost nothing."""
    margin: float = 5.0
    """Distance that a centroid must keep from every decision boundary."""
    compact_weight: float = 1.0
    """Weight of the compactness term."""
    margin_weight: float = 1.0
    """Weight of the margin term."""
    norm_weight: float = 1e-3
    """Weight of the penalty on the norms of the centroids."""
    noisy_weight: float = 1.0
    """Weight of the alignment of noisy features."""
    noisy_ce_weight: float = 0.0
    """Weight of cross-entropy on noisy logits; 0 in the paper."""
    centroid_momentum: float = 0.9
    """Share of the previous centroid kept at each step."""
    centroids: Literal["partial", "naive", "momentum"] = "partial"
    """Which centroid the terms use."""
    margin_over: Literal["max", "mean"] = "max"
    """Margin to the hardest rival class, or the mean over all rivals."""
    compact_hinge: Literal["squared", "plain"] = "squared"
    """Whether the hinges of compactness and noisy alignment are squared, as in the paper."""
    margin_hinge: Literal["plain", "squared"] = "plain"
    """Whether the hinge of the margin is plain, as in the paper, or squared."""
    spheres_weight: float = 0.3
    """For spheres: weight of the constraints."""
    spheres_radius: float = 0.2
    """For spheres: the radius as a share of the features' norm, instead of --radius."""
    spheres_margin: float = 0.5
    """For spheres: the margin as a share of the features' norm, instead of --margin."""
    stability_weight: float = 1.0
    """Weight of the feature distance in stability training."""
    ramp_epochs: float = 0.0
    """Epochs over which the weight of the stability term or of the constraints rises from 0."""
    smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""

    @property
    def relative(self) -> bool:
        """Whether radius and margin are shares of the features' norm."""
        return self.method == "spheres"


@dataclass(frozen=True)
class Optim:
    """Optimiser and schedule."""

    epochs: int = 40
    """Passes over the training data."""
    batch_size: int = 64
    """Images per step, over all devices together."""
    opt: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimiser; sgd has Nesterov momentum."""
    lr: float = 0.05
    """Learning rate (the peak, if the schedule has one)."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 5e-4
    """Weight decay."""
    sched: Literal["constant", "multistep", "cosine", "onecycle"] = "onecycle"
    """Learning-rate schedule."""
    decay_milestones: tuple[int, ...] = ()
    """Epochs after which multistep decays; those of a recipe scale with --epochs."""
    decay_rate: float = 0.2
    """Factor of each decay."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from 0, before multistep, cosine or constant."""
    clip_grad: float = 0.0
    """Largest gradient norm; 0 does not clip."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights, used for testing; 0 keeps none."""


@dataclass(frozen=True)
class Run:
    """Where and how it runs."""

    seed: int = 0
    """Seed of weights, order, augmentation and noise."""
    output: str = "runs"
    """Folder in which run folders are created."""
    name: str | None = None
    """Name of the run folder; by default DATA-METHOD-sSEED, DATA-tuned-sSEED or compare-DATA."""
    resume: bool = False
    """Continue the run in that folder where it stopped, or start it if there is none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    amp: Literal["auto", "no", "bf16", "fp16", "float64"] = "auto"
    """Precision; auto is bf16 on a GPU that supports it, and float32 elsewhere."""
    engine: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How a step is executed; auto uses the fastest that fits."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    sync_bn: bool = False
    """On GPUs, batch-norm over the batch of all processes, so that several train like one."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; 0 writes one after every epoch."""
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


@dataclass(frozen=True)
class Comparison:
    """What to compare; all trainings share the settings above."""

    methods: tuple[MethodName, ...] = PAPER_METHODS
    """Methods to train; see `noiseproof list methods`."""
    seeds: int = 1
    """Trainings per method, with seeds from --seed upwards."""
    jobs: int = 0
    """Trainings at a time, sharing the cores or the GPU; 0 chooses a number for the machine."""
    launcher: Launcher = "processes"
    """Train in processes of this machine, or as jobs of a SLURM cluster, from a login node."""
    slurm: tuple[str, ...] = ()
    """For slurm: partition=gpu time=60 (minutes) gpus=1 cpus=8 memory=32 (GB) jobs=4 account=me."""
    draws: int = 10
    """Draws of each random perturbation in the evaluation."""
    report: bool = True
    """Also analyse the first training of each method and write report.html."""


GROUPS: dict[str, type] = get_type_hints(Config)


def run_name(config: Config) -> str:
    """The name of the run folder: the one given, or DATA-METHOD-sSEED."""
    if config.run.name:
        return config.run.name
    data = config.data.data.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".npz")
    if data in ("", ".", ".."):
        data = os.path.basename(os.path.abspath(config.data.data))
    return f"{data}-{config.method.method}-s{config.run.seed}"


def run_path(config: Config) -> Path:
    """The run folder of a config."""
    return Path(config.run.output) / run_name(config)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain dictionaries, one per group, for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], base: Config | None = None) -> Config:
    """A config with some settings changed.

    Args:
        values: settings by name, in groups (as `to_dict` and JSON have them) or not. Values must
            have the right types, except that a list may replace a tuple. Unknown names are refused.
        base: the config to change; by default the one with all defaults.

    >>> from_dict({"lr": 0.1, "optim": {"batch_size": 32}}).optim.lr
    0.1
    """
    settings: dict[str, Any] = {}
    for name, value in values.items():
        settings |= value if isinstance(value, dict) else {name: value}
    config = base or Config()
    for group, cls in GROUPS.items():
        names = [f.name for f in dataclasses.fields(cls) if f.name in settings]
        changes = {name: settings.pop(name) for name in names}
        changes = {name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()}
        changed = dataclasses.replace(getattr(config, group), **changes)
        config = dataclasses.replace(config, **{group: changed})
    for name in settings:
        names = [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]
        raise ValueError(f"there is no setting {name!r}{did_you_mean(name, names)}")
    return config


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """The end of an error message that suggests known names close to `name`, if there are any.

    Args:
        name: what was given.
        known: what could have been given.
        most: how many names to suggest at most.

    >>> did_you_mean("cifr10", NAMED), did_you_mean("x", NAMED)
    (" (did you mean 'cifar10'?)", '')
    """
    closest = get_close_matches(name, set(known), most)
    return f" (did you mean {' or '.join(map(repr, closest))}?)" if closest else ""
