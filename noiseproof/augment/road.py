"""The paper's augmentation of road images, for a whole batch on the device.

Brightness, contrast and saturation change by up to 0.3, in random order; then the image is rotated
by up to 10 degrees, changed in perspective half of the time, and mirrored half of the time:
the distribution of torchvision's ColorJitter, RandomRotation, RandomPerspective and
RandomHorizontalFlip. Where those resample twice, rotation and perspective are one map here, and
pixels are read once, bilinearly; outside the image is black. There are no matrix products, so half
precision does not affect coordinates and a compiler can fuse the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from noiseproof.augment.batched import batched, uniforms
from noiseproof.draws import Source

__all__ = ["road"]

_JITTER, _DEGREES, _DISTORTION = 0.3, 10.0, 0.5
_GREY = (0.299, 0.587, 0.114)


@batched
def road(images: Tensor, source: Source = None, index: Tensor | None = None) -> Tensor:
    """Jittered colours, a rotation, a perspective and a flip. The arguments are those of every
    `Augmentation`; images have 1 or 3 channels."""
    batch = images if index is None else images[index]
    if batch.shape[1] not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {batch.shape[1]}")
    draw = uniforms(batch, 15, source)
    colour, angle, tilt, corners, flip = draw.split((4, 1, 1, 8, 1), 1)
    x = _jittered(batch if batch.is_floating_point() else batch.float() / 255, colour)
    height, width = x.shape[2:]
    down = torch.arange(height, device=x.device, dtype=torch.float32)[None, :, None]
    right = torch.arange(width, device=x.device, dtype=torch.float32).expand(1, height, width)
    right = torch.where(flip[..., None] < 0.5, width - 1 - right, right)  # B x H x W
    # Corners are points of the plane, where the centre of the first pixel is at one half.
    right, down = _perspective(right + 0.5, down + 0.5, corners, tilt[..., None] < 0.5)
    right, down = right - 0.5, down - 0.5
    inside = (right > -0.5) & (right < width - 0.5) & (down > -0.5) & (down < height - 0.5)
    right, down = _rotated(right, down, (2 * angle - 1) * math.radians(_DEGREES))
    grid = [2 * right / max(width - 1, 1) - 1, 2 * down / max(height - 1, 1) - 1]
    warped = F.grid_sample(x, torch.stack(grid, 3).to(x.dtype), align_corners=True)
    warped = warped * inside[:, None]
    return (warped if batch.is_floating_point() else (warped * 255).round()).to(batch.dtype)


def _jittered(x: Tensor, draw: Tensor) -> Tensor:
    """Each step blends the image with black, with its mean grey or with its own grey: brightness,
    contrast, saturation. Every image has its own order of the three."""
    factors = 1 + _JITTER * (2 * draw[:, :3] - 1)
    order = (6 * draw[:, 3:]).long().clamp(max=5)  # B x 1
    first, swap = order // 2, order % 2
    second = (first + 1 + swap) % 3
    for step in (first, second, 3 - first - second):
        grey = x
        if x.shape[1] == 3:
            grey = _GREY[0] * x[:, :1] + _GREY[1] * x[:, 1:2] + _GREY[2] * x[:, 2:]
        mean = grey.mean((2, 3), keepdim=True)
        kind = step[..., None, None]
        base = torch.where(kind == 1, mean, torch.where(kind == 2, grey, 0.0))
        factor = factors.gather(1, step)[..., None, None]
        x = (factor * x + (1 - factor) * base).clamp(0, 1)
    return x


def _perspective(right: Tensor, down: Tensor, draw: Tensor, tilt: Tensor) -> tuple[Tensor, Tensor]:
    """Where to read the pixel shown at (right, down) once the image's corners have moved inwards,
    by whole pixels and up to a quarter of each side.

    The map from the unit square to a quadrangle has a closed form; its adjugate is the inverse map.
    """
    height, width = (max(side, 2) for side in right.shape[1:])  # corners of one pixel coincide
    moves = draw[..., None, None].unbind(1)  # eight of B x 1 x 1

    def corners(side: int, moves: Sequence[Tensor], far: Sequence[bool]) -> list[Tensor]:
        offsets = [(m * (int(_DISTORTION * (side // 2)) + 1)).floor() * tilt for m in moves]
        return [side - 1 - o if f else o for o, f in zip(offsets, far, strict=True)]

    x = corners(width, moves[:4], (False, True, True, False))
    y = corners(height, moves[4:], (False, False, True, True))
    dx, dy = (x[1] - x[2], x[3] - x[2]), (y[1] - y[2], y[3] - y[2])
    sum_x, sum_y = x[0] - x[1] + x[2] - x[3], y[0] - y[1] + y[2] - y[3]
    determinant = dx[0] * dy[1] - dx[1] * dy[0]
    g = (sum_x * dy[1] - dx[1] * sum_y) / determinant
    h = (dx[0] * sum_y - sum_x * dy[0]) / determinant
    a, b, c = x[1] - x[0] + g * x[1], x[3] - x[0] + h * x[3], x[0]
    d, e, f = y[1] - y[0] + g * y[1], y[3] - y[0] + h * y[3], y[0]
    u = (e - f * h) * right + (c * h - b) * down + (b * f - c * e)
    v = (f * g - d) * right + (a - c * g) * down + (c * d - a * f)
    w = (d * h - e * g) * right + (b * g - a * h) * down + (a * e - b * d)
    return u / w * (width - 1), v / w * (height - 1)


def _rotated(right: Tensor, down: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Where to read the pixel shown at (right, down) of the image rotated about its centre."""
    height, width = right.shape[1:]
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    x, y = right - (width - 1) / 2, down - (height - 1) / 2
    return cos * x - sin * y + (width - 1) / 2, sin * x + cos * y + (height - 1) / 2
