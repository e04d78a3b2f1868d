"""JPEG compression as libjpeg does it by default: colour images in YCbCr with chroma at half the
resolution (4:2:0), 8 x 8 cosine transforms, quantisation by quality, smooth upsampling of chroma.

Only the loss is computed; coding the coefficients as bits loses nothing. The arithmetic is that of
libjpeg's accurate integer transforms, in float64, which holds these numbers exactly. Images are
whole numbers from 0 to 255, B x C x H x W.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from noiseproof.draws import Source
from noiseproof.perturb.corruptions.pixels import rounded

__all__ = ["decode", "encode", "jpeg"]

# Annex K of the JPEG standard, for quality 50.
_LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61,
    12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77,
    24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMINANCE = (
    17, 18, 24, 47, 99, 99, 99, 99,
    18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99,
    *(99,) * 32,
)  # fmt: skip
# √2 cos(k (2 j + 1) π / 16) in units of 2⁻¹³, and 1 for k = 0, as the sums of rounded constants in
# libjpeg's jfdctint.c and jidctint.c give it. The other half follows by symmetry.
_COSINES = (
    (8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260),
    (10703, 4433, -4433, -10703),
    (9633, -2259, -11362, -6436),
    (8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633),
    (4433, -10704, 10704, -4433),
    (2260, -6436, 9633, -11363),
)


def jpeg(x: Tensor, source: Source, quality: int) -> Tensor:
    """The images after compression, as whole numbers.

    Args:
        x: the images; unless they have three channels, each channel is compressed as a grey image.
        source: not used.
        quality: 1 to 100, as in Pillow and libjpeg.
    """
    height, width = x.shape[-2:]
    if x.shape[1] == 3:
        return decode(encode(x, quality), quality, height, width).to(x.dtype)
    grey = x.reshape(-1, 1, height, width)
    return decode(encode(grey, quality), quality, height, width).to(x.dtype).view_as(x)


def encode(x: Tensor, quality: int) -> list[Tensor]:
    """The quantised coefficients of each component, B x rows x columns of blocks x 8 x 8, float64.

    Args:
        x: images with one channel, or with three: then chroma has half the resolution.
        quality: 1 to 100.
    """
    x = x.double()
    if x.shape[1] == 1:
        return [_quantise(x[:, 0], _LUMINANCE, quality)]
    red, green, blue = x.unbind(1)
    # In units of 2⁻¹⁶; halves of chroma are rounded down.
    y = _shifted(19595 * red + 38470 * green + 7471 * blue, 16)
    cb = _shifted(-11058 * red - 21710 * green + 32768 * blue - 1, 16) + 128
    cr = _shifted(32768 * red - 27439 * green - 5329 * blue - 1, 16) + 128
    return [
        _quantise(y, _LUMINANCE, quality),
        _quantise(_halved(cb), _CHROMINANCE, quality),
        _quantise(_halved(cr), _CHROMINANCE, quality),
    ]


def decode(coefficients: Sequence[Tensor], quality: int, height: int, width: int) -> Tensor:
    """The images of these sizes with the quantised coefficients that `encode` gives."""
    y = _pixels(coefficients[0], _LUMINANCE, quality)[:, :height, :width]
    if len(coefficients) == 1:
        return y[:, None]
    rows, columns = -(-height // 2), -(-width // 2)
    chroma = (_pixels(c, _CHROMINANCE, quality)[:, :rows, :columns] for c in coefficients[1:])
    cb, cr = (_doubled(c)[:, :height, :width] - 128 for c in chroma)
    red, blue = y + 1.402 * cr, y + 1.772 * cb
    green = y - 0.344136286 * cb - 0.714136286 * cr
    return rounded(torch.stack((red, green, blue), 1))


def _quantise(plane: Tensor, table: Sequence[int], quality: int) -> Tensor:
    """Quantised coefficients of B x H x W, whose edges are repeated up to whole blocks."""
    height, width = plane.shape[-2:]
    padded = _repeat_edges(plane, -height % 8, -width % 8)
    blocks = padded.unflatten(2, (-1, 8)).unflatten(1, (-1, 8)).transpose(2, 3)
    basis = _cosines(plane)
    rows = _shifted((blocks - 128) @ basis.T, 11)
    exact = _shifted(basis @ rows, 15) / (8 * _divisors(plane, table, quality))
    return exact.sign() * (exact.abs() + 0.5).floor()


def _pixels(coefficients: Tensor, table: Sequence[int], quality: int) -> Tensor:
    """Whole numbers from 0 to 255, B x H x W, from quantised coefficients."""
    basis = _cosines(coefficients)
    columns = _shifted(basis.T @ (coefficients * _divisors(coefficients, table, quality)), 11)
    blocks = _shifted(columns @ basis, 18).transpose(2, 3)
    return (blocks.flatten(3).flatten(1, 2) + 128).clamp(0, 255)


def _divisors(like: Tensor, table: Sequence[int], quality: int) -> Tensor:
    """The quantisation steps, 8 x 8."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = [min(255, max(1, (value * scale + 50) // 100)) for value in table]
    return torch.tensor(steps, dtype=like.dtype, device=like.device).view(8, 8)


def _cosines(like: Tensor) -> Tensor:
    """The matrix of the discrete cosine transform in libjpeg's units, 8 x 8."""
    rows = [
        (*row, *(value * (-1) ** k for value in reversed(row))) for k, row in enumerate(_COSINES)
    ]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x / 2^bits, rounded."""
    return (x * 2.0**-bits + 0.5).floor()


def _halved(plane: Tensor) -> Tensor:
    """Means of 2 x 2 pixels; halves are rounded down in even columns and up in odd ones."""
    height, width = plane.shape[-2:]
    plane = _repeat_edges(plane, height % 2, -width % 16)
    sums = plane.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).sum((2, 4))
    bias = torch.arange(sums.shape[-1], device=plane.device) % 2 + 1
    return ((sums + bias) / 4).floor()


def _doubled(plane: Tensor) -> Tensor:
    """Twice the size: 3/4 of the nearer and 1/4 of the further pixel, in both directions."""
    padded = _repeat_edges(plane, 1, 1, 1, 1)
    middle = 3 * padded[:, 1:-1]
    rows = torch.stack((middle + padded[:, :-2], middle + padded[:, 2:]), 2).flatten(1, 2)
    middle = 3 * rows[..., 1:-1]
    pair = middle + rows[..., :-2] + 8, middle + rows[..., 2:] + 7
    return (torch.stack(pair, 3).flatten(2) / 16).floor()


def _repeat_edges(plane: Tensor, below: int, right: int, above: int = 0, left: int = 0) -> Tensor:
    """B x H x W with its edge pixels repeated outwards."""
    return F.pad(plane[:, None], (left, right, above, below), mode="replicate")[:, 0]
