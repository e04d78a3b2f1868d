"""Checks whether a config can be run, without torch, so that an invalid command fails immediately.

Every message names the flag, what came and what was expected. What depends on the data or on other
libraries (image sizes, names of models, the device) is checked where it is used.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from noiseproof.lab.config import (
    AUGMENTATIONS,
    DATASETS,
    GROUPS,
    METHODS,
    MIXINGS,
    NAMED,
    NOISELESS,
    UNTRAINED,
    Config,
    did_you_mean,
    to_dict,
)
from noiseproof.perturb import values
from noiseproof.perturb.text import has_no_effect, read

# A range in words, as a test, and the settings that must be in it. Other numbers are at least 0.
_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("at least 1", lambda v: v >= 1, ("epochs", "batch_size", "probes", "draws")),
    ("at least 2", lambda v: v >= 2, ("samples",)),
    # With smaller steps, float32 measures its own rounding.
    ("from 1e-5 to 10", lambda v: 1e-5 <= v <= 10, ("step",)),
    ("from 1 to 65536", lambda v: 1 <= v <= 65536, ("feature_dim",)),
    ("from 0 to 1024", lambda v: 0 <= v <= 1024, ("threads",)),  # torch crashes with thousands
    ("above 0", lambda v: v > 0, ("lr",)),
    (
        "at least 0 and below 1",
        lambda v: 0 <= v < 1,
        ("val_share", "centroid_momentum", "smoothing", "momentum", "ema_decay"),
    ),
    ("above 0 and below 1", lambda v: 0 < v < 1, ("test_share",)),
    ("above 0 and at most 1", lambda v: 0 < v <= 1, ("decay_rate", "train_share", "crop_share")),
    ("at least 0 and below 2**63", lambda v: 0 <= v < 2**63, ("seed", "split_seed")),
)


def validate(config: Config) -> None:
    """Raises ValueError for the first invalid setting of `config`.

    >>> from noiseproof.lab.config import Optim
    >>> validate(Config(optim=Optim(epochs=0)))
    Traceback (most recent call last):
        ...
    ValueError: --epochs must be at least 1, got 0
    """
    _check_ranges(config)
    _check_data(config)
    _check_model(config)
    _check_method(config)
    _check_optim(config)
    _check_run(config)
    validate_apart("--output", config.run.output, config.data.data)


def validate_types(config: Config) -> None:
    """Raises ValueError for the first setting that has another type than it should. The command
    line has converted its values, a file that somebody edited has not.

    >>> from noiseproof.lab.config import Optim
    >>> validate_types(Config(optim=Optim(lr="fast")))
    Traceback (most recent call last):
        ...
    ValueError: lr must be a float, got 'fast'
    """
    for group, kind in GROUPS.items():
        for name, hint in get_type_hints(kind).items():
            value = getattr(getattr(config, group), name)
            if not _has_type(value, hint):
                expected = hint if get_args(hint) else f"a {hint.__name__}"
                raise ValueError(f"{name} must be {expected}, got {value!r}")


def _has_type(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:  # older versions may have had other values
        return isinstance(value, str)
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return isinstance(value, tuple) and all(_has_type(item, kind) for item in value)
    if get_args(hint):  # a union
        return any(_has_type(value, part) for part in get_args(hint))
    return type(value) in ((int, float) if hint is float else (hint,))


def validate_perturbations(flag: str, perturbations: Iterable[str]) -> None:
    """Raises ValueError for the first text that does not describe a perturbation.

    Args:
        flag: the flag that gave them, for the message.
        perturbations: texts such as gaussian:0.1.
    """
    try:
        for text in perturbations:
            read(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def validate_number(flag: str, value: float, name: str) -> None:
    """Raises ValueError if a number is not one that the setting `name` can have.

    Args:
        flag: the flag that gave the number, for the message.
        value: the number.
        name: of a setting of `Config` or of an analysis.
    """
    ranges = {each: (words, test) for words, test, names in _RANGES for each in names}
    expected, holds = ranges.get(name, ("at least 0", lambda v: v >= 0))
    if not -math.inf < value < math.inf:  # math.isfinite refuses large integers
        raise ValueError(f"{flag} must be a finite number, got {value}")
    if not holds(value):
        raise ValueError(f"{flag} must be {expected}, got {value}")


def validate_analysis(settings: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ValueError for the first number that an analysis cannot use.

    Args:
        settings: of `noiseproof.lab.analysis.analyse`, by name.
        prefix: of the names in the message.
    """
    for name in ("probes", "draws", "samples", "step", "seed"):
        if settings[name] is not None:  # all samples
            validate_number(prefix + name, settings[name], name)


