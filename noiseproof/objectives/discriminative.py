"""The paper's method: cross-entropy on clean images and the discriminative loss on both views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noiseproof import perturb
from noiseproof.centroids import snapshot
from noiseproof.loss import DiscriminativeLoss
from noiseproof.objectives.base import Batch, Objective, Outcome, Views, features_of


class Discriminative(Objective):
    """loss = CE(clean) + ramp · criterion(clean, noisy features) + noisy_ce_weight · CE(noisy).

    `noisy_ce_weight` is 0 in the paper. With `ramp_steps` = n the constraints' weight rises
    linearly from 1/n to 1 over the first n training steps, which lets higher learning rates
    survive the start; the buffer `steps` counts them. Where neither noisy alignment nor noisy
    cross-entropy has a weight, no noisy pass is made.
    """

    sees_both = True
    steps: Tensor

    def __init__(
        self,
        criterion: DiscriminativeLoss,
        noise: perturb.Perturbation | str | None,
        *,
        noisy_ce_weight: float = 0.0,
        ramp_steps: int = 0,
        views: Views = "paired",
        smoothing: float = 0.0,
    ):
        super().__init__(noise, views=views, smoothing=smoothing)
        if not noisy_ce_weight >= 0:
            raise ValueError(f"noisy_ce_weight must not be negative, got {noisy_ce_weight}")
        if ramp_steps < 0:
            raise ValueError(f"ramp_steps must not be negative, got {ramp_steps}")
        self.criterion = criterion
        self.noisy_ce_weight, self.ramp_steps = noisy_ce_weight, ramp_steps
        self.sees_both = criterion.noisy_weight > 0 or noisy_ce_weight > 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, model: Any, batch: Batch) -> Outcome:
        if self.sees_both:
            clean, noisy = features_of(model, batch.images, self.noised(batch))
        else:
            clean, noisy = model.features(batch.images), None
        logits = model.head(clean)
        ce = self.cross_entropy(logits, batch.labels)
        constraints, terms = self.criterion(
            clean, batch.labels, model.head, noisy, return_terms=True
        )
        loss = ce + self._ramp(constraints.dtype) * constraints
        logged = {"ce": ce.detach(), **{k: v.detach() for k, v in terms._asdict().items()}}
        if noisy is not None and self.noisy_ce_weight > 0:
            noisy_ce = self.cross_entropy(model.head(noisy), batch.labels)
            loss = loss + self.noisy_ce_weight * noisy_ce
            logged["noisy_ce"] = noisy_ce.detach()
        return Outcome(loss, logits, logged)

    def _ramp(self, dtype: torch.dtype) -> Tensor | float:
        if self.ramp_steps == 0:
            return 1.0
        steps = snapshot(self.steps)
        if self.training:
            steps = steps + 1
            with torch.no_grad():
                self.steps.copy_(steps)
        return (steps.to(dtype) / self.ramp_steps).clamp(max=1.0)
