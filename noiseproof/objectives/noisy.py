"""Training on noisy images alone."""

from __future__ import annotations

from typing import Any

from noiseproof.objectives.base import Batch, Objective, Outcome


class Noisy(Objective):
    """loss = CE(model(noised(x)), y). There is one view, so `views` makes no difference."""

    def forward(self, model: Any, batch: Batch) -> Outcome:
        logits = model.head(model.features(self.noised(batch)))
        loss = self.cross_entropy(logits, batch.labels)
        return Outcome(loss, logits, {"ce": loss.detach()})
