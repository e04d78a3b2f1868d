"""Datasets that torchvision downloads, as training and test images in memory.

`NAME.npz` in the data folder takes the place of torchvision's files. If these are image files, it
is written when they are first read, so that they are decoded only once.

- GTSRB: its training images are those of the competition of 2011, which torchvision has, and its
  test images the official ones. There are about 30 frames of each sign, which the validation split
  keeps together: otherwise nearly every validation image would resemble a training image.
- Imagenette: its val/ is the test split.
- EuroSAT has no test split: a fifth of each class is, chosen by a hash, the same for all seeds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from noiseproof.lab.console import print_status
from noiseproof.lab.data.folder import read_images
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.npz import channels_first, read_npz
from noiseproof.lab.data.splits import TEST, Split, StoredSplits, stratified_split
from noiseproof.lab.files import write_atomically

_BY_FLAG = ({"train": True}, {"train": False})
_BY_NAME = ({"split": "train"}, {"split": "test"})
_IMAGENETTE = tuple({"split": split, "size": "160px"} for split in ("train", "val"))


class _Source(NamedTuple):
    """How torchvision stores a dataset."""

    kind: str  # its class in torchvision.datasets
    splits: tuple[dict[str, Any], ...]  # arguments for training and test images, or for all
    files: str  # what it keeps in the data folder
    megabytes: int  # to download
    images: int = 0  # number of image files; 0 if it stores arrays
    side: int = 0  # height and width to resize image files to


_SOURCES = {
    "cifar10": _Source("CIFAR10", _BY_FLAG, "cifar-10-batches-py", 170),
    "cifar100": _Source("CIFAR100", _BY_FLAG, "cifar-100-python", 169),
    "svhn": _Source("SVHN", _BY_NAME, "*_32x32.mat", 246),
    "fashion_mnist": _Source("FashionMNIST", _BY_FLAG, "FashionMNIST", 31),
    "gtsrb": _Source("GTSRB", _BY_NAME, "gtsrb", 277, 39_270, 48),
    "imagenette": _Source("Imagenette", _IMAGENETTE, "imagenette2-160", 99, 13_394, 128),
    "eurosat": _Source("EuroSAT", ({},), "eurosat", 94, 27_000, 64),
}
_TEST_SHARE = 0.2  # of a dataset without a test split

_OBJECTS = "airplane automobile bird cat deer dog frog horse ship truck"
_SIGNS = """
    speed limit 20 km/h, speed limit 30 km/h, speed limit 50 km/h, speed limit 60 km/h,
    speed limit 70 km/h, speed limit 80 km/h, end of speed limit 80 km/h, speed limit 100 km/h,
    speed limit 120 km/h, no passing, no passing for vehicles over 3.5 tons,
    right of way at the next intersection, priority road, yield, stop, no vehicles,
    no vehicles over 3.5 tons, no entry, general caution, dangerous curve to the left,
    dangerous curve to the right, double curve, bumpy road, slippery road,
    road narrows on the right, road work, traffic signals, pedestrians, children crossing,
    bicycles crossing, ice or snow, wild animals crossing, end of all limits, turn right ahead,
    turn left ahead, ahead only, go straight or right, go straight or left, keep right, keep left,
    roundabout, end of no passing, end of no passing for vehicles over 3.5 tons
