"""The paper's method: cross-entropy on clean images and the discriminative loss on both views."""

from __future__ import annotations

from typing import Any

from noiseproof import perturb
from noiseproof.loss import DiscriminativeLoss, LossTerms
from noiseproof.objectives.base import Batch, BatchNorm, Constrained, Outcome, Views


class Discriminative(Constrained):
    """loss = CE(clean) + ramp · criterion(clean, noisy features) + noisy_ce_weight · CE(noisy).

    The criterion applies to the samples that are not mixed with others. If `criterion.noisy_weight`
    and `noisy_ce_weight` are both 0, the noisy view is not computed.
    """

    terms = ("ce", *LossTerms._fields, "noisy_ce")

    def __init__(
        self,
        criterion: DiscriminativeLoss,
        noise: perturb.Perturbation | str | None,
        *,
        noisy_ce_weight: float = 0.0,
        ramp_steps: int = 0,
        views: Views = "paired",
        batch_norm: BatchNorm = "apart",
        smoothing: float = 0.0,
    ):
        """
        Args:
            criterion: the loss on features; its weights are relative to the cross-entropy.
            noise: perturbation of the training images, or its text, such as "gaussian:0.1".
            noisy_ce_weight: weight of cross-entropy on the noisy view; 0 in the paper.
            ramp_steps: as for `Constrained`.
            views: as for `Objective`.
            batch_norm: as for `Constrained`.
            smoothing: label smoothing of the cross-entropy, in [0, 1).
        """
        super().__init__(
            noise, views=views, smoothing=smoothing, ramp_steps=ramp_steps, batch_norm=batch_norm
        )
        if not noisy_ce_weight >= 0:
            raise ValueError(
                f"noisy_ce_weight must be a non-negative number, got {noisy_ce_weight}"
            )
        self.criterion, self.noisy_ce_weight = criterion, noisy_ce_weight

    @property
    def two_views(self) -> bool:
        """True while a weight of the noisy view is positive; weights may change during training."""
        return self.criterion.noisy_weight > 0 or self.noisy_ce_weight > 0

    def forward(self, model: Any, batch: Batch) -> Outcome:
        if self.two_views:
            clean, noisy = self.features_of(model, batch.images, self.noised(batch))
        else:
            clean, noisy = model.features(batch.images), None
        logits = model.head(clean)
        ce = self.cross_entropy(logits, batch.labels, batch.mixture)
        constraints, terms = self.criterion(
            batch.unmixed(clean),
            batch.unmixed(batch.labels),
            model.head,
            None if noisy is None else batch.unmixed(noisy),
            return_terms=True,
        )
        loss = ce + self.ramp(constraints.dtype) * constraints
        logged = {"ce": ce.detach(), **{k: v.detach() for k, v in terms._asdict().items()}}
        if noisy is not None and self.noisy_ce_weight > 0:
            noisy_ce = self.cross_entropy(model.head(noisy), batch.labels, batch.mixture)
            loss = loss + self.noisy_ce_weight * noisy_ce
            logged["noisy_ce"] = noisy_ce.detach()
        return Outcome(loss, logits, logged)
