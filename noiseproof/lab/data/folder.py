"""Image folders: which files belong to which class, and their pixels. Nothing is skipped silently.

A folder contains either `train/` with `val/` or `test/` next to it, each with one folder per class,
or the class folders themselves. Class names are the folders' names, verbatim and sorted; a class
folder may have subfolders. Images are jpg, jpeg, png, bmp, webp, tif and tiff files, in upper or
lower case. Names that start with a dot, Thumbs.db and desktop.ini are ignored; any other file is an
error that names it, and so are an empty class, an unreadable image, and a class folder with the
name of a split.

The folder itself may be a link, and links inside it are followed, but not out of it unless that is
asked for: whoever made the folder could have images from elsewhere on this machine trained on and
shown in a report.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from noiseproof.lab.data.images import DataError, decode, for_each, shortened
from noiseproof.lab.data.splits import SPLIT_OFF, Split, StoredSplits

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_MOST_NAMES = 100  # of one folder, by links; links to links can give it any number of names
_SPLITS = ("train", "test", "val", "valid", "validation")


class _Entries(NamedTuple):
    """What a folder contains, without hidden files; each list is sorted."""

    images: list[Path]
    folders: list[Path]
    others: list[str]


def list_images(
    root: Path, size: tuple[int, int] | None, *, verify: bool, follow_links: bool = False
) -> tuple[StoredSplits, tuple[int, int]]:
    """The images of a folder by split, and the height and width to read them in. Next to `train/`,
    `test/` is the test split and `val/` the validation split; without `test/`, `val/` is the test
    split.

    Args:
        root: the folder.
        size: as for `check_images`.
        verify: as for `check_images`.
        follow_links: also follow links that lead out of the folder; by default they are refused.
    """
    within = None if follow_links else root
    images, folders, others = _entries(root, within)
    names = {folder.name for folder in folders}
    if "train" in names and names & {"val", "test"}:
        if unknown := sorted(names - {"train", "val", "test"}):
            raise DataError(
                f"{root} contains {unknown[0]!r} next to train/; expected only train/, val/ and "
                "test/"
            )
        parts = {name: root / name for name in sorted(names)}
    else:
        _refuse_splits(root, folders, within)
        parts, others = {"train": root}, []
    _refuse_images(root, images)
    classes = tuple(sorted(folder.name for folder in _entries(parts["train"], within).folders))
    if len(classes) < 2:
        got = f"only {classes[0]!r}" if classes else "none"
        raise DataError(
            f"{parts['train']} must contain at least two folders, one per class; got {got}"
        )
    splits = {name: _labelled(folder, classes, others, within) for name, folder in parts.items()}
    validation, test = ("val", "test") if "test" in splits else ("", "val")
    origins = [f"{name}/" if name in splits else SPLIT_OFF for name in (validation, test)]
    stored = StoredSplits(
        classes, splits["train"], splits.get(validation), splits.get(test), *origins
    )
    paths = [path for split in stored[1:4] if split for path in split.files or ()]
    return stored, check_images(paths, size, verify=verify, others=others)


def _refuse_splits(root: Path, folders: Sequence[Path], within: Path | None) -> None:
    """Refuses folders in `root` that look like splits, but not like train/ with val/ or test/."""
    if [folder.name for folder in folders] == ["train"]:
        raise DataError(
            f"{root} contains only train/; expected test/ or val/ next to it. To have test images "
            f"split off, use {root / 'train'} itself"
        )
    contents = [_entries(folder, within) for folder in folders]
    subfolders = [{folder.name for folder in entries.folders} for entries in contents]
    bare = bool(subfolders and subfolders[0]) and not any(entries.images for entries in contents)
    if bare and all(names == subfolders[0] for names in subfolders):
        raise DataError(
            f"{root}: the folders {', '.join(f.name for f in folders)} contain the same subfolders "
            "and no images; rename them to train/ with val/ or test/, or put images into class "
            "folders"
        )
    named = [(f, e) for f, e in zip(folders, contents, strict=True) if f.name.lower() in _SPLITS]
    for folder, (images, inner, _) in named:
        # "train" may be a vehicle and "valid" a ticket, if it is the only such name and has images
        alone = len(named) == 1 and folder.name.lower() in ("train", "valid")
        if not alone or (inner and not images):
            raise DataError(
                f"{folder} would be a class, but has the name of a split; expected train/ with "
                "test/ or val/ next to it, each with one folder per class. If it is a class, give "
                "it another name"
            )


def _refuse_images(folder: Path, images: Sequence[Path]) -> None:
    if images:
        are = "is" if len(images) == 1 else "are"
        outside = shortened([str(image) for image in images])
        raise DataError(f"{outside} {are} outside the class folders of {folder}")


def _labelled(
    folder: Path, classes: tuple[str, ...], others: list[str], within: Path | None
) -> Split:
    """The images in `folder`, whose folders must be `classes`, class by class; other files are
    added to `others`."""
    images, folders, other_files = _entries(folder, within)
    _refuse_images(folder, images)
    others += other_files
    names = {inner.name for inner in folders}
    for name in sorted(names.symmetric_difference(classes)):
        wrong = "is not a class of train/" if name in names else "is missing: train/ has that class"
        raise DataError(f"{folder / name} {wrong}")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images, other_files = walk(folder / name, within=within)
        others += other_files
        if not images:
            raise DataError(f"class folder {folder / name} contains no images{_not_images(others)}")
        paths += sorted(map(str, images))
        labels += [label] * len(images)
    return Split(None, tuple(paths), torch.tensor(labels))


def walk(
    folder: Path, *, once: bool = False, within: Path | None = None
) -> tuple[list[Path], list[str]]:
    """The images in `folder` and its subfolders, and the other files that are not hidden. Links are
    followed.

    Args:
        folder: where to start.
        once: visit a folder that links lead to only once, under its own name; by default it is
            visited under each of its names, and a link to a folder that contains it is a DataError.
        within: a folder that links must not lead out of; by default they may lead anywhere.
    """
    images: list[Path] = []
    others: list[str] = []
    visited: Counter[Path] = Counter()
    # Links last: by then a folder that they lead to has been visited under its own name.
    queue: list[tuple[bool, Path, frozenset[Path]]] = [(False, folder, frozenset())]
    while queue:
        _, current, parents = heapq.heappop(queue)
        real = current.resolve()
        if once and real in visited:
            continue
        if real in parents:
            raise DataError(f"{current} is a link to a folder that contains it")
        visited[real] += 1
        if visited[real] > _MOST_NAMES:
            raise DataError(f"links in {folder} lead to {real} by more than {_MOST_NAMES} names")
        entries = _entries(current, within)
        images += entries.images
        others += entries.others
        for inner in entries.folders:
            heapq.heappush(queue, (inner.is_symlink(), inner, parents | {real}))
    return images, others


def image_files(paths: Sequence[str], warn: Callable[[str], object]) -> list[str]:
    """The files among `paths` and the images in the folders among them, sorted per folder. Names
    that start with a dot are skipped silently.

    Args:
        paths: files, and folders that are searched for images.
        warn: called with a message if a folder contains other files, which are skipped.
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        images, others = walk(Path(path), once=True)
        files += sorted(map(str, images))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            known = " ".join(extension[1:] for extension in EXTENSIONS)
            warn(f"skipped {min(others)}{more}: expected images ({known})")
    return files


