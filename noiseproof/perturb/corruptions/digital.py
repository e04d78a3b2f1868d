"""Digital corruptions: brightness, contrast, elastic and pixelate; `jpeg` has its own module.

Images are whole numbers from 0 to 255, B x C x H x W, float32; results are not rounded unless a
function says so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source, stream
from noiseproof.perturb.corruptions.pixels import rounded

__all__ = ["brightness", "contrast", "elastic", "pixelate"]


def brightness(x: Tensor, source: Source, added: float) -> Tensor:
    """`added` to the value of HSV, in units of the pixel range; hue and saturation remain.

    The value is the largest channel, and the other channels keep their ratio to it.
    """
    value = x.amax(1, keepdim=True)
    brighter = (value + 255 * added).clamp(max=255)
    return torch.where(value > 0, x * (brighter / value), brighter)


def contrast(x: Tensor, source: Source, factor: float) -> Tensor:
    """The distance from the mean of each channel, times `factor`."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def elastic(
    x: Tensor, source: Source, amplitude: float, smoothing: float, corners: float
) -> Tensor:
    """A random affine map, then a smooth random displacement of each pixel; edges are reflected.

    Args:
        x: the images.
        source: of the map and the displacements.
        amplitude: by which the smoothed uniform displacements are multiplied, in pixels.
        smoothing: standard deviation of the Gaussian blur of the displacements, in pixels.
        corners: the affine map moves three points by up to this many pixels each way.
    """
    height, width = x.shape[-2:]
    x = F.grid_sample(
        x, _affine_grid(x, corners, stream(source, 0)), padding_mode="reflection",
        align_corners=True,
    )  # fmt: skip
    if amplitude == 0:
        return x
    u = draws.uniform((len(x), 2, height, width), x, stream(source, 1)).double() * 2 - 1
    rows, columns = (_reflected_blur(size, smoothing, x.device) for size in (height, width))
    right, down = (rows @ u @ columns * amplitude).to(x.dtype).unbind(1)
    column, row = (torch.arange(size, device=x.device) for size in (width, height))
    grid = torch.stack(
        ((2 * (column + right) + 1) / width - 1, (2 * (row[:, None] + down) + 1) / height - 1), 3
    )
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _affine_grid(x: Tensor, corners: float, source: Source) -> Tensor:
    """Where each pixel comes from, under the affine map that moves three points of a square around
    the centre to random places: B x H x W x 2, from −1 for the first pixel to 1 for the last."""
    height, width = x.shape[-2:]
    reach = max(1, min(height, width) // 3)
    shift = (draws.uniform((len(x), 6), x, source) * 2 - 1) * corners
    ax, ay, bx, by, cx, cy = shift.unbind(1)  # of (reach, reach), (reach, −reach) and both negative
    # Relative to the first point, the others lie at (0, −2 reach) and (−2 reach, −2 reach); now at:
    bx, by = bx - ax, by - ay - 2 * reach
    cx, cy = cx - ax - 2 * reach, cy - ay - 2 * reach
    # The map back takes (bx, by) to (0, −2 reach) and (cx, cy) to (−2 reach, −2 reach).
    determinant = bx * cy - by * cx
    scale = torch.where(determinant == 0, 0.0, 2 * reach / determinant)[:, None, None]
    bx, by, cx, cy = (value[:, None, None] for value in (bx, by, cx, cy))
    across = torch.arange(width, device=x.device) - (width // 2 + reach + ax[:, None, None])
    along = torch.arange(height, device=x.device)[:, None]
    along = along - (height // 2 + reach + ay[:, None, None])
    column = scale * (by * across - bx * along) + (width // 2 + reach)
    row = scale * ((by - cy) * across + (cx - bx) * along) + (height // 2 + reach)
    return torch.stack(
        (column * (2 / max(1, width - 1)) - 1, row * (2 / max(1, height - 1)) - 1), 3
    )


def _reflected_blur(size: int, sigma: float, device: torch.device) -> Tensor:
    """Gaussian blur over 3 standard deviations of a line of `size` pixels that repeats, mirrored,
    beyond its edges: a symmetric matrix, size x size, float64."""
    period = 2 * size
    radius = int(3 * sigma + 0.5)
    periods = -(-radius // period)
    offset = torch.arange(-periods * period, (periods + 1) * period, device=device).double()
    weights = torch.exp(offset**2 * (-0.5 / sigma**2)) * (offset.abs() <= radius)
    weights = (weights / weights.sum()).view(-1, period).sum(0)
    pixel = torch.arange(size, device=device)
    return (
        weights[(pixel - pixel[:, None]) % period] + weights[(-1 - pixel - pixel[:, None]) % period]
    )


def pixelate(x: Tensor, source: Source, scale: float) -> Tensor:
    """Reduced to `scale` of the sides and enlarged again, both with Pillow's box filter: the mean
    of the pixels whose centres are in the box. Rounded to whole numbers after each step."""
    height, width = x.shape[-2:]
    small = max(1, int(height * scale)), max(1, int(width * scale))
    out = x.double()
    for rows, columns in (small, (height, width)):
        out = rounded(out @ _box(out.shape[-1], columns, x.device).T)  # Pillow does rows first
        out = rounded(_box(out.shape[-2], rows, x.device) @ out)
    return out.to(x.dtype)


def _box(size: int, target: int, device: torch.device) -> Tensor:
    """The matrix of Pillow's box filter from `size` to `target` pixels, target x size."""
    scale = size / target
    centre = (torch.arange(target, device=device).double()[:, None] + 0.5) * scale
    distance = torch.arange(size, device=device) + 0.5 - centre
    reach = 0.5 * max(1.0, scale)
    inside = (distance > -reach) & (distance <= reach)
    return inside.double() / inside.sum(1, keepdim=True)
