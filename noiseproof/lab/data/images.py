"""One image file and its pixels, or an error that names the file.

Every image becomes 8-bit RGB:

- the EXIF orientation is applied, and the first of several frames is taken;
- greyscale is repeated in three channels; palette, CMYK and YCbCr images are converted;
- transparent pixels are laid over black;
- 16-bit greyscale is divided by 257 and rounded; of 16-bit colour Pillow keeps the high byte;
- 32-bit and floating-point images, whose range is not known, are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

__all__ = ["DataError", "open_image", "opened"]

T = TypeVar("T")


class DataError(ValueError):
    """Data that cannot be used; the message names the file or folder and what to do.

    A loader's worker process hands over an exception as its printed traceback: only the message at
    its end is kept, so that it still reads as one line.

    >>> str(DataError("Caught DataError in a worker.\\n  File ...\\nDataError: a.png: bad\\n"))
    'a.png: bad'
    """

    def __init__(self, message: str):
        if message.startswith("Caught DataError in "):
            message = message.partition("DataError: ")[2].strip()
        super().__init__(message)


def open_image(path: str, size: tuple[int, int]) -> Image.Image:
    """The image as 8-bit RGB of (height, width) `size`: bilinear, with antialiasing."""
    image = opened(path, lambda image: _rgb(ImageOps.exif_transpose(image)))
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # "I;16" and its kin; older Pillow opens 16-bit PNG as "I"
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit pixels beyond 0..65535 have no known range")
        # 257 = 65535 / 255; an odd divisor leaves no ties, so that this rounds to the nearest
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        if image.mode in ("LA", "La"):
            image = image.convert("LA")
        over = image.convert("RGBA")
        black = Image.new("RGBA", over.size, (0, 0, 0, 255))
        return Image.alpha_composite(black, over).convert("RGB")
    return image.convert("RGB")


def opened(path: str, work: Callable[[Image.Image], T]) -> T:
    """What `work` makes of the opened image; whatever goes wrong becomes an error with its path."""
    try:
        with Image.open(path) as image:
            return work(image)
    except (
        Exception
    ) as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and more
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image" if os.path.getsize(path) else "the file is empty"
        raise DataError(f"{path} cannot be read: {reason}") from error