"""
_CLASSES: dict[str, tuple[str, ...]] = {  # where an .npz file or torchvision does not name them
    "cifar10": tuple(_OBJECTS.split()),
    "svhn": tuple("0123456789"),
    "gtsrb": tuple(sign.strip() for sign in _SIGNS.split(",")),
}


def read_named(name: str, root: Path, download: bool) -> StoredSplits:
    """Reads `NAME.npz` in the data folder if it exists, otherwise torchvision's files there.

    Args:
        name: of the dataset.
        root: the data folder.
        download: whether torchvision downloads its files if they are missing.
    """
    path, source = root / f"{name}.npz", _SOURCES[name]
    if path.exists():
        return read_npz(path, _CLASSES.get(name))
    classes, train, test = _from_torchvision(name, root, download)
    if source.images:
        count = train.count + test.count
        if count < source.images:
            raise DataError(
                f"{root / source.files} has {count:,} of {source.images:,} images, as after an "
                "interrupted download; delete it and start again"
            )
        print_status(name, f"decoding {count:,} images; from now on they are read from {path}")
        train, test = (_decoded(split, source.side) for split in (train, test))
        _write(path, classes, train, test)
    return StoredSplits(classes, train, None, test)


def _from_torchvision(
    name: str, root: Path, download: bool
) -> tuple[tuple[str, ...], Split, Split]:
    """Classes, training and test images."""
    source = _SOURCES[name]
    # Whether files are there that turn out to be of no use; a failed download leaves empty folders.
    damaged = any(_has_files(path) for path in root.glob(source.files))
    try:
        try:
            return _read(name, root, download=False)
        except Exception:
            if not download:
                raise
        print_status(name, f"downloading about {source.megabytes} MB to {root}")
        return _read(name, root, download=True)
    except Exception as error:  # of many kinds: the network, the disk, a damaged file
        state, advice = "is not in", f"put {source.files} or {name}.npz there"
        if damaged:
            state, advice = "is incomplete or damaged in", f"delete {source.files} there"
        why = "could not be downloaded" if download else "--download is off"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"{name} {state} the folder {str(root)!r} and {why} ({reason}); "
            f"{advice} and start again; when training, --data-dir names another folder"
        ) from error


def _has_files(path: Path) -> bool:
    return path.is_file() or any(inner.is_file() for inner in path.rglob("*"))


def _read(name: str, root: Path, download: bool) -> tuple[tuple[str, ...], Split, Split]:
    from torchvision import datasets

    source = _SOURCES[name]
    kind: Any = getattr(datasets, source.kind)
    parts = [kind(root, **split, download=download) for split in source.splits]
    classes = _CLASSES.get(name) or tuple(map(_in_words, parts[0].classes))
    train, *rest = [_split(name, part) for part in parts]
    if not rest:
        return classes, *stratified_split(train, _TEST_SHARE, 0, TEST, classes)
    return classes, train, rest[0]


def _split(name: str, part: Any) -> Split:
    """The images of one of torchvision's datasets: pixels, or files."""
    if hasattr(part, "data"):
        labels = part.labels if name == "svhn" else part.targets
        return Split.from_arrays(channels_first(np.asarray(part.data), name), labels)
    samples = part.samples if hasattr(part, "samples") else part._samples
    files, labels = zip(*samples, strict=True)
    groups = None
    if name == "gtsrb" and "_" in Path(files[0]).name:  # TRACK_FRAME, except in the test split
        tracks = [int(Path(file).name.partition("_")[0]) for file in files]
        groups = torch.tensor(tracks) * len(_CLASSES[name]) + torch.tensor(labels)
    return Split(None, tuple(map(str, files)), torch.tensor(labels), groups)


def _in_words(name: str | tuple[str, ...]) -> str:
    """A class as torchvision names it, in words; of several names the first.

    >>> [_in_words(name) for name in ("aquarium_fish", "SeaLake", ("tench", "Tinca tinca"))]
    ['aquarium fish', 'Sea Lake', 'tench']
    """
    name = name if isinstance(name, str) else name[0]
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)


def _decoded(split: Split, side: int) -> Split:
    pixels = read_images(split.files or (), (side, side))
    return Split(pixels, None, split.labels, split.groups)


def _write(path: Path, classes: tuple[str, ...], train: Split, test: Split) -> None:
    arrays: dict[str, Any] = {"classes": np.array(classes)}
    for part, split in (("train", train), ("test", test)):
        arrays[f"{part}_images"] = split.pixels.numpy()
        arrays[f"{part}_labels"] = split.labels.numpy()
    if train.groups is not None:
        arrays["train_groups"] = train.groups.numpy()
    try:
        write_atomically(path, lambda file: np.savez(file, **arrays))
    except OSError as error:  # a full disk, or a folder that may only be read
        print_status(path.stem, f"{path} cannot be written ({error.strerror})")
