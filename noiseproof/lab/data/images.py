"""Image files to pixels. A file that cannot be read is an error that names it.

Every image becomes 8-bit RGB, or greyscale where one channel is asked for:

- the EXIF orientation is applied, and the first of several frames is used;
- greyscale is repeated in three channels; palette, CMYK and YCbCr images are converted;
- transparent pixels are blended with black;
- 16-bit greyscale is divided by 257 and rounded; of 16-bit colour Pillow keeps the high byte;
- 32-bit and floating-point images, whose range is unknown, are refused;
- so are images of more than 89 megapixels (Pillow's `Image.MAX_IMAGE_PIXELS`), of which a small
  file can fill the memory, and PostScript, which other programs would have to execute.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

_SHOWN = 3  # how many names or messages an error lists
_AT_A_TIME = 1 << 28  # pixels decoded by all threads together; each can take 16 bytes


class DataError(ValueError):
    """Data that cannot be used; the message names the file or folder and what to do."""


@functools.cache
def _formats() -> tuple[str, ...]:
    """All that Pillow reads except PostScript, which it gives to Ghostscript, whatever the file's
    extension."""
    Image.init()
    return tuple(name for name in Image.ID if name != "EPS")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # "I;16" and its variants; older Pillow opens 16-bit PNG as "I"
        values = np.asarray(image).astype(np.int32)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit pixels outside 0..65535 have an unknown range")
        # 257 = 65535 / 255; an odd divisor leaves no ties, so this rounds to the nearest
        values += 128
        values //= 257
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have an unknown range")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        if image.mode in ("LA", "La"):
            image = image.convert("LA")
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        return Image.alpha_composite(black, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def decode(
    paths: Sequence[str], size: tuple[int, int, int], threads: int | None = None
) -> tuple[Tensor, dict[int, str]]:
    """The images as one uint8 tensor, N x C x H x W, and what is wrong with those that cannot be
    read, by position; their pixels are undefined.

    Args:
        paths: the files.
        size: C, H, W: images are resized to H x W, bilinearly with antialiasing, and become RGB, or
            greyscale where C is 1.
        threads: how many to decode in; by default one per core.
    """
    channels, height, width = size
    images = torch.empty(len(paths), *size, dtype=torch.uint8)
    array, limit = images.numpy(), _Limit(_AT_A_TIME)

    def read(position: int, image: Image.Image) -> None:
        with limit.reserve(image.width * image.height):
            convert(position, image)

    def convert(position: int, image: Image.Image) -> None:
        ImageOps.exif_transpose(image, in_place=True)
        image = _rgb(image)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if channels == 1:  # exact for a greyscale file, whose three channels are equal
            array[position, 0] = np.asarray(image.convert("L"))
        else:
            array[position] = np.asarray(image).transpose(2, 0, 1)

    return images, for_each(paths, read, threads)


class _Limit:
    """An amount that threads share, such as memory."""

    def __init__(self, amount: int):
        self._amount = self._free = amount
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Waits until `amount` is free, or all of it, and keeps it inside the block."""
        amount = min(amount, self._amount)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._changed:
                self._free += amount
                self._changed.notify_all()


def for_each(
    paths: Sequence[str], work: Callable[[int, Image.Image], None], threads: int | None = None
) -> dict[int, str]:
    """Opens every file and calls `work` with its position and the image; returns what is wrong with
    those that cannot be read, by position. In threads, since Pillow decodes outside the
    interpreter's lock."""

    def error_of(position: int) -> str | None:
        path = paths[position]
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ValueError("not a regular file")  # to open a pipe may take forever
            with Image.open(path, formats=_formats()) as image:
                if image.width * image.height > most:
                    raise Image.DecompressionBombError
                work(position, image)
        except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
            reason = str(error) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                reason = "not an image" if os.path.getsize(path) else "the file is empty"
            elif isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
                reason = f"it has more than {most / 1e6:.0f} megapixels; reduce its size"
            return f"{path} cannot be read: {reason}"

    def run(start: int) -> list[tuple[int, str]]:
        positions = range(start, min(start + chunk, len(paths)))
        return [(k, message) for k in positions if (message := error_of(k))]

    most = Image.MAX_IMAGE_PIXELS or math.inf  # Pillow itself only warns, up to twice as many
    threads = threads or min(32, os.cpu_count() or 1)
    # Few enough per task to balance threads, enough that a million files are not a million tasks.
    chunk = max(1, min(64, len(paths) // (4 * threads)))
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(run, range(0, len(paths), chunk))
        return dict(error for errors in results for error in errors)


def shortened(names: Sequence[str], separator: str = ", ") -> str:
    """The first few names, and how many more there are.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c, and 2 more'
    """
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
