"""The classes that a run's model predicts for the test images: computed and stored.

There is one file per weights, perturbation and noise seed, and one more for each set of images that
are not the run's own. It records the hash of the weights and the fingerprint of the test images;
its predictions are ignored once either has changed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.splits import Split
from noiseproof.lab.evaluation.calibration import Calibration, CalibrationSums
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import Identity, Perturbation
from noiseproof.robustness import (
    PerturbedClassifier,
    batch_size_for,
    canonical_name,
    predicted_classes,
)

_ARRAYS = ("classes", "labels", "draws", "model", "fingerprint")


def evaluation_batches(
    run: RunFolder, dataset: Dataset, device: torch.device, batch_size: int | None = None
) -> Batches:
    """The test images on the device, cached where they fit.

    Args:
        run: its settings give the number of processes that decode files.
        dataset: the run's data.
        device: where the batches go.
        batch_size: images per batch; by default as many as keep memory small.
    """
    size = batch_size or batch_size_for(dataset.size, device)
    workers = run.config.data.workers
    return Batches(dataset.test, dataset.size, size, device, workers=workers, cache=True)


@torch.inference_mode()
def split_logits(
    run: RunFolder,
    split: Split,
    *,
    weights: Weights,
    device: torch.device,
    perturbations: Iterable[Perturbation] = (Identity(),),
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The logits of all images of a split under the first draw of each perturbation, one after the
    other, n x classes, and their labels; on the CPU, in float32.

    Args:
        run: a trained run.
        split: labelled images of the run's size.
        weights: which of the run's weights.
        device: where the model runs.
        perturbations: applied to the images; by default none.
        seed: of the noise.
    """
    size, workers = tuple(run.info["size"]), run.config.data.workers
    classifier = PerturbedClassifier(run.model(weights, device).float(), seed)
    batches = Batches(
        split, size, batch_size_for(size, device), device, workers=workers, cache=True
    )
    logits = [
        classifier.logits(batch.pixels.float() / 255, batch.positions, perturbation, 0).cpu()
        for perturbation in perturbations
        for batch in batches
    ]
    joined = torch.cat(logits)
    return joined, split.labels.repeat(len(joined) // split.count)


@dataclass
class Predictor:
    """One model on one device, and the test images that it classifies.

    Args:
        run: the run whose model it is.
        weights: which of the run's weights.
        dataset: the run's data.
        device: where the model runs.
        batches: the test images on the device; predictors of the same data may share them.
        noise_seed: seed of the noise.
    """

    run: RunFolder
    weights: Weights
    dataset: Dataset
    device: torch.device
    batches: Batches
    noise_seed: int = 0

    @cached_property
    def model(self) -> nn.Module:
        model: nn.Module = self.run.model(self.weights, self.device).float()
        gpu = self.device.type == "cuda"
        return model.to(memory_format=torch.channels_last) if gpu else model  # pyright: ignore

    @property
    def precision(self) -> str:
        """bf16 on a GPU for a run that was trained in it, float32 otherwise."""
        half = self.device.type == "cuda" and self.run.info.get("precision") == "bf16"
        return "bf16" if half else "float32"

    @torch.inference_mode()
    def predict(
        self,
        perturbation: Perturbation,
        draws: Sequence[int],
        on_batch: Callable[[int], object] = lambda images: None,
    ) -> tuple[NDArray[Any], list[Calibration]]:
        """Predicted class ids, draws x n, in the smallest unsigned integers that hold them, and the
        calibration of each draw. ValueError if a prediction is not finite.

        Args:
            perturbation: applied to the test images.
            draws: numbers of the noise draws.
            on_batch: called after every batch with its number of images.
        """
        n, count = self.dataset.test.count, len(self.dataset.classes)
        classes = torch.empty(len(draws), n, dtype=torch.int32, device=self.device)
        sums = CalibrationSums(len(draws), self.device)
        half = self.precision == "bf16"
        for pixels, labels, index in self.batches:
            x = pixels.float() / 255
            for i, draw in enumerate(draws):
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
                    logits = self._classifier.logits(x, index, perturbation, draw)
                classes[i, index] = predicted_classes(logits).int()
                sums.add(i, logits, labels)
                on_batch(len(index))
        if undefined := int((classes < 0).sum()):
            raise ValueError(
                f"{self.run.name}: {undefined:,} of {classes.numel():,} predictions under "
                f"{canonical_name(perturbation)} are not finite; the {self.weights} weights are "
                "unusable"
            )
        dtype = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.int32
        return classes.cpu().numpy().astype(dtype), sums.result()

    def stored(self, name: str) -> dict[int, NDArray[Any]]:
        """The stored classes of each draw of the perturbation with this canonical name."""
        seed, fingerprint = self.noise_seed, self.run.fingerprint(self.dataset)
        stored = predictions(
            self.run, name, weights=self.weights, noise_seed=seed, fingerprint=fingerprint
        )
        return dict(zip(stored.draws.tolist(), stored.classes, strict=True)) if stored else {}

    def store(self, name: str, by_draw: Mapping[int, NDArray[Any]]) -> None:
        """Adds the predicted classes of draws of this perturbation to those that are stored."""
        classes, fingerprint = self.stored(name) | dict(by_draw), self.run.fingerprint(self.dataset)
        self.run.save_predictions(
            _key(self.run, self.weights, name, self.noise_seed, fingerprint),
            classes=np.stack([classes[draw] for draw in sorted(classes)]),
            labels=self.dataset.test.labels.numpy(),
            draws=np.array(sorted(classes), dtype=np.int64),
            model=np.array(self.run.weights_hash(self.weights)),
            fingerprint=np.array(fingerprint),
            perturbation=np.array(name),
            noise_seed=np.array(self.noise_seed),
        )

    @cached_property
    def _classifier(self) -> PerturbedClassifier:
        return PerturbedClassifier(self._logits, self.noise_seed)

    def _logits(self, images: Tensor) -> Tensor:
        if self.device.type == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        return self.model(images)


class Predictions(NamedTuple):
    """The predictions of one model under one perturbation."""

    classes: NDArray[Any]  # draws x n, predicted class ids
    labels: NDArray[np.int64]  # n, true class ids
    draws: NDArray[np.int64]  # numbers of the draws, ascending


def _key(
    run: RunFolder, weights: Weights, name: str, noise_seed: int, fingerprint: str | None
) -> str:
    """A file name; the checksum distinguishes texts that differ in punctuation only. Without a
    fingerprint, that of the run's own images."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:60]
    other = fingerprint if fingerprint != run.info.get("fingerprint", fingerprint) else None
    images = f"_{other}" if other else ""
    return f"{weights}_{readable}_{zlib.crc32(name.encode()):08x}_n{noise_seed}{images}"


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
        fingerprint: of the test images; by default those of the run, whichever they were.
    """
    name = canonical_name(perturbation)
    return stored_predictions(
        run, name, weights=weights, noise_seed=noise_seed, fingerprint=fingerprint
    )


def stored_predictions(
    run: RunFolder, name: str, *, weights: Weights, noise_seed: int, fingerprint: str | None = None
) -> Predictions | None:
    """`predictions` by the canonical name of a perturbation, which may be a user's own that is not
    registered now."""
    stored = run.predictions(_key(run, weights, name, noise_seed, fingerprint), _ARRAYS)
    if stored is None or str(stored["model"]) != run.weights_hash(weights):
        return None
    if fingerprint is not None and str(stored["fingerprint"]) != fingerprint:
        return None
    classes, labels, draws = (stored[name] for name in ("classes", "labels", "draws"))
    if classes.shape != (*draws.shape, *labels.shape) or classes.dtype.kind not in "iu":
        raise ValueError(
            f"the predictions of {run.path} under {name} are not one class per draw and image; "
            f"delete {run.path / 'predictions'} and evaluate again"
        )
    return Predictions(classes, labels, draws)


def correct(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
    draws: int | None = None,
    fingerprint: str | None = None,
) -> NDArray[np.bool_] | None:
    """Whether each stored prediction is right, draws x n; None if there are none.

    Args:
        run: the run.
        perturbation: applied to the test images.
        weights: which of the run's weights.
        noise_seed: seed of the noise.
        draws: only the first draws; by default all.
        fingerprint: of the test images, if they are not the run's own.
    """
    stored = predictions(
        run, perturbation, weights=weights, noise_seed=noise_seed, fingerprint=fingerprint
    )
    if stored is None:
        return None
    selected = slice(None) if draws is None else stored.draws < draws
    return stored.classes[selected] == stored.labels
