"""Whether a config can be run, answered without torch, so that a wrong command is told at once.

Every message names the flag, what came, and what was expected. What can only be known from the data
or the libraries (image sizes, a model's name, the device) is checked where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from noiseproof.lab.config import (
    DATASETS,
    METHODS,
    NAMED,
    Config,
    Data,
    Method,
    Model,
    Optim,
    Run,
    to_dict,
)
from noiseproof.perturb.text import check, is_clean

# Names that are this project's own networks; ImageNet weights exist for torchvision's and timm's.
_OWN_MODELS = ("small_cnn", "resnet18")

# What is expected in words, the same as a test, and the settings it holds for.
_RULES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("at least 1", lambda v: v >= 1, ("feature_dim", "epochs", "batch_size")),
    (
        "at least 0",
        lambda v: v >= 0,
        (
            *("workers", "threads", "checkpoint_minutes"),
            *("radius", "margin", "compact_weight", "margin_weight", "norm_weight"),
            *("noisy_weight", "noisy_ce_weight", "stability_weight", "ramp_epochs"),
            *("weight_decay", "warmup_epochs", "clip_grad"),
        ),
    ),
    ("above 0", lambda v: v > 0, ("lr",)),
    (
        "at least 0 and below 1",
        lambda v: 0 <= v < 1,
        ("val_share", "centroid_momentum", "smoothing", "momentum", "ema_decay"),
    ),
    ("above 0 and below 1", lambda v: 0 < v < 1, ("test_share",)),
    ("above 0 and at most 1", lambda v: 0 < v <= 1, ("decay_rate",)),
    ("at least 0 and below 2**63", lambda v: 0 <= v < 2**63, ("seed", "split_seed")),
)


def validate(config: Config) -> None:
    """Raises ValueError for the first setting that cannot be run.

    >>> validate(Config(optim=Optim(epochs=0)))
    Traceback (most recent call last):
        ...
    ValueError: --epochs must be at least 1, got 0
    """
    _in_range({name: v for group in to_dict(config).values() for name, v in group.items()})
    _data(config.data)
    _model(config.model)
    _method(config.method)
    _optim(config.optim)
    _run(config.run)
    validate_apart("--output", config.run.output, config.data.data)


def validate_perturbations(flag: str, specs: Iterable[str]) -> None:
    """Raises ValueError, naming the flag, for the first text that is no perturbation."""
    try:
        for spec in specs:
            check(spec)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def validate_apart(flag: str, folder: str, data: str) -> None:
    """Raises ValueError where what is made would lie among the images, as a class next time."""
    if data in NAMED or _is_npz(data):
        return
    made, images = Path(folder).resolve(), Path(data).resolve()
    if made.is_relative_to(images) and not any(
        part.startswith(".")
        for part in made.relative_to(images).parts  # passed over
    ):
        raise ValueError(
            f"{flag} {folder} lies in --data {data}, and would be taken for a class of images; "
            f"expected a folder elsewhere, such as {images.parent / made.name}"
        )


def _in_range(values: dict[str, Any]) -> None:
    for expected, holds, names in _RULES:
        for name in names:
            value = values[name]
            if not math.isfinite(value):
                raise ValueError(f"{_flag(name)} must be a finite number, got {value}")
            if not holds(value):
                raise ValueError(f"{_flag(name)} must be {expected}, got {value}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _data(data: Data) -> None:
    _exists(data.data)
    if data.val_noise is not None:
        validate_perturbations("--val-noise", [data.val_noise])
    if data.img_size is not None and min(data.img_size) < 4:
        raise ValueError(f"--img-size must be at least 4 4, got {_joined(data.img_size)}")
    folder = data.data not in NAMED and not _is_npz(data.data)
    if data.img_size is not None and not folder:
        raise ValueError(
            f"--img-size resizes an image folder; {data.data} keeps its own size, so leave it out"
        )
    if data.augment == "road" and not folder:
        raise ValueError(
            f"--augment road is for an image folder, got --data {data.data}; "
            "expected none, crop or crop-flip"
        )
    if data.storage == "stream" and not folder:
        raise ValueError(
            f"--storage stream reads an image folder, got --data {data.data}; "
            "expected --storage auto or memory"
        )


def _is_npz(data: str) -> bool:
    return data.lower().endswith(".npz")


def _exists(data: str) -> None:
    """A dataset's name, a folder, or a .npz file that is there."""
    if data in NAMED:
        return
    path = Path(data)
    if data and (path.is_file() if _is_npz(data) else path.is_dir()):
        return
    names = ", ".join(DATASETS)
    if _is_npz(data):
        raise ValueError(f"--data {data}: there is no such file; expected a .npz file")
    if path.is_file():
        raise ValueError(f"--data {data} is a file; expected a folder of images or a .npz file")
    if "/" in data or "\\" in data:
        raise ValueError(f"--data {data}: there is no such folder; expected a folder of images")
    near = get_close_matches(data, NAMED, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"--data {data!r} is no dataset and no folder; expected {names}{hint}")


