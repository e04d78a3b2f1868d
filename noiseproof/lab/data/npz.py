"""Images and labels from one .npz file, checked before anything is trained on them.

The file contains train_images, train_labels, test_images and test_labels; optionally classes, and
val_images with val_labels, which are then the validation split, whatever `val_share` is. Images are
uint8: N x H x W (greyscale), or N x H x W x C or N x C x H x W with C 1 or 3. The axis of length 1
or 3 is the channels; if both could be, the last one is. Labels are integers 0..C-1, N or N x 1, and
every class has training images.

train_groups, which is optional too, has an integer per training image. Images with the same number,
such as frames of one video, stay together: validation images are split off in whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import SPLIT_OFF, Split, StoredSplits
from noiseproof.lab.files import refuse_bomb

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels", "val_images", "val_labels")
_OPTIONAL = ("classes", "train_groups")


def read_npz(path: Path, names: tuple[str, ...] | None = None) -> StoredSplits:
    """Reads and checks the arrays of a file.

    Args:
        path: the file.
        names: the classes, if the file does not name them.
    """
    arrays, keys = _read(path, (*_ARRAYS, *_OPTIONAL))
    has_validation = "val_images" in keys or "val_labels" in keys
    _require(path, _ARRAYS[: 6 if has_validation else 4], keys)
    parts = ("train", "test", "val") if has_validation else ("train", "test")
    splits = {part: _split(path, f"{part}_", arrays) for part in parts}
    sizes = {part: tuple(split.pixels.shape[1:]) for part, split in splits.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{part} {size}" for part, size in sizes.items())
        raise DataError(f"{path}: images differ in C x H x W: {listed}")
    train = splits["train"]
    names = _class_names(arrays) or names
    if names is None:  # no more classes than images: a stray label must not make a billion names
        names = tuple(str(c) for c in range(min(int(train.labels.max()) + 1, train.count)))
    for name in names:
        if ".." in name.replace("\\", "/").split("/"):
            raise DataError(
                f"{path}: a class is named {name!r}, which leads out of any folder that would be "
                "named after it; rename it"
            )
    if len(names) < 2:
        raise DataError(f"{path} must have at least two classes, got {len(names)}")
    for part, split in splits.items():
        wrong = ((split.labels < 0) | (split.labels >= len(names))).nonzero()
        if len(wrong):
            index = int(wrong[0])
            raise DataError(
                f"{path}: {part}_labels must be in [0, {len(names)}), "
                f"got {split.labels[index]} at index {index}"
            )
    empty = (train.labels.bincount(minlength=len(names)) == 0).nonzero()
    if len(empty):
        label = int(empty[0])
        raise DataError(f"{path}: class {label} ({names[label]}) has no training images")
    origin = "val_images" if has_validation else SPLIT_OFF
    return StoredSplits(names, train, splits.get("val"), splits["test"], origin)


def read_test_arrays(path: Path) -> tuple[Split, tuple[str, ...] | None]:
    """The test images of a file and the names of its classes, if it has names: test_images and
    test_labels, or images and labels.

    Args:
        path: the file.
    """
    names = ("test_images", "test_labels", "images", "labels")
    arrays, keys = _read(path, (*names, "classes"))
    if not {"images", "labels"} <= set(keys):
        _require(path, names[:2] if set(names[:2]) & set(keys) else names[2:], keys)
    prefix = "test_" if {"test_images", "test_labels"} <= set(keys) else ""
    return _split(path, prefix, arrays), _class_names(arrays)


def _read(path: Path, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of the named arrays that a file has, and the names of all that it has."""
    try:
        refuse_bomb(path)
        # Opened here, because numpy leaves a damaged file open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            keys = list(file.files)
            return {key: file[key] for key in names if key in keys}, keys
    except Exception as error:  # numpy, zipfile and zlib raise exceptions of their own
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        if "allow_pickle" in reason:
            reason = "it holds Python objects, which could run any code and are never loaded"
        raise DataError(f"{path} cannot be read: {reason}") from error


def _require(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    if missing := [name for name in names if name not in keys]:
        has = ", ".join(keys) or "nothing"
        raise DataError(f"{path} lacks {', '.join(missing)}; it contains {has}")


def _class_names(arrays: dict[str, np.ndarray]) -> tuple[str, ...] | None:
    if "classes" not in arrays:
        return None
    given = np.atleast_1d(arrays["classes"])  # bytes, as in CIFAR's own files, or text
    return tuple(n.decode(errors="replace") if isinstance(n, bytes) else str(n) for n in given)


def _split(path: Path, prefix: str, arrays: dict[str, np.ndarray]) -> Split:
    images = channels_first(arrays[f"{prefix}images"], f"{path}: {prefix}images")
    labels = _integers(path, prefix, "labels", arrays, len(images))
    if f"{prefix}groups" not in arrays:
        return Split.from_arrays(images, labels)
    groups = _integers(path, prefix, "groups", arrays, len(images))
    return Split.from_arrays(images, labels, groups)


def _integers(
    path: Path, prefix: str, kind: str, arrays: dict[str, np.ndarray], count: int
) -> np.ndarray:
    """The labels or groups of a split: an integer per image."""
    name = f"{prefix}{kind}"
    values = arrays[name]
    if values.shape[1:] == (1,):
        values = values[:, 0]
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(
            f"{path}: {name} must be a vector of integers, "
            f"got {values.dtype} of shape {values.shape}"
        )
    if len(values) != count:
        raise DataError(f"{path}: {count} {prefix}images, but {len(values)} {name}")
    return values.astype(np.int64)


def channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """The images as N x C x H x W; DataError if they are not images.

    Args:
        images: in any layout that a file may have.
        where: their file and name, for the message.
    """
    if images.dtype != np.uint8:
        raise DataError(f"{where} must be uint8, got {images.dtype}")
    if images.size == 0:
        raise DataError(f"{where} is empty: shape {images.shape}")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    raise DataError(
        f"{where} must be N x H x W, N x H x W x C or N x C x H x W with C 1 or 3, "
        f"got {images.shape}"
    )
