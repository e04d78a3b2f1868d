"""The classes that a run's model predicts for the test images under noise.

The noise of an image is keyed by (noise seed, perturbation, draw, index of the image in the test
set), so that it is the same for every run, batch size and device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import Perturbation
from noiseproof.robustness import PerturbedClassifier, batch_size_for

__all__ = ["Predictor"]

CACHE_LIMIT = 1 << 30  # bytes of decoded test images that are kept in memory


@dataclass
class Predictor:
    """One model on one device, and the test images that it classifies.

    Args:
        run: the run whose model it is.
        weights: which of the run's weights.
        dataset: the run's data.
        device: where the model runs.
        noise_seed: seed of the noise.
        batch_size: images per batch; by default as many as keep memory small.
        decoded: a cache of batches read from files, filled if their pixels fit into `CACHE_LIMIT`
            bytes; predictors of the same data on the same device may share it.
    """

    run: RunFolder
    weights: Weights
    dataset: Dataset
    device: torch.device
    noise_seed: int = 0
    batch_size: int | None = None
    decoded: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    checked_devices = ("cuda",)  # where the first batch of each size is checked against a small one

    @cached_property
    def model(self) -> nn.Module:
        model: nn.Module = self.run.model(self.weights, self.device).float()
        gpu = self.device.type == "cuda"
        return model.to(memory_format=torch.channels_last) if gpu else model  # pyright: ignore

    @cached_property
    def images(self) -> Tensor | None:
        """The test images on the device, if the dataset holds them in memory."""
        images = self.dataset.test.images
        return None if images is None else images.to(self.device)

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
    ) -> NDArray[Any]:
        """Predicted class ids, draws x n, in the smallest unsigned integers that hold them.

        Args:
            perturbation: applied to the test images.
            draws: numbers of the noise draws.
            on_batch: called after every batch with its number of images.
        """
        n, count = self.dataset.test.count, len(self.dataset.classes)
        classes = torch.empty(len(draws), n, dtype=torch.int32, device=self.device)
        half = self.precision == "bf16"
        for pixels, index in self._batches():
            x = pixels.float() / 255
            for i, draw in enumerate(draws):
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
                    classes[i, index] = self._classifier(x, index, perturbation, [draw])[0]
                on_batch(len(index))
        dtype = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.int32
        return classes.cpu().numpy().astype(dtype)

    @cached_property
    def _classifier(self) -> PerturbedClassifier:
        return PerturbedClassifier(self._logits, self.noise_seed, self.checked_devices)

    def _logits(self, images: Tensor) -> Tensor:
        if self.device.type == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        return self.model(images)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(uint8 pixels, index in the test set), both on the device."""
        test = self.dataset.test
        size = self.batch_size or batch_size_for(self.dataset.size, self.device)
        if self.images is not None:
            index = torch.arange(test.count, device=self.device).split(size)
            yield from zip(self.images.split(size), index, strict=True)
            return
        if self.decoded:
            yield from self.decoded
            return
        from noiseproof.lab.data.stream import FileDataset  # torchvision takes seconds to import

        loader = DataLoader(
            FileDataset(test, self.dataset.size, augment="none", seed=0, epoch=0, views=1),
            batch_size=size,
            num_workers=min(self.run.config.data.workers, os.cpu_count() or 1),
            pin_memory=self.device.type == "cuda",
        )
        fits = test.count * math.prod(self.dataset.size) <= CACHE_LIMIT
        batches: list[tuple[Tensor, Tensor]] = []
        for pixels, _, index in loader:
            batch = pixels.to(self.device, non_blocking=True), index.to(self.device)
            yield batch
            if fits:  # copied: a worker's batch holds shared memory and a file descriptor
                batches.append(batch if self.device.type == "cuda" else (pixels.clone(), batch[1]))
        self.decoded.extend(batches)  # only now: the loop may be abandoned before its end
