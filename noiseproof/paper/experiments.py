"""The paper's experiments: the config of each row of a table, and the numbers in the paper.

Where the paper's text and its authors' code disagree, there is a row for each: `discriminative`
(weights 1 and 1, momentum 0.9) and `discriminative-code` (0.5 and 0.5, momentum 0.99). Views are
independent, as in the code behind the tables; `-paired` rows add the noise to the clean crop
instead. An experiment takes a number of epochs for shorter trainings. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import tyro

from noiseproof.lab.config import PAPER_METHODS, Config, Launcher, from_dict
from noiseproof.lab.evaluation.suites import SENSOR
from noiseproof.lab.recipes import modern, paper, robust, suite
from noiseproof.perturb.text import CORRUPTIONS

Numbers = dict[str, tuple[float, ...]]


class Renormalised(NamedTuple):
    """The network of another row, with batch-norm statistics estimated again after training."""

    row: str  # the row that is trained
    noise: tuple[str, ...]  # perturbations of the training images, as `renormalise` takes them


class Experiment(NamedTuple):
    """One table of the paper, or one of ours."""

    title: str
    rows: dict[str, Config]
    suite: tuple[str, ...]  # perturbations, one per column
    paper: Numbers  # the paper's accuracies in %, by row, one per column
    weights: Literal["last", "best"] = "last"  # which epoch is reported
    renormalised: Mapping[str, Renormalised] = {}  # rows that are not trained, by name
    once: tuple[str, ...] = ()  # further perturbations, with one draw each, in tables of their own


_CODE = {"compact_weight": 0.5, "noisy_weight": 0.5, "centroid_momentum": 0.99}

_CIFAR10: Numbers = {
    "normal": (92.73, 92.63, 91.95, 87.73, 64.93, 50.32),
    "noisy": (89.64, 89.65, 89.70, 89.99, 89.81, 87.92),
    "both": (91.48, 91.45, 91.41, 91.15, 90.06, 89.04),
    "stability": (91.13, 91.16, 91.24, 91.26, 89.12, 84.62),
    "discriminative": (92.67, 92.70, 92.68, 92.61, 91.15, 89.42),
}
_SVHN: Numbers = {
    "normal": (95.69, 95.41, 94.32, 86.85, 66.36, 58.87),
    "noisy": (93.42, 93.39, 93.37, 93.02, 91.64, 90.39),
    "both": (95.34, 95.25, 94.96, 93.94, 91.62, 90.43),
    "stability": (96.01, 95.93, 95.63, 94.59, 91.45, 89.71),
    "discriminative": (96.13, 96.06, 95.91, 95.17, 92.47, 90.86),
}
# Clean and Gaussian 10, 30, 40, 60; then occlusion, occlusion with noise, down-up, down-up with
# occlusion, stripes, down-up with stripes.
_ROAD: Numbers = {
    "normal": (96.84, 95.57, 75.42, 59.34, 43.81, 89.89, 27.68, 92.36, 77.58, 84.39, 69.52),
    "noisy": (91.58, 92.66, 95.71, 94.95, 92.05, 80.21, 74.00, 86.58, 78.86, 76.21, 70.13),
    "both": (96.31, 96.36, 95.97, 95.39, 92.92, 87.92, 78.60, 91.84, 81.34, 88.00, 77.78),
    "stability": (96.05, 96.31, 94.63, 92.92, 90.87, 80.99, 54.07, 96.05, 74.47, 86.63, 82.44),
    "discriminative": (97.37, 97.29, 96.71, 95.52, 93.65, 94.05, 82.73, 95.79, 88.05, 90.42, 87.99),
}
_ONCE = (*CORRUPTIONS, *SENSOR)
_CLEAN_TERMS = ("compact", "margin", "norm")
# Their weights -> clean accuracy on CIFAR-10 and on SVHN.
_ABLATION = {
    (1.0, 0.0, 1e-3): (93.43, 96.15),
    (0.0, 1.0, 1e-3): (92.25, 95.98),
    (1.0, 1.0, 1e-3): (94.01, 96.64),
    (1.0, 1.0, 0.0): (93.66, 96.55),
    (1.0, 1.0, 1.0): (93.81, 96.67),
}


def _methods(base: Config) -> dict[str, Config]:
    """The five methods, the authors' weights, and paired views if they make a difference."""
    rows = {m: _with(base, method=m) for m in PAPER_METHODS}
    rows["discriminative-code"] = _with(base, method="discriminative", **_CODE)
    for method in ("stability", "discriminative"):
        rows[f"{method}-paired"] = _with(base, method=method, views="paired")
    return rows


