"""Image files to pixels. A file that cannot be read is an error that names it.

Every image becomes 8-bit RGB, or greyscale where one channel is asked for:

- the EXIF orientation is applied, and the first of several frames is used;
- greyscale is repeated in three channels; palette, CMYK and YCbCr images are converted;
- transparent pixels are blended with white, or with black as in older runs;
- 16-bit greyscale is divided by 257 and rounded; of 16-bit colour Pillow keeps the high byte;
- 32-bit and floating-point images, whose range is unknown, are refused;
- so are images of one pixel;
- so are images of more than 89 megapixels (Pillow's `Image.MAX_IMAGE_PIXELS`), of which a small
  file can fill the memory, and PostScript, which other programs would have to execute.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from noiseproof.lab.config import Data
from noiseproof.lab.console import progress_bars

_SHOWN = 3  # how many names or messages an error lists
_AT_A_TIME = 1 << 28  # pixels decoded by all threads together; each can take 16 bytes


class DataError(ValueError):
    """Data that cannot be used; the message names the file or folder and what to do."""


class Reading(NamedTuple):
    """How a file becomes an image of a given height and width.

    Attributes:
        crop_share: share of the shorter side that a centre crop of that size keeps, after resizing
            with the aspect ratio kept, as torchvision and timm do it; None stretches the image.
        interpolation: of the resizing, which always averages over the pixels that it merges.
        background: colour behind transparent pixels.
    """

    crop_share: float | None = None
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    background: Literal["white", "black"] = "white"

    @classmethod
    def of(cls, config: Data) -> Reading:
        """How the files of a run's folder are read."""
        return cls(config.crop_share, config.interpolation, config.background)


STRETCHED = Reading()


@functools.cache
def _formats() -> tuple[str, ...]:
    """All that Pillow reads, with HEIC if pillow-heif is installed, but without PostScript, which
    it gives to Ghostscript, whatever the file's extension."""
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    Image.init()
    return tuple(name for name in Image.ID if name != "EPS")


def rgb(image: Image.Image, background: str) -> Image.Image:
    """The image as 8-bit RGB; ValueError if the range of its pixels is unknown.

    Args:
        image: as Pillow opens it.
        background: colour behind transparent pixels.
    """
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
    if is_transparent(image):
        if image.mode in ("LA", "La"):
            image = image.convert("LA")
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        behind = Image.new("RGBA", image.size, background)
        return Image.alpha_composite(behind, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def is_transparent(image: Image.Image) -> bool:
    """Whether an image, which need not be decoded, can have transparent pixels."""
    return image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info


def _fitted(image: Image.Image, height: int, width: int, reading: Reading) -> Image.Image:
    """The image in this size."""
    resample = Image.Resampling[reading.interpolation.upper()]
    if reading.crop_share is None:
        small = (width, height)
        return image if image.size == small else image.resize(small, resample)
    least_height, least_width = before_crop(height, width, reading.crop_share)
    scaled_width = max(least_width, least_height * image.width // image.height)
    scaled_height = max(least_height, least_width * image.height // image.width)
    if image.size != (scaled_width, scaled_height):
        image = image.resize((scaled_width, scaled_height), resample)
    left, top = round((scaled_width - width) / 2), round((scaled_height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def before_crop(height: int, width: int, share: float) -> tuple[int, int]:
    """The smallest height and width of an image of which a crop keeps this share."""
    return max(height, round(height / share)), max(width, round(width / share))


def decode(
    paths: Sequence[str],
    size: tuple[int, int, int],
    reading: Reading = STRETCHED,
    threads: int | None = None,
    progress: str | None = None,
    enough: int | None = None,
) -> tuple[Tensor, dict[int, str]]:
    """The images as one uint8 tensor, N x C x H x W, and what is wrong with those that cannot be
    read, by position; their pixels are undefined.

    Args:
        paths: the files.
        size: C, H, W: images are resized to H x W, and become RGB, or greyscale where C is 1.
        reading: how they are resized, and what is behind transparent pixels.
        threads: how many to decode in; by default one per core.
        progress: the text of a progress bar; by default there is none.
        enough: a large JPEG is decoded at a lower resolution, which is several times faster, of at
            least this many pixels per side; by default twice those of the result if it is cropped,
            and all if it is stretched.
    """
    channels, height, width = size
    if enough is None and reading.crop_share is not None:
        enough = 2 * max(before_crop(height, width, reading.crop_share))
    images = torch.empty(len(paths), *size, dtype=torch.uint8)
    array, limit = images.numpy(), _Limit(_AT_A_TIME)

    def read(position: int, image: Image.Image) -> None:
        if enough is not None:
            image.draft(None, (enough, enough))
        with limit.reserve(image.width * image.height):
            convert(position, image)

    def convert(position: int, image: Image.Image) -> None:
        ImageOps.exif_transpose(image, in_place=True)
        image = _fitted(rgb(image, reading.background), height, width, reading)
        if channels == 1:  # exact for a greyscale file, whose three channels are equal
            array[position, 0] = np.asarray(image.convert("L"))
        else:
            array[position] = np.asarray(image).transpose(2, 0, 1)

    return images, for_each(paths, read, threads, progress)


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
    paths: Sequence[str],
    work: Callable[[int, Image.Image], None],
    threads: int | None = None,
    progress: str | None = None,
) -> dict[int, str]:
    """Opens every file and calls `work` with its position and the image; returns what is wrong with
    those that cannot be read, by position. In threads, since Pillow decodes outside the
    interpreter's lock. `threads` and `progress` as for `decode`."""

    def error_of(position: int) -> str | None:
        path = paths[position]
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ValueError("not a regular file")  # to open a pipe may take forever
            with Image.open(path, formats=_formats()) as image:
                if image.width * image.height > most:
                    raise Image.DecompressionBombError
                if image.size == (1, 1):
                    raise ValueError("it has one pixel; remove it")
                work(position, image)
        except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
            reason = str(error) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                reason = _unidentified(path)
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
    starts, errors = range(0, len(paths), chunk), dict[int, str]()
    with ThreadPoolExecutor(threads) as pool, file_progress(progress, len(starts)) as advance:
        for found in pool.map(run, starts):
            errors.update(found)
            advance(1)
    return errors


def _unidentified(path: str) -> str:
    """Why Pillow does not know the format of a file."""
    with open(path, "rb") as file:
        start = file.read(12)
    if start[4:] in (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypheim", b"ftypmif1"):
        return "it is HEIC: install pillow-heif to read it, or convert it to JPEG"
    return "not an image" if start else "the file is empty"


@contextlib.contextmanager
def file_progress(text: str | None, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar of work on files, on the first of torchrun's processes.

    Args:
        text: what is done; None for no bar.
        total: the amount of work; the function that is given counts it.
    """
    hidden = text is None or int(os.environ.get("RANK") or 0) > 0
    with progress_bars(False if hidden else None) as bars:
        yield functools.partial(bars.advance, bars.add_task(text or "", total=total))


def reasons(errors: Mapping[int, str]) -> str:
    """What is wrong with files: the first few messages of each kind.

    Args:
        errors: messages by position, as `for_each` returns them.
    """
    kinds: dict[str, list[str]] = {}
    for message in errors.values():
        reason = message.rpartition(" cannot be read: ")[2]
        kinds.setdefault(re.sub(r"\d+", "", reason), []).append(message)  # "12 bytes" is one kind
    return "; ".join(shortened(messages, "; ") for messages in kinds.values())


def shortened(names: Sequence[str], separator: str = ", ") -> str:
    """The first few names, and how many more there are.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c, and 2 more'
    """
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
