"""Certified radii of a trained run by randomised smoothing: one row per test image, in
certificates.jsonl.

A row holds the settings and the hash of the weights, so that rows of other settings, of an earlier
training or of more images can be in the same file. Images that have a row are not certified again.

Noisy pixels are clipped to [0, 1] before the model, as in training: what is smoothed is clipping
and model together, for which the theorem holds as for any other classifier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text
from torch import nn

from noiseproof.lab.command import command_record
from noiseproof.lab.console import (
    TimeEstimate,
    approximate_duration,
    print_status,
    progress_bars,
    terminal,
)
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.predictions import Predictor
from noiseproof.lab.runs import RunFolder, Weights, open_runs, shared_weights
from noiseproof.robustness import batch_size_for
from noiseproof.smoothing import certify as certify_images
from noiseproof.smoothing import largest_radius

SCHEMA = 2  # 1: noisy pixels were not clipped
FILE = "certificates.jsonl"
CertificateRow = dict[str, Any]
_IMAGES = 500  # about as many are certified by default
_PAUSE = 5.0  # seconds between two writes


@dataclass(frozen=True)
class Smoothing:
    """How images are certified; arguments as for `noiseproof.smoothing.certify`."""

    sigma: float
    samples: int = 1000
    selection: int = 100
    alpha: float = 0.001
    noise_seed: int = 0


def default_every(count: int) -> int:
    """k such that every k-th of `count` images gives about 500 of them, or all if they are fewer
    than 1,000.

    >>> default_every(10_000), default_every(360)
    (20, 1)
    """
    return max(1, count // _IMAGES)


def certify(
    run: RunFolder,
    smoothing: Smoothing,
    *,
    every: int | None = None,
    weights: Weights = "last",
    device: str = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
    dataset: Dataset | None = None,
) -> list[CertificateRow]:
    """The rows of every k-th test image, in order; those that do not exist yet are computed.

    Args:
        run: a trained run.
        smoothing: the settings.
        every: k; by default such that there are about 500 images.
        weights: which of the run's weights.
        device: "auto", "cpu" or "cuda".
        batch_size: noisy images per batch; by default as many as keep memory small.
        progress: show a progress bar; by default on a terminal, and lines elsewhere.
        dataset: the run's data, if the caller has loaded it already.
    """
    run.require(weights)
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if (damaged := run.drop_damaged_rows(FILE)) and progress is not False:
        print_status(run.name, f"damaged lines removed from {FILE}: {damaged}")
    dataset = run.dataset(dataset)
    n = dataset.test.count
    chosen = range(0, n, every or default_every(n))
    facts = {
        "schema": SCHEMA,
        "weights": weights,
        "model": run.weights_hash(weights),
        "fingerprint": run.fingerprint(dataset),
        **asdict(smoothing),
    }
    rows = {r["image"]: r for r in run.read_jsonl(FILE) if facts.items() <= r.items()}
    missing = [image for image in chosen if image not in rows]
    if missing:
        torch_device = chosen_device(device)
        size = batch_size or batch_size_for(dataset.size, torch_device)
        batches = Batches(
            dataset.test,
            dataset.size,
            max(1, size // smoothing.samples),
            torch_device,
            index=torch.tensor(missing),
            workers=run.config.data.workers,
        )
        predictor = Predictor(run, weights, dataset, torch_device, batches)
        for row in _computed(predictor, smoothing, size, facts, len(missing), progress):
            rows[row["image"]] = row
    return [rows[image] for image in chosen]


def _computed(
    predictor: Predictor,
    smoothing: Smoothing,
    batch_size: int,
    facts: dict[str, Any],
    count: int,
    progress: bool | None,
) -> list[CertificateRow]:
    """Rows of the predictor's images, which are written every few seconds and when interrupted."""
    run, device = predictor.run, predictor.device
    model = nn.Sequential(nn.Hardtanh(0.0, 1.0), predictor.model)
    common = {
        "run": run.name,
        "data": predictor.dataset.name,
        "method": run.config.method.method,
        "seed": run.config.run.seed,
        **facts,
        "precision": predictor.precision,
        "device": device.type,
        **command_record(),
    }
    rows: list[CertificateRow] = []
    written, last_write = 0, time.monotonic()
    with progress_bars(progress) as bar:
        task = bar.add_task(f"{run.name}: certifying", total=count)

        def announce(seconds: float) -> None:
            if progress is not False:
                text = f"certifying {count:,} images takes {approximate_duration(seconds)}"
                print_status(run.name, text, bar)

        estimate = TimeEstimate(count, announce)
        try:
            for pixels, labels, index in predictor.batches:
                start = time.perf_counter()
                half = predictor.precision == "bf16"
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
                    found = certify_images(
                        model,
                        pixels.float() / 255,
                        smoothing.sigma,
                        samples=smoothing.samples,
                        selection=smoothing.selection,
                        alpha=smoothing.alpha,
                        seed=smoothing.noise_seed,
                        index=index,
                        batch_size=batch_size,
                    )
                seconds = round((time.perf_counter() - start) / len(index), 4)
                columns = (index, labels, found.classes, found.counts, found.limits, found.radii)
                for image, label, c, k, limit, radius in zip(
                    *(column.tolist() for column in columns), strict=True
                ):
                    result = {"image": image, "label": label, "class": None if c < 0 else c}
                    result |= {"count": k, "limit": limit, "radius": radius, "seconds": seconds}
                    rows.append(common | result)
                if time.monotonic() - last_write >= _PAUSE:
                    run.append_jsonl(FILE, rows[written:])
                    written, last_write = len(rows), time.monotonic()
                bar.advance(task, len(index))
                estimate.advance(len(index))
        finally:
            if rows[written:]:
                run.append_jsonl(FILE, rows[written:])
    return rows


