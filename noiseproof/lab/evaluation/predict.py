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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from noiseproof.lab.console import printable
from noiseproof.lab.data.folder import EXTENSIONS, entries
from noiseproof.lab.data.images import DataError, open_image
from noiseproof.lab.device import chosen_device
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.robustness import batch_size_for

__all__ = ["Prediction", "files_in", "pixels_of", "predict", "predict_paths"]

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
    names, size = run.info["classes"], run.info["size"]
    each = batch_size or batch_size_for(size, where)
    for start in range(0, len(files), each):
        read, pixels = _read(files[start : start + each], size, unreadable)
        if not read:
            continue
        with torch.inference_mode():
            chances = model(pixels.to(where).float() / 255).float().softmax(1)
        best = chances.topk(min(top, len(names)))
        for file, values, ids in zip(
            read, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            yield Prediction(file, tuple(names[i] for i in ids), tuple(values))


def pixels_of(run: RunFolder, files: Sequence[str | Path]) -> Tensor:
    """The files as the run's model takes them: B x C x H x W, in [0, 1]."""
    return _read(files, run.info["size"], None)[1].float() / 255


def _read(
    files: Sequence[str | Path], size: Sequence[int], unreadable: Tell | None
) -> tuple[list[str], Tensor]:
    """The files that can be read, and their pixels as uint8; decoded in threads."""
    channels, height, width = size

    def decoded(file: str) -> np.ndarray | DataError:
        try:
            image = open_image(file, (height, width))
        except DataError as error:
            if unreadable is None:
                raise
            return error
        # A grey file has been repeated in three channels, of which this gives the one back exactly
        grey = channels == 1
        return (
            np.asarray(image.convert("L"))[None] if grey else np.asarray(image).transpose(2, 0, 1)
        )

    names = [os.fspath(file) for file in files]
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        found = list(pool.map(decoded, names))
    for one in found:
        if isinstance(one, DataError) and unreadable is not None:
            unreadable(str(one))
    good = [(n, one) for n, one in zip(names, found, strict=True) if not isinstance(one, DataError)]
    if not good:
        return [], torch.empty(0, *size, dtype=torch.uint8)
    return [n for n, _ in good], torch.from_numpy(np.stack([one for _, one in good]))


def files_in(paths: Sequence[str], other: Tell) -> list[str]:
    """The files among `paths`, and in place of a folder the images in it and below, sorted. `other`
    is told of files in it that are no images. A name that begins with a dot is passed over."""
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        images: list[str] = []
        rest: list[str] = []
        entered: set[Path] = set()
        waiting = [Path(path)]
        while waiting:
            # Links last: a folder keeps its own name, and one may lead to where it lies.
            folder = min(waiting, key=lambda one: (one.is_symlink(), one))
            waiting.remove(folder)
            if (real := folder.resolve()) not in entered:
                entered.add(real)
                mine, below, others = entries(folder)
                images += map(str, mine)
                rest += others
                waiting += below
        files += sorted(images)
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
