"""Image folders: which files belong to which class, and their pixels. Nothing is skipped silently.

A folder holds either `train/` with `val/` or `test/` beside it, each with one folder a class, or
the class folders themselves. Class names are the folders' names, verbatim and sorted; images may
lie in folders below. Read are jpg, jpeg, png, bmp, webp, tif and tiff, in either case. Names that
begin with a dot, Thumbs.db and desktop.ini are ignored; any other file is an error that names it,
and so are an empty class, an image that cannot be read, and a class folder that looks like a part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from noiseproof.lab.data.images import DataError, decode, for_each, shortened, with_image

__all__ = ["Files", "Listing", "check", "entries", "read", "scan"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_PARTS = ("train", "test", "val", "valid", "validation")


class Files(NamedTuple):
    """Some of a folder's images: paths relative to it, with '/', in sorted order, and labels."""

    paths: tuple[str, ...]
    labels: Tensor  # int64, N

    def take(self, indices: Tensor) -> Files:
        return Files(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])


class Listing(NamedTuple):
    """What a folder holds; `test` is None where it is not split yet."""

    classes: tuple[str, ...]
    train: Files
    validation: Files | None
    test: Files | None
    others: list[str]  # full paths of files that are no images; `check` refuses them


def scan(root: Path) -> Listing:
    """Lists the images of `root`. Beside `train/`, `test/` is the test set and `val/` validation;
    with `val/` alone, `val/` is the test set."""
    _, folders, others = entries(root)
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
    parts = {name: _list(root, root / name, classes, others) for name in sorted(names)}
    val = parts.get("val")
    own, test = (val, parts["test"]) if "test" in parts else (None, val)
    return Listing(classes, parts["train"], own, test, others)


def _unsplit(root: Path, folders: Sequence[Path]) -> Listing:
    """Class folders directly below `root`, unless they look like parts under names unknown here."""
    if [folder.name for folder in folders] == ["train"]:
        raise DataError(
            f"{root} holds train/ alone; expected test/ or val/ beside it. To have test images "
            f"split off, give {root / 'train'} itself"
        )
    inside = [entries(folder) for folder in folders]
    below = [{f.name for f in inner} for _, inner, _ in inside]
    bare = bool(below and below[0]) and not any(images for images, _, _ in inside)
    if bare and all(names == below[0] for names in below):
        raise DataError(
            f"{root}: the folders {', '.join(f.name for f in folders)} hold the same folders and "
            "no images; name them train/ with val/ or test/, or put images into class folders"
        )
    _refuse_images(root)
    _refuse_parts(folders)
    classes, others = _classes(root), []
    return Listing(classes, _list(root, root, classes, others), None, None, others)


def _classes(part: Path) -> tuple[str, ...]:
    folders = entries(part)[1]
    classes = tuple(sorted(folder.name for folder in folders))
    if len(classes) < 2:
        found = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{part} must hold at least two folders, one a class; found {found}")
    return classes


def _refuse_parts(folders: Sequence[Path]) -> None:
    """Class folders that are called like parts, where there are no parts."""
    suspects = [folder for folder in folders if folder.name.lower() in _PARTS]
    for folder in suspects:
        images, inner, _ = entries(folder)
        # "train" may be a vehicle and "valid" a ticket, as long as one of them holds images itself
        alone = len(suspects) == 1 and folder.name.lower() in ("train", "valid")
        if not alone or (inner and not images):
            raise DataError(
                f"{folder} would be a class, but is called like a part of the data; expected "
                "train/ with test/ or val/ beside it, each with one folder a class. If it is a "
                "class, give it another name"
            )


