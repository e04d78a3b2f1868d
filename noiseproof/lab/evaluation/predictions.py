"""Stored predictions: the classes that a run's model gave to the test images.

There is one file per weights, perturbation and noise seed. It records the hash of the weights and
the fingerprint of the test images; its predictions are ignored once either has changed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import Perturbation
from noiseproof.robustness import canonical_name


class Predictions(NamedTuple):
    """The predictions of one model under one perturbation."""

    classes: NDArray[Any]  # draws x n, predicted class ids
    labels: NDArray[np.int64]  # n, true class ids
    draws: NDArray[np.int64]  # numbers of the draws, ascending


def _key(weights: Weights, name: str, noise_seed: int) -> str:
    """A file name; the checksum distinguishes texts that differ in punctuation only."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:60]
    return f"{weights}_{readable}_{zlib.crc32(name.encode()):08x}_n{noise_seed}"


def predictions(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
    fingerprint: str | None = None,
) -> Predictions | None:
    """The stored predictions of the run's current model; None if there are none.

    Args:
        run: the run.
        perturbation: applied to the test images.
        weights: which of the run's weights.
        noise_seed: seed of the noise.
        fingerprint: of the test images; by default predictions for any images are returned.
    """
    stored = run.predictions(_key(weights, canonical_name(perturbation), noise_seed))
    if stored is None or str(stored["model"]) != run.weights_hash(weights):
        return None
    if fingerprint is not None and str(stored["fingerprint"]) != fingerprint:
        return None
    return Predictions(stored["classes"], stored["labels"], stored["draws"])


def save_predictions(
    run: RunFolder,
    name: str,
    by_draw: Mapping[int, NDArray[Any]],
    labels: NDArray[Any],
    *,
    weights: Weights,
    noise_seed: int,
    fingerprint: str,
) -> None:
    """Stores the predictions of the run's current model.

    Args:
        run: the run.
        name: canonical text of the perturbation.
        by_draw: predicted classes of all test images, by number of the draw.
        labels: true classes of the test images.
        weights: which of the run's weights predicted them.
        noise_seed: seed of the noise.
        fingerprint: of the test images.
    """
    draws = sorted(by_draw)
    run.save_predictions(
        _key(weights, name, noise_seed),
        classes=np.stack([by_draw[draw] for draw in draws]),
        labels=labels,
        draws=np.array(draws, dtype=np.int64),
        model=np.array(run.weights_hash(weights)),
        fingerprint=np.array(fingerprint),
        perturbation=np.array(name),
        noise_seed=np.array(noise_seed),
    )


def correct(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
    draws: int | None = None,
) -> NDArray[np.bool_] | None:
    """Whether each stored prediction is right, draws x n; None if there are none.

    Args:
        run: the run.
        perturbation: applied to the test images.
        weights: which of the run's weights.
        noise_seed: seed of the noise.
        draws: only the first draws; by default all.
    """
    stored = predictions(run, perturbation, weights=weights, noise_seed=noise_seed)
    if stored is None:
        return None
    selected = slice(None) if draws is None else stored.draws < draws
    return stored.classes[selected] == stored.labels
