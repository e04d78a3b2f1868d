"""Data to learn from, always as train, validation and test: digits, CIFAR-10, SVHN, .npz, a folder.

The test images are fixed by the data (or, for a folder without a test part, by `split_seed`) and
are never part of training or validation. Validation is taken from the training images, stratified
by class. Images are uint8, N x C x H x W; a large folder stays on disk as file names for
`noiseproof.lab.data.stream`.

>>> digits = load_dataset(config.Data("digits"))
>>> digits.size, digits.train.count, digits.test.count
((1, 8, 8), 1131, 540)
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from noiseproof.lab import config
from noiseproof.lab.config import DATASETS
from noiseproof.lab.data import folder, npz
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.npz import Arrays
from noiseproof.lab.data.splits import TEST, split_off, stratified

__all__ = ["Dataset", "Split", "load_dataset"]

MEMORY_LIMIT = 2 << 30  # bytes of pixels that storage "auto" keeps in memory
STATISTICS_SAMPLE = 500  # images of a streamed folder that mean and std are taken from
DIGITS_TEST_SHARE = 0.3
_DIGIT_NAMES = tuple("0123456789")
_OBJECTS = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR10_NAMES = tuple(_OBJECTS.split())


class Split(NamedTuple):
    """Labelled images: pixels in memory, or files to be streamed; the other one is None."""

    images: Tensor | None  # uint8, N x C x H x W, contiguous, on the CPU
    files: tuple[str, ...] | None
    labels: Tensor  # int64, N

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """How many images; len() of a named tuple is the number of its fields."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train, validation and test data, and what a model and a table need to know of them.

    mean, std: per channel, of the training images in [0, 1] (of a streamed folder, of 500 of them
    spread evenly); a channel that never varies has std 1.
    fingerprint: a hash of the test images and labels, the same on every machine; of a folder, of
    the test files' relative names and sizes in bytes. Two runs may be compared image by image only
    where it is equal.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split
    size: tuple[int, int, int]  # C, H, W
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    in_memory: bool
    validation_from: str = "split off"  # a folder's part, such as val/, or that it was split off
    test_from: str = ""  # nothing where the data have test images of their own


def load_dataset(config: config.Data) -> Dataset:
    """The dataset that `config.data` names, or a DataError (a ValueError) that says what is wrong.

    - digits: 30 % are the test set, drawn once and for all; `split_seed` moves validation alone.
    - cifar10, svhn: `data_dir/cifar10.npz` or `svhn.npz` where it exists, otherwise torchvision's
      files there, downloaded when `download` is set.
    - PATH.npz: see `noiseproof.lab.data.npz`.
    - PATH/: see `noiseproof.lab.data.folder`; a folder's own `val/` beside `test/` is the
      validation set, whatever `val_share` says.
    """
    if not 0 <= config.val_share < 1:
        raise DataError(f"val_share must lie in [0, 1), got {config.val_share}")
    if config.data == "digits":
        return _digits(config)
    if config.data in ("cifar10", "svhn"):
        path = Path(config.data_dir).expanduser() / f"{config.data}.npz"
        names = _CIFAR10_NAMES if config.data == "cifar10" else _DIGIT_NAMES
        arrays = npz.read(path, names) if path.exists() else _torchvision(config, names)
        return _in_memory(config, config.data, arrays)
    path = Path(config.data).expanduser()
    if path.is_dir():
        return _folder(Path(os.path.abspath(path)), config)
    if path.suffix.lower() == ".npz":
        return _in_memory(config, path.stem, npz.read(path))
    near = difflib.get_close_matches(config.data, ["digits", "cifar10", "svhn"], 1)
    raise DataError(
        f"there is no dataset, folder or .npz file {config.data!r}; "
        + (f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(DATASETS)}")
    )


def _digits(config: config.Data) -> Dataset:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    train, test = stratified(
        torch.from_numpy(labels), DIGITS_TEST_SHARE, 0, TEST, classes=_DIGIT_NAMES
    )
    arrays = Arrays(_DIGIT_NAMES, images[train], labels[train], images[test], labels[test])
    return _in_memory(config, "digits", arrays)


def _torchvision(config: config.Data, names: tuple[str, ...]) -> Arrays:
    from torchvision import datasets

    root, found = Path(config.data_dir).expanduser(), []
    try:
        for part in ("train", "test"):
            if config.data == "cifar10":
                cifar = datasets.CIFAR10(root, train=part == "train", download=config.download)
                labels = np.asarray(cifar.targets, dtype=np.int64)
                found += [np.asarray(cifar.data).transpose(0, 3, 1, 2), labels]
            else:
                svhn = datasets.SVHN(root, split=part, download=config.download)
                found += [svhn.data, svhn.labels]
    except Exception as error:  # the network, the disk, or a damaged file: many kinds
        files = "cifar-10-batches-py" if config.data == "cifar10" else "*_32x32.mat"
        why = "and could not be downloaded" if config.download else "and --download is off"
        raise DataError(
            f"{config.data} is not in the folder {str(root)!r} {why} "
            f"({type(error).__name__}: {error}); "
            f"put {files} or {config.data}.npz there, or name another folder with --data-dir"
        ) from error
    return Arrays(names, *found)


