"""The classes that a run's model predicts for the test images under noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import Perturbation
from noiseproof.robustness import PerturbedClassifier, batch_size_for


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
    checked_devices = ("cuda",)  # where the first batch of each size is checked against a small one

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
        for pixels, _, index in self.batches:
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
