"""Datasets that torchvision downloads, as training and test images in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.npz import read_npz
from noiseproof.lab.data.splits import Split, StoredSplits

_OBJECTS = "airplane automobile bird cat deer dog frog horse ship truck"
_CLASSES = {"cifar10": tuple(_OBJECTS.split()), "svhn": tuple("0123456789")}


def read_named(name: str, root: Path, download: bool) -> StoredSplits:
    """Reads `NAME.npz` in the data folder if it exists, otherwise torchvision's files there.

    Args:
        name: of the dataset.
        root: the data folder.
        download: whether torchvision downloads its files if they are missing.
    """
    path = root / f"{name}.npz"
    return read_npz(path, _CLASSES[name]) if path.exists() else _read(name, root, download)


def _read(name: str, root: Path, download: bool) -> StoredSplits:
    from torchvision import datasets

    splits = []
    try:
        for split in ("train", "test"):
            if name == "cifar10":
                cifar = datasets.CIFAR10(root, train=split == "train", download=download)
                images = np.asarray(cifar.data).transpose(0, 3, 1, 2)
                splits.append(Split.from_arrays(images, cifar.targets))
            else:
                svhn = datasets.SVHN(root, split=split, download=download)
                splits.append(Split.from_arrays(svhn.data, svhn.labels))
    except Exception as error:  # of many kinds: the network, the disk, a damaged file
        files = "cifar-10-batches-py" if name == "cifar10" else "*_32x32.mat"
        why = "and could not be downloaded" if download else "and --download is off"
        raise DataError(
            f"{name} is not in the folder {str(root)!r} {why} "
            f"({type(error).__name__}: {error}); "
            f"put {files} or {name}.npz there, or choose another folder with --data-dir"
        ) from error
    return StoredSplits(_CLASSES[name], splits[0], None, splits[1])
