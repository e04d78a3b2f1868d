"""Frost: parts of photographs of frozen windows, added to the image.

`frost.bin` holds the four pictures of ImageNet-C, which hendrycks/robustness publishes under the
Apache License 2.0 (frost-LICENSE.txt), compressed as JPEG at quality 75 by `tools/frost.py`.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source
from noiseproof.perturb.corruptions.jpeg import decode
from noiseproof.perturb.corruptions.pixels import grey

__all__ = ["FILE", "QUALITY", "SIZES", "frost", "pictures"]

FILE = Path(__file__).with_name("frost.bin")
SIZES = ((600, 900), (315, 560), (350, 527), (495, 660))  # height, width
QUALITY = 75
_CHOSEN = (0, 1, 1, 2, 3)  # the original draws one of five files, two of which are the same


def frost(x: Tensor, source: Source, share: float, amount: float, window: float) -> Tensor:
    """share · image + amount · part of a picture.

    Args:
        x: the images, whole numbers from 0 to 255, B x C x H x W, float32.
        source: of the choice of the picture and of its part.
        share: of the image.
        amount: of the picture.
        window: pixels of the picture along the shorter side of the image.
    """
    height, width = x.shape[-2:]
    step = window / min(height, width)  # pixels of the picture per pixel of the image
    u = draws.uniform((len(x), 3), x, source)
    chosen = (u[:, 0] * len(_CHOSEN)).long()
    sides = [SIZES[i] for i in _CHOSEN]
    starts = [sum(h * w for h, w in SIZES[:i]) for i in _CHOSEN]
    start, tall, wide = (_looked_up(v, chosen) for v in (starts, *zip(*sides, strict=True)))
    pixels, start, wide = pictures().to(x.device), start[:, None, None], wide[:, None, None]
    part = torch.zeros_like(x[:, :1])
    for rows, row_weight in _neighbours(u[:, 1], tall, height, step):
        for columns, column_weight in _neighbours(u[:, 2], wide[:, 0, 0], width, step):
            index = start + rows[:, :, None] * wide + columns[:, None, :]
            weight = row_weight[:, None, :, None] * column_weight[:, None, None, :]
            part = part + pixels[:, index].movedim(0, 1) * weight  # B x 3 x H x W
    return share * x + amount * (part if x.shape[1] == 3 else grey(part))


def _neighbours(u: Tensor, size: Tensor, count: int, step: float) -> list[tuple[Tensor, Tensor]]:
    """`count` positions `step` apart, at a random place along sides of length `size`: the pixels
    before and after each and their weights in a linear interpolation, B x count.

    A picture that is too short is mirrored.
    """
    places = ((size / step + 0.5).floor() - count).clamp(min=1)
    first = (u * places).floor()[:, None]
    position = (first + torch.arange(count, device=u.device) + 0.5) * step - 0.5
    before, period = position.floor(), 2 * size[:, None]
    share = position - before
    indices = ((before.long() + i) % period for i in (0, 1))
    low, high = (torch.minimum(index, period - 1 - index) for index in indices)
    return [(low, 1 - share), (high, share)]


def _looked_up(table: tuple[int, ...] | list[int], index: Tensor) -> Tensor:
    return torch.tensor(table, device=index.device)[index]


def pictures() -> Tensor:
    """The pixels of all pictures, one after the other, 3 x pixels, uint8."""
    return _decoded()


# As torch.compiler.assume_constant_result does, which would import the whole compiler here.
pictures.__dict__["_dynamo_marked_constant"] = True


@lru_cache(maxsize=1)
def _decoded() -> Tensor:
    signed = torch.frombuffer(bytearray(zlib.decompress(FILE.read_bytes())), dtype=torch.int8)
    decoded, start = [], 0
    for height, width in SIZES:
        coefficients = []
        for scale in (8, 16, 16):  # chroma has half the resolution
            rows, columns = -(-height // scale), -(-width // scale)
            plane = signed[start : start + 64 * rows * columns].view(8, 8, rows, columns)
            coefficients.append(plane.permute(2, 3, 0, 1)[None].double())
            start += plane.numel()
        decoded.append(decode(coefficients, QUALITY, height, width)[0].flatten(1).byte())
    return torch.cat(decoded, 1)
