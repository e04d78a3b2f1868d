"""Corruptions that blur: defocus, glass, motion, zoom; and the blurs that others are made of.

Images are whole numbers from 0 to 255, B x C x H x W, float32; results are not rounded unless a
function says so.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source, stream
from noiseproof.perturb.corruptions.pixels import reflect_101, rounded, truncated

__all__ = ["defocus", "gaussian_blur", "glass", "motion", "motion_blur", "zoom", "zoomed"]


def defocus(x: Tensor, source: Source, radius: float, smoothing: float) -> Tensor:
    """Convolution with a disk, reflected at the edges of the image; rounded down.

    Args:
        x: the images.
        source: not used.
        radius: of the disk in pixels.
        smoothing: standard deviation of a small Gaussian blur of the disk: over 3 x 3 pixels up to
            a radius of 8, over 5 x 5 above it.
    """
    height, width = x.shape[-2:]
    kernel = _disk(radius, smoothing, x.device)
    pad = len(kernel) // 2
    rows, columns = (reflect_101(size, pad, x.device) for size in (height, width))
    padded = x.double()[..., rows, :][..., columns]
    size = padded.shape[-2:]
    # In float64, so that a uniform area keeps its value. The kernel is symmetric.
    spectrum = torch.fft.rfft2(padded) * torch.fft.rfft2(kernel, s=size)
    full = torch.fft.irfft2(spectrum, s=size)
    return truncated(full[..., 2 * pad :, 2 * pad :]).to(x.dtype)


def _disk(radius: float, smoothing: float, device: torch.device) -> Tensor:
    """The kernel of `defocus`, float64, with an odd side."""
    taps = 3 if radius <= 8 else 5
    # OpenCV reflects the disk at the edges of its grid, which is 17 x 17 up to a radius of 8.
    grid = 8 if radius <= 8 else math.ceil(radius)
    offset = torch.arange(-grid, grid + 1, device=device, dtype=torch.float64)
    disk = (offset**2 + offset[:, None] ** 2 <= radius**2).double()
    index = reflect_101(2 * grid + 1, taps // 2, device)
    weights = _gaussian_weights(taps // 2, smoothing)
    blurred = disk / disk.sum()
    for dim in (0, 1):
        blurred = _weighted_sum(blurred.index_select(dim, index), weights, dim)
    used = min(grid, math.ceil(radius) + taps // 2)  # zero beyond
    return blurred[grid - used : grid + used + 1, grid - used : grid + used + 1]


def glass(x: Tensor, source: Source, sigma: float, shift: float, iterations: int) -> Tensor:
    """Pixels replaced by near ones at random, between two Gaussian blurs of standard deviation
    `sigma`; rounded down.

    The original loops over the pixels from the lower right to the upper left. It means to exchange
    each with one at most `shift` away, but the second assignment reads what the first has written:
    the pixel becomes a copy of the other, and the other stays what it is.

    Args:
        x: the images.
        source: of the random shifts.
        sigma: of the blurs, in pixels.
        shift: the largest shift in pixels, rounded, at least 1; shifts to the right and
            down are smaller by one.
        iterations: how many times all pixels are replaced.
    """
    pixels = truncated(gaussian_blur(x.double(), sigma)).flatten(2)
    for i in range(iterations):
        u = draws.uniform((len(x), 2, *x.shape[-2:]), x, stream(source, i))
        origin = _origins(u, max(1, round(shift)))[:, None]
        pixels = pixels.gather(2, origin.expand(-1, x.shape[1], -1))
    return truncated(gaussian_blur(pixels.view_as(x), sigma)).to(x.dtype)


def _origins(u: Tensor, shift: int) -> Tensor:
    """Which pixel each one becomes a copy of in one iteration of `glass`, as flat indices, B x HW.

    Args:
        u: uniform numbers, B x 2 x H x W.
        shift: the largest shift.
    """
    height, width = u.shape[-2:]
    row, column = (torch.arange(size, device=u.device) for size in (height, width))
    moves = ((row > shift) & (row <= height - shift))[:, None]
    moves = (moves & (column > shift) & (column <= width - shift)).flatten()
    here = torch.arange(height * width, device=u.device)
    down, right = ((u * (2 * shift)).long() - shift).flatten(2).unbind(1)
    origin = here + (down * width + right) * moves
    if shift == 1:  # the origin is above or to the left, where pixels have not been replaced yet
        return origin
    # Pixels below or to the right have been replaced: follow them to where their copy came from.
    # Each round doubles the number of steps followed. After each step, less than half of the pixels
    # have a further one, so that none has 2⁸.
    replaced = moves[origin] & (origin > here)
    for _ in range(8):
        further = origin.gather(1, origin)
        origin, replaced = (
            torch.where(replaced, further, origin),
            replaced & replaced.gather(1, origin),
        )
    return origin


def motion(x: Tensor, source: Source, radius: float, sigma: float) -> Tensor:
    """`motion_blur` in a direction from −45 to 45 degrees."""
    angle = draws.uniform((len(x),), x, source) * 90 - 45
    return motion_blur(x, angle, radius, sigma)


def motion_blur(x: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """ImageMagick's motion blur, rounded to whole numbers: a mean over pixels in one direction from
    each pixel, at whole steps, weighted by half a Gaussian; edges are repeated.

    Args:
        x: the images.
        angle: the direction for each image in degrees, clockwise from the right, B.
        radius: in pixels; 2 ⌈radius⌉ + 1 pixels are averaged.
        sigma: standard deviation of the Gaussian, in pixels.
    """
    height, width = x.shape[-2:]
    steps = range(2 * math.ceil(radius) + 1)
    weights = [math.exp(-(step**2) / (2 * sigma**2)) for step in steps]
    radians = angle[:, None] * (math.pi / 180)
    row, column = (torch.arange(size, device=x.device) for size in (height, width))
    pixels, out = x.flatten(2), torch.zeros_like(x).flatten(2)
    for step, weight in zip(steps, weights, strict=True):
        down, right = (
            torch.ceil(step * part - 0.5).long() for part in (radians.sin(), radians.cos())
        )
        rows = (row + down).clamp(0, height - 1)  # B x H
        columns = (column + right).clamp(0, width - 1)
        index = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)[:, None]
        out = out + pixels.gather(2, index.expand_as(pixels)) * (weight / sum(weights))
    return rounded(out).view_as(x)


def zoom(x: Tensor, source: Source, end: float, step: float) -> Tensor:
    """The mean of the image and of the image enlarged by the factors 1, 1 + step, … up to `end`."""
    factors = math.ceil((end - 1) / step)
    out = x
    for k in range(factors):  # the floating-point numbers of numpy.arange(1, end, step)
        out = out + zoomed(x, 1 + k * ((1 + step) - 1))
    return out / (factors + 1)


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The middle of the images enlarged to their own size, as the original does it: the crop is
    rounded up, its corner pixels stay corner pixels, and what is too large is cut off."""
    sides = x.shape[-2:]
    crops = [math.ceil(side / factor) for side in sides]
    top, left = ((side - crop) // 2 for side, crop in zip(sides, crops, strict=True))
    crop = x[..., top : top + crops[0], left : left + crops[1]]
    large = [round(crop * factor) for crop in crops]
    out = F.interpolate(crop, size=large, mode="bilinear", align_corners=True)
    top, left = ((size - side) // 2 for size, side in zip(large, sides, strict=True))
    return out[..., top : top + sides[0], left : left + sides[1]]


def gaussian_blur(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur over 4 standard deviations with repeated edges, as in scikit-image."""
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return x
    weights = _gaussian_weights(radius, sigma)
    x = _weighted_sum(F.pad(x, (0, 0, radius, radius), mode="replicate"), weights, -2)
    return _weighted_sum(F.pad(x, (radius, radius, 0, 0), mode="replicate"), weights, -1)


def _gaussian_weights(radius: int, sigma: float) -> list[float]:
    """Values of a Gaussian at −radius, …, radius, with sum 1."""
    values = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(-radius, radius + 1)]
    return [value / sum(values) for value in values]


def _weighted_sum(padded: Tensor, weights: list[float], dim: int) -> Tensor:
    """Σ_k weights[k] padded[i + k] along `dim`, which gets shorter by len(weights) − 1."""
    size = padded.shape[dim] - len(weights) + 1
    parts = (padded.narrow(dim, k, size) * weight for k, weight in enumerate(weights))
    return sum(parts, start=torch.zeros((), dtype=padded.dtype, device=padded.device))