def _entries(folder: Path, within: Path | None = None) -> _Entries:
    try:
        with os.scandir(folder) as scanned:
            listed = sorted(
                (e.name, _is_folder(e, within)) for e in scanned if not _is_hidden(e.name)
            )
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror})") from error
    entries = _Entries([], [], [])
    for name, is_folder in listed:
        if is_folder:
            entries.folders.append(folder / name)
        elif name.lower().endswith(EXTENSIONS):
            entries.images.append(folder / name)
        else:
            entries.others.append(str(folder / name))
    return entries


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini")


def _is_folder(entry: os.DirEntry[str], within: Path | None) -> bool:
    """DataError for a link that leads out of `within`, or nowhere but to itself."""
    if within is not None and entry.is_symlink():
        target = os.path.realpath(entry.path)
        if not Path(target).is_relative_to(within.resolve()):
            raise DataError(
                f"{entry.path} is a link to {target}, outside {within}; replace it by a copy, or "
                "allow such links with --follow-links"
            )
    try:
        return entry.is_dir()
    except OSError as error:  # too many levels of links
        raise DataError(f"{entry.path} cannot be followed ({error.strerror})") from error


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

    def measure(position: int, image: Image.Image) -> None:
        width, height = image.size
        if verify and image.format in ("JPEG", "MPO") and not _has_end(paths[position]):
            image.load()  # fails if the file is truncated
        if size is None:  # a PNG may end with its EXIF data: this decodes it, so verifies it
            turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # stored on its side
            sizes[position] = (width, height) if turned else (height, width)
        elif verify:
            image.verify()

    _raise(for_each(paths, measure), others)
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
    """Whether a JPEG ends with its end marker; one with more data after it may be complete too."""
    with open(path, "rb") as file:
        file.seek(-2, os.SEEK_END)
        return file.read() == b"\xff\xd9"


def read_images(paths: Sequence[str], size: tuple[int, int]) -> Tensor:
    """The images as one uint8 tensor, N x 3 x `size`; one DataError reports all unreadable ones."""
    images, errors = decode(paths, (3, *size))
    _raise(errors)
    return images


def hashed_files(paths: Sequence[str]) -> list[bytes]:
    """The SHA-256 of the bytes of each image file; one DataError reports all unreadable ones."""
    hashes = [b""] * len(paths)

    def read(position: int, _image: Image.Image) -> None:
        hashes[position] = hashlib.sha256(Path(paths[position]).read_bytes()).digest()

    _raise(for_each(paths, read))
    return hashes


def _raise(errors: dict[int, str], others: Sequence[str] = ()) -> None:
    if errors or others:
        failed = shortened(list(errors.values()), "; ")
        raise DataError((failed + _not_images(others)).removeprefix("; "))
