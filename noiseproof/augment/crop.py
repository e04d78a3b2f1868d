"""Padded crop and horizontal flip.

An image is padded with black by an eighth of its shorter side (4 pixels at 32 x 32) and cropped
back to its size at a random position. Selecting the batch, crop and flip are a single gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noiseproof.augment.batched import batched, uniforms
from noiseproof.draws import Source

__all__ = ["crop"]


@batched
def crop(
    images: Tensor, source: Source = None, index: Tensor | None = None, *, flip: bool = False
) -> Tensor:
    """A random padded crop; with `flip`, mirrored with probability 1/2. The other arguments are
    those of every `Augmentation`."""
    count, channels, height, width = images.shape
    device = images.device
    index = torch.arange(count, device=device) if index is None else index
    pad = min(height, width) // 8
    draw = uniforms(index, 3, source)  # B x 3: down, right, flip
    shift = (draw[:, :2] * (2 * pad + 1)).long() - pad
    rows = torch.arange(height, device=device) + shift[:, :1]  # B x H
    columns = torch.arange(width, device=device).expand(len(index), -1)
    if flip:
        columns = torch.where(draw[:, 2:] < 0.5, width - 1 - columns, columns)
    columns = columns + shift[:, 1:]  # B x W
    inside = ((rows >= 0) & (rows < height))[:, None, :, None]
    inside = inside & ((columns >= 0) & (columns < width))[:, None, None, :]
    cropped = images[
        index[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows.clamp(0, height - 1)[:, None, :, None],
        columns.clamp(0, width - 1)[:, None, None, :],
    ]
    return cropped * inside  # black where the crop reaches into the padding
