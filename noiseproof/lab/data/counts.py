"""How many images a split has, before any are read: no torch, and of a .npz file only a header."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

from noiseproof.lab.config import Data

TRAINING_IMAGES = {  # of the datasets in `data.downloads`, validation images included
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
    "fashion_mnist": 60_000,
    "gtsrb": 26_640,
    "imagenette": 9_469,
    "eurosat": 21_600,
}


def chosen_count(count: int, share: float) -> int:
    """How many of `count` images a split with this share has, if no class needs more.

    >>> chosen_count(1001, 0.1), chosen_count(1000, 0.1)
    (101, 100)
    """
    return math.ceil(share * count - 1e-9)


def training_images(data: Data) -> int | None:
    """How many images a named dataset or a .npz file has for training. None for other data, and if
    the file or the settings are wrong, which is reported when they are read. If images are in
    groups or classes are tiny, the splits can be larger or smaller.

    Args:
        data: the settings that it will be loaded with.

    >>> training_images(Data("cifar10", data_dir="no/folder", val_share=0.1, train_share=0.02))
    900
    """
    count, path = TRAINING_IMAGES.get(data.data), Path(data.data)
    if count is not None:
        path = Path(data.data_dir, f"{data.data}.npz")  # read instead, if it exists
    elif path.suffix.lower() != ".npz":
        return None
    try:
        has_validation = False
        if count is None or path.expanduser().exists():
            count, has_validation = _stored_count(path.expanduser())
        if not has_validation:
            count -= chosen_count(count, data.val_share)
        return max(chosen_count(count, data.train_share), 0) or None
    except Exception:  # zipfile, zlib and numpy raise exceptions of their own
        return None


def _stored_count(path: Path) -> tuple[int, bool]:
    """The number of training labels in a .npz file, and whether it has validation images."""
    from numpy.lib import format

    with zipfile.ZipFile(path) as archive, archive.open("train_labels.npy") as file:
        major, _ = format.read_magic(file)
        read = format.read_array_header_1_0 if major == 1 else format.read_array_header_2_0
        shape, _, _ = read(file)
        return shape[0], "val_images.npy" in archive.namelist()
