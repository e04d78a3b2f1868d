"""Classifiers: pixels in [0, 1] -> normalise -> backbone -> features -> head.

`build_classifier` builds one from the config's names. Weights are drawn from torch's global
generator, so seed that first.

>>> config = Model(feature_dim=8)
>>> model = build_classifier(config, num_classes=10, size=(1, 8, 8), mean=[0.5], std=[0.25])
>>> model(torch.zeros(2, 1, 8, 8)).shape, model.features(torch.zeros(2, 1, 8, 8)).shape
(torch.Size([2, 10]), torch.Size([2, 8]))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.lab.config import Config, Model, did_you_mean
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.models.backbones import Backbone, ResNet18, SmallCNN
from noiseproof.lab.models.own_head import own_classifier
from noiseproof.lab.models.pretrained import (
    input_size,
    load_weights,
    read_weights,
    timm_backbone,
    torchvision_backbone,
)
from noiseproof.wrapped import Wrapped

BACKBONES: dict[str, Callable[[int], Backbone]] = {"small_cnn": SmallCNN, "resnet18": ResNet18}


class Classifier(nn.Module):
    """head(features(x)), where features(x) = neck(backbone((x − mean) / std)).

    `neck` and `head` are linear, with nothing in between, so features can have any sign. For a
    backbone of three channels a greyscale image becomes three equal channels: normalised by the
    data's one mean and then repeated, or normalised by the three means of pretrained weights.

    Args:
        backbone: normalised images to one vector per image.
        feature_dim: length of the features.
        num_classes: number of classes.
        channels: of the images: those of the backbone, or 1.
        mean: subtracted from the pixels, per channel of the images or of the backbone.
        std: what the difference is divided by, likewise.
        rectify: apply a ReLU before the neck, as the paper's ResNet18 does.
    """

    mean: Tensor
    std: Tensor
    joint_views = 1  # views that share a pass; set by `join_passes`

    def __init__(
        self,
        backbone: Backbone,
        *,
        feature_dim: int,
        num_classes: int,
        channels: int,
        mean: Sequence[float],
        std: Sequence[float],
        rectify: bool = True,
    ):
        super().__init__()
        for name, count in (("feature_dim", feature_dim), ("num_classes", num_classes)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(
                f"mean and std must have equal lengths and std > 0; got {mean} and {std}"
            )
        if len(mean) != channels and (channels, len(mean)) != (1, backbone.channels):
            raise ValueError(f"images have {channels} channels, but mean has {len(mean)}")
        if channels not in (1, backbone.channels):
            raise ValueError(f"the model takes 1 or {backbone.channels} channels, got {channels}")
        self.channels = channels
        self.rectify = rectify
        self.backbone = backbone
        self.neck = nn.Linear(backbone.dim, feature_dim)
        self.head = nn.Linear(feature_dim, num_classes)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).reshape(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).reshape(1, -1, 1, 1))

    def normalise(self, x: Tensor) -> Tensor:
        """The input of the backbone for pixels `x`, B x C x H x W in [0, 1]."""
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"images must be B x {self.channels} x H x W, got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(
                f"images must be floating point in [0, 1], got {x.dtype}; "
                "convert bytes with x.float() / 255"
            )
        return ((x - self.mean) / self.std).expand(-1, self.backbone.channels, -1, -1)

    def project(self, pooled: Tensor) -> Tensor:
        """The features of the backbone's pooled vectors."""
        return self.neck(F.relu(pooled) if self.rectify else pooled)

    def features(self, x: Tensor) -> Tensor:
        """The penultimate layer, B x `feature_dim`."""
        return self.project(self.backbone(self.normalise(x)))

    def features_of(self, *views: Tensor) -> tuple[Tensor, ...]:
        """The features of several views of a batch. Batch-norm uses the statistics of one view at
        a time: each view has a pass of its own or, after `join_passes`, a part of one pass, with
        the same result."""
        if self.joint_views != len(views):
            return tuple(self.features(view) for view in views)
        return self.features(torch.cat(views)).chunk(len(views))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, B x classes."""
        return self.head(self.features(x))

    def blocks(self, x: Tensor) -> dict[str, Tensor]:
        """Pooled outputs of the stages, `block1` (B x its channels), `block2`, ..., then
        `features`."""
        pooled, stages = self.backbone.forward_stages(self.normalise(x))
        named = {f"block{i}": stage for i, stage in enumerate(stages, 1)}
        return {**named, "features": self.project(pooled)}


def build_classifier(
    config: Model,
    *,
    num_classes: int,
    size: tuple[int, int, int],
    mean: Sequence[float],
    std: Sequence[float],
    load: bool = True,
) -> Classifier | Wrapped:
    """The classifier that `config` describes.

    Args:
        config: model, feature dimension and weights. A model is a name in `BACKBONES`, one of
            torchvision's (`torchvision:NAME` if `BACKBONES` has the same name), or `timm:NAME`.
            Those of other libraries have no ReLU before the neck: many end in a normalisation
            layer, whose sign matters.
        num_classes: number of classes.
        size: C, H, W of the images.
        mean: of the training images, per channel; pretrained weights of torchvision and timm come
            with their own.
        std: standard deviation of the training images, likewise.
        load: whether to read or download pretrained weights; if not, the classifier has the same
            modules and shapes, ready to load a trained state dict.
    """
    if config.head == "own":
        return own_classifier(config, num_classes=num_classes, size=size, load=load)
    name = config.model
    library, _, bare = name.rpartition(":")
    weights = read_weights(config.weights, load) if config.weights else None
    normalisation = None
    if name in BACKBONES:
        backbone = BACKBONES[name](size[0])
        if config.weights == "imagenet":
            raise ValueError(f"{name} has no ImageNet weights; use a torchvision model instead")
        load_weights(backbone, weights)
    elif library == "timm":
        backbone, normalisation = timm_backbone(bare, size, weights)
    else:
        _check_name(name)
        backbone, normalisation = torchvision_backbone(bare, size, weights)
    mean, std = normalisation or (mean, std)
    return Classifier(
        backbone,
        feature_dim=config.feature_dim,
        num_classes=num_classes,
        channels=size[0],
        mean=mean,
        std=std,
        rectify=name in BACKBONES,
    )


def classifier_for(config: Model, data: Dataset) -> Classifier | Wrapped:
    """The classifier that `config` describes, for the images and classes of `data`."""
    return build_classifier(
        config, num_classes=len(data.classes), size=data.size, mean=data.mean, std=data.std
    )


def with_input_size(config: Config) -> Config:
    """The config with the image size of its pretrained weights, if it leaves the size to us; the
    shape of the images decides where there are none.

    Args:
        config: settings of a run.
    """
    name, weights = config.model.model, config.model.weights
    if config.data.img_size != "auto" or not weights or name in BACKBONES:
        return config
    _check_name(name)
    size, share, interpolation = input_size(name)
    settings: Any = {"img_size": size, "crop_share": share, "interpolation": interpolation}
    return replace(config, data=replace(config.data, **settings))


def _check_name(name: str) -> None:
    """ValueError if there is no such model; timm's names are checked by timm."""
    library, _, bare = name.rpartition(":")
    if library != "timm" and (
        library not in ("", "torchvision") or bare not in _torchvision_names()
    ):
        hint = did_you_mean(bare, [*BACKBONES, *_torchvision_names()], most=3)
        raise ValueError(f"there is no model {name!r}{hint}; see `noiseproof list models`")


def _torchvision_names() -> list[str]:
    import torchvision.models as tv  # the models in `BACKBONES` do not need it

    return tv.list_models(module=tv)
