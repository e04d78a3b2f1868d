"""The paper's augmentation of road images for a whole batch on the device, each image by its own.

Brightness, contrast and saturation change by up to 0.3, in random order; then the image is turned
by up to 10 degrees, half of the time seen in another perspective, and half of the time mirrored:
torchvision's ColorJitter, RandomRotation, RandomPerspective and RandomHorizontalFlip, in law. Where
those resample twice, turn and perspective are one map here, and pixels are read once, bilinearly.
What comes from outside the image is black. Plain arithmetic without matrix products, so that half
precision does not touch coordinates, and a compiler can fuse it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from noiseproof.draws import PerSample

__all__ = ["road"]

_JITTER, _DEGREES, _DISTORTION = 0.3, 10.0, 0.5
_GREY = (0.299, 0.587, 0.114)


def road(images: Tensor, source: PerSample) -> Tensor:
    """uint8 in, uint8 out, B x 3 x H x W."""
    draw = source.uniform(15)
    colour, turn, seen, corners, mirror = draw.split((4, 1, 1, 8, 1), 1)
    x = _jittered(images.float() / 255, colour)
    height, width = images.shape[2:]
    down = torch.arange(height, device=x.device, dtype=torch.float32)[None, :, None]
    right = torch.arange(width, device=x.device, dtype=torch.float32).expand(1, height, width)
    right = torch.where(mirror[..., None] < 0.5, width - 1 - right, right)  # B x H x W
    # Corners are points of the plane, in which the middle of the first pixel lies at a half.
    right, down = _perspective(right + 0.5, down + 0.5, corners, seen < 0.5)
    right, down = right - 0.5, down - 0.5
    inside = (right > -0.5) & (right < width - 0.5) & (down > -0.5) & (down < height - 0.5)
    right, down = _turned(right, down, (2 * turn - 1) * math.radians(_DEGREES))
    place = [2 * right / max(width - 1, 1) - 1, 2 * down / max(height - 1, 1) - 1]
    warped = F.grid_sample(x, torch.stack(place, 3), align_corners=True)
    return (warped * inside[:, None] * 255).round().to(torch.uint8)


def _jittered(x: Tensor, draw: Tensor) -> Tensor:
    """Each step lays the image over black, over its mean grey, or over its own grey: brightness,
    contrast, saturation. An image takes the three in an order of its own."""
    factors = 1 + _JITTER * (2 * draw[:, :3] - 1)
    order = (6 * draw[:, 3:]).long().clamp(max=5)  # B x 1
    first, swap = order // 2, order % 2
    second = (first + 1 + swap) % 3
    for step in (first, second, 3 - first - second):
        grey = sum(weight * x[:, i : i + 1] for i, weight in enumerate(_GREY))
        mean = torch.as_tensor(grey).mean((2, 3), keepdim=True)
        which = step[..., None, None]
        base = torch.where(which == 1, mean, torch.where(which == 2, grey, 0.0))
        factor = factors.gather(1, step)[..., None, None]
        x = (factor * x + (1 - factor) * base).clamp(0, 1)
    return x


def _perspective(right: Tensor, down: Tensor, draw: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Where to read what is shown at (right, down) once the image's corners have moved inwards, by
    whole pixels and up to a quarter of each side.

    The map from the unit square to a quadrangle has a closed form; its adjugate leads back.
    """
    height, width = right.shape[1:]
    by = draw[..., None, None].unbind(1)  # eight of B x 1 x 1

    def corner(side: int, u: Tensor, far: bool) -> Tensor:
        moved = (u * (int(_DISTORTION * (side // 2)) + 1)).floor() * seen[..., None]
        return side - 1 - moved if far else moved

    x = [corner(width, u, far) for u, far in zip(by[:4], (False, True, True, False), strict=True)]
    y = [corner(height, u, far) for u, far in zip(by[4:], (False, False, True, True), strict=True)]
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


def _turned(right: Tensor, down: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Places before the image was turned about its middle."""
    height, width = right.shape[1:]
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    x, y = right - (width - 1) / 2, down - (height - 1) / 2
    return cos * x - sin * y + (width - 1) / 2, sin * x + cos * y + (height - 1) / 2
