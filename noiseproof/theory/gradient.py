"""Momentum of the centroid multiplies the margin's gradient by 1 − γ (proposition 4.1).

With the current centroid c̄ = mean of the class in the batch, and the momentum centroid
m = γ·previous + (1 − γ)·c̄, where `previous` carries no gradient, the margin term of a class is

    max over i ≠ c of max(0, margin − d(centroid, P_ci)),     d the signed distance to P_ci.

d is linear in the centroid, so ∂/∂m is the same unit normal as ∂/∂c̄, and ∂m/∂q = (1 − γ) ∂c̄/∂q.
Hence the gradient with momentum is (1 − γ) times the naive one, with respect to the features and
everything before them. For each class this requires that both centroids select the same i (always
so with two classes), that the hinge is active at both, and that the class was seen before (else
m = c̄ and the ratio is 1). It does not hold for W and b, whose gradient depends on the position of
the centroid, nor for a squared hinge, whose gradient is multiplied by twice the hinge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import check_samples, hardest_rivals, head_parameters, working_dtype
from noiseproof.loss import DiscriminativeLoss, Hinge
from noiseproof.theory.verdict import Verdict, verdict


class MarginGradients(NamedTuple):
    """The gradient of the margin term with respect to the features, with either centroid."""

    naive: Tensor  # B x D, current centroid
    momentum: Tensor  # B x D, momentum centroid
    ratio: Tensor  # C, momentum / naive in each class; NaN where the naive gradient is 0
    expected: float  # 1 − γ
    conditions: Tensor  # C, whether the proposition's conditions hold for that class
    applies: bool  # every class present meets the conditions, or has no active hinge
    holds: bool  # measured: momentum = (1 − γ) naive, up to rounding

    @property
    def verdict(self) -> Verdict:
        """Vacuous if the proposition does not apply or both gradients are 0."""
        return verdict(self.holds, vacuous=not self.applies or not bool(self.conditions.any()))


def margin_gradients(
    features: Tensor,
    labels: Tensor,
    head: nn.Linear,
    previous: Tensor,
    *,
    momentum: float,
    margin: float,
    seen: Tensor | None = None,
    margin_hinge: Hinge = "plain",
) -> MarginGradients:
    """Both gradients of the margin term, their ratio, and whether the proposition applies.

    Args:
        features: B x D, clean features of one batch; not modified.
        labels: B class indices, int64.
        head: the linear softmax layer, D -> C.
        previous: C x D, the centroids before this batch.
        momentum: γ in [0, 1).
        margin: δ_d >= 0.
        seen: C booleans, whether a class was seen before; all of them if not given.
        margin_hinge: of the margin term, as for `DiscriminativeLoss`; the proposition does not
            apply to an active hinge that is "squared".

    >>> head = nn.Linear(1, 2)
    >>> _ = head.weight.data.copy_(torch.tensor([[1.0], [-1.0]])), head.bias.data.zero_()
    >>> q, y = torch.tensor([[1.0], [3.0], [-1.0]]), torch.tensor([0, 0, 1])
    >>> both = margin_gradients(q, y, head, torch.zeros(2, 1), momentum=0.75, margin=5.0)
    >>> both.naive.flatten().tolist(), both.momentum.flatten().tolist(), both.holds
    ([-0.25, -0.25, 0.5], [-0.0625, -0.0625, 0.125], True)
    """
    num_classes, dim = head.weight.shape
    check_samples(features, labels, num_classes, previous)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
    known = torch.ones(num_classes, dtype=torch.bool) if seen is None else seen
    if known.shape != (num_classes,) or known.dtype != torch.bool:
        raise ValueError(f"seen must be {num_classes} booleans, got {tuple(known.shape)}")

    q = features.detach().requires_grad_()
    known = known.to(q.device)
    classes = torch.arange(num_classes, device=q.device)
    weight, bias = (p.detach() for p in head_parameters(head, working_dtype(q, head.weight)))
    gradients, rivals = [], []
    for strategy in ("naive", "momentum"):
        loss = DiscriminativeLoss(
            *(num_classes, dim),
            margin=margin,
            momentum=momentum,
            centroids=strategy,
            margin_hinge=margin_hinge,
        ).to(q.device, q.dtype)
        loss.centroids.copy_(previous.detach())
        loss.seen.copy_(known)
        with torch.enable_grad():
            _, terms = loss(q, labels, head, return_terms=True)
            gradients += torch.autograd.grad(terms.margin, q)
        # The call has stored the centroids that its margin term used.
        points = loss.centroids.to(weight.dtype)
        rival, exists = hardest_rivals(points, classes, weight, bias)
        difference = weight - weight[rival]
        gap = torch.linalg.vecdot(difference, points) + bias - bias[rival]
        close = gap < margin * torch.linalg.vector_norm(difference, dim=1)
        rivals.append(torch.where(exists & close, rival, -1))
    naive, slow = gradients

    def per_class(values: Tensor) -> Tensor:
        return q.detach().new_zeros(num_classes).index_add(0, labels, values.sum(1))

    ratio = per_class(slow * naive) / per_class(naive.square())
    present = torch.bincount(labels, minlength=num_classes) > 0
    same = present & (rivals[0] == rivals[1])
    conditions = same & (rivals[0] >= 0) & known & (margin_hinge == "plain")
    applies = bool((conditions | (same & (rivals[0] < 0)))[present].all())
    expected = 1 - momentum
    tolerance = 100 * torch.finfo(q.dtype).eps * naive.abs().max()
    holds = bool(((slow - expected * naive).abs() <= tolerance).all())
    return MarginGradients(naive, slow, ratio, expected, conditions, applies, holds)
