"""Labelled images to test a run on that are not its own: `noiseproof evaluate RUN --data NEW`.

NEW is one of

- a folder with one folder per class, all of whose images are tested, unless it has `train/` with
  `test/` or `val/` next to it: then those of `test/`, or else of `val/`;
- an .npz file with `test_images` and `test_labels`, or `images` and `labels`; `classes` names them;
- the name of a dataset, whose test images are used;
- a folder of corrupted arrays as CIFAR-10-C has it: `labels.npy` and files such as `fog.npy`, each
  with the same images at severities 1 to 5, one severity after the other.

Files are resized to the run's image size; arrays must have it. Classes are matched by name, or by
number if the images have no class names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from noiseproof.lab.config import NAMED, Data, did_you_mean
from noiseproof.lab.data.datasets import (
    Dataset,
    array_fingerprint,
    folder_fingerprint,
    load_dataset,
)
from noiseproof.lab.data.folder import list_images
from noiseproof.lab.data.images import DataError, Reading, shortened
from noiseproof.lab.data.npz import channels_first, read_test_arrays
from noiseproof.lab.data.splits import Split
from noiseproof.perturb.text import CORRUPTION_FAMILIES

_LABELS = "labels.npy"
_SEVERITIES = 5
_BLOCK = 1 << 24  # bytes to hash at a time


class OtherImages(NamedTuple):
    """Images to test a run on.

    Attributes:
        dataset: the images, as a test split; of corrupted arrays, those of the first.
        path: where they are from, as an absolute path or the name of a dataset.
        corrupted: the file and severity of each corruption, by text such as "fog:3"; empty unless
            they are corrupted arrays.
        skipped: files that are none of the 15 corruptions.
    """

    dataset: Dataset
    path: str
    corrupted: Mapping[str, tuple[Path, int]]
    skipped: tuple[str, ...] = ()

    def under(self, corruption: str) -> Dataset:
        """The images under one of the corruptions."""
        file, severity = self.corrupted[corruption]
        images = channels_first(_block(_array(file), severity), str(file))
        test = Split.from_arrays(images, self.dataset.test.labels.numpy())
        return dataclasses.replace(self.dataset, train=test, test=test)


def load_other_images(
    source: str,
    *,
    classes: Sequence[str],
    size: tuple[int, int, int],
    class_map: Mapping[str, str] | None = None,
    config: Data | None = None,
) -> OtherImages:
    """Reads labelled images to test a run on.

    Args:
        source: a folder, an .npz file or the name of a dataset.
        classes: names of the run's classes.
        size: C, H, W of the run's images.
        class_map: names of classes in `source`, each with the run's name for it, or with "" to
            leave its images out.
        config: the run's settings, for where datasets are and whether links may leave a folder.

    Raises:
        DataError: a ValueError that says what is wrong with the images or their classes.
    """
    config, path, notes = config or Data(), Path(source).expanduser(), ()
    if source in NAMED:
        named = load_dataset(dataclasses.replace(
            config, data=source, val_share=0.0, augment="none", noisy_augment=None, img_size=None,
            storage="auto",
        ))  # fmt: skip
        split, names = named.test, named.classes
    elif path.suffix.lower() == ".npz" and not path.is_dir():
        split, names = read_test_arrays(path)
    elif (path / _LABELS).is_file() or any(_corruption(f.stem) for f in path.glob("*.npy")):
        return _corrupted(path.absolute(), classes, size, class_map or {})
    else:
        listing = list_images(
            path,
            size[1:],
            verify=True,
            reading=Reading.of(config),
            follow_links=config.follow_links,
            same_subfolders=True,  # folders that are not the run's classes are refused below
            min_classes=1,
        )
        stored, notes = listing.stored, listing.notes
        split, names = stored.test or stored.train, stored.classes
    split = _relabelled(source, split, names, classes, class_map or {})
    if split.images is not None:
        _check_size(source, split.images.shape[1:], size)
        fingerprint = array_fingerprint(split)
    else:
        fingerprint = folder_fingerprint(split, path.absolute())
    name = source if source in NAMED else path.stem if split.images is not None else path.name
    where = source if source in NAMED else str(path.absolute())
    dataset = dataclasses.replace(_dataset(name, split, classes, size, fingerprint), notes=notes)
    return OtherImages(dataset, where, {})


def _dataset(
    name: str, test: Split, classes: Sequence[str], size: tuple[int, int, int], fingerprint: str
) -> Dataset:
    """A dataset of test images alone. Its fingerprint is never that of a run's own images."""
    fingerprint = f"other-{fingerprint}"
    empty = (0.0,) * size[0]
    return Dataset(name, tuple(classes), test, None, test, size, empty, empty, fingerprint, "", "")