def _list(root: Path, part: Path, classes: tuple[str, ...], others: list[str]) -> Files:
    """The images in `part`, whose folders must be `classes`, class after class; `others` gets the
    files that are none."""
    _refuse_images(part)
    _, folders, besides = entries(part)
    others += besides
    found = {folder.name for folder in folders}
    for name in sorted(found.symmetric_difference(classes)):
        wrong = "is not a class of train/" if name in found else "is missing: train/ has that class"
        raise DataError(f"{part / name} {wrong}")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        walked = _walk(part / name, frozenset(), others)
        images = sorted(i.relative_to(root).as_posix() for i in walked)
        if not images:
            raise DataError(f"class folder {part / name} holds no images{_stray(others)}")
        paths += images
        labels += [label] * len(images)
    return Files(tuple(paths), torch.tensor(labels))


def _walk(folder: Path, above: frozenset[Path], others: list[str]) -> Iterator[Path]:
    """Every image below `folder`, links followed; `others` gets the other files."""
    real = folder.resolve()
    if real in above:
        raise DataError(f"{folder} is a link to a folder that it lies in")
    images, folders, besides = entries(folder)
    others += besides
    yield from images
    for inner in folders:
        yield from _walk(inner, above | {real}, others)


def entries(folder: Path) -> tuple[list[Path], list[Path], list[str]]:
    """Images, folders and other visible files in `folder`, each sorted."""
    try:
        with os.scandir(folder) as found:
            listed = sorted((entry.name, entry.is_dir()) for entry in found)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror})") from error
    images: list[Path] = []
    folders: list[Path] = []
    others: list[str] = []
    for name, is_folder in listed:
        if name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini"):
            continue
        if is_folder:
            folders.append(folder / name)
        elif name.lower().endswith(EXTENSIONS):
            images.append(folder / name)
        else:
            others.append(str(folder / name))
    return images, folders, others


def _refuse_images(folder: Path) -> None:
    if images := [str(image) for image in entries(folder)[0]]:
        lie = "lies" if len(images) == 1 else "lie"
        raise DataError(f"{shortened(images)} {lie} outside the class folders of {folder}")


def _stray(others: Sequence[str]) -> str:
    """The end of a message, on files that are no images."""
    if not others:
        return ""
    one, known = len(others) == 1, " ".join(extension[1:] for extension in EXTENSIONS)
    are = "is not an image" if one else "are not images"
    move = "it away, or let its name" if one else "them away, or let their names"
    return f"; {shortened(others)} {are} (known: {known}); move {move} begin with a dot"


def check(
    paths: Sequence[str], size: tuple[int, int] | None, *, verify: bool, others: Sequence[str] = ()
) -> tuple[int, int]:
    """Opens every file and gives the height and width to read them in: `size`, or the first
    image's, which all must then share. `verify` also checks what can be checked without decoding
    whole files, so that a streamed training does not meet it hours later: PNGs by their checksums,
    JPEGs by their end.
    `others`, which are no images, are refused together with what cannot be read."""
    sizes = np.zeros((len(paths), 2), dtype=np.int64)

    def header(position: int) -> None:
        def measure(image: Image.Image) -> tuple[int, int]:
            width, height = image.size
            if verify and image.format in ("JPEG", "MPO") and not _ends(paths[position]):
                image.load()  # fails where the file was cut off
            if size is None:  # a PNG may end with its EXIF data: this decodes it, so verifies it
                turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # stored on its side
                return (width, height) if turned else (height, width)
            if verify:
                image.verify()
            return height, width

        sizes[position] = with_image(paths[position], measure)

    _raise(for_each(len(paths), header), others)
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


def _ends(path: str) -> bool:
    """Whether a JPEG ends with its end marker; one that has more behind it may be whole, too."""
    with open(path, "rb") as file:
        file.seek(-2, os.SEEK_END)
        return file.read() == b"\xff\xd9"


def read(paths: Sequence[str], size: tuple[int, int]) -> Tensor:
    """The images as one uint8 tensor, N x 3 x `size`, decoded in threads."""
    images, errors = decode(paths, (3, *size))
    _raise(errors)
    return images


def _raise(errors: Mapping[int, str], others: Sequence[str] = ()) -> None:
    """Raises one error for all files that failed, and for `others`."""
    if errors or others:
        failed = shortened(list(errors.values()), "; ")
        raise DataError((failed + _stray(others)).removeprefix("; "))
