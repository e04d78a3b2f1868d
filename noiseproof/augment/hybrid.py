"""HybridAugment (Yucel et al., 2023): the low frequencies of an image, the high ones of another.

The label stays that of the low frequencies. A network that has seen such images relies less on high
frequencies, which blur, compression and pixelation remove.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from noiseproof.augment.batched import batched, check_range, uniforms
from noiseproof.augment.mixing import partners
from noiseproof.draws import Source

__all__ = ["hybrid"]

_SIGMA = 0.5  # of the blur, in pixels
_SIDE = math.exp(-0.5 / _SIGMA**2)
_SIDE /= 1 + 2 * _SIDE  # weight of a neighbour, in each direction


@batched
def hybrid(
    images: Tensor, source: Source = None, index: Tensor | None = None, *, fraction: float = 0.5
) -> Tensor:
    """low(x) + x' − low(x'), where x' is another image of the batch and low a Gaussian blur of
    3 x 3 pixels with σ = 0.5.

    Args:
        images, source, index: as for every `Augmentation`. A single image is its own partner and
            does not change.
        fraction: the probability that an image changes.
    """
    check_range("fraction", fraction)
    batch = images if index is None else images[index]
    draw = uniforms(batch, 2, source)
    x = batch if batch.is_floating_point() else batch.float()
    low = _blurred(x)
    changed = (low + (x - low)[partners(draw[:, 0])]).clamp(0, 1 if x is batch else 255)
    changed = changed if x is batch else changed.round()
    return torch.where((draw[:, 1] < fraction)[:, None, None, None], changed.to(batch.dtype), batch)


def _blurred(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1), "replicate")
    rows = padded[..., 1:-1, :] + _SIDE * padded.diff(dim=-2).diff(dim=-2)
    return rows[..., 1:-1] + _SIDE * rows.diff(dim=-1).diff(dim=-1)