def _with(base: Config, **changes: object) -> Config:
    return from_dict(changes, base)


def cifar10(epochs: int | None = None) -> Experiment:
    """Table 1: CIFAR-10 under Gaussian noise, ResNet18, 200 epochs.

    Other rows show what batch-norm does to the paper's method: clean and noisy images in one batch
    (`-together`), and statistics estimated again after training, from noisy images or from clean
    and noisy ones. `normal-float32` is in full precision, like the authors' code, and
    `normal-renormalised-clean` has the chance of the last batches removed from its statistics.
    """
    base = paper("cifar10", epochs)
    rows = _methods(base)
    rows["normal-float32"] = _with(base, method="normal", amp="no")
    rows["discriminative-together"] = _with(rows["discriminative"], batch_norm="together")
    noise = base.method.noise
    renormalised = {
        "normal-renormalised-clean": Renormalised("normal", ("clean",)),
        "discriminative-renormalised-noisy": Renormalised("discriminative", (noise,)),
        "discriminative-renormalised-mixed": Renormalised("discriminative", ("clean", noise)),
    }
    rows |= {row: rows[source.row] for row, source in renormalised.items()}
    perturbations = tuple(suite("cifar10"))
    return Experiment(
        "CIFAR-10 (table 1)", rows, perturbations, _CIFAR10, renormalised=renormalised
    )


def svhn(epochs: int | None = None) -> Experiment:
    """Table 2: SVHN under Gaussian noise, ResNet18, 200 epochs.

    Stability training can collapse in its first epoch; `stability-ramp` raises its weight slowly.
    """
    base = paper("svhn", epochs)
    rows = _methods(base)
    rows["stability-ramp"] = _with(base, method="stability", ramp_epochs=5.0)
    return Experiment("SVHN (table 2)", rows, tuple(suite("svhn")), _SVHN)


def road(epochs: int | None = None) -> Experiment:
    """Tables 3 and 4: road photographs under noise, masks and resampling, MobileNet."""
    base = _with(paper("road/", epochs), model="mobilenet_v2")
    return _road("Road conditions (tables 3 and 4)", base)


def road_efficientnet(epochs: int | None = None) -> Experiment:
    """Tables 3 and 4 with EfficientNet-Lite0, and epochs chosen on noisy images too.

    `--weights FILE` takes the network's ImageNet weights from `tools.efficientnet_lite0`, if timm
    cannot download them.
    """
    base = paper("road/", epochs)
    base = _with(base, model="timm:tf_efficientnet_lite0", val_noise=base.method.noise)
    return _road("Road conditions (tables 3 and 4), EfficientNet-Lite0", base)


def _road(title: str, base: Config) -> Experiment:
    base = _with(base, img_size=None, background="black")  # as the recorded results were made
    rows = {m: _with(base, method=m) for m in PAPER_METHODS}
    return Experiment(title, rows, tuple(suite("road/", (3, 250, 250))), _ROAD, "best")


def ablation(epochs: int | None = None) -> Experiment:
    """Table 5 on CIFAR-10: only the constraints on clean images, with five sets of weights."""
    return _ablation("cifar10", "CIFAR-10", 0, epochs)


def ablation_svhn(epochs: int | None = None) -> Experiment:
    """Table 5 on SVHN: as on CIFAR-10."""
    return _ablation("svhn", "SVHN", 1, epochs)


def _ablation(data: str, title: str, column: int, epochs: int | None) -> Experiment:
    base = paper(data, epochs)
    rows, numbers = {}, {}
    for values, accuracies in _ABLATION.items():
        name = " ".join(f"{term}={v:g}" for term, v in zip(_CLEAN_TERMS, values, strict=True))
        weights = {f"{term}_weight": v for term, v in zip(_CLEAN_TERMS, values, strict=True)}
        rows[name] = _with(base, method="discriminative", noisy_weight=0.0, **weights)
        numbers[name] = (accuracies[column],)
    return Experiment(f"Ablation on {title} (table 5)", rows, ("clean",), numbers)


def modern30(epochs: int | None = None) -> Experiment:
    """Not in the paper: CIFAR-10 with a one-cycle schedule of 30 epochs."""
    return _modern(30, epochs)


def modern100(epochs: int | None = None) -> Experiment:
    """Not in the paper: CIFAR-10 with a one-cycle schedule of 100 epochs."""
    return _modern(100, epochs)


