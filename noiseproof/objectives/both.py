"""Training on clean and noisy images together."""

from __future__ import annotations

from typing import Any

import torch

from noiseproof.objectives.base import Batch, Objective, Outcome


class Both(Objective):
    """loss = mean CE over the 2B images of the clean and the noisy batch.

    They go through the network as one batch, so batch-norm sees them mixed.
    """

    sees_both = True

    def forward(self, model: Any, batch: Batch) -> Outcome:
        images = torch.cat([batch.images, self.noised(batch)])
        logits = model.head(model.features(images))
        loss = self.cross_entropy(logits, torch.cat([batch.labels, batch.labels]))
        return Outcome(loss, logits[: len(batch.labels)], {"ce": loss.detach()})
