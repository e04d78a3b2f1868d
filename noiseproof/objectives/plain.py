"""Training by cross-entropy alone: on clean images, on noisy ones, on both."""

from __future__ import annotations

from typing import Any

import torch

from noiseproof.objectives.base import Batch, Objective, Outcome


class Normal(Objective):
    """loss = CE(model(x), y). A noise may be given, as to the other methods; it is not used."""

    def forward(self, model: Any, batch: Batch) -> Outcome:
        logits = model.head(model.features(batch.images))
        loss = self.cross_entropy(logits, batch.labels)
        return Outcome(loss, logits, {"ce": loss.detach()})


class Noisy(Objective):
    """loss = CE(model(noised(x)), y). There is one view, so `views` makes no difference."""

    def forward(self, model: Any, batch: Batch) -> Outcome:
        logits = model.head(model.features(self.noised(batch)))
        loss = self.cross_entropy(logits, batch.labels)
        return Outcome(loss, logits, {"ce": loss.detach()})


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
