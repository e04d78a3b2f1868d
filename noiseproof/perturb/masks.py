"""Black masks at random positions: rectangles and vertical stripes.

A position is drawn uniformly among those where the mask is entirely inside the image; masks may
overlap. All channels of an image share its masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source
from noiseproof.perturb import values
from noiseproof.perturb.base import Perturbation

_BITS = 15  # an int16 without its sign
_VISIBLE = 0.01  # share of an image that several masks must leave visible, on average


@dataclass(frozen=True)
class Occlusion(Perturbation):
    """Black squares or rectangles.

    Args:
        patches: how many per image.
        size: side of a square in pixels, or (height, width).

    >>> print(Occlusion(20, 70), Occlusion(20, (70, 50)))
    occlusion:20x70 occlusion:20x70x50
    >>> image = torch.ones(1, 1, 8, 8)
    >>> int(Occlusion(1, 3)(image).sum())  # 64 - 9
    55
    """

    patches: int
    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patches", values.count("patches", self.patches))
        object.__setattr__(self, "size", values.side_or_pair("size", self.size))

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        height, width = x.shape[-2:]
        h, w = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if h > height or w > width:
            raise ValueError(
                f"a patch of {h} x {w} does not fit into an image of {height} x {width}"
            )
        _check_visible(self, self.patches, h * w / (height * width), f"{height} x {width}")
        u = draws.uniform((len(x), self.patches, 2), x, source)
        rows = _cover(u[..., 0], h, height)  # (B, P, H)
        columns = _cover(u[..., 1], w, width)  # (B, P, W)
        return _blacken(x, _outer_any(rows, columns)[:, None])

    def __str__(self) -> str:
        sides = self.size if isinstance(self.size, tuple) else (self.size,)
        return f"occlusion:{'x'.join(map(str, (self.patches, *sides)))}"


@dataclass(frozen=True)
class Stripes(Perturbation):
    """Vertical black stripes over the full height.

    Args:
        count: how many per image.
        width: of each, in pixels.

    >>> print(Stripes(10, 6))
    stripes:10x6
    >>> image = torch.ones(1, 1, 2, 8)
    >>> int(Stripes(1, 3)(image).sum())  # 2 rows of 8 - 3
    10
    """

    count: int
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", values.count("count", self.count))
        object.__setattr__(self, "width", values.count("width", self.width))

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        height, width = x.shape[-2:]
        if self.width > width:
            raise ValueError(
                f"a stripe of width {self.width} does not fit into an image of {height} x {width}"
            )
        _check_visible(self, self.count, self.width / width, f"{height} x {width}")
        u = draws.uniform((len(x), self.count), x, source)
        return _blacken(x, _cover(u, self.width, width).any(1)[:, None, None])

    def __str__(self) -> str:
        return f"stripes:{self.count}x{self.width}"


def _check_visible(masks: Perturbation, count: int, share: float, size: str) -> None:
    """Raises ValueError if several masks, each covering a `share` of an image, leave almost none of
    it visible."""
    if count > 1 and (1 - share) ** count < _VISIBLE:
        raise ValueError(
            f"{masks} leaves less than {100 * _VISIBLE:g} % of an image of {size} visible; "
            "expected fewer or smaller masks"
        )


def _blacken(x: Tensor, mask: Tensor) -> Tensor:
    # On a CPU a product takes less than half the time of masked_fill or where.
    return x * mask.logical_not().to(x.dtype)


def _cover(u: Tensor, length: int, size: int) -> Tensor:
    """Which of `size` pixels an interval of `length` covers, positioned by `u` in [0, 1).

    Returns (..., size). The start is floor(u n) with n = size − length + 1 positions. u is a
    multiple of 2⁻²⁴ (in float64, of 2⁻⁵³) below 1, for which the product never rounds up to n.
    """
    start = (u * (size - length + 1)).long()[..., None]
    pixel = torch.arange(size, device=u.device)
    return (pixel >= start) & (pixel < start + length)


def _outer_any(rows: Tensor, columns: Tensor) -> Tensor:
    """any_p rows[b, p, i] and columns[b, p, j]: the union of P rectangles per image, (B, H, W).

    Bit p of a row's number says whether patch p covers the row; a pixel is covered if the numbers
    of its row and its column share a bit. One pass over the pixels handles 15 patches: 1,000 images
    of 400 x 500 with 20 patches took 0.4 s on two cores, against 3.2 s patch by patch.
    """
    groups = zip(rows.split(_BITS, 1), columns.split(_BITS, 1), strict=True)
    parts = ((_number(r)[:, :, None] & _number(c)[:, None, :]) != 0 for r, c in groups)
    return reduce(Tensor.logical_or_, parts)


def _number(member: Tensor) -> Tensor:
    """Σ_p member[b, p, i] 2^p as int16, (B, size)."""
    bit = torch.arange(member.shape[1], device=member.device, dtype=torch.int16)[:, None]
    return (member.to(torch.int16) << bit).sum(1, dtype=torch.int16)
