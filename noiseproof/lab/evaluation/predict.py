"""Predictions for new images.

A file is read exactly like a training image: rotated by its EXIF orientation, as 8-bit RGB, resized
to the run's size (see `noiseproof.lab.data.images`). For a run on greyscale data, colour images are
converted to greyscale.
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
from noiseproof.lab.data.folder import image_files
from noiseproof.lab.data.splits import Split
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.writers import spreadsheet_text
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.robustness import batch_size_for


class Prediction(NamedTuple):
    """The most probable classes of one file, in order, and their probabilities."""

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
    unreadable: Callable[[str], None] | None = None,
) -> Iterator[Prediction]:
    """The predictions of the run's model for each file, in order; one batch at a time is in memory.

    Args:
        run: a trained run.
        files: image files.
        weights: "last" or "best"; by default "best" if the run has it.
        top: classes per file, most probable first.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images per batch; by default as many as keep memory small.
        unreadable: called with a message for every file that cannot be read, which is then left
            out; by default such a file raises a DataError.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    torch_device = chosen_device(device)
    model = run.model(weights or ("best" if run.has("best") else "last"), torch_device)
    names, size = run.info["classes"], tuple(run.info["size"])
    batch_size = batch_size or batch_size_for(size, torch_device)
    images = Split.unlabelled(files)
    for batch in Batches(images, size, batch_size, torch_device, unreadable=unreadable):
        with torch.inference_mode():
            best = model(batch.pixels.float() / 255).float().softmax(1).topk(min(top, len(names)))
        columns = batch.positions.tolist(), best.values.tolist(), best.indices.tolist()
        for i, chances, ids in zip(*columns, strict=True):
            yield Prediction(os.fspath(files[i]), tuple(names[c] for c in ids), tuple(chances))


def pixels_of(run: RunFolder, files: Sequence[str | Path]) -> Tensor:
    """The image `files` as inputs of the model of `run`: B x C x H x W, in [0, 1]."""
    size = tuple(run.info["size"])
    batches = Batches(Split.unlabelled(files), size, max(1, len(files)), torch.device("cpu"))
    return next(iter(batches)).pixels.float() / 255


def predict_paths(
    path: str | Path,
    paths: Sequence[str],
    *,
    weights: Weights | None = None,
    top: int = 1,
    out: str | Path | None = None,
    device: str = "auto",
) -> int:
    """Prints the predictions for each image; returns 1 if a file could not be read, otherwise 0.

    Args:
        path: the run folder.
        paths: image files, or folders with images.
        weights: "last" or "best"; by default "best" if the run has it.
        top: classes per file, most probable first.
        out: a CSV file to write the predictions to.
        device: "auto", "cpu", "cuda" or "cuda:N".
    """
    run, files = RunFolder.open(path), image_files(paths, _warn)
    if not files:
        raise ValueError(f"there are no images in {' or '.join(paths)}")
    width = min(60, max(len(file) for file in files))
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["file", "rank", "class", "probability"])
    predictions = predict(run, files, weights=weights, top=top, device=device, unreadable=_warn)
    failed = len(files)
    for file, classes, chances in predictions:
        failed -= 1
        pairs = list(zip(classes, chances, strict=True))
        shown = "   ".join(f"{100 * chance:5.1f} % {name}" for name, chance in pairs)
        print(printable(f"{file:<{width}}  {shown}"))
        # ./ keeps a spreadsheet from taking a name for a formula, and still names the file
        path = file if spreadsheet_text(file) == file else os.path.join(".", file)
        for i, (name, chance) in enumerate(pairs, 1):
            table.writerow([path, i, spreadsheet_text(name), f"{chance:.6g}"])
    if out is not None:
        content = text.getvalue().encode("utf-8", "surrogateescape")  # file names may not be UTF-8
        write_atomically(Path(out), content)
        print(f"Predictions: {out}")
    if failed:
        _warn(f"{failed} of {len(files)} files could not be read")
    return int(failed > 0)


def _warn(message: str) -> None:
    print(f"noiseproof: {printable(message)}", file=sys.stderr, flush=True)
