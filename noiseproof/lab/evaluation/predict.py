"""From new images to classes.

A file is read exactly as one of the training data: turned by its EXIF orientation, as 8-bit RGB,
resized to the run's size (see `noiseproof.lab.data.folder`). A run of greyscale data sees the
brightness of a colour image, and a grey image as it is.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from noiseproof.lab.console import printable
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.folder import EXTENSIONS, walk
from noiseproof.lab.data.splits import Split
from noiseproof.lab.device import chosen_device
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.robustness import batch_size_for

Tell = Callable[[str], None]


class Prediction(NamedTuple):
    """The likeliest classes of one file, the first one first, and their probabilities."""

    file: str
    classes: tuple[str, ...]
    chances: tuple[float, ...]


def predict(
    run: RunFolder,
    files: Sequence[str | Path],
    *,
    weights: Weights | None = None,
    top: int = 1,
    device: str = "auto",
    batch_size: int | None = None,
    unreadable: Tell | None = None,
) -> Iterator[Prediction]:
    """What the run's model takes each file for, in their order, a batch at a time in memory.

    Args:
        weights: "last" or "best"; by default the best that the run has.
        top: classes of each file, the likeliest first.
        unreadable: told of every file that cannot be read, which is then left out; by default the
            first of them raises a DataError.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    where = chosen_device(device)
    model = run.model(weights or ("best" if run.has("best") else "last"), where)
    names, size = run.info["classes"], tuple(run.info["size"])
    each = batch_size or batch_size_for(size, where)
    batches = Batches(_unlabelled(files), size, each, where, unreadable=unreadable)
    for pixels, _, places in batches:
        with torch.inference_mode():
            chances = model(pixels.float() / 255).float().softmax(1)
        best = chances.topk(min(top, len(names)))
        for place, values, ids in zip(
            places.tolist(), best.values.tolist(), best.indices.tolist(), strict=True
        ):
            yield Prediction(os.fspath(files[place]), tuple(names[i] for i in ids), tuple(values))


def pixels_of(run: RunFolder, files: Sequence[str | Path]) -> Tensor:
    """The files as the run's model takes them: B x C x H x W, in [0, 1]."""
    size = tuple(run.info["size"])
    batches = Batches(_unlabelled(files), size, max(1, len(files)), torch.device("cpu"))
    return next(iter(batches)).pixels.float() / 255


def _unlabelled(files: Sequence[str | Path]) -> Split:
    names = tuple(os.fspath(file) for file in files)
    return Split(None, names, torch.zeros(len(names), dtype=torch.int64))


def files_in(paths: Sequence[str], other: Tell) -> list[str]:
    """The files among `paths`, and in place of a folder the images in it and below, sorted. `other`
    is told of files in it that are no images. A name that begins with a dot is passed over."""
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        images, rest = walk(Path(path), once=True)
        files += sorted(map(str, images))
        if rest:
            more = f" and {len(rest) - 1} more files" if len(rest) > 1 else ""
            known = " ".join(extension[1:] for extension in EXTENSIONS)
            other(f"{min(rest)}{more}: not taken for images (known: {known})")
    return files


def predict_paths(
    path: str | Path,
    paths: Sequence[str],
    *,
    weights: Weights | None = None,
    top: int = 1,
    out: str | Path | None = None,
    device: str = "auto",
) -> int:
    """Prints a line for each image, and writes them to `out` as CSV; 1 where a file could not be
    read, after all others, otherwise 0."""
    run, failed = RunFolder.open(path), 0

    def tell(message: str) -> None:
        print(f"noiseproof: {printable(message)}", file=sys.stderr, flush=True)

    def unreadable(message: str) -> None:
        nonlocal failed
        failed += 1
        tell(message)

    files = files_in(paths, tell)
    if not files:
        raise ValueError(f"there are no images in {' or '.join(paths)}")
    width = min(60, max(len(file) for file in files))
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["file", "rank", "class", "probability"])
    found = predict(run, files, weights=weights, top=top, device=device, unreadable=unreadable)
    for file, classes, chances in found:
        pairs = list(zip(classes, chances, strict=True))
        shown = "   ".join(f"{100 * chance:5.1f} % {name}" for name, chance in pairs)
        print(printable(f"{file:<{width}}  {shown}"))
        table.writerows([file, i, name, f"{p:.6g}"] for i, (name, p) in enumerate(pairs, 1))
    if out is not None:
        content = text.getvalue().encode("utf-8", "surrogateescape")  # names as the disk has them
        write_atomically(Path(out), content)
        print(f"Predictions: {out}")
    if failed:
        tell(f"{failed} of {len(files)} files could not be read")
    return int(failed > 0)
