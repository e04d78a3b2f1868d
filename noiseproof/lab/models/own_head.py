"""Trained classifiers with their own head: networks of torchvision and timm, and functions in files
of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from noiseproof import wrap
from noiseproof.lab.config import Model, did_you_mean
from noiseproof.lab.models.pretrained import (
    Normalisation,
    auxiliary_heads,
    load_weights,
    read_weights,
    weights_for,
)
from noiseproof.lab.plugins import function_in_file
from noiseproof.wrapped import Wrapped


class OtherClasses(ValueError):
    """A network has another number of classes than the data."""


def own_classifier(
    config: Model, *, num_classes: int, size: tuple[int, int, int], load: bool = True
) -> Wrapped:
    """The network that `config` names, with its own head. ValueError if it has other classes, or
    cannot process such images.

    Args:
        config: the network: a name of torchvision's, `timm:NAME`, or `FILE.py:FUNCTION`, called
            without arguments, of a file that has been run. The normalisation is that of `mean` and
            `std`, by default that of the library's ImageNet weights.
        num_classes: number of classes of the data.
        size: C, H, W of the images.
        load: whether to read the weights; if not, the network is ready to load a trained state
            dict.
    """
    library, _, name = config.model.rpartition(":")
    normalisation = None
    if library.endswith(".py"):
        make = function_in_file(config.model)
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise ValueError(f"{config.model} is called without arguments: {error}") from error
        net: Any = make()
        if not isinstance(net, nn.Module):
            raise ValueError(f"{config.model} must return a network, got {type(net).__name__}")
    elif library == "timm":
        net, normalisation = _timm_network(name, num_classes)
    else:
        net, normalisation = _torchvision_network(name, num_classes)
    if config.mean and config.std:
        normalisation = config.mean, config.std
    if isinstance(net, Wrapped):
        model = net
    elif normalisation is None:
        raise ValueError(
            f"{config.model} needs --mean and --std of its training images, such as --mean 0.485 "
            "0.456 0.406 --std 0.229 0.224 0.225 (ImageNet's); --mean 0 --std 1 if it takes pixels"
        )
    else:
        model = _wrapped(config.model, net, normalisation, size)
    weights = read_weights(config.weights, load) if config.weights else None
    rows = model.head.weight.shape[0]
    if weights and weights.state is not None:
        weights = weights_for(model.net, weights)
        trained = (weights.state or {}).get(f"{model.head_path}.weight")
        rows = rows if trained is None else len(trained)
    if rows != num_classes:
        raise OtherClasses(
            f"{config.weights or config.model} has {rows} classes, and the data have {num_classes};"
            " expected the same classes in the same order"
        )
    load_weights(model.net, weights, auxiliary_heads(model.net))
    return model


def _wrapped(
    name: str, net: nn.Module, normalisation: Normalisation, size: Sequence[int]
) -> Wrapped:
    mean, std = normalisation
    channels = len(mean) if len(mean) > 1 else size[0]
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(4, channels, *size[1:], generator=generator)
    try:
        return wrap(net, mean, std, example)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _torchvision_network(name: str, num_classes: int) -> tuple[nn.Module, Normalisation]:
    import torchvision.models as tv

    options: Any = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name not in (names := tv.list_models(module=tv)):  # others segment, or find objects
        raise ValueError(f"torchvision has no classifier {name!r}{did_you_mean(name, names)}")
    net = tv.get_model(name, weights=None, num_classes=num_classes, **options)
    transforms: Any = tv.get_model_weights(name).DEFAULT.transforms()  # type: ignore[attr-defined]
    return net, (transforms.mean, transforms.std)


def _timm_network(name: str, num_classes: int) -> tuple[nn.Module, Normalisation]:
    try:
        import timm
    except ModuleNotFoundError as error:
        raise ValueError(f'timm:{name} needs timm: pip install "noiseproof[timm]"') from error
    try:
        net: Any = timm.create_model(name, num_classes=num_classes)
    except RuntimeError as error:
        raise ValueError(f"timm:{name}: {error}") from error
    return net, (net.pretrained_cfg["mean"], net.pretrained_cfg["std"])