def _modern(budget: int, epochs: int | None) -> Experiment:
    """The five methods, and rows that change one thing at a time, apart from the constraints.

    `both` has cross-entropy on noisy images, and batch-norm over batches of clean and noisy images;
    the paper's loss has neither. `-noisy-ce` adds the first, with the paper's weights and with a
    share of them (at 0, only cross-entropy is left); `-together` adds the second.
    """
    base = modern("cifar10", epochs or budget)
    rows = {m: _with(base, method=m) for m in PAPER_METHODS}
    noisy_ce = _with(base, method="discriminative", noisy_ce_weight=1.0)
    rows["discriminative-noisy-ce"] = noisy_ce
    for share in (0.1, 0.01, 0.0):
        names = [f"{term}_weight" for term in (*_CLEAN_TERMS, "noisy")]
        weights = {name: share * getattr(noisy_ce.method, name) for name in names}
        rows[f"discriminative-noisy-ce-{share:g}"] = _with(noisy_ce, **weights)
    for row in ("stability", "discriminative", "discriminative-noisy-ce-0.1"):
        rows[f"{row}-together"] = _with(rows[row], batch_norm="together")
    title = f"CIFAR-10, one-cycle, {budget} epochs (not in the paper)"
    return Experiment(title, rows, tuple(suite("cifar10")), {})


def robust_cifar10(epochs: int | None = None) -> Experiment:
    """Not in the paper: CIFAR-10 with the robust recipe, 100 epochs of two views."""
    return _robust("cifar10", "CIFAR-10", epochs)


def robust_cifar100(epochs: int | None = None) -> Experiment:
    """Not in the paper: CIFAR-100 with the robust recipe, 100 epochs of two views."""
    return _robust("cifar100", "CIFAR-100", epochs)


def robust_gtsrb(epochs: int | None = None) -> Experiment:
    """Not in the paper: German traffic signs with the robust recipe, 50 epochs of two views.

    Half the recipe's epochs, since about 30 images in a row show the same sign; the images have 48
    x 48 pixels, so that the trainings take about as long as on CIFAR-10.
    """
    return _robust("gtsrb", "Traffic signs (GTSRB)", epochs or 50, side=48)


def robust_imagenette(epochs: int | None = None) -> Experiment:
    """Not in the paper: Imagenette at 128 x 128, robust recipe, 100 epochs of two views.

    Trained from scratch, since most of its test images are training images of ImageNet. ResNet18 is
    torchvision's, with the stem for ImageNet (7 x 7, stride 2, max-pool), so that its four stages
    see 32 x 32 to 4 x 4 pixels, as on CIFAR: 0.59 billion multiply-adds per image, against 0.56.
    With the stem for CIFAR they would be 8.9 billion.
    """
    return _robust("imagenette", "Imagenette", epochs, side=128, model="torchvision:resnet18")


def robust_road(epochs: int | None = None) -> Experiment:
    """Not in the paper: road photographs with the robust recipe, 70 epochs of two views.

    Network, weights, image size, perturbations and the choice of the epoch are those of
    `road-efficientnet`.
    """
    like = road_efficientnet()
    usual = like.rows["both"]
    kept = {name: getattr(usual.data, name) for name in ("val_noise", "img_size", "background")}
    two = robust("road/", epochs).optim.epochs
    rows = {
        method: _with(robust("road/", length), method=method, model=usual.model.model, **kept)
        for method, length in (("normal", 2 * two), ("both", two), ("spheres", two))
    }
    title = f"Road conditions, robust recipe, {two} epochs of two views (not in the paper)"
    return Experiment(title, rows, like.suite, {}, like.weights, once=_ONCE)


def few_images(epochs: int | None = None) -> Experiment:
    """Not in the paper: when do the constraints pay? CIFAR-10 with fewer images and plain crops.

    Rows are named by method, augmentation and percentage of the training images. `plain` has crops
    and flips; noise and the rest are those of the robust recipe. All images with strong
    augmentation are in `robust-cifar10`.
    """
    base, rows = robust("cifar10", epochs), {}
    plain = _with(base, augment=paper("cifar10").data.augment, noisy_augment=None)
    for percentage in (100, 10, 2):
        for kind, config in (("plain", plain), ("strong", base)):
            if (kind, percentage) == ("strong", 100):
                continue
            for method in ("both", "spheres"):
                changes = {"method": method, "train_share": percentage / 100}
                rows[f"{method}-{kind}-{percentage}"] = _with(config, **changes)
    title = f"CIFAR-10 with fewer images, {base.optim.epochs} epochs (not in the paper)"
    return Experiment(title, rows, _robust_suite(32), {}, once=_ONCE)


