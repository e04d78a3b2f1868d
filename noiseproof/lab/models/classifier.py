"""Classifiers: pixels in [0, 1] -> normalise -> backbone -> features -> head.

`build_classifier` builds one from the config's names. Weights are drawn from torch's global
generator, so seed that first.

>>> config = Model(feature_dim=8)
>>> model = build_classifier(config, num_classes=10, size=(1, 8, 8), mean=[0.5], std=[0.25])
>>> model(torch.zeros(2, 1, 8, 8)).shape, model.features(torch.zeros(2, 1, 8, 8)).shape
(torch.Size([2, 10]), torch.Size([2, 8]))
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.lab.config import Model
from noiseproof.lab.models import pretrained as adapters
from noiseproof.lab.models.backbones import Backbone, ResNet18, SmallCNN
from noiseproof.lab.models.pretrained import Adapted, Weights

__all__ = ["BACKBONES", "Classifier", "build_classifier"]

BACKBONES: dict[str, Callable[[int], Backbone]] = {
    "small_cnn": SmallCNN,
    "resnet18": ResNet18,
}


class Classifier(nn.Module):
    """head(features(x)), where features(x) = neck(backbone((x − mean) / std)).

    `neck` and `head` are linear and follow one another with nothing between, so features take any
    sign. With `rectify` a ReLU stands before the neck, as in the paper's ResNet18.

    A greyscale image meets a backbone of three channels as three equal channels: normalised by the
    data's one mean and then repeated, or by the three means that pretrained weights come with.
    """

    mean: Tensor
    std: Tensor
    joint_views = 1  # how many views share a pass; set by `join_passes`

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
        for what, count in (("feature_dim", feature_dim), ("num_classes", num_classes)):
            if count < 1:
                raise ValueError(f"{what} must be at least 1, got {count}")
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(f"mean and std must pair up, std > 0; got {mean} and {std}")
        if len(mean) != channels and (channels, len(mean)) != (1, backbone.channels):
            raise ValueError(f"images have {channels} channels, mean has {len(mean)}")
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
        """What the backbone sees of pixels `x`."""
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"images must be B x {self.channels} x H x W, got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(
                f"images must be floating point in [0, 1], got {x.dtype}; "
                "bytes become so by x.float() / 255"
            )
        return ((x - self.mean) / self.std).expand(-1, self.backbone.channels, -1, -1)

    def project(self, pooled: Tensor) -> Tensor:
        """The features of the backbone's pooled vectors."""
        return self.neck(F.relu(pooled) if self.rectify else pooled)

    def features(self, x: Tensor) -> Tensor:
        """The penultimate layer, B x `feature_dim`."""
        return self.project(self.backbone(self.normalise(x)))

    def features_of(self, *views: Tensor) -> tuple[Tensor, ...]:
        """The features of several views of a batch: batch-norm takes the statistics of one view at
        a time. Each view has a pass of its own, or, after `join_passes`, a part of one
        pass with the same result."""
        if self.joint_views != len(views):
            return tuple(self.features(view) for view in views)
        return self.features(torch.cat(views)).chunk(len(views))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, B x classes."""
        return self.head(self.features(x))

    def blocks(self, x: Tensor) -> dict[str, Tensor]:
        """Pooled outputs of the stages, `block1` (B x its channels) and on, then `features`."""
        pooled, stages = self.backbone.staged(self.normalise(x))
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
) -> Classifier:
    """The classifier that `config` names, for images of `size` (C, H, W).

    `mean` and `std` are the training data's; pretrained weights of torchvision and timm bring
    their own instead. `load=False` makes the same modules and shapes without reading or
    downloading weights, to load a trained state dict into.

    Names: those in `BACKBONES`, torchvision's (`torchvision:NAME` where `BACKBONES` has the same
    name), and `timm:NAME`. These others have no ReLU before the neck: many end in a norm whose sign
    matters.
    """
    name = config.model
    library, _, bare = name.rpartition(":")
    weights = _weights(config.weights, load) if config.weights else None
    if name in BACKBONES:
        backbone = BACKBONES[name](size[0])
        if config.weights == "imagenet":
            raise ValueError(f"{name} has no ImageNet weights; a torchvision model has")
        if weights and weights.state is not None:
            adapters.fill(backbone, weights.state, weights.label)
        adapted = Adapted(backbone)
    elif library == "timm":
        adapted = adapters.from_timm(bare, size, weights)
    elif library in ("", "torchvision") and bare in _torchvision_names():
        adapted = adapters.from_torchvision(bare, size, weights)
    else:
        known = [*BACKBONES, *_torchvision_names()]
        near = difflib.get_close_matches(bare, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see: noiseproof list"
        raise ValueError(f"no model is called {name!r}; {hint}")
    return Classifier(
        adapted.backbone,
        feature_dim=config.feature_dim,
        num_classes=num_classes,
        channels=size[0],
        mean=adapted.mean or mean,
        std=adapted.std or std,
        rectify=name in BACKBONES,
    )


def _torchvision_names() -> list[str]:
    import torchvision.models as tv  # here: the models of `BACKBONES` do without it

    return tv.list_models(module=tv)


def _weights(given: str, load: bool) -> Weights:
    if given == "imagenet":
        return Weights(given, download=load)
    return Weights(given, state=_read(given)) if load else Weights(given)


def _read(given: str) -> Mapping[str, Tensor]:
    """The state dict in a file, unwrapped from a checkpoint or a data-parallel module."""
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"weights must be 'imagenet' or a file, and there is no file {given!r}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{given} cannot be read as weights: {error}") from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{given} does not hold a state dict (names and tensors)")
    return {str(key).removeprefix("module."): value for key, value in state.items()}
