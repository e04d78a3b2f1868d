"""Image folders: which files belong to which class, and their pixels. Nothing is skipped silently.

A folder contains either `train/` with `val/` or `test/` next to it, each with one folder per class,
or the class folders themselves. Class names are the folders' names, verbatim and sorted; a class
folder may have subfolders. Images are jpg, jpeg, png, bmp, webp, tif and tiff files, in upper or
lower case. Names that start with a dot, Thumbs.db and desktop.ini are ignored; any other file is an
error that names it, and so are an empty class, an unreadable image, and a class folder with the
name of a split.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from noiseproof.lab.data.images import DataError, decode, for_each, shortened, with_image

__all__ = ["Files", "Listing", "check_images", "list_images", "read_images", "walk"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_SPLITS = ("train", "test", "val", "valid", "validation")


class Files(NamedTuple):
    """Some images of a folder: paths relative to it, with '/', sorted by class, and labels."""

    paths: tuple[str, ...]
    labels: Tensor  # int64, N

    def take(self, indices: Tensor) -> Files:
        return Files(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])


class Listing(NamedTuple):
    """The images of a folder by split; `test` is None if the folder has no test split."""

    classes: tuple[str, ...]
    train: Files
    validation: Files | None
    test: Files | None
    others: list[str]  # full paths of files that are not images; `check_images` refuses them


class _Entries(NamedTuple):
    """What a folder contains, without hidden files; each list is sorted."""

    images: list[Path]
    folders: list[Path]
    others: list[str]


def list_images(root: Path) -> Listing:
    """Lists the images of `root`. Next to `train/`, `test/` is the test split and `val/` the
    validation split; without `test/`, `val/` is the test split."""
    _, folders, others = _entries(root)
    names = {folder.name for folder in folders}
    if "train" not in names or not names & {"val", "test"}:
        return _without_splits(root, folders)
    unknown = sorted(names - {"train", "val", "test"})
    if unknown:
        raise DataError(
            f"{root} contains {unknown[0]!r} next to train/; expected only train/, val/ and test/"
        )
    _refuse_images(root)
    classes = _classes(root / "train")
    splits = {name: _labelled(root, root / name, classes, others) for name in sorted(names)}
    val = splits.get("val")
    validation, test = (val, splits["test"]) if "test" in splits else (None, val)
    return Listing(classes, splits["train"], validation, test, others)


def _without_splits(root: Path, folders: Sequence[Path]) -> Listing:
    """Class folders directly in `root`, unless they look like splits under other names."""
    if [folder.name for folder in folders] == ["train"]:
        raise DataError(
            f"{root} contains only train/; expected test/ or val/ next to it. To have test images "
            f"split off, use {root / 'train'} itself"
        )
    contents = [_entries(folder) for folder in folders]
    subfolders = [{folder.name for folder in entries.folders} for entries in contents]
    bare = bool(subfolders and subfolders[0]) and not any(entries.images for entries in contents)
    if bare and all(names == subfolders[0] for names in subfolders):
        raise DataError(
            f"{root}: the folders {', '.join(f.name for f in folders)} contain the same subfolders "
            "and no images; rename them to train/ with val/ or test/, or put images into class "
            "folders"
        )
    _refuse_images(root)
    _refuse_splits(folders)
    classes, others = _classes(root), []
    return Listing(classes, _labelled(root, root, classes, others), None, None, others)


def _classes(folder: Path) -> tuple[str, ...]:
    classes = tuple(sorted(inner.name for inner in _entries(folder).folders))
    if len(classes) < 2:
        got = f"only {classes[0]!r}" if classes else "none"
        raise DataError(f"{folder} must contain at least two folders, one per class; got {got}")
    return classes


def _refuse_splits(folders: Sequence[Path]) -> None:
    """Refuses class folders with the name of a split, where there are no splits."""
    suspects = [folder for folder in folders if folder.name.lower() in _SPLITS]
    for folder in suspects:
        images, subfolders, _ = _entries(folder)
        # "train" may be a vehicle and "valid" a ticket, if only one of them is there, with images
        alone = len(suspects) == 1 and folder.name.lower() in ("train", "valid")
        if not alone or (subfolders and not images):
            raise DataError(
                f"{folder} would be a class, but has the name of a split; expected train/ with "
                "test/ or val/ next to it, each with one folder per class. If it is a class, give "
                "it another name"
            )


def _refuse_images(folder: Path) -> None:
    if images := [str(image) for image in _entries(folder).images]:
        are = "is" if len(images) == 1 else "are"
        raise DataError(f"{shortened(images)} {are} outside the class folders of {folder}")


def _labelled(root: Path, split: Path, classes: tuple[str, ...], others: list[str]) -> Files:
    """The images in `split`, whose folders must be `classes`, class by class; other files are added
    to `others`."""
    _refuse_images(split)
    entries = _entries(split)
    others += entries.others
    names = {folder.name for folder in entries.folders}
    for name in sorted(names.symmetric_difference(classes)):
        wrong = "is not a class of train/" if name in names else "is missing: train/ has that class"
        raise DataError(f"{split / name} {wrong}")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images, besides = walk(split / name)
        others += besides
        if not images:
            raise DataError(f"class folder {split / name} contains no images{_not_images(others)}")
        paths += sorted(image.relative_to(root).as_posix() for image in images)
        labels += [label] * len(images)
    return Files(tuple(paths), torch.tensor(labels))


def walk(folder: Path, *, once: bool = False) -> tuple[list[Path], list[str]]:
    """The images in `folder` and its subfolders, and the other files that are not hidden. Links are
    followed.

    Args:
        folder: where to start.
        once: visit a folder that links lead to only once, under its own name; by default it is
            visited under each of its names, and a link to a folder that contains it is a DataError.
    """
    images: list[Path] = []
    others: list[str] = []
    visited: set[Path] = set()
    # Links last: by then a folder that they lead to has been visited under its own name.
    queue: list[tuple[bool, Path, frozenset[Path]]] = [(False, folder, frozenset())]
    while queue:
        _, current, parents = heapq.heappop(queue)
        real = current.resolve()
        if once and real in visited:
            continue
        if real in parents:
            raise DataError(f"{current} is a link to a folder that contains it")
        visited.add(real)
        entries = _entries(current)
        images += entries.images
        others += entries.others
        for inner in entries.folders:
            heapq.heappush(queue, (inner.is_symlink(), inner, parents | {real}))
    return images, others


def _entries(folder: Path) -> _Entries:
    try:
        with os.scandir(folder) as scanned:
            listed = sorted((entry.name, entry.is_dir()) for entry in scanned)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror})") from error
    entries = _Entries([], [], [])
    for name, is_folder in listed:
        if name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini"):
            continue
        if is_folder:
            entries.folders.append(folder / name)
        elif name.lower().endswith(EXTENSIONS):
            entries.images.append(folder / name)
        else:
            entries.others.append(str(folder / name))
    return entries


def _not_images(others: Sequence[str]) -> str:
    """The end of an error message, about files that are not images."""
    if not others:
        return ""
    single, known = len(others) == 1, " ".join(extension[1:] for extension in EXTENSIONS)
    are = "is not an image" if single else "are not images"
    move = "it elsewhere, or let its name" if single else "them elsewhere, or let their names"
    return f"; {shortened(others)} {are} (known: {known}); move {move} start with a dot"


def check_images(
    paths: Sequence[str], size: tuple[int, int] | None, *, verify: bool, others: Sequence[str] = ()
) -> tuple[int, int]:
    """Opens every file and returns the height and width to read them in. One DataError reports all
    unreadable files.

    Args:
        paths: the image files.
        size: height and width; None for those of the first image, which all others must share.
        verify: also check what can be checked without decoding whole files, so that a streamed
            training does not fail hours later: PNGs by their checksums, JPEGs by their end.
        others: files that are not images, to be refused together with the unreadable ones.
    """
    sizes = np.zeros((len(paths), 2), dtype=np.int64)

    def read_header(position: int) -> None:
        def measure(image: Image.Image) -> tuple[int, int]:
            width, height = image.size
            if verify and image.format in ("JPEG", "MPO") and not _has_end(paths[position]):
                image.load()  # fails if the file is truncated
            if size is None:  # a PNG may end with its EXIF data: this decodes it, so verifies it
                turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # stored on its side
                return (width, height) if turned else (height, width)
            if verify:
                image.verify()
            return height, width

        sizes[position] = with_image(paths[position], measure)

    _raise(for_each(len(paths), read_header), others)
    if size is not None:
        return size
    odd = np.flatnonzero((sizes != sizes[0]).any(axis=1))
    height, width = map(int, sizes[0])
    if len(odd):
        h, w = map(int, sizes[odd[0]])
        raise DataError(
            f"{paths[odd[0]]} is {h} x {w}, but {paths[0]} is {height} x {width} (height x width): "
            f"set one size for all with --img-size {height} {width}"
        )
    return height, width


def _has_end(path: str) -> bool:
    """Whether a JPEG ends with its end marker; one with more data behind it may be complete too."""
    with open(path, "rb") as file:
        file.seek(-2, os.SEEK_END)
        return file.read() == b"\xff\xd9"


def read_images(paths: Sequence[str], size: tuple[int, int]) -> Tensor:
    """The images as one uint8 tensor, N x 3 x `size`; one DataError reports all unreadable ones."""
    images, errors = decode(paths, (3, *size))
    _raise(errors)
    return images


def _raise(errors: Mapping[int, str], others: Sequence[str] = ()) -> None:
    if errors or others:
        failed = shortened(list(errors.values()), "; ")
        raise DataError((failed + _not_images(others)).removeprefix("; "))
