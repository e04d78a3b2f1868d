"""The paper's constraints as a regulariser of training on clean and noisy images."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from noiseproof import perturb
from noiseproof.centroids import over_ranks, ranks
from noiseproof.loss import DiscriminativeLoss, LossTerms
from noiseproof.objectives.base import Batch, BatchNorm, Constrained, Outcome, Views


class Spheres(Constrained):
    """loss = CE(clean and noisy) + weight · ramp · criterion(clean, noisy features / scale).

    `scale` is the root mean square norm of the clean features of the global batch, without a
    gradient. Radius and margin of the criterion are shares of it, so they mean the same for every
    network, and growing features do not escape the constraints. The criterion applies to the
    samples that are not mixed with others.
    """

    terms = ("ce", *LossTerms._fields)

    def __init__(
        self,
        criterion: DiscriminativeLoss,
        noise: perturb.Perturbation | str | None,
        *,
        weight: float = 0.3,
        ramp_steps: int = 0,
        views: Views = "paired",
        batch_norm: BatchNorm = "together",
        smoothing: float = 0.0,
    ):
        """
        Args:
            criterion: the constraints; the results of this project have radius 0.2 and margin 0.5.
            noise: perturbation of the training images, or its text, such as "gaussian:0..0.12".
            weight: of the criterion, relative to the cross-entropy.
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
        self.criterion, self.weight = criterion, weight

    def forward(self, model: Any, batch: Batch) -> Outcome:
        views = self.features_of(model, batch.images, self.noised(batch))
        logits = model.head(torch.cat(views))
        ce = self.cross_entropy(logits, batch.labels, batch.mixture)
        scale = feature_scale(batch.unmixed(views[0]).detach(), global_batch=True)
        clean, noisy = (batch.unmixed(view).to(scale.dtype) / scale for view in views)
        bias = None if model.head.bias is None else model.head.bias / scale
        head: Any = LinearHead(model.head.weight, bias)
        constraints, terms = self.criterion(
            clean, batch.unmixed(batch.labels), head, noisy, return_terms=True
        )
        loss = ce + self.weight * self.ramp(constraints.dtype) * constraints
        logged = {"ce": ce.detach(), **{k: v.detach() for k, v in terms._asdict().items()}}
        return Outcome(loss, logits[: len(batch.labels)], logged)


class LinearHead(NamedTuple):
    """What the criterion reads of a linear layer; torch.compile can trace it."""

    weight: Tensor
    bias: Tensor | None


def feature_scale(features: Tensor, *, global_batch: bool = False) -> Tensor:
    """The root mean square of the norms of features, n x D, never in half precision.

    NaN if a feature is not finite: divided by infinity, all others would be 0.

    Args:
        features: n x D.
        global_batch: whether to include the features of the other ranks, n on each.

    >>> feature_scale(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))  # √(25 / 2)
    tensor(3.5355)
    """
    features = features.float() if features.itemsize < 4 else features
    square = features.square().sum(1).mean()
    if global_batch:
        square = over_ranks(square) / ranks()
    return torch.where(square.isfinite(), square, torch.nan).sqrt().clamp(min=1e-12)
