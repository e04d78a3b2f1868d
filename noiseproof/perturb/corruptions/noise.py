"""Corruptions that act on each pixel and channel independently: Gaussian, shot and impulse noise.

Images are whole numbers from 0 to 255, B x C x H x W, float32; results are not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source

__all__ = ["gaussian_noise", "impulse", "shot"]


def gaussian_noise(x: Tensor, source: Source, std: float) -> Tensor:
    """Normal noise with standard deviation `std`, in units of the pixel range."""
    return x + draws.normal(x.shape, x, source) * (255 * std)


def shot(x: Tensor, source: Source, photons: int) -> Tensor:
    """Poisson(λ) · 255 / photons, where λ = x / 255 · photons is the number of photons expected.

    A pixel has one of 256 values, so that one table of cumulative probabilities gives every count:
    that of a pixel is the number of entries in its row that are at most its uniform number. Counts
    above `photons` are white in any case and have no entries.
    """
    value = torch.arange(256, device=x.device, dtype=torch.float64)
    counts = torch.arange(1, photons + 1, device=x.device, dtype=torch.float64)
    # P(N <= n) = Q(n + 1, λ), the regularised incomplete gamma function.
    cumulative = torch.special.gammaincc(counts, value[:, None] * (photons / 255))
    rows = (cumulative + value[:, None]).flatten()  # row v lies in [v, v + 1]: sorted as a whole
    u = draws.uniform(x.shape, x, source).double()
    count = torch.searchsorted(rows, u + x, right=True) - x.long() * photons
    return count.to(x.dtype) * (255 / photons)


def impulse(x: Tensor, source: Source, share: float) -> Tensor:
    """A `share` of the values becomes 0 or 255, each with probability 1/2."""
    u = draws.uniform(x.shape, x, source)
    return torch.where(u < share, torch.where(u < share / 2, 0.0, 255.0), x)
