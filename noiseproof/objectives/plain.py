"""Training by cross-entropy alone: on clean images, on noisy images, on both."""

from __future__ import annotations

from typing import Any

import torch

from noiseproof.objectives.base import Batch, Objective, Outcome


class Normal(Objective):
    """loss = CE(model(x), y). Accepts `noise` and `views`, as the other methods do; unused here."""

    def forward(self, model: Any, batch: Batch) -> Outcome:
        logits = model.head(model.features(batch.images))
        loss = self.cross_entropy(logits, batch.labels, batch.mixture)
        return Outcome(loss, logits, {"ce": loss.detach()})


class Noisy(Objective):
    """loss = CE(model(noise(x)), y). There is one view, so `views` makes no difference."""

    def forward(self, model: Any, batch: Batch) -> Outcome:
        logits = model.head(model.features(self.noised(batch)))
        loss = self.cross_entropy(logits, batch.labels, batch.mixture)
        return Outcome(loss, logits, {"ce": loss.detach()})


class Both(Objective):
    """loss = mean CE over the 2B images of the clean and the noisy batch.

    They go through the network as one batch, so batch-norm sees them mixed.
    """

    num_views = 2

    def forward(self, model: Any, batch: Batch) -> Outcome:
        images = torch.cat([batch.images, self.noised(batch)])
        logits = model.head(model.features(images))
        loss = self.cross_entropy(logits, batch.labels, batch.mixture)
        return Outcome(loss, logits[: len(batch.labels)], {"ce": loss.detach()})