def _model(model: Model) -> None:
    name = model.model
    if not name:
        raise ValueError("--model must name a network, got nothing; see `noiseproof list models`")
    if name.startswith("timm:"):
        if name == "timm:":
            raise ValueError("--model timm: must be followed by a name, such as timm:resnet18")
        if find_spec("timm") is None:
            raise ValueError(f"--model {name} needs timm; install it with `pip install timm`")
    if model.weights is None:
        return
    if model.weights == "imagenet":
        if name in _OWN_MODELS:
            raise ValueError(
                f"--weights imagenet does not exist for --model {name}, a network for small images;"
                " expected --weights None, or a torchvision model"
            )
    elif not Path(model.weights).is_file():
        raise ValueError(
            f"--weights {model.weights}: there is no such file; "
            "expected imagenet, None, or a file of weights"
        )


def _method(method: Method) -> None:
    if method.method not in METHODS:
        near = get_close_matches(method.method, METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"--method must be one of {', '.join(METHODS)}, got {method.method!r}{hint}"
        )
    validate_perturbations("--noise", [method.noise])
    if method.uses_noise and is_clean(method.noise):
        raise ValueError(
            f"--method {method.method} trains with noise, got --noise {method.noise}; "
            "expected noise such as gaussian:0.1, or --method normal"
        )


def _optim(optim: Optim) -> None:
    if optim.sched == "multistep":
        _milestones(optim.decay_milestones, optim.epochs)
    if optim.warmup_epochs and optim.sched == "onecycle":
        raise ValueError(
            f"--warmup-epochs {optim.warmup_epochs:g} has no place before --sched onecycle, which "
            "warms up by itself; expected 0, or another schedule"
        )
    if optim.warmup_epochs >= optim.epochs:
        raise ValueError(
            f"--warmup-epochs must be less than --epochs {optim.epochs}, "
            f"got {optim.warmup_epochs:g}"
        )


def _milestones(milestones: tuple[int, ...], epochs: int) -> None:
    """Increasing, from 1 to epochs - 1; the message offers the same course over these epochs."""
    if not milestones and epochs == 1:
        return  # there is no epoch to decay after
    if not milestones:
        raise ValueError(
            "--sched multistep needs --decay-milestones, such as "
            f"{_joined(sorted({max(1, epochs // 2), max(1, 3 * epochs // 4)}))}, got none"
        )
    given = f"--decay-milestones {_joined(milestones)}"
    if any(b <= a for a, b in zip((0, *milestones), milestones, strict=False)):
        raise ValueError(f"{given} must be epochs from 1 upwards in increasing order")
    if milestones[-1] < epochs:
        return
    # As if the training had ended a fifth after its last decay, the paper's proportion.
    scaled = sorted({round(m * epochs / (1.25 * milestones[-1])) for m in milestones} - {0})
    if scaled and scaled[-1] < epochs:
        advice = f"for the same course over {epochs} epochs give --decay-milestones "
        advice += _joined(scaled)
    else:
        advice = "for so short a training give --sched constant"
    raise ValueError(f"{given} must lie below --epochs {epochs}; {advice}")


def _run(run: Run) -> None:
    if run.name is not None and (
        not run.name or run.name in (".", "..") or set(run.name) & {*"/\\"}
    ):
        raise ValueError(
            f"--name must be a folder's name without separators, got {run.name!r}; "
            "the folder around it is --output"
        )
    if not run.output:
        raise ValueError("--output must be a folder, got nothing")
    if Path(run.output).is_file():
        raise ValueError(f"--output must be a folder, got the file {run.output}")
    if run.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs tensorboard, which is not installed; "
            "install it with `pip install tensorboard`, or leave the flag out"
        )


def _joined(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))
