"""Image folders: which files belong to which class, and their pixels. Nothing is skipped silently.

A folder contains either `train/` with `val/` or `test/` next to it, each with one folder per class,
or the class folders themselves. Class names are the folders' names, verbatim and sorted; a class
folder may have subfolders. Images are files with one of `EXTENSIONS`, in upper or lower case. Names
that start with a dot, Thumbs.db and desktop.ini are ignored; texts, tables and the like are
reported and skipped. Any other file is an error that names it, and so are an empty class, an
unreadable image, and a class folder with the name of a split.

The folder itself may be a link, and links inside it are followed, but not out of it unless that is
asked for: whoever made the folder could have images from elsewhere on this machine trained on and
shown in a report.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from noiseproof.lab.data.file_facts import DEEP, FRAMES, TRANSPARENT, Facts, file_facts
from noiseproof.lab.data.images import (
    STRETCHED,
    DataError,
    Reading,
    before_crop,
    decode,
    reasons,
    shortened,
)
from noiseproof.lab.data.splits import SPLIT_OFF, Split, StoredSplits

EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".heic", ".heif"),
)
_DOCUMENTS = (  # lie next to images, and are none
    *(".md", ".txt", ".rst", ".pdf", ".html", ".htm", ".log", ".doc", ".docx", ".xls", ".xlsx"),
    *(".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".py", ".ipynb"),
    *(".xmp", ".aae", "readme", "license", "licence"),
)
_RAW = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2")
LONGER_SIDE = 224  # the most pixels that images get without pretrained weights
_SAMPLE = 20  # 16-bit images whose range is looked at
_MOST_NAMES = 100  # of one folder, by links; links to links can give it any number of names
_SPLITS = ("train", "test", "val", "valid", "validation")


class _Entries(NamedTuple):
    """What a folder contains, without hidden files; each list is sorted."""

    images: list[str]
    folders: list[Path]
    others: list[str]


class Listing(NamedTuple):
    """The images of a folder.

    Attributes:
        stored: the files by split.
        size: the height and width to read them in.
        resized: how they get that size, in words.
        notes: what else a user should know about the files.
    """

    stored: StoredSplits
    size: tuple[int, int]
    resized: str
    notes: tuple[str, ...]


Size = tuple[int, int] | Literal["auto", "native"] | None


def list_images(
    root: Path,
    size: Size,
    *,
    verify: bool,
    reading: Reading = STRETCHED,
    follow_links: bool = False,
    same_subfolders: bool = False,
    min_classes: int = 2,
) -> Listing:
    """The images of a folder by split. Next to `train/`, `test/` is the test split and `val/` the
    validation split; without `test/`, `val/` is the test split.

    Args:
        root: the folder.
        size: height and width; None or "native" for those of the first image, which all others must
            share; "auto" for the median, reduced to at most 224 for the longer side.
        verify: also check what can be checked without decoding whole files, so that a streamed
            training does not fail hours later: PNGs by their checksums, JPEGs by their end.
        reading: how files get that size; with "auto" they are cropped.
        follow_links: also follow links that lead out of the folder; by default they are refused.
        same_subfolders: accept folders that all have the same subfolders and no images of their
            own. They can be classes, divided by day, but also splits, divided by class, so that by
            default they are refused.
        min_classes: 2, since nothing is learned from one; 1 for images that are only tested.
    """
    if size == "auto":
        reading = reading._replace(crop_share=1.0)
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
        _refuse_splits(root, folders, within, same_subfolders)
        parts, others = {"train": root}, []
    _refuse_images(root, images)
    classes = tuple(sorted(folder.name for folder in _entries(parts["train"], within).folders))
    if len(classes) < min_classes:
        got = f"only {classes[0]!r}" if classes else "none"
        least = "at least two folders, one per class" if min_classes > 1 else "one folder per class"
        raise DataError(f"{parts['train']} must contain {least}; got {got}")
    splits = {
        name: _labelled(folder, classes, others, within)._replace(reading=reading)
        for name, folder in parts.items()
    }
    validation, test = ("val", "test") if "test" in splits else ("", "val")
    origins = [f"{name}/" if name in splits else SPLIT_OFF for name in (validation, test)]
    stored = StoredSplits(
        classes, splits["train"], splits.get(validation), splits.get(test), *origins
    )
    paths = [path for split in stored[1:4] if split for path in split.files or ()]
    documents = [name for name in others if name.lower().endswith(_DOCUMENTS)]
    exact = size in (None, "native")
    facts, errors = file_facts(paths, str(root), verify=verify, exact=exact)
    _raise(errors, [name for name in others if name not in documents])
    if not isinstance(size, tuple):
        size = _shared_size(paths, facts) if exact else _reduced(facts["height"], facts["width"])
    notes = [*_skipped(documents), *_kinds_of_pixels(paths, facts["flags"], reading)]
    return Listing(stored, size, _resized(facts, size, reading), tuple(notes))


def _refuse_splits(
    root: Path, folders: Sequence[Path], within: Path | None, same_subfolders: bool
) -> None:
    """Refuses folders in `root` that look like splits, but not like train/ with val/ or test/."""
    if [folder.name for folder in folders] == ["train"]:
        raise DataError(
            f"{root} contains only train/; expected test/ or val/ next to it. To have test images "
            f"split off, use {root / 'train'} itself"
        )
    contents = [_entries(folder, within) for folder in folders]
    subfolders = [{folder.name for folder in entries.folders} for entries in contents]
    bare = bool(subfolders and subfolders[0]) and not any(entries.images for entries in contents)
    if bare and not same_subfolders and all(names == subfolders[0] for names in subfolders):
        raise DataError(
            f"{root}: the folders {', '.join(f.name for f in folders)} contain the same subfolders "
            "and no images. If they are splits, rename them to train/ with val/ or test/; if they "
            "are classes, --group folder keeps images of a subfolder together"
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


def _refuse_images(folder: Path, images: Sequence[str]) -> None:
    if images:
        are = "is" if len(images) == 1 else "are"
        outside = shortened(images)
        raise DataError(
            f"{outside} {are} outside the class folders of {folder}; expected one folder per "
            "class, with its images inside"
        )


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
        paths += sorted(images)
        labels += [label] * len(images)
    return Split(None, tuple(paths), torch.tensor(labels))


def walk(
    folder: Path, *, once: bool = False, within: Path | None = None
) -> tuple[list[str], list[str]]:
    """The images in `folder` and its subfolders, and the other files that are not hidden. Links are
    followed.

    Args:
        folder: where to start.
        once: visit a folder that links lead to only once, under its own name; by default it is
            visited under each of its names, and a link to a folder that contains it is a DataError.
        within: a folder that links must not lead out of; by default they may lead anywhere.
    """
    images: list[str] = []
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
        files += sorted(images)
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
            entries.images.append(os.path.join(folder, name))
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
    if any(name.lower().endswith(_RAW) for name in others):
        move = "raw images elsewhere after converting them to JPEG, PNG or TIFF, or let their names"
    return f"; {shortened(others)} {are} (known: {known}); move {move} start with a dot"


def _shared_size(paths: Sequence[str], facts: Facts) -> tuple[int, int]:
    """The height and width that all images have."""
    height, width = int(facts["height"][0]), int(facts["width"][0])
    odd = np.flatnonzero((facts["height"] != height) | (facts["width"] != width))
    if len(odd):
        h, w = facts["height"][odd[0]], facts["width"][odd[0]]
        raise DataError(
            f"{paths[odd[0]]} is {h} x {w}, but {paths[0]} is {height} x {width} (height x width): "
            f"set one size for all with --img-size {height} {width}, or --img-size auto"
        )
    return height, width


def _reduced(heights: NDArray[np.integer], widths: NDArray[np.integer]) -> tuple[int, int]:
    """The median height and width, reduced together until the longer side has at most 224 pixels.

    >>> _reduced(np.array([3000, 3000, 32]), np.array([4000, 4000, 32]))
    (168, 224)
    """
    middle = (len(heights) - 1) // 2  # of an even number the lower one, which is some image's
    height, width = (int(np.partition(sides, middle)[middle]) for sides in (heights, widths))
    scale = min(1.0, LONGER_SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _resized(facts: Facts, size: tuple[int, int], reading: Reading) -> str:
    """How images of these sizes get the size that they are read in, and how many are enlarged."""
    height, width = before_crop(*size, reading.crop_share or 1.0)
    enlarged = int(((facts["height"] < height) | (facts["width"] < width)).sum())
    pixels = facts["height"].astype(np.int64) * facts["width"]
    ends = facts[np.lexsort((facts["height"], pixels))[[0, -1]]]
    sizes = list(dict.fromkeys(f"{f['height']} x {f['width']}" for f in ends))
    result = f"{size[0]} x {size[1]}"
    if sizes == [result] and not enlarged:
        return f"images {result}"
    verb = "stretched" if reading.crop_share is None else "resized and cropped"
    verb += f", from {' to '.join(sizes)}"
    if enlarged:
        verb += ", all enlarged" if enlarged == len(facts) else f", {enlarged:,} enlarged"
    return f"images {result} ({verb})"


def _skipped(documents: Sequence[str]) -> list[str]:
    if not documents:
        return []
    are = "is not an image" if len(documents) == 1 else "are not images"
    return [f"skipped {shortened(documents)}, which {are}"]


def _kinds_of_pixels(
    paths: Sequence[str], flags: NDArray[np.uint8], reading: Reading
) -> Iterator[str]:
    """What happens to images that are not plain 8-bit pictures, in words."""
    kinds = {
        TRANSPARENT: ("images with transparency", f"composited on {reading.background}"),
        FRAMES: ("images of several frames or pages", "of which the first is used"),
        DEEP: ("16-bit images", "reduced to 8 bits"),
    }
    for flag, (kind, consequence) in kinds.items():
        with_flag = np.flatnonzero(flags & flag)
        if not len(with_flag):
            continue
        files = [paths[int(i)] for i in with_flag[:_SAMPLE]]
        yield f"{kind}: {len(with_flag):,}, {consequence} ({files[0]})"
        if flag == DEEP and (highest := _highest_value(files)):
            yield (
                f"the 16-bit images use values up to {highest:,} of 65,535, so they will be dark: "
                "scale them up first if that is not intended"
            )


def _highest_value(paths: Sequence[str]) -> int | None:
    """The highest value in 16-bit greyscale images, if a sensor with fewer bits made them."""
    highest = 0
    for path in paths:
        with contextlib.suppress(OSError), Image.open(path) as image:
            if not image.mode.startswith("I"):
                return None
            highest = max(highest, int(np.asarray(image).max()))
    return highest if 255 < highest < 1 << 14 else None


def read_images(
    paths: Sequence[str], size: tuple[int, int], reading: Reading = STRETCHED
) -> Tensor:
    """The images as one uint8 tensor, N x 3 x `size`; one DataError reports all unreadable ones."""
    images, errors = decode(paths, (3, *size), reading, progress=f"reading {len(paths):,} images")
    _raise(errors)
    return images


def _raise(errors: dict[int, str], others: Sequence[str] = ()) -> None:
    if errors or others:
        raise DataError((reasons(errors) + _not_images(others)).removeprefix("; "))