def _check_size(source: str | Path, got: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(got) != tuple(expected):
        shown, run = (" x ".join(map(str, shape)) for shape in (got, expected))
        raise DataError(
            f"the images of {source} are {shown}, those of the run {run}; only images in files are "
            "resized"
        )


def _relabelled(
    source: str,
    split: Split,
    names: Sequence[str] | None,
    classes: Sequence[str],
    class_map: Mapping[str, str],
) -> Split:
    """The images with the run's labels, without those that are left out.

    Args:
        source: of the images, for messages.
        split: the images with their own labels.
        names: of their classes; None if they have none, so that labels are the run's.
        classes: of the run.
        class_map: as for `load_other_images`.
    """
    names = list(classes if names is None else names)
    wrong = ((split.labels < 0) | (split.labels >= len(names))).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"labels of {source} must be in [0, {len(names)}), since the run has {len(names)} "
            f"classes; got {int(split.labels[index])} at index {index}"
        )
    for name, target in class_map.items():
        if name not in names:
            hint = did_you_mean(name, names)
            known = shortened(list(map(repr, names)))
            raise DataError(f"{source} has no class {name!r}{hint}; it has {known}")
        if target and target not in classes:
            hint = did_you_mean(target, classes)
            known = shortened(list(map(repr, classes)))
            raise DataError(f"the run has no class {target!r}{hint}; it has {known}")
    present = [names[i] for i in split.labels.unique().tolist()]
    unknown = [name for name in present if class_map.get(name, name) not in (*classes, "")]
    if unknown:
        first = unknown[0]
        raise DataError(
            f"{source} has {_counted(unknown)} that the run does not have: "
            f"{shortened(list(map(repr, unknown)))}; the run has "
            f"{shortened(list(map(repr, classes)))}{did_you_mean(first, classes)}. Name the run's "
            f"class with --class-map {shlex.quote(first)}=CLASS, or leave out its images with "
            f"--class-map {shlex.quote(first)}="
        )
    targets = [class_map.get(name, name) for name in names]
    index_of = {name: i for i, name in enumerate(classes)}
    labels = torch.tensor([index_of.get(target, -1) for target in targets])[split.labels]
    kept = (labels >= 0).nonzero().flatten()
    if not len(kept):
        raise DataError(f"no image of {source} is left to test on")
    return split.take(kept)._replace(labels=labels[kept], groups=None)


def _counted(names: Sequence[str]) -> str:
    return "a class" if len(names) == 1 else f"{len(names)} classes"


def _corrupted(
    folder: Path, classes: Sequence[str], size: tuple[int, int, int], class_map: Mapping[str, str]
) -> OtherImages:
    """The arrays of CIFAR-10-C, or of another dataset in the same form."""
    if class_map:
        raise DataError(f"{folder} has class numbers and no names, so that none can be mapped")
    files = sorted(file for file in folder.glob("*.npy") if file.name != _LABELS)
    known = {name: file for file in files if (name := _corruption(file.stem))}
    if not known:
        raise DataError(f"{folder} contains {_LABELS}, but no array such as fog.npy")
    if not (folder / _LABELS).exists():
        example = min(known.values()).name
        raise DataError(f"{folder} contains arrays such as {example}, but no {_LABELS}")
    labels = _labels(folder)
    digest = hashlib.sha256(labels.numpy().astype("<i8").tobytes())
    for name in known:
        array = _array(known[name])
        if len(array) != _SEVERITIES * len(labels):
            raise DataError(
                f"{known[name]} must contain {_SEVERITIES} x {len(labels):,} images, those that "
                f"{_LABELS} has labels for at each severity; got {len(array):,}"
            )
        _check_size(known[name], channels_first(array[:1], str(known[name])).shape[1:], size)
        digest.update(f"{name}{array.shape}".encode())
        with known[name].open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    ordered = [name for name in CORRUPTION_FAMILIES if name in known]
    texts = {f"{name}:{s}": (known[name], s) for name in ordered for s in range(1, _SEVERITIES + 1)}
    first, severity = next(iter(texts.values()))
    images = channels_first(_block(_array(first), severity), str(first))
    test = _relabelled(str(folder), Split.from_arrays(images, labels.numpy()), None, classes, {})
    dataset = _dataset(folder.name, test, classes, size, digest.hexdigest()[:16])
    skipped = tuple(file.name for file in files if _corruption(file.stem) is None)
    return OtherImages(dataset, str(folder), texts, skipped)


def _corruption(stem: str) -> str | None:
    """The name of a corruption in a file's name.

    >>> _corruption("shot_noise"), _corruption("fog"), _corruption("speckle_noise")
    ('shot', 'fog', None)
    """
    names = (name for name in CORRUPTION_FAMILIES if stem == name or stem.startswith(f"{name}_"))
    return next(names, None)


def _array(file: Path) -> np.ndarray:
    """The array in a file, which is read as far as it is used."""
    try:
        array = np.lib.format.open_memmap(file, mode="r")  # unlike np.load, reads nothing but .npy
    except (OSError, ValueError, TypeError, OverflowError, SyntaxError) as error:
        raise DataError(
            f"{file} cannot be read: {error}; expected an array as written by numpy.save"
        ) from error
    if array.ndim == 0:
        raise DataError(f"{file} must contain an array, got a single number")
    return array


def _block(images: np.ndarray, severity: int) -> np.ndarray:
    count = len(images) // _SEVERITIES
    return np.array(images[(severity - 1) * count : severity * count])  # a copy in memory


def _labels(folder: Path) -> Tensor:
    """The labels of the images at one severity; the file has them once, or for each severity."""
    labels = np.array(_array(folder / _LABELS))
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels):
        raise DataError(
            f"{folder / _LABELS} must be a vector of integers, got {labels.dtype} of shape "
            f"{labels.shape}"
        )
    if len(labels) % _SEVERITIES == 0:
        blocks = labels.reshape(_SEVERITIES, -1)
        if (blocks == blocks[0]).all() and len(blocks[0]) > 1:
            labels = blocks[0]
    return torch.from_numpy(labels.astype(np.int64))
