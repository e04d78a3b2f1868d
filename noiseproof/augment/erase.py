"""Black rectangles: random erasing (Zhong et al., 2017) and cutout (DeVries and Taylor, 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noiseproof.augment.batched import batched, check_range, uniforms
from noiseproof.draws import Source

__all__ = ["cutout", "erase", "rectangle"]

_AREA, _ASPECT = (0.02, 0.33), (0.3, 3.3)
_ATTEMPTS = 10


@batched
def erase(
    images: Tensor, source: Source = None, index: Tensor | None = None, *, probability: float = 0.5
) -> Tensor:
    """A rectangle inside the image becomes black: the distribution of torchvision's RandomErasing.

    Its share of the image is uniform in [0.02, 0.33] and the logarithm of height / width uniform
    between those of 0.3 and 3.3. Both are drawn up to ten times, until the rectangle is smaller
    than the image; then its position is drawn.

    Args:
        images, source, index: as for every `Augmentation`.
        probability: that an image is erased at all.

    >>> image = torch.ones(1, 20, 20)
    >>> 0.01 < 1 - erase(image, probability=1).mean() < 0.35
    tensor(True)
    """
    check_range("probability", probability)
    batch = images if index is None else images[index]
    height, width = batch.shape[2:]
    draw = uniforms(batch, 3 + 2 * _ATTEMPTS, source)
    area = height * width * (_AREA[0] + draw[:, 3::2] * (_AREA[1] - _AREA[0]))
    low, high = map(math.log, _ASPECT)
    aspect = torch.exp(low + draw[:, 4::2] * (high - low))
    rows, columns = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # B x 10
    fits = (rows < height) & (columns < width)
    first = fits.int().argmax(1, keepdim=True)
    erased = fits.any(1, keepdim=True) & (draw[:, :1] < probability)
    rows, columns = rows.gather(1, first) * erased, columns.gather(1, first)
    top = (draw[:, 1:2] * (height - rows + 1)).floor()
    left = (draw[:, 2:3] * (width - columns + 1)).floor()
    return batch * ~rectangle(batch, top, left, top + rows, left + columns)


@batched
def cutout(
    images: Tensor, source: Source = None, index: Tensor | None = None, *, share: float = 0.5
) -> Tensor:
    """A square becomes black. Its centre is any pixel; it is cut off at the edges of the image.

    Args:
        images, source, index: as for every `Augmentation`.
        share: the side of the square, as a share of the shorter side of the image, up to 2: at
            32 x 32 pixels, 0.5 gives squares of 16.

    >>> float(cutout(torch.ones(1, 4, 4), share=2).sum())  # covers the image from any pixel
    0.0
    """
    check_range("share", share, high=2)
    batch = images if index is None else images[index]
    height, width = batch.shape[2:]
    draw = uniforms(batch, 2, source)
    side = int(share * min(height, width))
    top = (draw[:, :1] * height).floor() - side // 2
    left = (draw[:, 1:] * width).floor() - side // 2
    return batch * ~rectangle(batch, top, left, top + side, left + side)


def rectangle(images: Tensor, top: Tensor, left: Tensor, bottom: Tensor, right: Tensor) -> Tensor:
    """Which pixels are in the rectangle of each image, B x 1 x H x W.

    Args:
        images: a batch, for its size and device.
        top, left, bottom, right: B x 1; the last two are the first row and column outside.
    """
    rows, columns = (torch.arange(size, device=images.device) for size in images.shape[2:])
    inside = ((rows >= top) & (rows < bottom))[:, None, :, None]
    return inside & ((columns >= left) & (columns < right))[:, None, None, :]
