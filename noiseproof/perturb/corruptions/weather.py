"""Corruptions by weather: snow and fog; `frost` has its own module.

Images are whole numbers from 0 to 255, B x C x H x W, float32; results are not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source, stream
from noiseproof.perturb.corruptions.blur import motion_blur, zoomed
from noiseproof.perturb.corruptions.pixels import grey, truncated

__all__ = ["fog", "plasma", "snow"]


def snow(
    x: Tensor,
    source: Source,
    mean: float,
    std: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    share: float,
) -> Tensor:
    """A whitened image and two layers of flakes: normal noise, enlarged, cut off below a threshold
    and blurred in one direction; the second is the first, turned by 180 degrees.

    Args:
        x: the images.
        source: of the noise and of the direction.
        mean: of the noise, in units of the pixel range.
        std: of the noise.
        size: of the flakes in pixels, at least 1: the factor by which the noise is enlarged.
        threshold: below which there is no flake.
        radius: of the motion blur, in pixels.
        sigma: of the motion blur, in pixels.
        share: of the image; the rest is its whitened version.
    """
    noise = draws.normal((len(x), 1, *x.shape[-2:]), x, stream(source, 0))
    layer = zoomed(noise * std + mean, max(1.0, size))
    layer = truncated(torch.where(layer < threshold, 0.0, layer) * 255)
    angle = draws.uniform((len(x),), x, stream(source, 1)) * 90 - 135
    layer = motion_blur(layer, angle, radius, sigma)
    white = torch.maximum(x, grey(x) * 1.5 + 127.5)
    return share * x + (1 - share) * white + layer + layer.flip(-2, -1)


def fog(x: Tensor, source: Source, amount: float, decay: float) -> Tensor:
    """A fractal cloud is added, and the sum is scaled back by m / (m + amount), where m is the
    largest value of the image.

    Args:
        x: the images.
        source: of the clouds.
        amount: of fog, in units of the pixel range.
        decay: by which the amplitude of the cloud falls from one scale to the next.
    """
    height, width = x.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()  # the next power of two
    cloud = plasma(draws.uniform((len(x), side, side), x, source), decay)[:, None, :height, :width]
    largest = x.amax((1, 2, 3), keepdim=True)
    return (x + (255 * amount) * cloud) * (largest / (largest + 255 * amount))


def plasma(u: Tensor, decay: float) -> Tensor:
    """Fractal clouds from 0 to 1 by the diamond–square algorithm on a torus, B x S x S.

    Scale by scale, the middle of each square of points and of each edge becomes the mean of its
    four neighbours plus noise.

    Args:
        u: uniform numbers, B x S x S, one for each point; S is a power of two.
        decay: by which the square root of the noise amplitude is divided from scale to scale.
    """
    cloud, noise = torch.zeros_like(u), 2 * u - 1
    step, amplitude = u.shape[-1], 100.0**2
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        rows = corners + corners.roll(-1, 1)
        squares = (rows + rows.roll(-1, 2)) / 4 + amplitude * noise[:, half::step, half::step]
        columns = corners + corners.roll(-1, 2)
        across = (columns + squares + squares.roll(1, 1)) / 4
        down = (rows + squares + squares.roll(1, 2)) / 4
        cloud[:, half::step, half::step] = squares
        cloud[:, ::step, half::step] = across + amplitude * noise[:, ::step, half::step]
        cloud[:, half::step, ::step] = down + amplitude * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay**2
    cloud = cloud - cloud.amin((1, 2), keepdim=True)
    return cloud / cloud.amax((1, 2), keepdim=True).clamp(min=1e-12)
