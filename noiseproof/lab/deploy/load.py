"""A trained run as one module, pixels to logits: `noiseproof.load`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.lab.data.images import Reading, before_crop
from noiseproof.lab.deploy.model_folders import model_folder
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb.base import check_range_on_cpu


class PixelClassifier(nn.Module):
    """A trained classifier with its preprocessing, in eval mode.

    `forward` maps images, B x C x H x W, to logits, B x classes. Images are bytes, or floating
    point in [0, 1]; those of another size than in training are resized, and cropped if files are.
    On a CPU, floats from 0 to 255 raise a ValueError; on other devices the range is not checked.

    Args:
        run: a trained run.
        weights: "last" or "best"; by default as `RunFolder.default_weights` chooses.

    Attributes:
        classes: names of the classes, in the order of the logits.
        size: C, H, W of the training images.
        note: which epoch the weights are of, and why.
        head: the last linear layer.
    """

    def __init__(self, run: RunFolder, weights: Weights | None = None):
        super().__init__()
        self.run = run
        self.weights: Weights = weights or run.default_weights()
        self.classifier = run.model(self.weights)
        self.classes: tuple[str, ...] = tuple(run.info["classes"])
        channels, height, width = run.info["size"]
        self.size = (int(channels), int(height), int(width))
        self.note = run.weights_note(self.weights)
        self.eval()

    @property
    def head(self) -> nn.Linear:
        return self.classifier.head

    def pixels(self, x: Tensor, resize: bool | None = None) -> Tensor:
        """The images `x` as the network takes them: in [0, 1], of its size.

        Args:
            x: as for `forward`.
            resize: by default only if the size differs; True also if it does not, for tracing.
        """
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise ValueError(f"images must be bytes, or floats in [0, 1], got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"images must be B x C x H x W, got shape {tuple(x.shape)}")
        as_bytes = x.dtype == torch.uint8
        x = x.to(self.classifier.mean.dtype)
        if as_bytes:
            x = x / 255
        else:
            _check_floats(x)
        if resize or (resize is None and x.shape[2:] != self.size[1:]):
            x = resized(x, self.size[1:], Reading.of(self.run.config.data))
        return x

    def features(self, x: Tensor) -> Tensor:
        """The penultimate layer, B x `feature_dim`."""
        return self.classifier.features(self.pixels(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pixels(x))


def _check_floats(x: Tensor) -> None:
    """ValueError for bytes as floats. Noise that is not clipped may leave [0, 1], on both sides."""
    try:
        check_range_on_cpu(x)
    except ValueError:
        if not x.amin() < 0:
            raise


def resized(x: Tensor, size: tuple[int, int], reading: Reading) -> Tensor:
    """Images as files are resized, except that Pillow also rounds to bytes: in a graph, ties would
    round differently in other programs. Images that have this size already stay as they are, also
    if files are cropped. Without branches, so that it can be traced for any height and width.

    Args:
        x: images in [0, 1], B x C x H x W.
        size: height and width of the result.
        reading: how files are resized; bicubic interpolation replaces Lanczos, which torch lacks.
    """
    mode = "bilinear" if reading.interpolation == "bilinear" else "bicubic"
    if reading.crop_share is None:
        return F.interpolate(x, size, mode=mode, antialias=True).clamp(0, 1)
    (height, width), (given_height, given_width) = size, x.shape[2:]
    change = _abs(given_height - height) + _abs(given_width - width)
    margins = [
        least - side
        for least, side in zip(before_crop(height, width, reading.crop_share), size, strict=True)
    ]
    differs = torch.sym_min(change, 1)  # 0 or 1
    least_height, least_width = height + differs * margins[0], width + differs * margins[1]
    scaled_height = torch.sym_max(least_height, least_width * given_height // given_width)
    scaled_width = torch.sym_max(least_width, least_height * given_width // given_height)
    x = F.interpolate(x, (scaled_height, scaled_width), mode=mode, antialias=True).clamp(0, 1)
    for dim, side, scaled in ((2, height, scaled_height), (3, width, scaled_width)):
        # Unlike a slice, whose strides torch.export would compare with those of a whole image.
        x = x.index_select(dim, torch.arange(side, device=x.device) + _half(scaled - side))
    return x


def _abs(number: Any) -> Any:
    return torch.sym_max(number, -number)


def _half(number: Any) -> Any:
    """round(number / 2), of which Python rounds ties to even, for a symbolic integer.

    >>> [_half(n) - round(n / 2) for n in range(8)]
    [0, 0, 0, 0, 0, 0, 0, 0]
    """
    return number // 2 + number % 4 // 3


def load(
    path: str | os.PathLike[str],
    *,
    weights: Weights | None = None,
    device: str | torch.device = "cpu",
) -> PixelClassifier:
    """A trained model in eval mode, from pixels to logits.

    Args:
        path: a run folder; that of a comparison, for the run it recommends; a folder that
            `noiseproof export --format safetensors` has written; the name of a folder in
            `weights/`, in a checkout; or hf://USER/MODEL, which is downloaded from the Hugging Face
            Hub.
        weights: "last" or "best"; by default the best epoch if it was chosen on 1,000 validation
            images or more. The module's `note` says which.
        device: where the model goes.
    """
    return PixelClassifier(find_run(path), weights).to(device)


def find_run(path: str | os.PathLike[str]) -> RunFolder:
    """The run that `load` takes for `path`; ValueError if there is none."""
    return RunFolder.open(model_folder(path))
