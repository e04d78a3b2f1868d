"""Predictions for new images.

A file is read exactly like a training image: rotated by its EXIF orientation, as 8-bit RGB, resized
and cropped to the run's size (see `noiseproof.lab.data.images`). For a run on greyscale data,
colour images are converted to greyscale.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noiseproof.lab.console import printable
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.folder import image_files
from noiseproof.lab.data.images import Reading
from noiseproof.lab.data.splits import Split
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.abstention import Threshold, fit_threshold, threshold_text
from noiseproof.lab.evaluation.predictions import split_logits
from noiseproof.lab.evaluation.tolerance import DRAWS, noise_tolerance, tolerance_text
from noiseproof.lab.evaluation.writers import spreadsheet_text
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.robustness import batch_size_for


class Prediction(NamedTuple):
    """The most probable classes of one file, in order, and their probabilities."""

    file: str
    classes: tuple[str, ...]
    chances: tuple[float, ...]
    tolerance: float | None = None  # the strongest noise that keeps the answer, if asked for


def predict(
    run: RunFolder,
    files: Sequence[str | Path],
    *,
    weights: Weights | None = None,
    top: int = 1,
    device: str = "auto",
    batch_size: int | None = None,
    unreadable: Callable[[str], None] | None = None,
    tolerance: bool = False,
    noise_seed: int = 0,
) -> Iterator[Prediction]:
    """The predictions of the run's model for each file, in order; one batch at a time is in memory.

    Args:
        run: a trained run.
        files: image files.
        weights: "last" or "best"; by default as `RunFolder.default_weights` chooses.
        top: classes per file, most probable first.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images per batch; by default as many as keep memory small.
        unreadable: called with a message for every file that cannot be read, which is then left
            out; by default such a file raises a DataError.
        tolerance: also find the strongest noise that keeps each answer, by `noise_tolerance`, which
            is about 70 times the work.
        noise_seed: of that noise.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    torch_device = chosen_device(device)
    model = run.model(weights or run.default_weights(), torch_device)
    names, size = run.info["classes"], tuple(run.info["size"])
    batch_size = batch_size or batch_size_for(size, torch_device)
    if tolerance:
        batch_size = max(1, batch_size // DRAWS)
    images = Split.unlabelled(files, Reading.of(run.config.data))
    for batch in Batches(images, size, batch_size, torch_device, unreadable=unreadable):
        x = batch.pixels.float() / 255
        with torch.inference_mode():
            best = model(x).float().softmax(1).topk(min(top, len(names)))
        kept = noise_tolerance(model, x, noise_seed).tolist() if tolerance else [None] * len(x)
        columns = batch.positions.tolist(), best.values.tolist(), best.indices.tolist(), kept
        for i, chances, ids, level in zip(*columns, strict=True):
            classes = tuple(names[c] for c in ids)
            yield Prediction(os.fspath(files[i]), classes, tuple(chances), level)


def abstention_threshold(
    run: RunFolder, error: float, *, weights: Weights | None = None, device: str = "auto"
) -> tuple[Threshold, Threshold]:
    """Where to abstain so that the estimated error on clean images is at most `error`: the lowest
    probability of an answer, fitted on the run's validation images; and what it gives on the test
    images.

    Args:
        run: a trained run.
        error: share of wrong answers to allow, in (0, 1).
        weights: as for `predict`.
        device: as for `predict`.
    """
    dataset = run.dataset() if run.validation_images else None  # which may be a download
    if dataset is None or dataset.validation is None:
        raise ValueError(
            f"{run.path} kept no validation images, on which to choose when to abstain; "
            "expected a run trained with --val-share 0.1"
        )
    fitted = fit_threshold(*_confidence(run, dataset.validation, weights, device), error)
    if fitted is None:
        raise ValueError(
            f"no threshold keeps the error below {error:.3g} on the {dataset.validation.count:,} "
            "validation images; allow more, or hold out more with --val-share"
        )
    probability, wrong = _confidence(run, dataset.test, weights, device)
    kept = probability >= fitted.score
    checked = Threshold(fitted.score, float(kept.mean()), int(wrong[kept].sum()), int(kept.sum()))
    return fitted, checked


def _confidence(
    run: RunFolder, split: Split, weights: Weights | None, device: str
) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """The probability of the predicted class of each image, and whether it is wrong."""
    logits, labels = split_logits(
        run, split, weights=weights or run.default_weights(), device=chosen_device(device)
    )
    probabilities, classes = logits.softmax(1).max(1)
    return probabilities.numpy(), (classes != labels).numpy()


def pixels_of(run: RunFolder, files: Sequence[str | Path]) -> Tensor:
    """The image `files` as inputs of the model of `run`: B x C x H x W, in [0, 1]."""
    size = tuple(run.info["size"])
    images = Split.unlabelled(files, Reading.of(run.config.data))
    batches = Batches(images, size, max(1, len(files)), torch.device("cpu"))
    return next(iter(batches)).pixels.float() / 255


def predict_paths(
    path: str | Path,
    paths: Sequence[str],
    *,
    weights: Weights | None = None,
    top: int = 1,
    out: str | Path | None = None,
    abstain: float | None = None,
    tolerance: bool = False,
    noise_seed: int = 0,
    device: str = "auto",
) -> int:
    """Prints the predictions for each image; returns 1 if a file could not be read, otherwise 0.

    Args:
        path: the run folder.
        paths: image files, or folders with images.
        weights: "last" or "best"; by default as `RunFolder.default_weights` chooses.
        top: classes per file, most probable first.
        out: a CSV file to write the predictions to.
        abstain: answer only where the estimated error on clean images stays below this share.
        tolerance: also show the strongest noise that keeps each answer.
        noise_seed: of that noise.
        device: "auto", "cpu", "cuda" or "cuda:N".
    """
    run = RunFolder.open(path)
    chosen_device(device)  # refused before folders are searched and the data is loaded
    weights = weights or run.default_weights()
    run.require(weights)  # likewise
    files = image_files(paths, _warn)
    if not files:
        raise ValueError(f"there are no images in {' or '.join(paths)}")
    print(run.weights_note(weights), file=sys.stderr)
    width = min(60, max(len(file) for file in files))
    text = io.StringIO(newline="")
    table = csv.writer(text)
    optional = [*(["answered"] if abstain else []), *(["tolerance"] if tolerance else [])]
    table.writerow(["file", "rank", "class", "probability", *optional])
    lowest = 0.0
    if abstain:
        fitted, checked = abstention_threshold(run, abstain, weights=weights, device=device)
        lowest = fitted.score
        print(abstention_line(fitted, checked))
    predictions = predict(
        run,
        files,
        weights=weights,
        top=top,
        device=device,
        unreadable=_warn,
        tolerance=tolerance,
        noise_seed=noise_seed,
    )
    failed = len(files)
    for file, classes, chances, level in predictions:
        failed -= 1
        pairs = list(zip(classes, chances, strict=True))
        answered = chances[0] >= lowest
        shown = "   ".join(f"{100 * chance:5.1f} % {name}" for name, chance in pairs)
        shown = shown if answered else f"no answer ({shown.strip()})"
        shown += "" if level is None else f"   {tolerance_text(level)}"
        print(printable(f"{file:<{width}}  {shown}"))
        # ./ keeps a spreadsheet from taking a name for a formula, and still names the file
        path = file if spreadsheet_text(file) == file else os.path.join(".", file)
        for i, (name, chance) in enumerate(pairs, 1):
            cells = [path, i, spreadsheet_text(name), f"{chance:.6g}"]
            cells += ["yes" if answered else "no"] if abstain else []
            table.writerow([*cells, *([] if level is None else [f"{level:.2f}"])])
    if out is not None:
        content = text.getvalue().encode("utf-8", "surrogateescape")  # file names may not be UTF-8
        write_atomically(Path(out), content)
        print(f"Predictions: {out}")
    if failed:
        _warn(f"{failed} of {len(files)} files could not be read")
    return int(failed > 0)


def abstention_line(fitted: Threshold, checked: Threshold) -> str:
    """What `abstention_threshold` has found, in words.

    Args:
        fitted: on validation images.
        checked: on test images.
    """
    share = checked.wrong / max(1, checked.answered)
    return (
        f"Answers from a probability of {threshold_text(fitted.score)}, chosen on validation "
        f"images ({fitted.wrong} of {fitted.answered:,} answers wrong). Of the test images, "
        f"{100 * checked.coverage:.1f} % are answered, {100 * share:.1f} % of these wrongly. "
        "Images unlike these, such as noisy ones, can be worse."
    )


def _warn(message: str) -> None:
    print(f"noiseproof: {printable(message)}", file=sys.stderr, flush=True)
