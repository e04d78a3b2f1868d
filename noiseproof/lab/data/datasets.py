"""Datasets, split into training, validation and test images: by name, .npz files, folders.

The test images are fixed by the data (or, for a folder without a test split, by `split_seed`) and
are never part of training or validation. Validation images are split off the training images,
stratified by class, unless the data have their own. Images are uint8, N x C x H x W; a large folder
stays on disk, as file names for `noiseproof.lab.data.batches`.

>>> digits = load_dataset(Data("digits"))
>>> digits.size, digits.train.count, digits.test.count
((1, 8, 8), 1131, 540)
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noiseproof.lab.config import DATASETS, NAMED, Data, did_you_mean
from noiseproof.lab.data.downloads import read_named
from noiseproof.lab.data.duplicates import Leak, find_leaks, without_leaks
from noiseproof.lab.data.file_facts import file_hashes
from noiseproof.lab.data.folder import list_images, read_images
from noiseproof.lab.data.images import DataError, Reading
from noiseproof.lab.data.npz import read_npz
from noiseproof.lab.data.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    Split,
    StoredSplits,
    stratified_split,
    with_groups,
)

MEMORY_LIMIT = 2 << 30  # bytes of pixels that storage "auto" keeps in memory
STATISTICS_SAMPLE = 500  # images of a streamed folder that mean and std are computed from
_Splits = tuple[Split, Split | None, Split]  # training, validation, test
_DIGIT_NAMES = tuple("0123456789")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test images, and the facts that a model and a table need.

    Attributes:
        name: of the dataset, its file or its folder.
        classes: names of the classes, in the order of the labels.
        train: the training images.
        validation: the validation images; None if there are none.
        test: the test images.
        size: C, H, W of the images.
        mean: per channel, of the training images in [0, 1] (of a streamed folder, of 500 of them,
            evenly spaced).
        std: likewise; 1 for a constant channel.
        fingerprint: a hash of the test images and labels, the same on every machine; for a folder
            two hashes: of the labels and of the test files' relative names and sizes, and of what
            the files contain. Two runs can be compared image by image only if theirs match, see
            `same_images`.
        validation_from: the source of the validation images: a folder such as "val/", "val_images"
            of an .npz file, or "split off" the training images.
        test_from: the same for the test images of a folder; empty for other data.
        groups: for a folder with --group, how many there are; otherwise 0.
        resized: for a folder, the size of its images and how they get it, in words.
        notes: what else a user should know about its files.
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
    validation_from: str
    test_from: str
    groups: int = 0
    resized: str = ""
    notes: tuple[str, ...] = ()

    @property
    def in_memory(self) -> bool:
        """Whether the splits contain images, not files."""
        return self.train.images is not None


def load_dataset(config: Data) -> Dataset:
    """Loads the dataset that `config.data` names.

    - digits: 30 % are the test split, the same for all seeds; `split_seed` changes validation only.
    - other names: `data_dir/NAME.npz` if it exists, otherwise torchvision's files in `data_dir`,
      downloaded if `download` is set; see `noiseproof.lab.data.downloads`.
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
    path = Path(config.data).expanduser()
    if config.data == "digits":
        return _from_arrays(config, "digits", _digits())
    if config.data in NAMED:
        folder = Path(config.data_dir).expanduser()
        return _from_arrays(config, config.data, read_named(config.data, folder, config.download))
    if path.is_dir():
        return _from_folder(config, Path(os.path.abspath(path)))
    if path.suffix.lower() == ".npz":
        return _from_arrays(config, path.stem, read_npz(path))
    expected = did_you_mean(config.data, NAMED) or f"; expected one of {', '.join(DATASETS)}"
    raise DataError(f"there is no dataset, folder or .npz file {config.data!r}{expected}")


def _digits() -> StoredSplits:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    whole = Split.from_arrays(images, bunch.target)
    train, test = stratified_split(whole, share=0.3, seed=0, purpose=TEST, classes=_DIGIT_NAMES)
    return StoredSplits(_DIGIT_NAMES, train, None, test)


def _from_arrays(config: Data, name: str, stored: StoredSplits) -> Dataset:
    if "road" in f"{config.augment}+{config.noisy_augment}".split("+"):
        raise DataError(f"the road augmentation is for photographs in a folder, got {name}")
    if config.storage == "stream":
        raise DataError(f"only an image folder can be streamed, got {name}; use --storage memory")
    h, w = stored.train.pixels.shape[2:]
    if isinstance(config.img_size, tuple) and config.img_size != (h, w):
        raise DataError(
            f"img_size resizes only image folders; {name} is {h} x {w}, got {config.img_size}"
        )
    splits = _split_off(config, stored)
    return _dataset(name, stored, splits, splits[0].pixels, array_fingerprint(splits[2]))