class Attack(NamedTuple):
    """Which images an attack may choose from: those within a distance."""

    norm: Literal["l2", "linf"]
    epsilon: float
    name: str  # canonical text


def read_attack(text: str) -> Attack:
    """The attack that a text such as linf:2/255 describes; ValueError if it describes none.

    >>> read_attack("LINF:2/255").name, read_attack("l2:1/4").name
    ('linf:2/255', 'l2:0.25')
    """
    norm, _, distance = text.strip().lower().partition(":")
    fraction = re.fullmatch(r"(\d*\.?\d+)(?:/(\d*\.?\d+))?", distance)
    if norm not in ("l2", "linf") or not fraction or float(fraction[2] or 1) == 0:
        raise ValueError(f"an attack must be text such as linf:2/255 or l2:0.25, got {text!r}")
    epsilon = float(fraction[1]) / float(fraction[2] or 1)
    if norm == "linf":
        epsilon = values.level(f"the distance of {text!r}", epsilon)
    if epsilon == 0:
        raise ValueError(f"the distance of an attack must be above 0, got {text!r}")
    return Attack(norm, epsilon, f"{norm}:{values.show(epsilon)}")


def validate_apart(flag: str, output: str, data: str) -> None:
    """Raises ValueError if results would be written into a folder of images, where the next
    training would read them as a class. Hidden folders are never read, and so allowed.

    Args:
        flag: the flag that gave `output`, for the message.
        output: the folder to write to.
        data: the value of --data.
    """
    if not is_folder(data):
        return
    written, images = Path(output).resolve(), Path(data).resolve()
    if not written.is_relative_to(images):
        return
    if not any(part.startswith(".") for part in written.relative_to(images).parts):
        raise ValueError(
            f"{flag} {output} is inside --data {data}, where it would be read as a class of "
            f"images; expected a folder elsewhere, such as {images.parent / written.name}"
        )


def validate_writable(flag: str, path: str | None) -> None:
    """Raises ValueError if nothing can be written to `path`, before hours of work are lost.

    Args:
        flag: the flag that gave it, for the message.
        path: the file to write, if there is one; folders that do not exist yet will be created.
    """
    if not path:
        return
    if Path(path).is_dir():
        raise ValueError(f"{flag}: {path} is a folder; expected a file to write")
    folder = next(each for each in Path(path).absolute().parents if each.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"{flag}: {folder} is not a folder that can be written to")


# Settings of --slurm by the names that submitit has for them; others are options of sbatch.
_SLURM = {
    "time": "timeout_min",
    "gpus": "gpus_per_node",
    "cpus": "cpus_per_task",
    "memory": "mem_gb",
    "jobs": "slurm_array_parallelism",
}


def slurm_parameters(launcher: str, settings: Iterable[str]) -> dict[str, Any] | None:
    """The settings of SLURM jobs as submitit takes them; None if nothing runs on a cluster.

    Args:
        launcher: "processes" or "slurm".
        settings: as in "partition=gpu" and "time=120", which is in minutes; memory is in GB.

    >>> slurm_parameters("slurm", ["time=120", "partition=gpu"])["slurm_additional_parameters"]
    {'partition': 'gpu'}
    """
    others: dict[str, str] = {}
    parameters: dict[str, Any] = {
        "name": "noiseproof",
        "timeout_min": 60,
        "stderr_to_stdout": True,
        "slurm_additional_parameters": others,
    }
    for setting in settings:
        name, _, value = setting.partition("=")
        if launcher != "slurm":
            raise ValueError(f"--slurm is for --launcher slurm, got {setting} without it")
        if not name or not value:
            raise ValueError(f"--slurm takes settings such as partition=gpu, got {setting!r}")
        if name not in _SLURM:
            others[name] = value
        elif value.isdecimal():
            parameters[_SLURM[name]] = int(value)
        else:
            raise ValueError(f"--slurm {name} must be a whole number, got {value!r}")
    return parameters if launcher == "slurm" else None


def validate_launcher(launcher: str, settings: Iterable[str]) -> None:
    """Raises ValueError if jobs cannot be launched like this; arguments as `slurm_parameters`."""
    slurm_parameters(launcher, settings)
    if launcher == "slurm":
        validate_installed("--launcher slurm", "slurm", "submitit")
    if launcher == "slurm" and shutil.which("srun") is None:
        raise ValueError("--launcher slurm needs srun and sbatch; run it on a login node")


