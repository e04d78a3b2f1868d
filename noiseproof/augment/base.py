"""What an augmentation is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from noiseproof.draws import PerSample

__all__ = ["Augmentation", "identity"]


class Augmentation(Protocol):
    """A random change of a batch of images, made on the device and drawn per sample."""

    def __call__(self, images: Tensor, source: PerSample, index: Tensor | None = None) -> Tensor:
        """The augmented batch, B x C x H x W, in the dtype of `images`.

        Args:
            images: N x C x H x W, uint8, or floating point in [0, 1].
            source: the random numbers, one stream per sample of the batch.
            index: which of the images form the batch, B; by default all of them. A crop reads
                them from `images` in the same gather that crops them.
        """
        ...


def identity(images: Tensor, source: PerSample, index: Tensor | None = None) -> Tensor:
    """The batch, unchanged; see `Augmentation` for the arguments."""
    return images if index is None else images[index]
