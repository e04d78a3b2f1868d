"""What a run's models predict for the test images: how it is computed, and how it is kept.

The noise of an image is keyed by (noise seed, perturbation, draw, place of the image in the test
set). There is one file for each weights, perturbation and noise seed; it names the model file that
its predictions came from, and they count as unknown once that has changed.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import Perturbation
from noiseproof.robustness import PerturbedClassifier, batch_size_for, canonical_name

__all__ = ["Predictions", "Predictor", "correct", "key_of", "predictions"]

KEPT = 1 << 30  # bytes of streamed test images that are kept decoded


class Predictions(NamedTuple):
    """Class ids that a model gave to the test images: `classes` is draws x n, `labels` n."""

    classes: NDArray[Any]
    labels: NDArray[np.int64]
    draws: NDArray[np.int64]


def key_of(weights: Weights, name: str, noise_seed: int) -> str:
    """A file name of its own for each; the checksum parts texts that look alike once cleaned."""
    clean = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:60]
    return f"{weights}_{clean}_{zlib.crc32(name.encode()):08x}_n{noise_seed}"


def predictions(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
) -> Predictions | None:
    """What the run's present model predicted under this perturbation; None if it is not known."""
    stored = run.predictions(key_of(weights, canonical_name(perturbation), noise_seed))
    if stored is None or str(stored["model"]) != run.weights_hash(weights):
        return None
    return Predictions(stored["classes"], stored["labels"], stored["draws"])


def correct(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
    draws: int | None = None,
) -> NDArray[np.bool_] | None:
    """Right or wrong, draws x n, of the first `draws` draws (all by default); None if not known."""
    found = predictions(run, perturbation, weights=weights, noise_seed=noise_seed)
    if found is None:
        return None
    order = np.argsort(found.draws)
    if draws is not None:
        order = order[found.draws[order] < draws]
    return found.classes[order] == found.labels


@dataclass
class Predictor:
    """One model on one device, with the test images that it is asked about.

    Images are taken `batch_size` at a time, by default as many as keep memory small. Streamed files
    are decoded once where their pixels fit into `KEPT` bytes, and for each perturbation else;
    predictors of the same data on one device may share the list `kept`.
    """

    run: RunFolder
    weights: Weights
    dataset: Dataset
    device: torch.device
    noise_seed: int = 0
    batch_size: int | None = None
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what `_batches` has decoded
    doubted = ("cuda",)  # devices whose predictions are looked at twice, for some images

    @cached_property
    def model(self) -> nn.Module:
        model: nn.Module = self.run.model(self.weights, self.device).float()
        gpu = self.device.type == "cuda"
        return model.to(memory_format=torch.channels_last) if gpu else model  # pyright: ignore

    @cached_property
    def images(self) -> Tensor | None:
        images = self.dataset.test.images
        return None if images is None else images.to(self.device)

    @property
    def precision(self) -> str:
        """bf16 on a GPU for a run trained so, float32 everywhere else."""
        half = self.device.type == "cuda" and self.run.info.get("precision") == "bf16"
        return "bf16" if half else "float32"

    @torch.inference_mode()
    def predict(
        self,
        perturbation: Perturbation,
        todo: Sequence[int],
        tick: Callable[[int], object] = lambda images: None,
    ) -> NDArray[Any]:
        """Predicted class ids, draws x n, in the smallest unsigned integers that hold them.

        `tick` is told after every batch how many images were in it.
        """
        n, count = self.dataset.test.count, len(self.dataset.classes)
        found = torch.empty(len(todo), n, dtype=torch.int32, device=self.device)
        half = self.precision == "bf16"
        for pixels, index in self._batches():
            x = pixels.float() / 255
            for i, draw in enumerate(todo):
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
                    found[i, index] = self._asking(x, index, perturbation, [draw])[0]
                tick(len(index))
        dtype = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.int32
        return found.cpu().numpy().astype(dtype)

    @cached_property
    def _asking(self) -> PerturbedClassifier:
        return PerturbedClassifier(self._logits, self.noise_seed, self.doubted)

    def _logits(self, noisy: Tensor) -> Tensor:
        if self.device.type == "cuda":
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        return self.model(noisy)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(uint8 pixels, place in the test set), both on the device."""
        test = self.dataset.test
        size = self.batch_size or batch_size_for(self.dataset.size, self.device)
        if self.images is not None:
            index = torch.arange(test.count, device=self.device).split(size)
            yield from zip(self.images.split(size), index, strict=True)
            return
        if self.kept:
            yield from self.kept
            return
        from noiseproof.lab.data.stream import (
            FileDataset,  # here: torchvision takes seconds to import
        )

        loader = DataLoader(
            FileDataset(test, self.dataset.size, augment="none", seed=0, epoch=0, views=1),
            batch_size=size,
            num_workers=min(self.run.config.data.workers, os.cpu_count() or 1),
            pin_memory=self.device.type == "cuda",
        )
        fits = test.count * math.prod(self.dataset.size) <= KEPT
        read: list[tuple[Tensor, Tensor]] = []
        for pixels, _, index in loader:
            batch = pixels.to(self.device, non_blocking=True), index.to(self.device)
            yield batch
            if fits:  # copied: a worker's batch holds shared memory and a file descriptor
                read.append(batch if self.device.type == "cuda" else (pixels.clone(), batch[1]))
        self.kept.extend(read)  # all of them, or none where the loop was left before
