"""Datasets, split into training, validation and test images: digits, CIFAR-10, SVHN, .npz, folders.

The test images are fixed by the data (or, for a folder without a test split, by `split_seed`) and
are never part of training or validation. Validation images are split off the training images,
stratified by class, unless the data have their own. Images are uint8, N x C x H x W; a large folder
stays on disk, as file names for `noiseproof.lab.data.stream`.

>>> digits = load_dataset(Data("digits"))
>>> digits.size, digits.train.count, digits.test.count
((1, 8, 8), 1131, 540)
"""

from __future__ import annotations

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

from noiseproof.lab.config import DATASETS, NAMED, Data, did_you_mean
from noiseproof.lab.data.folder import check_images, list_images, read_images
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.npz import Arrays, read_npz
from noiseproof.lab.data.splits import TEST, split_validation, stratified_split

__all__ = ["Dataset", "Split", "load_dataset"]

MEMORY_LIMIT = 2 << 30  # bytes of pixels that storage "auto" keeps in memory
STATISTICS_SAMPLE = 500  # images of a streamed folder that mean and std are computed from
DIGITS_TEST_SHARE = 0.3
_SPLIT_OFF = "split off"
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
        """The number of images; len() of a named tuple is the number of its fields."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test images, and the facts that a model and a table need.

    Attributes:
        name: of the dataset, its file or its folder.
        classes: names of the classes, in the order of the labels.
        train, validation, test: the splits; validation is None if there are no such images.
        size: C, H, W of the images.
        mean, std: per channel, of the training images in [0, 1] (of a streamed folder, of 500 of
            them, evenly spaced); a constant channel has std 1.
        fingerprint: a hash of the test images and labels, the same on every machine; for a folder,
            of the test files' relative names and sizes in bytes. Two runs can be compared image by
            image only if it is equal.
        in_memory: whether splits contain images, not files.
        validation_from: where the validation images are from: a folder such as "val/", "val_images"
            of an .npz file, or "split off" the training images.
        test_from: the same for the test images of a folder; empty for other data.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split
    size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    in_memory: bool
    validation_from: str = _SPLIT_OFF
    test_from: str = ""


def load_dataset(config: Data) -> Dataset:
    """Loads the dataset that `config.data` names.

    - digits: 30 % are the test split, the same for all seeds; `split_seed` changes validation only.
    - cifar10, svhn: `data_dir/cifar10.npz` or `svhn.npz` if it exists, otherwise torchvision's
      files there, downloaded if `download` is set.
    - PATH.npz: see `noiseproof.lab.data.npz`.
    - PATH/: see `noiseproof.lab.data.folder`. If a folder has `val/` and `test/`, `val/` is the
      validation split, whatever `val_share` is.

    Args:
        config: name or path of the data, and how to split, resize and store them.

    Raises:
        DataError: a ValueError that says what is wrong with the data or the settings.
    """
    if not 0 <= config.val_share < 1:
        raise DataError(f"val_share must be in [0, 1), got {config.val_share}")
    if config.data == "digits":
        return _digits(config)
    if config.data in ("cifar10", "svhn"):
        path = Path(config.data_dir).expanduser() / f"{config.data}.npz"
        names = _CIFAR10_NAMES if config.data == "cifar10" else _DIGIT_NAMES
        arrays = read_npz(path, names) if path.exists() else _from_torchvision(config, names)
        return _from_arrays(config, config.data, arrays)
    path = Path(config.data).expanduser()
    if path.is_dir():
        return _from_folder(Path(os.path.abspath(path)), config)
    if path.suffix.lower() == ".npz":
        return _from_arrays(config, path.stem, read_npz(path))
    expected = did_you_mean(config.data, NAMED) or f"; expected one of {', '.join(DATASETS)}"
    raise DataError(f"there is no dataset, folder or .npz file {config.data!r}{expected}")


def _digits(config: Data) -> Dataset:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    train, test = stratified_split(
        torch.from_numpy(labels), DIGITS_TEST_SHARE, 0, TEST, classes=_DIGIT_NAMES
    )
    arrays = Arrays(_DIGIT_NAMES, images[train], labels[train], images[test], labels[test])
    return _from_arrays(config, "digits", arrays)


def _from_torchvision(config: Data, names: tuple[str, ...]) -> Arrays:
    from torchvision import datasets

    root, arrays = Path(config.data_dir).expanduser(), []
    try:
        for split in ("train", "test"):
            if config.data == "cifar10":
                cifar = datasets.CIFAR10(root, train=split == "train", download=config.download)
                labels = np.asarray(cifar.targets, dtype=np.int64)
                arrays += [np.asarray(cifar.data).transpose(0, 3, 1, 2), labels]
            else:
                svhn = datasets.SVHN(root, split=split, download=config.download)
                arrays += [svhn.data, svhn.labels]
    except Exception as error:  # of many kinds: the network, the disk, a damaged file
        files = "cifar-10-batches-py" if config.data == "cifar10" else "*_32x32.mat"
        why = "and could not be downloaded" if config.download else "and --download is off"
        raise DataError(
            f"{config.data} is not in the folder {str(root)!r} {why} "
            f"({type(error).__name__}: {error}); "
            f"put {files} or {config.data}.npz there, or choose another folder with --data-dir"
        ) from error
    return Arrays(names, *arrays)


def _from_arrays(config: Data, name: str, arrays: Arrays) -> Dataset:
    if config.augment == "road":
        raise DataError(f"the road augmentation is for photographs in a folder, got {name}")
    if config.storage == "stream":
        raise DataError(f"only an image folder can be streamed, got {name}; use --storage memory")
    h, w = arrays.train_images.shape[2:]
    if config.img_size is not None and tuple(config.img_size) != (h, w):
        raise DataError(
            f"img_size resizes only image folders; {name} is {h} x {w}, got {config.img_size}"
        )
    images, labels, test_images, test_labels = map(_tensor, arrays[1:5])
    validation, origin = None, _SPLIT_OFF
    if arrays.val_images is not None and arrays.val_labels is not None:
        validation = Split(_tensor(arrays.val_images), None, _tensor(arrays.val_labels))
        origin = "val_images"
    elif config.val_share > 0:
        train, val = split_validation(labels, config, arrays.classes)
        validation = Split(images[val], None, labels[val])
        images, labels = images[train], labels[train]
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


def _from_folder(root: Path, config: Data) -> Dataset:
    if config.img_size is not None and (len(config.img_size) != 2 or min(config.img_size) < 1):
        raise DataError(f"img_size must be a height and a width, got {config.img_size}")
    classes, train, validation, test, others = list_images(root)
    listed = [files for files in (train, validation, test) if files is not None]
    paths = [os.path.join(root, path) for files in listed for path in files.paths]
    verify = config.storage != "memory"
    size = check_images(paths, config.img_size, verify=verify, others=others)
    # The folders of validation and test images, where they are not split off
    folders = [files and files.paths[0].partition("/")[0] + "/" for files in (validation, test)]
    if test is None:
        if not 0 < config.test_share < 1:
            raise DataError(f"test_share must be in (0, 1), got {config.test_share}")
        rest, chosen = stratified_split(
            train.labels, config.test_share, config.split_seed, TEST, classes
        )
        train, test = train.take(rest), train.take(chosen)
    if validation is None:
        rest, chosen = split_validation(train.labels, config, classes)
        train, validation = train.take(rest), train.take(chosen) if len(chosen) else None

    stream = config.storage == "stream"
    if config.storage == "auto":
        stream = len(paths) * 3 * size[0] * size[1] > MEMORY_LIMIT

    listed = [files for files in (train, validation, test) if files is not None]
    names = [tuple(os.path.join(root, path) for path in files.paths) for files in listed]
    if stream:
        splits = [Split(None, n, files.labels) for n, files in zip(names, listed, strict=True)]
    else:  # all at once, so that one error reports all unreadable images
        pixels = read_images([path for n in names for path in n], size)
        parts = pixels.split([len(n) for n in names])
        splits = [Split(p, None, files.labels) for p, files in zip(parts, listed, strict=True)]
    contents = (f"{path}\0{os.path.getsize(root / path)}\n" for path in test.paths)
    sample = splits[0].images
    if sample is None:
        step = math.ceil(len(names[0]) / STATISTICS_SAMPLE)
        sample = read_images(names[0][::step], size)
    mean, std = _statistics(sample)
    return Dataset(
        name=root.name,
        classes=classes,
        train=splits[0],
        validation=None if validation is None else splits[1],
        test=splits[-1],
        size=(3, *size),
        mean=mean,
        std=std,
        fingerprint=_fingerprint(test.labels, map(os.fsencode, contents)),
        in_memory=not stream,
        validation_from=folders[0] or _SPLIT_OFF,
        test_from=folders[1] or _SPLIT_OFF,
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
