"""Stability training (Zheng et al., 2016), in the penultimate feature space."""

from __future__ import annotations

from typing import Any

import torch

from noiseproof import perturb
from noiseproof.objectives.base import Batch, BatchNorm, Constrained, Outcome, Views


class Stability(Constrained):
    """loss = CE(clean) + ramp · weight · mean over the batch of ‖q(x) − q(noise(x))‖, not squared.

    The mean is over the samples that are not mixed with others. The gradient of an unsquared
    distance does not vanish as the features approach each other, so collapsed features can be a
    minimum; with a ramp, classes separate before it acts.
    """

    terms = ("ce", "stability")

    def __init__(
        self,
        noise: perturb.Perturbation | str,
        *,
        weight: float = 1.0,
        ramp_steps: int = 0,
        views: Views = "paired",
        batch_norm: BatchNorm = "apart",
        smoothing: float = 0.0,
    ):
        """
        Args:
            noise: perturbation of the training images, or its text, such as "gaussian:0.1".
            weight: weight of the distance between clean and noisy features.
            ramp_steps: as for `Constrained`.
            views: as for `Objective`.
            batch_norm: as for `Constrained`.
            smoothing: label smoothing of the cross-entropy, in [0, 1).
        """
        super().__init__(
            noise, views=views, smoothing=smoothing, ramp_steps=ramp_steps, batch_norm=batch_norm
        )
        if not weight >= 0:
            raise ValueError(f"weight must be a non-negative number, got {weight}")
        self.weight = weight

    def forward(self, model: Any, batch: Batch) -> Outcome:
        clean, noisy = self.features_of(model, batch.images, self.noised(batch))
        logits = model.head(clean)
        ce = self.cross_entropy(logits, batch.labels, batch.mixture)
        clean, noisy = batch.unmixed(clean), batch.unmixed(noisy)
        difference = clean.float() - noisy.float() if clean.itemsize < 4 else clean - noisy
        distance = torch.linalg.vector_norm(difference, dim=1).mean()
        loss = ce + self.ramp(distance.dtype) * self.weight * distance
        return Outcome(loss, logits, {"ce": ce.detach(), "stability": distance.detach()})
