"""AugMix (Hendrycks et al., 2020): an image mixed with three differently augmented versions."""

from __future__ import annotations

import torch
from torch import Tensor

from noiseproof.augment import operations as ops
from noiseproof.augment.batched import batched, check_range, uniforms
from noiseproof.draws import Source

__all__ = ["augmix"]

_CHAINS, _DEPTH, _OPERATIONS = 3, 3, 9


@batched
def augmix(
    images: Tensor, source: Source = None, index: Tensor | None = None, *, severity: float = 3.0
) -> Tensor:
    """m x + (1 − m) Σ_i w_i chain_i(x), with w ~ Dirichlet(1, 1, 1) and m ~ Beta(1, 1).

    A chain is 1 to 3 of nine operations, each drawn uniformly: the shears, translations and
    rotation, posterize, solarize, autocontrast and equalize. As in the paper, brightness, colour,
    contrast and sharpness are left out, since corruption benchmarks test these. The level of an
    operation is uniform in [0.1, severity], on a scale to 10.

    Args:
        images, source, index: as for every `Augmentation`; images have 1 or 3 channels.
        severity: the highest level, from 0.1 to 10.

    >>> float(augmix(torch.zeros(3, 8, 8)).max())  # none of the operations changes black
    0.0
    """
    check_range("severity", severity, 0.1, 10)
    batch = images if index is None else images[index]
    count, size = len(batch), batch.shape[1:]
    draw = uniforms(batch, 1 + _CHAINS * (2 + 3 * _DEPTH), source)
    share, weights, depth, steps = draw.split((1, _CHAINS, _CHAINS, 3 * _CHAINS * _DEPTH), 1)
    weights = -torch.log1p(-weights)  # exponential; their shares of the sum are Dirichlet
    weights = (1 - share) * weights / weights.sum(1, keepdim=True)
    steps = steps.reshape(count * _CHAINS, _DEPTH, 3)
    length = 1 + (depth * _DEPTH).floor().flatten()

    x = batch if batch.is_floating_point() else batch.float() / 255
    chains = x[:, None].expand(-1, _CHAINS, -1, -1, -1).flatten(0, 1)
    for i in range(_DEPTH):
        operation, strength, sign = steps[:, i].unbind(1)
        operation = (operation * _OPERATIONS).long() + ops.SHEAR_X  # the first five are geometric
        operation = torch.where(operation > ops.ROTATE, operation + 4, operation)
        magnitude = magnitudes(operation, 0.1 + strength * (severity - 0.1), sign, size[1:])
        operation = torch.where(i < length, operation, ops.IDENTITY)
        chains = ops.apply_operations(chains, operation, magnitude, interpolation="bilinear")
    mixed = (weights.view(-1, _CHAINS, 1, 1, 1) * chains.view(-1, _CHAINS, *size)).sum(1)
    mixed = share[..., None, None] * x + mixed
    return (mixed if batch.is_floating_point() else (mixed * 255).round()).to(batch.dtype)


def magnitudes(operation: Tensor, level: Tensor, sign: Tensor, size: torch.Size) -> Tensor:
    """The magnitudes of AugMix's operations, in the units of `apply_operations`.

    Args:
        operation: numbers of the operations in `OPERATIONS`, B.
        level: from 0 to 10, B. At 10, a shear is 0.3, a translation a third of the image, a
            rotation 30 degrees; posterize keeps 0 of 4 bits, and solarize inverts everything.
        sign: uniform in [0, 1), B; shears, translations and rotations are negative below 1/2.
        size: height and width of the images.
    """
    limit = torch.where(operation <= ops.SHEAR_Y, 0.3, 30.0)
    limit = torch.where(operation == ops.TRANSLATE_X, size[1] / 3, limit)
    limit = torch.where(operation == ops.TRANSLATE_Y, size[0] / 3, limit)
    limit = torch.where(operation == ops.POSTERIZE, 4.0, limit)
    limit = torch.where(operation >= ops.SOLARIZE, 256.0, limit)
    amount = level / 10 * limit
    amount = torch.where(operation <= ops.SHEAR_Y, amount, amount.floor())
    signed = torch.where(sign < 0.5, -amount, amount)
    return torch.where(operation <= ops.ROTATE, signed, limit - amount)
