"""The interface of augmentations, and the augmentations by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from noiseproof.augment.augmix import augmix
from noiseproof.augment.batched import batched
from noiseproof.augment.crop import crop
from noiseproof.augment.erase import cutout, erase
from noiseproof.augment.road import road
from noiseproof.augment.trivial import trivial
from noiseproof.draws import Source, stream

__all__ = ["AUGMENTATIONS", "Augmentation", "identity", "parse"]


class Augmentation(Protocol):
    """A random change to images, drawn per sample and computed on the device.

    Args:
        images: N x C x H x W, uint8, or floating point in [0, 1]; or one image, C x H x W.
        source: the random numbers: a `noiseproof.draws.PerSample` with one stream per sample of
            the batch, a `torch.Generator`, or None for torch's global generator.
        index: which of the images form the batch, B; by default all of them.

    Returns:
        The augmented batch, B x C x H x W, in the dtype of `images`; or one image.
    """

    def __call__(
        self, images: Tensor, source: Source = None, index: Tensor | None = None
    ) -> Tensor: ...


@batched
def identity(images: Tensor, source: Source = None, index: Tensor | None = None) -> Tensor:
    """The batch, unchanged."""
    return images if index is None else images[index]


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": identity,
    "crop": crop,
    "crop-flip": partial(crop, flip=True),
    "road": road,
    "trivial": trivial,
    "erase": erase,
    "cutout": cutout,
    "augmix": augmix,
}


def parse(text: str) -> Augmentation:
    """The augmentation that a text describes, as in `--augment`.

    Args:
        text: a name in `AUGMENTATIONS`, or several joined by +, applied from left to right. Each
            of several has its own random numbers.

    >>> import torch
    >>> parse("crop-flip+trivial+erase")(torch.rand(3, 32, 32)).shape
    torch.Size([3, 32, 32])
    """
    names = text.split("+")
    for name in names:
        if name not in AUGMENTATIONS:
            *known, last = AUGMENTATIONS
            raise ValueError(
                f"augment must be {', '.join(known)} or {last}, or several joined by +, "
                f"got {name!r}" + (f" in {text!r}" if len(names) > 1 else "")
            )
    members = [AUGMENTATIONS[name] for name in names]
    return members[0] if len(members) == 1 else partial(_chained, members)


def _chained(
    members: Sequence[Augmentation],
    images: Tensor,
    source: Source = None,
    index: Tensor | None = None,
) -> Tensor:
    for i, augment in enumerate(members):
        images = augment(images, stream(source, i), index)
        index = None  # the first has selected the batch
    return images