def certified_cifar10(epochs: int | None = None) -> Experiment:
    """Not in the paper: CIFAR-10 models for `noiseproof certify`, at σ = 0.12 and σ = 0.25.

    Trained on noisy images alone, as by Cohen, Rosenfeld and Kolter (ICML 2019), under the noise
    of their certificates; otherwise the robust recipe, and as many views as in `robust-cifar10`.
    """
    sigmas, base = ("0.12", "0.25"), robust("cifar10", epochs)
    changes = {"method": "noisy", "epochs": 2 * base.optim.epochs}
    rows = {f"noisy-{s}": _with(base, **changes, noise=f"gaussian:{s}") for s in sigmas}
    columns = ("clean", *(f"gaussian:{s}" for s in sigmas))
    return Experiment("CIFAR-10, models to certify (not in the paper)", rows, columns, {})


def _robust(
    data: str, title: str, epochs: int | None, side: int = 32, model: str = "resnet18"
) -> Experiment:
    """Methods with the same number of views: by default 100 epochs of two, 200 of one, 67 of three.

    `augmix` is the usual peer, with its own augmentation: without noise, and without other
    augmentation than crops and flips. The schedule is the recipe's.
    """
    base = _with(robust(data, epochs), model=model)
    two = base.optim.epochs
    rows = {
        "normal": _with(base, method="normal", epochs=2 * two),
        "noisy": _with(base, method="noisy", epochs=2 * two),
        "both": _with(base, method="both"),
        "stability": _with(base, method="stability"),
        "discriminative": _with(base, method="discriminative"),
        "spheres": _with(base, method="spheres"),
        "augmix": _with(
            base,
            method="augmix",
            epochs=round(2 * two / 3),
            augment=paper(data).data.augment,
            noisy_augment=None,
        ),
    }
    title = f"{title}, robust recipe, {two} epochs of two views (not in the paper)"
    return Experiment(title, rows, _robust_suite(side), {}, once=_ONCE)


def _robust_suite(side: int) -> tuple[str, ...]:
    """Noise, and masks that cover about the same share of an image of any size: their sides are
    whole pixels, so at 48 pixels they cover up to a third more.

    >>> _robust_suite(32)[-2:], _robust_suite(128)[-2:]
    (('occlusion:20x5', 'stripes:4x1'), ('occlusion:20x20', 'stripes:4x4'))
    """
    noise = (f"gaussian:{level}" for level in ("8/255", "16/255", "20/255", "0.1"))
    patch, stripe = round(5 * side / 32), round(side / 32)
    return ("clean", *noise, f"occlusion:20x{patch}", f"stripes:4x{stripe}")


EXPERIMENTS: dict[str, Callable[..., Experiment]] = {
    "cifar10": cifar10,
    "svhn": svhn,
    "road": road,
    "road-efficientnet": road_efficientnet,
    "ablation": ablation,
    "ablation-svhn": ablation_svhn,
    "modern-30": modern30,
    "modern-100": modern100,
    "robust-cifar10": robust_cifar10,
    "robust-cifar100": robust_cifar100,
    "robust-gtsrb": robust_gtsrb,
    "robust-imagenette": robust_imagenette,
    "robust-road": robust_road,
    "few-images": few_images,
    "certified-cifar10": certified_cifar10,
}


@dataclass(frozen=True)
class ReproduceArguments:
    """Run an experiment and print its table, with the differences from the paper."""

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")]
    """Name of the experiment, such as cifar10; see `noiseproof list experiments`."""
    only: tuple[str, ...] = ()
    """Rows to run, such as normal both; by default all."""
    epochs: int | None = None
    """Train for fewer epochs, with the schedule scaled; such rows are recorded separately."""
    seed: int = 0
    """Seed of the trainings; with several per row, the first seed."""
    seeds: int = 1
    """Trainings per row, with seeds from --seed upwards."""
    data: str | None = None
    """Data to use instead: a .npz file, or a folder of images (required for road)."""
    data_dir: str = "data"
    """Folder of the datasets; they are downloaded to it."""
    follow_links: bool = False
    """Follow links that lead out of the folder of images."""
    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """File of pretrained weights for the road experiments, if they cannot be downloaded."""
    output: str = "runs"
    """Folder in which run folders are created."""
    results: str = "results"
    """Folder for records."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    draws: int = 10
    """Draws of each random perturbation."""
    jobs: int = 1
    """Trainings at a time, sharing the cores or the GPU."""
    launcher: Launcher = "processes"
    """Train in processes of this machine, or as jobs of a SLURM cluster, from a login node."""
    slurm: tuple[str, ...] = ()
    """For slurm: partition=gpu time=60 (minutes) gpus=1 cpus=8 memory=32 (GB) jobs=4 account=me."""
    along: int = 0
    """Also test every N epochs (0: never), to record what choosing the epoch would gain."""