def certificates(run: RunFolder, weights: Weights) -> dict[Smoothing, list[CertificateRow]]:
    """The rows of the run's current weights and own test images, by settings.

    Args:
        run: the run.
        weights: which of its weights.
    """
    if not run.has(weights):
        return {}
    own = {"schema": SCHEMA, **run.measured_with(weights)}
    found: dict[Smoothing, dict[int, CertificateRow]] = {}
    for row in run.read_jsonl(FILE):
        if own.items() <= row.items():
            settings = Smoothing(**{name: row[name] for name in Smoothing.__dataclass_fields__})
            found.setdefault(settings, {})[row["image"]] = row
    return {s: [rows[image] for image in sorted(rows)] for s, rows in found.items()}


def certified_radii(rows: Sequence[CertificateRow]) -> NDArray[np.float64]:
    """The radius within which each image is classified correctly; -1 where it is not, so that the
    certified accuracy at r is the share of numbers that are at least r."""
    return np.array([r["radius"] if r["class"] == r["label"] else -1.0 for r in rows])


def radius_steps(smoothing: Smoothing) -> list[float]:
    """The radii of a table: steps of 0.25, or of 0.05 if no image can reach 0.5.

    >>> radius_steps(Smoothing(0.25))
    [0.0, 0.25, 0.5]
    """
    largest = largest_radius(smoothing.sigma, smoothing.samples, smoothing.alpha)
    step = 0.25 if largest >= 0.5 else 0.05
    return [round(i * step, 2) for i in range(int(largest / step) + 1)]


def certify_runs(
    paths: Sequence[str | Path],
    *,
    sigma: float,
    samples: int = 1000,
    selection: int = 100,
    alpha: float = 0.001,
    every: int | None = None,
    weights: Weights | None = None,
    noise_seed: int = 0,
    device: str = "auto",
) -> None:
    """Certifies test images of runs and prints the certified accuracy at several radii.

    Args:
        paths: run folders.
        sigma: standard deviation of the noise, in pixel units.
        samples: noisy copies that estimate the probability of the class.
        selection: noisy copies that select the class.
        alpha: probability with which a certificate may be wrong.
        every: certify every k-th test image; by default about 500.
        weights: which of the runs' weights; by default as `shared_weights` chooses, which a report
            on these runs is about.
        noise_seed: seed of the noise.
        device: "auto", "cpu" or "cuda".
    """
    smoothing = Smoothing(sigma, samples, selection, alpha, noise_seed)
    runs = open_runs(paths)
    weights = weights or shared_weights(runs)
    chosen_device(device)  # refused before the data is loaded, which can take a while
    for run in runs:
        run.require(weights)  # likewise
    distances = radius_steps(smoothing)
    largest = largest_radius(sigma, samples, alpha)
    settings = f"σ {sigma:g}, {samples:,} samples, α {alpha:g}"
    columns = [["radius", *(f"{r:g}" for r in distances), "abstained", "images", "s per image"]]
    for run in runs:
        rows = certify(run, smoothing, every=every, weights=weights, device=device)
        radii = certified_radii(rows)
        shares = [f"{100 * np.mean(radii >= r):.1f}" for r in distances]
        abstained = f"{100 * np.mean([r['class'] is None for r in rows]):.1f}"
        seconds = f"{np.mean([r['seconds'] for r in rows]):.3g}"
        columns.append([run.name, *shares, abstained, f"{len(rows):,}", seconds])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, (head, *_) in enumerate(columns):
        table.add_column(Text(head), justify="right" if i else "left", overflow="fold")
    for i, row in enumerate(zip(*(column[1:] for column in columns), strict=True)):
        table.add_row(*row, end_section=i == len(distances) - 1)
    out = terminal()
    out.print(
        f"\nCertified accuracy in %, by L2 radius ({settings})", style="italic", highlight=False
    )
    out.print(table)
    out.print(
        "This share of the images is classified correctly by the smoothed model, however each is "
        f"changed within the radius; a certificate is wrong with probability {alpha:g} at most. "
        f"{samples:,} samples can certify a radius of at most {largest:.3f}.",
        highlight=False,
    )
    for run in runs:
        out.print(f"Rows: {run.path / FILE}", markup=False, soft_wrap=True)
