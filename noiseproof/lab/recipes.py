"""Recipes: settings that suit a dataset, and the perturbations to test on it.

`noiseproof train --recipe NAME` starts from a recipe; a YAML file and then flags override it.
Nothing here needs torch.

>>> recipe("paper", "cifar10").method.noise
'gaussian:0.06'
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from noiseproof.lab.config import NAMED, Config, Data, Method, Model, Optim, did_you_mean

# Standard deviations of Gaussian noise, as `perturb.parse` reads them.
_LEVELS: dict[str, tuple[str, ...]] = {
    "digits": ("0.1", "0.2", "0.3", "0.4"),
    "cifar10": ("2/255", "4/255", "8/255", "16/255", "20/255"),
    "svhn": ("5/255", "10/255", "20/255", "36/255", "42/255"),
    "folder": ("10/255", "30/255", "40/255", "60/255"),
}
_ROBUST_NOISE = {  # up to twice the paper's
    "cifar10": "gaussian:0..0.12",
    "svhn": "gaussian:0..0.3",
    "folder": "gaussian:0..80/255",
}
_PAPER_HEIGHT, _PAPER_WIDTH = 400, 500
_SCRATCH_LR = 1e-3  # of Adam, for photographs without pretrained weights
_ROBUST_EPOCHS, _ROBUST_BATCH = 100, 128  # for small images


def kind(data: str) -> str:
    """The kind of dataset, which decides its defaults: digits, cifar10, svhn or folder.

    Other names count as CIFAR-10, and so does a .npz file, unless its own name says SVHN; any other
    path is a folder of images.

    >>> kind("digits"), kind("sets/svhn_small.npz"), kind("mine.npz"), kind("photos/")
    ('digits', 'svhn', 'cifar10', 'folder')
    """
    if data in NAMED:
        return data if data in _LEVELS else "cifar10"
    if not data.lower().endswith(".npz"):
        return "folder"
    # The folder's name does not count, so that a file keeps its kind when it is moved.
    name = os.path.basename(data.lower())
    return "svhn" if name.rfind("svhn") > name.rfind("cifar") else "cifar10"


def crop_for(data: str) -> Literal["crop", "crop-flip"]:
    """The crop that suits small images. Traffic signs (gtsrb, or a .npz file of that name) are not
    mirrored, since a mirrored arrow belongs to another class.

    >>> crop_for("gtsrb"), crop_for("cifar100")
    ('crop', 'crop-flip')
    """
    return "crop" if "gtsrb" in os.path.basename(data.lower()) else "crop-flip"


def paper(data: str, epochs: int | None = None) -> Config:
    """The paper's settings: small learning rates, 200 epochs (photographs: 70; digits: our own).

    >>> paper("svhn").method.noise, paper("photos/").model.model
    ('gaussian:0.15', 'mobilenet_v3_small')
    """
    which = kind(data)
    if which == "digits":
        return Config(data=Data(data=data), optim=Optim(epochs=epochs or Optim.epochs))
    if which == "folder":
        return _road(data, epochs or 70)
    noise = "gaussian:0.15" if which == "svhn" else "gaussian:0.06"
    return _small_images(data, noise, epochs or 200)


def _small_images(data: str, noise: str, epochs: int) -> Config:
    """ResNet18 on 32 x 32 images. Of public datasets, no images are held out for validation: the
    paper trains on all training images, so the last epoch is the one to report. Views are cropped
    independently, as in the authors' code.
    """
    val_share = 0.0 if data in NAMED else Data.val_share
    return Config(
        data=Data(data=data, val_share=val_share, augment=crop_for(data)),
        model=Model(model="resnet18", feature_dim=128),
        method=Method(noise=noise, margin=5.0, views="independent"),
        optim=Optim(
            epochs=epochs,
            batch_size=64,
            opt="sgd",
            lr=1e-3,
            momentum=0.9,
            weight_decay=5e-4,
            sched="multistep",
            decay_milestones=_milestones(epochs, 0.3, 0.6, 0.8),
            decay_rate=0.2,
        ),
    )


def _road(data: str, epochs: int) -> Config:
    """MobileNetV3 on photographs, from ImageNet weights.

    The paper does not state the size of MobileNetV3, the feature size, the batch size or a weight
    decay: small, 128, 64 and none are our choice. It keeps the best epoch by validation accuracy
    without describing a validation set: here, a tenth of the training images. The noisy view shares
    its crop with the clean one, as in the paper's text (the code of this experiment is not public).
    The paper's images are 400 x 500; here they get the size that the weights were trained with.
    """
    return Config(
        data=Data(data=data, val_share=0.1, test_share=0.2, augment="road", img_size="auto"),
        model=Model(model="mobilenet_v3_small", feature_dim=128, weights="imagenet"),
        method=Method(noise="gaussian:40/255", margin=3.0),
        optim=Optim(
            epochs=epochs,
            batch_size=64,
            opt="adam",
            lr=1e-4,
            weight_decay=0.0,
            sched="multistep",
            decay_milestones=_milestones(epochs, 5 / 7),
            decay_rate=0.1,
        ),
    )


def _milestones(epochs: int, *shares: float) -> tuple[int, ...]:
    """These shares of a training as epochs, from 1 to `epochs` - 1; a single epoch has none.

    >>> _milestones(200, 0.3, 0.6, 0.8), _milestones(2, 0.3, 0.6, 0.8), _milestones(1, 0.5)
    ((60, 120, 160), (1,), ())
    """
    if epochs == 1:
        return ()
    return tuple(sorted({min(max(1, round(share * epochs)), epochs - 1) for share in shares}))


def modern(data: str, epochs: int | None = None) -> Config:
    """One-cycle, 30 epochs, lr 0.05, clipped gradients; data, model and noise as in the paper.

    >>> config = modern("cifar10")
    >>> config.optim.sched, config.method.noise
    ('onecycle', 'gaussian:0.06')
    """
    base = paper(data)
    return replace(
        base,
        method=replace(base.method, ramp_epochs=5.0),
        optim=replace(
            base.optim,
            epochs=epochs or 30,
            opt="sgd",
            lr=0.05,
            momentum=0.9,
            weight_decay=5e-4,
            sched="onecycle",
            decay_milestones=(),
            clip_grad=1.0,
        ),
    )


def robust(data: str, epochs: int | None = None) -> Config:
    """Strong augmentation, random noise strength, averaged weights; 100+ epochs (photographs: 70).

    Chosen on held-out CIFAR-10 images (docs/results/robust.md). Half of each step's images are
    noisy, of any strength up to twice the paper's. The method is `spheres`, and the schedule
    one-cycle. Photographs are fine-tuned with `both`, and the paper's optimiser and schedule. The
    digits have the settings of `paper`, method `discriminative`.

    Small images are trained on for 100 epochs. `noiseproof train` and `compare` count the images
    first, and train longer if there are few: see `robust_epochs`.

    >>> config = robust("cifar10")
    >>> config.method.method, config.method.noise, config.data.augment
    ('spheres', 'gaussian:0..0.12', 'crop-flip+trivial')
    """
    which = kind(data)
    if which == "digits":
        return paper(data, epochs)
    base = paper(data, epochs or (None if which == "folder" else _ROBUST_EPOCHS))
    crop = "crop" if which == "svhn" else crop_for(data)  # house numbers are not mirrored
    augment = f"{crop}+trivial"
    optim = replace(base.optim, ema_decay=0.999)
    if which != "folder":
        optim = replace(
            optim, batch_size=_ROBUST_BATCH, lr=0.1, sched="onecycle", decay_milestones=()
        )
    return replace(
        base,
        data=replace(base.data, augment=augment, noisy_augment=f"{augment}+hybrid"),
        method=replace(
            base.method,
            method="both" if which == "folder" else "spheres",
            noise=_ROBUST_NOISE[which],
            views="independent",
            batch_norm="together",
            ramp_epochs=5.0,
        ),
        optim=optim,
    )


def robust_epochs(images: int) -> int:
    """Epochs of `robust` for a number of small images: 7,300 steps, but from 100 to 800 epochs.

    With batches of 128, as the recipe has them. Chosen on held-out CIFAR-10 images, with 1,000 and
    with 5,000 for training (docs/guide.md), and so that Imagenette keeps its 100.

    >>> [robust_epochs(images) for images in (50_000, 5_000, 900, 9)]
    [100, 188, 800, 800]
    """
    steps = max(1, images // _ROBUST_BATCH)  # per epoch; the last batch, if smaller, is left out
    return min(max(_ROBUST_EPOCHS, math.ceil(7_300 / steps)), 800)


def tune(data: str, epochs: int | None = None) -> Config:
    """For trained weights: clean and noisy images, small learning rate, 10 epochs.

    The noise is that of `robust`, and for the digits of any strength too. Images are not augmented:
    in ten epochs, a small network for photographs lost clean accuracy with crops, and more with the
    augmentation of `robust` (docs/guide.md).

    >>> tune("digits").method.noise, tune("photos/").data.augment
    ('gaussian:0..0.4', 'none')
    """
    base = robust(data)
    noise = "gaussian:0..0.4" if kind(data) == "digits" else base.method.noise
    method = replace(
        base.method,
        method="both",
        noise=noise,
        views="paired",
        batch_norm="together",
        ramp_epochs=0.0,
    )
    return replace(
        base,
        data=replace(base.data, augment="none", noisy_augment=None),
        method=method,
        optim=replace(
            base.optim,
            epochs=epochs or 10,
            opt="adamw",
            lr=1e-3,
            weight_decay=0.0,
            sched="onecycle",
            decay_milestones=(),
            ema_decay=0.0,
        ),
    )


RECIPES: dict[str, Callable[[str, int | None], Config]] = {
    "robust": robust,
    "modern": modern,
    "paper": paper,
    "tune": tune,
}
DEFAULT = "robust"


def recipe(name: str, data: str, epochs: int | None = None, *, pretrained: bool = True) -> Config:
    """The config that a recipe gives for a dataset.

    Args:
        name: the recipe, one of `RECIPES`.
        data: a dataset's name, a folder or a .npz file.
        epochs: length of the training; by default the recipe's. Milestones keep their share of it.
            A ramp keeps its length in epochs.
        pretrained: whether photographs start from ImageNet weights. If not, Adam's learning rate is
            ten times that of fine-tuning.

    >>> recipe("paper", "cifar10", epochs=20).optim.decay_milestones
    (6, 12, 16)
    >>> recipe("x", "digits")
    Traceback (most recent call last):
        ...
    ValueError: there is no recipe 'x'; expected robust, modern, paper or tune
    """
    if name not in RECIPES:
        *others, last = RECIPES
        expected = f"{', '.join(others)} or {last}{did_you_mean(name, RECIPES)}"
        raise ValueError(f"there is no recipe {name!r}; expected {expected}")
    config = RECIPES[name](data, epochs)
    if pretrained or config.model.weights is None:
        return config
    lr = _SCRATCH_LR if config.optim.opt == "adam" else config.optim.lr
    model = replace(config.model, weights=None)
    return replace(config, model=model, optim=replace(config.optim, lr=lr))


def recipe_help() -> dict[str, str]:
    """Recipes by name, with the first line of their docstrings."""
    docs = {name: (make.__doc__ or "").strip() for name, make in RECIPES.items()}
    return {name: text.partition("\n")[0].rstrip(".") for name, text in docs.items()}


def suite(data: str, size: Sequence[int] | None = None) -> list[str]:
    """The noise to test on a dataset, at levels that suit it, "clean" first.

    Args:
        data: a dataset's name, a folder or a .npz file.
        size: size of the images, (..., height, width). It sets the size of the masks for a folder
            of images; by default the paper's 400 x 500.

    >>> suite("digits")
    ['clean', 'gaussian:0.1', 'gaussian:0.2', 'gaussian:0.3', 'gaussian:0.4']
    >>> suite("photos/", (3, 200, 250))[-2:]
    ['stripes:10x3', 'downup:3+stripes:10x3']
    """
    which = kind(data)
    perturbations = ["clean", *(f"gaussian:{level}" for level in _LEVELS[which])]
    if which == "folder":
        height, width = size[-2:] if size is not None else (_PAPER_HEIGHT, _PAPER_WIDTH)
        perturbations += _masks(height, width)
    return perturbations


def _masks(height: int, width: int) -> list[str]:
    """The paper's masks, alone and combined, covering the same share of an image of this size."""
    scale = math.sqrt(height * width / (_PAPER_HEIGHT * _PAPER_WIDTH))
    side = min(max(1, round(70 * scale)), height, width)
    stripe = min(max(1, round(6 * width / _PAPER_WIDTH)), width)
    occlusion, stripes = f"occlusion:20x{side}", f"stripes:10x{stripe}"
    return [
        occlusion,
        f"gaussian:40/255+{occlusion}",
        "downup:3",
        f"downup:3+{occlusion}",
        stripes,
        f"downup:3+{stripes}",
    ]
