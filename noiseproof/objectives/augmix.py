"""AugMix training (Hendrycks et al., 2020): predictions that agree under augmentation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from noiseproof import perturb
from noiseproof.augment import augmix
from noiseproof.draws import stream
from noiseproof.objectives.base import Batch, Objective, Outcome, Views


class AugMix(Objective):
    """loss = CE(p₁, y) + weight · JS(p₁, p₂, p₃).

    p₁ is the prediction for the images of the batch, p₂ and p₃ those for two of their `augmix`
    versions, all in one forward pass. JS is the Jensen–Shannon divergence, averaged over the
    samples that are not mixed with others. Accepts `noise` and `views`, as the other methods do;
    unused here.
    """

    terms = ("ce", "js")
    num_views = 3

    def __init__(
        self,
        noise: perturb.Perturbation | str | None = None,
        *,
        weight: float = 12.0,
        views: Views = "paired",
        smoothing: float = 0.0,
    ):
        """
        Args:
            noise: unused.
            weight: of the Jensen–Shannon divergence; the paper's is 12.
            views: unused.
            smoothing: label smoothing of the cross-entropy, in [0, 1).
        """
        super().__init__(noise, views=views, smoothing=smoothing)
        if not weight >= 0:
            raise ValueError(f"weight must be a non-negative number, got {weight}")
        self.weight = weight

    def forward(self, model: Any, batch: Batch) -> Outcome:
        versions = [augmix(batch.images, stream(batch.source, i)) for i in range(2)]
        views = torch.cat([batch.images, *versions])
        clean, *others = model.head(model.features(views)).chunk(3)
        ce = self.cross_entropy(clean, batch.labels, batch.mixture)
        js = jensen_shannon([batch.unmixed(logits) for logits in (clean, *others)])
        return Outcome(ce + self.weight * js, clean, {"ce": ce.detach(), "js": js.detach()})


def jensen_shannon(logits: list[Tensor]) -> Tensor:
    """The mean over samples of JS(p₁, …, pₙ) = Σ_k KL(p_k ‖ m) / n, where m is the mean of the p_k.

    Args:
        logits: of the n predictions, B x classes each.

    >>> opposite = [torch.tensor([[40.0, 0.0]]), torch.tensor([[0.0, 40.0]])]
    >>> float(jensen_shannon(opposite) / math.log(2))
    1.0
    """
    stacked = torch.stack([x.float() if x.itemsize < 4 else x for x in logits]).log_softmax(2)
    mean = stacked.logsumexp(0) - math.log(len(logits))
    return (stacked.exp() * (stacked - mean)).sum(2).mean()
