"""Image folders: which files belong to which class, and their pixels. Nothing is skipped silently.

A folder holds either `train/` with `val/` or `test/` beside it, each with one folder a class, or
the class folders themselves. Class names are the folders' names, verbatim and sorted; images may
lie in folders below. Read are jpg, jpeg, png, bmp, webp, tif and tiff, in either case. Names that
begin with a dot, Thumbs.db and desktop.ini are ignored; any other file is an error that names it,
and so are an empty class and an image that cannot be read.

Every image becomes 8-bit RGB:

- the EXIF orientation is applied, and the first of several frames is taken;
- greyscale is repeated in three channels; palette, CMYK and YCbCr images are converted;
- transparent pixels are laid over black;
- 16-bit greyscale is divided by 257 and rounded; of 16-bit colour Pillow keeps the high byte;
- 32-bit and floating-point images, whose range is not known, are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

__all__ = ["DataError", "Files", "Listing", "check", "open_image", "read", "scan"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
T = TypeVar("T")
_CHUNK = 64  # files a task: few enough to share out, enough that a million files are not a million
_SHOWN = 3  # how many unreadable files a message names


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


class Files(NamedTuple):
    """Some of a folder's images: paths relative to it, with '/', in sorted order, and labels."""

    paths: tuple[str, ...]
    labels: Tensor  # int64, N

    def take(self, indices: Tensor) -> Files:
        return Files(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])


class Listing(NamedTuple):
    """What a folder holds; `test` is None when the folder is not split yet."""

    classes: tuple[str, ...]
    train: Files
    validation: Files | None
    test: Files | None


def scan(root: Path) -> Listing:
    """Lists the images of `root`. Beside `train/`, `test/` is the test set and `val/` validation;
    with `val/` alone, `val/` is the test set."""
    _, folders = _entries(root)
    names = {folder.name for folder in folders}
    if "train" not in names or not names & {"val", "test"}:
        return _unsplit(root, folders)
    other = sorted(names - {"train", "val", "test"})
    if other:
        raise DataError(
            f"{root} has {other[0]!r} beside train/; expected train/, val/, test/ alone"
        )
    _refuse_images(root)
    classes = _classes(root / "train")
    parts = {name: _list(root, root / name, classes) for name in sorted(names)}
    test = parts.get("test", parts.get("val"))
    return Listing(classes, parts["train"], parts.get("val") if "test" in parts else None, test)


def _unsplit(root: Path, folders: Sequence[Path]) -> Listing:
    """Class folders directly below `root`, unless they look like parts under names unknown here."""
    inside = [_entries(folder) for folder in folders]
    below = [{f.name for f in inner} for _, inner in inside]
    bare = bool(below and below[0]) and not any(images for images, _ in inside)
    if bare and all(names == below[0] for names in below):
        raise DataError(
            f"{root}: the folders {', '.join(f.name for f in folders)} hold the same folders and "
            "no images; name them train/ with val/ or test/, or put images into class folders"
        )
    _refuse_images(root)
    classes = _classes(root)
    return Listing(classes, _list(root, root, classes), None, None)


def _classes(part: Path) -> tuple[str, ...]:
    classes = tuple(sorted(folder.name for folder in _entries(part)[1]))
    if len(classes) < 2:
        found = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{part} must hold at least two folders, one a class; found {found}")
    return classes


def _list(root: Path, part: Path, classes: tuple[str, ...]) -> Files:
    """The images in `part`, whose folders must be `classes`, class after class."""
    _refuse_images(part)
    found = {folder.name for folder in _entries(part)[1]}
    for name in sorted(found.symmetric_difference(classes)):
        wrong = "is not a class of train/" if name in found else "is missing: train/ has that class"
        raise DataError(f"{part / name} {wrong}")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(i.relative_to(root).as_posix() for i in _walk(part / name, frozenset()))
        if not images:
            raise DataError(f"class folder {part / name} holds no images")
        paths += images
        labels += [label] * len(images)
    return Files(tuple(paths), torch.tensor(labels))


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Every image below `folder`, links followed."""
    real = folder.resolve()
    if real in above:
        raise DataError(f"{folder} is a link to a folder that it lies in")
    images, folders = _entries(folder)
    yield from images
    for inner in folders:
        yield from _walk(inner, above | {real})


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Images and folders in `folder`, each sorted; any other visible file is refused."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry.name, entry.is_dir()) for entry in found)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror})") from error
    images: list[Path] = []
    folders: list[Path] = []
    for name, is_folder in entries:
        if name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini"):
            continue
        if is_folder:
            folders.append(folder / name)
        elif name.lower().endswith(EXTENSIONS):
            images.append(folder / name)
        else:
            raise DataError(
                f"{folder / name} is not an image (known: {' '.join(e[1:] for e in EXTENSIONS)}); "
                "move it away, or let its name begin with a dot"
            )
    return images, folders


def _refuse_images(folder: Path) -> None:
    for image in _entries(folder)[0]:
        raise DataError(f"{image} lies outside the class folders of {folder}")


def check(paths: Sequence[str], size: tuple[int, int] | None, *, verify: bool) -> tuple[int, int]:
    """Opens every file and gives the height and width to read them in: `size`, or the first
    image's, which all must then share. `verify` also checks what a format can check undecoded."""
    sizes = np.zeros((len(paths), 2), dtype=np.int64)

    def header(position: int) -> None:
        def measure(image: Image.Image) -> tuple[int, int]:
            width, height = image.size
            if size is None:  # a PNG may end with its EXIF data: this decodes it, so verifies it
                turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # stored on its side
                return (width, height) if turned else (height, width)
            if verify:
                image.verify()
            return height, width

        sizes[position] = _opened(paths[position], measure)

    _each(len(paths), header)
    if size is not None:
        return size
    odd = np.flatnonzero((sizes != sizes[0]).any(axis=1))
    height, width = map(int, sizes[0])
    if len(odd):
        h, w = map(int, sizes[odd[0]])
        raise DataError(
            f"{paths[odd[0]]} is {h} x {w}, but {paths[0]} is {height} x {width} (height x width): "
            f"give the size of all with --img-size {height} {width}"
        )
    return height, width


def read(paths: Sequence[str], size: tuple[int, int]) -> Tensor:
    """The images as one uint8 tensor, N x 3 x `size`, decoded in threads."""
    images = torch.empty(len(paths), 3, *size, dtype=torch.uint8)
    array = images.numpy()

    def decode(position: int) -> None:
        array[position] = np.asarray(open_image(paths[position], size)).transpose(2, 0, 1)

    _each(len(paths), decode)
    return images


def open_image(path: str, size: tuple[int, int]) -> Image.Image:
    """The image as 8-bit RGB of (height, width) `size`: bilinear, with antialiasing."""
    image = _opened(path, lambda opened: _rgb(ImageOps.exif_transpose(opened)))
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


def _opened(path: str, work: Callable[[Image.Image], T]) -> T:
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


def _each(count: int, work: Callable[[int], None]) -> None:
    """Runs `work` on 0..count-1 in threads (Pillow decodes outside the interpreter's lock), and
    raises one error for all files that failed."""

    def problem(position: int) -> str | None:
        try:
            work(position)
        except DataError as error:
            return str(error)

    def run(start: int) -> list[str]:
        found = map(problem, range(start, min(start + _CHUNK, count)))
        return [message for message in found if message is not None]

    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        failed = [message for part in pool.map(run, range(0, count, _CHUNK)) for message in part]
    if failed:
        more = f"; and {len(failed) - _SHOWN} more files" if len(failed) > _SHOWN else ""
        raise DataError("; ".join(failed[:_SHOWN]) + more)
