"""What augmentations share: a single image is a batch of one, and random numbers per sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.perturb.base import check_range_on_cpu

__all__ = ["batched", "check_images", "check_range", "uniforms"]

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def batched(augment: _Function) -> _Function:
    """Lets an augmentation of batches take a single image too, C x H x W, as `transforms.Compose`
    passes it. Anything but images raises a ValueError, and on a CPU so do normalised ones.

    Args:
        augment: a function of images, N x C x H x W, source, index and named arguments.
    """

    @wraps(augment)
    def checked(
        images: Tensor,
        source: draws.Source = None,
        index: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        check_images(images)
        if images.ndim == 3:
            return checked(images[None], source, index, **options)[0]
        if images.ndim != 4:
            raise ValueError(
                f"images must be C x H x W or B x C x H x W, got shape {tuple(images.shape)}"
            )
        if images.is_floating_point() and images.device.type == "cpu":  # of the batch alone
            check_range_on_cpu(images if index is None else images[index])
        return augment(images, source, index, **options)

    return cast(_Function, checked)


def check_images(images: Tensor) -> None:
    """ValueError unless `images` is a tensor of bytes or of floating-point numbers."""
    if not isinstance(images, Tensor):
        raise ValueError(
            f"images must be a torch.Tensor, got {type(images).__name__}; "
            "convert first, with torchvision's PILToTensor for example"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8 or floating point, got {images.dtype}")


def check_range(name: str, value: float, low: float = 0, high: float = 1) -> None:
    """ValueError if an argument of an augmentation is not from `low` to `high`."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")


def uniforms(batch: Tensor, count: int, source: draws.Source) -> Tensor:
    """Uniform numbers in [0, 1), B x `count`: float32, so that they do not depend on the dtype.

    Args:
        batch: the images, for their number and device.
        count: how many numbers each image gets.
        source: the random numbers, as for every `Augmentation`.
    """
    like = torch.empty(0, dtype=torch.float32, device=batch.device)
    return draws.uniform((len(batch), count), like, source)