def validate_installed(what: str, extra: str, *libraries: str) -> None:
    """Raises ValueError for the first library that is not installed.

    Args:
        what: what needs them, for the message.
        extra: the extra of this package that they come with.
        *libraries: their names.
    """
    for name in libraries:
        if find_spec(name) is None:
            raise ValueError(f'{what} needs {name}: pip install "noiseproof[{extra}]"')


def validate_format(format: str) -> None:
    """Raises ValueError if a library that an export in this format needs is not installed."""
    if format == "onnx":
        validate_installed("--format onnx", "export", "onnxscript", "onnx", "onnxruntime")


def validate_exists(data: str) -> None:
    """Raises ValueError if --data names neither a dataset nor a folder or .npz file that exists.

    Args:
        data: the value of --data.
    """
    path = Path(data)
    if data in NAMED or (data and (path.is_file() if _is_npz(data) else path.is_dir())):
        return
    if _is_npz(data):
        raise ValueError(f"--data {data} does not exist; expected a .npz file")
    if path.is_file():
        raise ValueError(f"--data {data} is a file; expected a folder of images or a .npz file")
    if "/" in data or "\\" in data:
        raise ValueError(f"--data {data} does not exist; expected a folder of images")
    expected = ", ".join(DATASETS) + did_you_mean(data, NAMED)
    raise ValueError(f"--data {data!r} is neither a dataset nor a folder; expected {expected}")


def _check_ranges(config: Config) -> None:
    for name, value in itertools.chain(*(group.items() for group in to_dict(config).values())):
        if isinstance(value, (int, float)):
            validate_number(f"--{name.replace('_', '-')}", value, name)


def _is_npz(data: str) -> bool:
    return data.lower().endswith(".npz")


def is_folder(data: str) -> bool:
    """Whether --data names a folder of images, rather than a dataset or a .npz file."""
    return data not in NAMED and not _is_npz(data)


def _check_data(config: Config) -> None:
    data = config.data
    validate_exists(data.data)
    _check_augment("--augment", data.augment)
    if config.optim.batch_size == 1 and set(data.augment.split("+")).intersection(MIXINGS):
        raise ValueError(f"--augment {data.augment} mixes images of a batch, got --batch-size 1")
    if data.noisy_augment is not None:
        _check_noisy_augment(data.noisy_augment, config.method.views)
    if data.val_noise is not None:
        validate_perturbations("--val-noise", [data.val_noise])
    if isinstance(data.img_size, tuple) and not all(4 <= side <= 10000 for side in data.img_size):
        raise ValueError(
            f"--img-size must have sides from 4 to 10000, got {_joined(data.img_size)}"
        )
    if data.group is not None:
        _check_group(data.group)
    if is_folder(data.data):
        return
    if data.group is not None or data.dedupe:
        flag = "--dedupe" if data.group is None else "--group"
        raise ValueError(
            f"{flag} is for a folder of images, got --data {data.data}; in a .npz file, "
            "train_groups names the groups"
        )
    if isinstance(data.img_size, tuple):
        raise ValueError(
            f"--img-size resizes the images of a folder, got --data {data.data}; leave it out"
        )
    needs = f"needs a folder of images, got --data {data.data}; expected"
    for flag, names in (("--augment", data.augment), ("--noisy-augment", data.noisy_augment or "")):
        if "road" in names.split("+"):
            raise ValueError(f"{flag} {names} {needs} others, such as crop-flip+trivial")
    if data.storage == "stream":
        raise ValueError(f"--storage stream {needs} auto or memory")


def _check_group(group: str) -> None:
    if group.lower().endswith(".csv"):
        if not Path(group).is_file():
            raise ValueError(f"--group {group} does not exist; expected a .csv file of path,group")
        return
    try:
        re.compile(group)
    except re.error as error:
        raise ValueError(
            f"--group {group!r} is not a regular expression ({error}); expected one such as "
            r"'(.+)_\d+', folder, or a .csv file"
        ) from None


def _check_augment(flag: str, augment: str) -> None:
    *others, _ = names = augment.split("+")
    for name in names:
        if name not in AUGMENTATIONS:
            got = repr(name) if name == augment else f"{name!r} in {augment!r}"
            expected, hint = ", ".join(AUGMENTATIONS), did_you_mean(name, AUGMENTATIONS)
            raise ValueError(f"{flag} must be names joined by +, of {expected}; got {got}{hint}")
        if name in MIXINGS and name in others:
            raise ValueError(
                f"{flag}: only one of mixup and cutmix can be used, at the end, got {augment!r}"
            )


