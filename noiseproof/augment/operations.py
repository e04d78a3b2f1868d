"""The image operations of TrivialAugment and AugMix, a different one for each image of a batch.

All operations are computed for all images, in few passes: one affine map for the geometric ones,
one blend for brightness, colour, contrast and sharpness. Each image then takes the result of its
own operation. There are no matrix products, no loops over images and no numbers from the host, so a
compiler can fuse the arithmetic and a CUDA graph can capture it.

Results are those of torchvision's functions of the same names: on bytes they differ by 1 of 255 at
most, where a product is a whole number but for rounding, and at ties between nearest neighbours.
Floating-point images are not rounded; posterize, solarize and equalize see them in 256 levels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["OPERATIONS", "apply_operations"]

OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color",
    "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
(
    IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, COLOR, CONTRAST,
    SHARPNESS, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE,
) = range(14)  # fmt: skip

_GREY = (0.2989, 0.587, 0.114)


def apply_operations(
    images: Tensor, operation: Tensor, magnitude: Tensor, *, interpolation: str = "nearest"
) -> Tensor:
    """Each image after its own operation.

    Args:
        images: B x C x H x W with 1 or 3 channels, uint8, or floating point in [0, 1].
        operation: numbers of the operations in `OPERATIONS`, B.
        magnitude: B. Shears: the tangent of the angle. Translations: pixels. Rotate: degrees,
            counterclockwise. Brightness, colour, contrast and sharpness: the factor minus 1.
            Posterize: the number of bits that remain. Solarize: the threshold, from 0 to 255. The
            other operations have none.
        interpolation: of the geometric operations, "nearest" or "bilinear"; black outside.

    >>> image = torch.tensor([[[[0, 50], [100, 200]]]], dtype=torch.uint8)
    >>> solarize = torch.tensor([OPERATIONS.index("Solarize")])
    >>> apply_operations(image, solarize, torch.tensor([100.0])).flatten().tolist()
    [0, 50, 155, 55]
    """
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {images.shape[1]}")
    bound = 1.0 if images.is_floating_point() else 255.0
    x = images.float() if images.itemsize < 4 else images
    levels = (x * (255 / bound)).round().clamp(0, 255)
    kind, amount = operation[:, None, None, None], magnitude[:, None, None, None].to(x.dtype)
    out = _blended(x, kind, amount, bound)
    out = torch.where(kind == POSTERIZE, _posterized(levels, kind, amount) * (bound / 255), out)
    out = torch.where((kind == SOLARIZE) & (levels >= amount), bound - x, out)
    out = torch.where(kind == AUTOCONTRAST, _stretched(x, bound), out)
    out = torch.where(kind == EQUALIZE, _equalized(levels) * (bound / 255), out)
    warped = _warped(x, operation, magnitude, interpolation)
    warped = warped if bound == 1 else warped.round()
    out = torch.where((kind >= SHEAR_X) & (kind <= ROTATE), warped, out)
    return out.to(images.dtype)  # truncates to bytes, as torchvision does


def _warped(x: Tensor, operation: Tensor, magnitude: Tensor, interpolation: str) -> Tensor:
    """x(A p + b), where p is the position of a pixel relative to the centre of the image.

    A shear keeps the upper left corner of the image in place, a rotation the centre.
    """
    height, width = x.shape[2:]
    amount = magnitude[:, None, None].float()  # B x 1 x 1
    shear_x, shear_y, right, down, degrees = (
        amount * (operation[:, None, None] == number)
        for number in (SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE)
    )
    cos, sin = torch.cos(degrees * (math.pi / 180)), torch.sin(degrees * (math.pi / 180))
    u = torch.arange(width, device=x.device) - (width - 1) / 2  # W
    v = (torch.arange(height, device=x.device) - (height - 1) / 2)[:, None]  # H x 1
    across = cos * u + (shear_x - sin) * v + (shear_x * (height / 2) - right)
    along = (shear_y + sin) * u + cos * v + (shear_y * (width / 2) - down)
    grid = torch.stack((across / (width / 2), along / (height / 2)), 3)
    return F.grid_sample(x, grid.to(x.dtype), mode=interpolation, align_corners=False)


def _blended(x: Tensor, kind: Tensor, amount: Tensor, bound: float) -> Tensor:
    """f x + (1 − f) base, where base is black (brightness), the image in grey (colour), its mean
    grey (contrast) or blurred (sharpness); `x` for other operations."""
    grey = x
    if x.shape[1] == 3:
        grey = x[:, :1] * _GREY[0] + x[:, 1:2] * _GREY[1] + x[:, 2:] * _GREY[2]
        grey = grey if bound == 1 else grey.floor()
    base = grey * (kind == COLOR)
    base = torch.where(kind == CONTRAST, grey.mean((2, 3), keepdim=True), base)
    base = torch.where(kind == SHARPNESS, _blurred(x, bound), base)
    factor = torch.where((kind >= BRIGHTNESS) & (kind <= SHARPNESS), 1 + amount, 1.0)
    return (x + (1 - factor) * (base - x)).clamp(0, bound)


def _blurred(x: Tensor, bound: float) -> Tensor:
    """The mean over 3 x 3 pixels, where the middle one counts five times; pixels along the edges of
    the image are unchanged."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[2:])
    inner = ((rows > 0) & (rows < len(rows) - 1))[:, None]
    inner = inner & (columns > 0) & (columns < len(columns) - 1)
    padded = F.pad(x, (1, 1, 1, 1))
    summed = padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]
    summed = summed[..., :-2] + summed[..., 1:-1] + summed[..., 2:]  # over 3 x 3 pixels
    blurred = (summed + 4 * x) / 13
    return torch.where(inner, blurred if bound == 1 else blurred.round(), x)


def _posterized(levels: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    """The highest bits of each level, `amount` of them."""
    dropped = torch.where(kind == POSTERIZE, 8 - amount, 0.0).int()
    return ((levels.int() >> dropped) << dropped).to(levels.dtype)


def _stretched(x: Tensor, bound: float) -> Tensor:
    """Each channel scaled to the whole range from black to white, unless it is constant."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    constant = low == high
    low = torch.where(constant, 0.0, low)
    scale = torch.where(constant, 1.0, (high - low) * (1 / bound))
    return ((x - low) / scale).clamp(0, bound)


def _equalized(levels: Tensor) -> Tensor:
    """Each channel with its histogram made uniform, as Pillow defines it: level k becomes
    ⌊(number of pixels below k + s/2) / s⌋, where s = ⌊number of pixels below the highest / 255⌋."""
    flat = levels.flatten(2).long()  # B x C x HW
    counts = torch.zeros((*flat.shape[:2], 256), dtype=torch.int32, device=levels.device)
    one = torch.ones((), dtype=torch.int32, device=levels.device)
    counts = counts.scatter_add(2, flat, one.expand_as(flat))
    below = counts.cumsum(2, dtype=torch.int32) - counts
    step = (below * (counts > 0)).amax(2, keepdim=True) // 255
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    equalized = table.gather(2, flat).view(levels.shape).to(levels.dtype)
    return torch.where(step[..., None] > 0, equalized, levels)