def _in_memory(config: config.Data, name: str, arrays: Arrays) -> Dataset:
    if config.augment == "road":
        raise DataError(f"the road augmentation is for photographs in a folder, got {name}")
    if config.storage == "stream":
        raise DataError(f"only an image folder can be streamed, got {name}; use --storage memory")
    h, w = arrays.train_images.shape[2:]
    if config.img_size is not None and tuple(config.img_size) != (h, w):
        raise DataError(
            f"img_size resizes image folders alone; {name} is {h} x {w}, got {config.img_size}"
        )
    images, labels, test_images, test_labels = map(_tensor, arrays[1:5])
    validation, origin = None, "split off"
    if arrays.val_images is not None and arrays.val_labels is not None:
        validation = Split(_tensor(arrays.val_images), None, _tensor(arrays.val_labels))
        origin = "val_images"
    elif config.val_share > 0:
        rest, kept = split_off(labels, config, arrays.classes)
        validation = Split(images[kept], None, labels[kept])
        images, labels = images[rest], labels[rest]
    mean, std = _statistics(images)
    shape = str(tuple(test_images.shape)).encode()
    return Dataset(
        name=name,
        classes=arrays.classes,
        train=Split(images, None, labels),
        validation=validation,
        test=Split(test_images, None, test_labels),
        size=(images.shape[1], h, w),
        mean=mean,
        std=std,
        fingerprint=_fingerprint(test_labels, [shape, test_images.flatten().numpy().data]),
        in_memory=True,
        validation_from=origin,
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _folder(root: Path, config: config.Data) -> Dataset:
    if config.img_size is not None and (len(config.img_size) != 2 or min(config.img_size) < 1):
        raise DataError(f"img_size must be a height and a width, got {config.img_size}")
    classes, train, validation, test, others = folder.scan(root)
    parts = [part for part in (train, validation, test) if part is not None]
    paths = [os.path.join(root, path) for part in parts for path in part.paths]
    verify = config.storage != "memory"
    size = folder.check(paths, config.img_size, verify=verify, others=others)
    # The parts that are folders of their own; the others are split off
    own = [part and part.paths[0].partition("/")[0] + "/" for part in (validation, test)]
    if test is None:
        if not 0 < config.test_share < 1:
            raise DataError(f"test_share must lie in (0, 1), got {config.test_share}")
        rest, kept = stratified(train.labels, config.test_share, config.split_seed, TEST, classes)
        train, test = train.take(rest), train.take(kept)
    if validation is None:
        rest, kept = split_off(train.labels, config, classes)
        train, validation = train.take(rest), train.take(kept) if len(kept) else None

    stream = config.storage == "stream"
    if config.storage == "auto":
        stream = len(paths) * 3 * size[0] * size[1] > MEMORY_LIMIT

    parts = [part for part in (train, validation, test) if part is not None]
    files = [tuple(os.path.join(root, path) for path in part.paths) for part in parts]
    if stream:
        splits = [Split(None, f, part.labels) for f, part in zip(files, parts, strict=True)]
    else:  # all at once, so that all that cannot be read is told at once
        pixels = folder.read([path for f in files for path in f], size).split(list(map(len, files)))
        splits = [Split(p, None, part.labels) for p, part in zip(pixels, parts, strict=True)]
    mark = _fingerprint(
        test.labels,
        (os.fsencode(f"{path}\0{os.path.getsize(root / path)}\n") for path in test.paths),
    )
    learnt = splits[0]
    sample = learnt.images
    if sample is None:
        every = math.ceil(learnt.count / STATISTICS_SAMPLE)
        sample = folder.read((learnt.files or ())[::every], size)
    mean, std = _statistics(sample)
    return Dataset(
        name=root.name,
        classes=classes,
        train=learnt,
        validation=None if validation is None else splits[1],
        test=splits[-1],
        size=(3, *size),
        mean=mean,
        std=std,
        fingerprint=mark,
        in_memory=not stream,
        validation_from=own[0] or "split off",
        test_from=own[1] or "split off",
    )


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images.unbind(1):
        counts = sum(torch.bincount(part.flatten(), minlength=256) for part in channel.split(1024))
        weights = torch.as_tensor(counts).double() / channel.numel()
        mean = (weights * values).sum()
        std = (weights * (values - mean) ** 2).sum().sqrt()
        means.append(mean.item())
        stds.append(std.item() or 1.0)
    return tuple(means), tuple(stds)


def _fingerprint(labels: Tensor, content: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(labels.numpy().astype("<i8").tobytes())
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]
