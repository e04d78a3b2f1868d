"""Images and labels from one .npz file, checked before anything is trained on them.

The file contains train_images, train_labels, test_images and test_labels; optionally classes, and
val_images with val_labels, which are then the validation split, whatever `val_share` is. Images are
uint8: N x H x W (greyscale), or N x H x W x C or N x C x H x W with C 1 or 3. The axis of length 1
or 3 is the channels; if both could be, the last one is. Labels are integers 0..C-1, N or N x 1, and
every class has training images.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from noiseproof.lab.data.images import DataError

__all__ = ["Arrays", "read_npz"]

_REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
_VALIDATION = ("val_images", "val_labels")


class Arrays(NamedTuple):
    """Training, test and perhaps validation data."""

    classes: tuple[str, ...]
    train_images: np.ndarray  # uint8, N x C x H x W
    train_labels: np.ndarray  # int64
    test_images: np.ndarray
    test_labels: np.ndarray
    val_images: np.ndarray | None = None
    val_labels: np.ndarray | None = None


def read_npz(path: Path, names: tuple[str, ...] | None = None) -> Arrays:
    """Reads and checks the arrays of a file.

    Args:
        path: the file.
        names: the classes, if the file does not name them.
    """
    try:
        # Opened here, because numpy leaves a damaged file open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            keys = list(file.files)
            known = (*_REQUIRED, *_VALIDATION, "classes")
            arrays = {key: file[key] for key in known if key in keys}
    except Exception as error:  # numpy, zipfile and zlib raise exceptions of their own
        reason = "no such file" if isinstance(error, FileNotFoundError) else error
        raise DataError(f"{path} cannot be read: {reason}") from error
    expected = _REQUIRED + (_VALIDATION if any(key in keys for key in _VALIDATION) else ())
    missing = [key for key in expected if key not in arrays]
    if missing:
        has = ", ".join(keys) or "nothing"
        raise DataError(f"{path} lacks {', '.join(missing)}; it contains {has}")
    splits = [key.removesuffix("_images") for key in expected if key.endswith("_images")]
    for split in splits:
        key, labels = f"{split}_images", arrays[f"{split}_labels"]
        arrays[key] = _channels_first(arrays[key], f"{path}: {key}")
        if labels.shape[1:] == (1,):
            labels = arrays[f"{split}_labels"] = labels[:, 0]
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"{path}: {split}_labels must be a vector of integers, "
                f"got {labels.dtype} of shape {labels.shape}"
            )
        if len(labels) != len(arrays[key]):
            raise DataError(f"{path}: {len(arrays[key])} {key}, but {len(labels)} {split}_labels")
    sizes = {split: arrays[f"{split}_images"].shape[1:] for split in splits}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{split} {size}" for split, size in sizes.items())
        raise DataError(f"{path}: images differ in C x H x W: {listed}")
    if "classes" in arrays:
        given = np.atleast_1d(arrays["classes"])  # bytes, as in CIFAR's own files, or text
        names = tuple(n.decode(errors="replace") if isinstance(n, bytes) else str(n) for n in given)
    if names is None:  # no more classes than images: a stray label must not make a billion names
        last = min(int(arrays["train_labels"].max()), len(arrays["train_images"]) - 1)
        names = tuple(str(c) for c in range(last + 1))
    if len(names) < 2:
        raise DataError(f"{path} must have at least two classes, got {len(names)}")
    for split in splits:
        labels = arrays[f"{split}_labels"].astype(np.int64)
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(wrong):
            raise DataError(
                f"{path}: {split}_labels must be in [0, {len(names)}), "
                f"got {labels[wrong[0]]} at index {wrong[0]}"
            )
        arrays[f"{split}_labels"] = labels
    empty = np.flatnonzero(np.bincount(arrays["train_labels"], minlength=len(names)) == 0)
    if len(empty):
        raise DataError(f"{path}: class {empty[0]} ({names[empty[0]]}) has no training images")
    return Arrays(names, *(arrays[key] for key in expected))


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
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
