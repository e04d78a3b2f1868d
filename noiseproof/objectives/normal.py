"""Normal training: cross-entropy on clean images."""

from __future__ import annotations

from typing import Any

from noiseproof.objectives.base import Batch, Objective, Outcome


class Normal(Objective):
    """loss = CE(model(x), y). A noise may be given, as to the other methods; it is not used."""

    def forward(self, model: Any, batch: Batch) -> Outcome:
        logits = model.head(model.features(batch.images))
        loss = self.cross_entropy(logits, batch.labels)
        return Outcome(loss, logits, {"ce": loss.detach()})