def _check_noisy_augment(augment: str, views: str) -> None:
    _check_augment("--noisy-augment", augment)
    if views != "independent":
        raise ValueError("--noisy-augment needs --views independent, got paired")
    if mixing := set(augment.split("+")).intersection(MIXINGS):
        raise ValueError(
            f"--noisy-augment {augment}: {mixing.pop()} belongs in --augment; "
            "both views are mixed in the same way"
        )


def _check_model(config: Config) -> None:
    name, weights = config.model.model, config.model.weights
    if not name:
        raise ValueError("--model must name a network, got nothing; see `noiseproof list models`")
    if name == "timm:":
        raise ValueError("--model timm: must be followed by a name, such as timm:resnet18")
    if name.startswith("timm:"):
        validate_installed(f"--model {name}", "timm", "timm")
    if config.model.head == "own":
        _check_own_head(config)
    elif config.model.mean or config.model.std:
        raise ValueError("--mean and --std are for --head own; other networks know their own")
    # ImageNet weights exist only for the networks of torchvision and timm.
    if weights == "imagenet" and name in UNTRAINED:
        raise ValueError(
            f"--weights imagenet does not exist for --model {name}, a network for small images;"
            " expected --weights none, or a torchvision model"
        )
    if weights not in (None, "imagenet") and not Path(weights).is_file():
        raise ValueError(
            f"--weights {weights} does not exist; expected imagenet, none, or a file of weights"
        )


def _check_own_head(config: Config) -> None:
    name, weights = config.model.model, config.model.weights
    mean, std = config.model.mean or (), config.model.std or ()
    if ".py:" not in name and weights in (None, "imagenet"):
        raise ValueError(
            f"--head own needs a file with the weights of a trained classifier, got --weights "
            f"{weights or 'none'}"
        )
    if len(mean) != len(std) or (std and min(std) <= 0):
        raise ValueError(
            "--mean and --std must have the same number of values, with --std above 0, got "
            f"{_joined(mean) or 'none'} and {_joined(std) or 'none'}"
        )


def _check_method(config: Config) -> None:
    method, noise = config.method.method, config.method.noise
    if method not in METHODS:
        expected, hint = ", ".join(METHODS), did_you_mean(method, METHODS)
        raise ValueError(f"--method must be one of {expected}, got {method!r}{hint}")
    validate_perturbations("--noise", [noise])
    if method not in NOISELESS and has_no_effect(noise):
        raise ValueError(
            f"--method {method} trains with noise, got --noise {noise}; "
            "expected noise such as gaussian:0.1, or --method normal"
        )


def _check_optim(config: Config) -> None:
    optim = config.optim
    if optim.sched == "multistep":
        _check_milestones(optim.decay_milestones, optim.epochs)
    if optim.warmup_epochs and optim.sched == "onecycle":
        raise ValueError(
            f"--sched onecycle has its own warm-up, got --warmup-epochs "
            f"{optim.warmup_epochs:g}; expected 0, or another schedule"
        )
    if optim.warmup_epochs >= optim.epochs:
        limit, got = f"less than --epochs {optim.epochs}", f"{optim.warmup_epochs:g}"
        raise ValueError(f"--warmup-epochs must be {limit}, got {got}")


def _check_milestones(milestones: tuple[int, ...], epochs: int) -> None:
    if not milestones and epochs > 1:
        example = _joined(sorted({max(1, epochs // 2), max(1, 3 * epochs // 4)}))
        raise ValueError(f"--sched multistep needs --decay-milestones, such as {example}, got none")
    if list(milestones) != sorted({m for m in milestones if 0 < m < epochs}):
        expected = f"epochs from 1 to {epochs - 1} in increasing order" if epochs > 1 else "none"
        got = f"for --epochs {epochs}, got {_joined(milestones)}"
        raise ValueError(f"--decay-milestones must be {expected} {got}")


def _check_run(config: Config) -> None:
    run, name = config.run, config.run.name
    if name is not None and (not name or name in (".", "..") or set(name) & {*"/\\"}):
        raise ValueError(
            f"--name must be the name of a folder, without separators, got {name!r}; "
            "--output sets where that folder is"
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


def _joined(numbers: Iterable[float]) -> str:
    return " ".join(map(str, numbers))
