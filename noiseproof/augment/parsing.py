"""The interface of augmentations, and the augmentations by name."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from noiseproof.augment.crop import crop
from noiseproof.augment.road import road
from noiseproof.draws import PerSample

__all__ = ["AUGMENTATIONS", "Augmentation", "identity", "parse"]


class Augmentation(Protocol):
    """A random change to a batch of images, drawn per sample and computed on the device.

    Args:
        images: N x C x H x W, uint8, or floating point in [0, 1].
        source: the random numbers, one stream per sample of the batch.
        index: which of the images form the batch, B; by default all of them.

    Returns:
        The augmented batch, B x C x H x W, in the dtype of `images`.
    """

    def __call__(
        self, images: Tensor, source: PerSample, index: Tensor | None = None
    ) -> Tensor: ...


def identity(images: Tensor, source: PerSample, index: Tensor | None = None) -> Tensor:
    """The batch, unchanged."""
    return images if index is None else images[index]


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": identity,
    "crop": crop,
    "crop-flip": partial(crop, flip=True),
    "road": road,
}


def parse(name: str) -> Augmentation:
    """The augmentation called `name`, as in `--augment`: none, crop, crop-flip or road."""
    if name not in AUGMENTATIONS:
        *names, last = AUGMENTATIONS
        raise ValueError(f"augment must be {', '.join(names)} or {last}, got {name!r}")
    return AUGMENTATIONS[name]
