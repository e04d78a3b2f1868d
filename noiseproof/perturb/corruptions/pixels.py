"""What corruptions share: rounding to bytes, and pixels beyond the edges of an image."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["grey", "reflect_101", "rounded", "to_bytes", "truncated"]

# Values this close below a whole number are taken as equal to it: rounding errors are smaller.
_BELOW = {torch.float32: 2e-4, torch.float64: 1e-6}


def to_bytes(x: Tensor) -> Tensor:
    """Pixels in [0, 1] as whole numbers from 0 to 255, float32."""
    return (x.float() * 255).round().clamp(0, 255)


def truncated(x: Tensor) -> Tensor:
    """Rounded down to whole numbers from 0 to 255, as a conversion to bytes does."""
    return (x + _BELOW[x.dtype]).floor().clamp(0, 255)


def rounded(x: Tensor) -> Tensor:
    """Rounded to the nearest whole numbers from 0 to 255, halves upwards."""
    return (x + 0.5).floor().clamp(0, 255)


def grey(x: Tensor) -> Tensor:
    """Luminance of colour images, the mean of the channels of others, B x 1 x H x W."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, 1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def reflect_101(size: int, pad: int, device: torch.device) -> Tensor:
    """Indices of `size` pixels with `pad` more at either end, reflected about the first and the
    last pixel as often as necessary.

    >>> reflect_101(3, 4, torch.device("cpu")).tolist()
    [0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2]
    """
    period = max(1, 2 * (size - 1))
    index = torch.arange(-pad, size + pad, device=device) % period
    return torch.minimum(index, period - index)
