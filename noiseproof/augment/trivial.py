"""TrivialAugment (Müller and Hutter, 2021) in its wide space: one operation of random strength."""

from __future__ import annotations

import torch
from torch import Tensor

from noiseproof.augment import operations as ops
from noiseproof.augment.batched import batched, uniforms
from noiseproof.draws import Source

__all__ = ["trivial"]

_BINS = 31


@batched
def trivial(images: Tensor, source: Source = None, index: Tensor | None = None) -> Tensor:
    """One of 14 operations per image, drawn uniformly, with one of 31 equally spaced strengths and
    a random sign: the distribution of torchvision's TrivialAugmentWide, except that translations of
    the middle strength are 16 pixels, where torchvision rounds 15.999999 down to 15.

    Shears go up to 0.99, translations up to 32 pixels, rotations up to 135 degrees; the factors of
    brightness, colour, contrast and sharpness lie in 1 ± 0.99; posterize keeps 8 to 2 bits; the
    threshold of solarize is between 255 and 0. Pixels are read from their nearest neighbour.

    Args:
        images, source, index: as for every `Augmentation`; images have 1 or 3 channels.
    """
    batch = images if index is None else images[index]
    draw = uniforms(batch, 3, source)
    operation = (draw[:, 0] * len(ops.OPERATIONS)).long()
    return ops.apply_operations(batch, operation, magnitudes(operation, draw[:, 1], draw[:, 2]))


def magnitudes(operation: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """The magnitudes of operations, in the units of `apply_operations`.

    Args:
        operation: numbers of the operations in `OPERATIONS`, B.
        strength: uniform in [0, 1), B; selects one of the 31 strengths.
        sign: uniform in [0, 1), B; below 1/2, the magnitude of a signed operation is negative.
    """
    step = (strength * _BINS).floor()  # 0 to 30
    limit = torch.where(operation <= ops.SHEAR_Y, 0.99, 32.0)
    limit = torch.where(operation == ops.ROTATE, 135.0, limit)
    limit = torch.where(operation >= ops.BRIGHTNESS, 0.99, limit)
    signed = torch.where(sign < 0.5, -limit, limit) * step / (_BINS - 1)
    translates = (operation == ops.TRANSLATE_X) | (operation == ops.TRANSLATE_Y)
    signed = torch.where(translates, signed.trunc(), signed)
    posterize, solarize = 8 - (step / 5).round(), 255 - 8.5 * step
    unsigned = torch.where(operation == ops.POSTERIZE, posterize, solarize)
    return torch.where(operation < ops.POSTERIZE, signed, unsigned)