def _from_folder(config: Data, root: Path) -> Dataset:
    given = config.img_size
    if isinstance(given, tuple) and (len(given) != 2 or min(given) < 1):
        raise DataError(f"img_size must be a height and a width, got {given}")
    stored, size, resized, notes = list_images(
        root,
        given,
        verify=config.storage != "memory",
        reading=Reading.of(config),
        follow_links=config.follow_links,
        same_subfolders=config.group is not None,
    )
    if config.group is not None:
        stored, sentences = with_groups(stored, config.group, root)
        notes = (*notes, *sentences)
    if config.dedupe:
        stored, note = without_leaks(stored)
        notes = (*notes, note)
    train, validation, test = _split_off(config, stored)
    reading = train.reading
    parts = [split for split in (train, validation, test) if split is not None]
    grouped = [part.groups for part in parts if config.group and part.groups is not None]
    groups = len(torch.cat(grouped).unique()) if grouped else 0
    total_bytes = sum(split.count for split in parts) * 3 * math.prod(size)
    if config.storage == "stream" or (config.storage == "auto" and total_bytes > MEMORY_LIMIT):
        step = math.ceil(train.count / STATISTICS_SAMPLE)
        sample = read_images((train.files or ())[::step], size, reading)
    else:  # all at once, so that one error reports all unreadable images
        pixels = read_images([path for split in parts for path in split.files or ()], size, reading)
        divided = pixels.split([split.count for split in parts])
        loaded = [split._replace(images=p) for p, split in zip(divided, parts, strict=True)]
        train, validation, test = loaded[0], validation and loaded[1], loaded[-1]
        sample = train.pixels
    splits = (train, validation, test)
    dataset = _dataset(root.name, stored, splits, sample, folder_fingerprint(test, root))
    return replace(dataset, groups=groups, resized=resized, notes=notes)


def leaks_of(dataset: Dataset, config: Data) -> list[Leak]:
    """What the splits of a folder share; see `data.duplicates`.

    Args:
        dataset: the images.
        config: the settings that they were loaded with.
    """
    if dataset.test.files is None or config.dedupe:  # which leaves nothing to be found
        return []
    return find_leaks((dataset.train, dataset.validation, dataset.test), config.data)


def with_read_size(config: Data, dataset: Dataset) -> Data:
    """The settings with the image size that `dataset` was read in, and how, if they leave the size
    to us.

    Args:
        config: the settings that it was loaded with.
        dataset: the images.
    """
    if config.img_size != "auto":
        return config
    reading: Any = dataset.train.reading._asdict()
    return replace(config, img_size=dataset.size[1:], **reading)


def _split_off(config: Data, stored: StoredSplits) -> _Splits:
    classes, train, validation, test = stored[:4]
    members = "images or near-duplicates (--dedupe)" if config.dedupe else "images"

    def split(share: float, purpose: int) -> tuple[Split, Split]:
        return stratified_split(train, share, config.split_seed, purpose, classes, members)

    if test is None:
        if not 0 < config.test_share < 1:
            raise DataError(f"test_share must be in (0, 1), got {config.test_share}")
        train, test = split(config.test_share, TEST)
    if validation is None and config.val_share > 0:
        train, validation = split(config.val_share, VALIDATION)
    if config.train_share < 1:
        train = split(config.train_share, TRAIN)[1]
    return train, validation, test


def same_images(fingerprint: str, other: str) -> bool:
    """Whether two fingerprints are of the same test images. Those of folders used to consist of the
    names and sizes of files alone: such a one is compared with that part of the other.

    Args:
        fingerprint: of one dataset.
        other: of the other one.

    >>> same_images("names-pixels", "names"), same_images("names-pixels", "names-others")
    (True, False)
    """
    shorter, longer = sorted((fingerprint, other), key=len)
    return shorter == longer or longer.startswith(f"{shorter}-")


def array_fingerprint(test: Split) -> str:
    """The fingerprint of test images in memory."""
    content = [str(tuple(test.pixels.shape)).encode(), test.pixels.numpy().tobytes()]
    return _hash(test.labels, content)


def folder_fingerprint(test: Split, root: Path) -> str:
    """The fingerprint of the files of a test split in the folder `root`."""
    files = [(os.path.relpath(path, root), os.path.getsize(path)) for path in test.files or ()]
    listing = _hash(test.labels, (os.fsencode(f"{path}\0{length}\n") for path, length in files))
    contents = _hash(test.labels, file_hashes(test.files or (), str(root)))
    return f"{listing}-{contents}"


def _hash(labels: Tensor, content: Iterable[bytes]) -> str:
    digest = hashlib.sha256(labels.numpy().astype("<i8").tobytes())
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]


def _dataset(
    name: str, stored: StoredSplits, splits: _Splits, sample: Tensor, fingerprint: str
) -> Dataset:
    """The dataset, with the statistics of `sample`."""
    mean, std = _statistics(sample)
    channels, height, width = sample.shape[1:]
    return Dataset(
        name,
        stored.classes,
        *splits,
        size=(channels, height, width),
        mean=mean,
        std=std,
        fingerprint=fingerprint,
        validation_from=stored.validation_from,
        test_from=stored.test_from,
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
