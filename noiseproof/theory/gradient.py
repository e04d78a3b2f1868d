"""The margin's gradient shrinks by 1 − γ when the centroid has momentum (the paper's section 4.4).

With the current centroid c̄ = mean of the class in the batch, and the momentum centroid
m = γ·previous + (1 − γ)·c̄, where `previous` carries no gradient, the margin term of a class is

    max over i ≠ c of max(0, margin − d(centroid, P_ci)),     d the signed distance to P_ci.

d is linear in the centroid, so ∂/∂m is the same unit normal as ∂/∂c̄, and ∂m/∂q = (1 − γ) ∂c̄/∂q.
Hence the gradient with momentum is (1 − γ) times the naive one, with respect to the features and
everything before them. For each class this requires that both centroids select the same i (always
so with two classes), that the hinge is active at both, and that the class was seen before (else
m = c̄ and the ratio is 1). It does not hold for W and b, whose gradient depends on the position of
the centroid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import check_samples

__all__ = ["MarginGradients", "margin_gradients"]


class MarginGradients(NamedTuple):
    """The gradient of the margin term with respect to the features, with either centroid."""

    naive: Tensor  # B x D, current centroid
    momentum: Tensor  # B x D, momentum centroid
    ratio: Tensor  # C, momentum / naive in each class; NaN where the naive gradient is 0
    expected: float  # 1 − γ
    conditions: Tensor  # C, whether the proposition's conditions hold for that class
    applies: bool  # every class present meets the conditions, or has no active hinge
    holds: bool  # measured: momentum = (1 − γ) naive, up to rounding


def margin_gradients(
    features: Tensor,
    labels: Tensor,
    head: nn.Linear,
    previous: Tensor,
    *,
    momentum: float,
    margin: float,
    seen: Tensor | None = None,
) -> MarginGradients:
    """Both gradients of the margin term, their ratio, and whether the proposition applies.

    Args:
        features: B x D, clean features of one batch; not modified.
        labels: B class indices, int64.
        head: the linear softmax layer, D -> C.
        previous: C x D, the centroids before this batch.
        momentum: γ in [0, 1).
        margin: δ_d.
        seen: C booleans, whether a class was seen before; all of them if not given.

    >>> head = nn.Linear(1, 2)
    >>> _ = head.weight.data.copy_(torch.tensor([[1.0], [-1.0]])), head.bias.data.zero_()
    >>> q, y = torch.tensor([[1.0], [3.0], [-1.0]]), torch.tensor([0, 0, 1])
    >>> both = margin_gradients(q, y, head, torch.zeros(2, 1), momentum=0.75, margin=5.0)
    >>> both.naive.flatten().tolist(), both.momentum.flatten().tolist(), both.holds
    ([-0.25, -0.25, 0.5], [-0.0625, -0.0625, 0.125], True)
    """
    num_classes = head.out_features
    check_samples(features, labels, num_classes, previous)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
    known = torch.ones(num_classes, dtype=torch.bool) if seen is None else seen.cpu()
    if known.shape != (num_classes,) or known.dtype != torch.bool:
        raise ValueError(f"seen must be {num_classes} booleans, got {tuple(known.shape)}")

    present = [int(c) for c in labels.unique()]
    with torch.enable_grad():
        q = features.detach().requires_grad_()
        current = {c: q[labels == c].mean(0) for c in present}
        running = {
            c: momentum * previous[c].detach() + (1 - momentum) * m if known[c] else m
            for c, m in current.items()
        }
        naive_loss, naive_rival = _margin_term(current, head, margin)
        slow_loss, slow_rival = _margin_term(running, head, margin)
        (naive,) = torch.autograd.grad(naive_loss, q, retain_graph=True)
        (slow,) = torch.autograd.grad(slow_loss, q)

    ratio = torch.full((num_classes,), torch.nan, dtype=q.dtype, device=q.device)
    conditions = torch.zeros(num_classes, dtype=torch.bool)
    inactive = torch.zeros(num_classes, dtype=torch.bool)
    for c in present:
        own = naive[labels == c]
        ratio[c] = (slow[labels == c] * own).sum() / own.square().sum()
        same = naive_rival[c] == slow_rival[c]
        inactive[c] = same and naive_rival[c] is None
        conditions[c] = same and naive_rival[c] is not None and known[c]
    expected = 1 - momentum
    tolerance = 100 * torch.finfo(q.dtype).eps * naive.abs().max()
    holds = bool(((slow - expected * naive).abs() <= tolerance).all())
    applies = bool((conditions | inactive)[present].all())
    return MarginGradients(naive, slow, ratio, expected, conditions.to(q.device), applies, holds)


def _margin_term(
    centroids: dict[int, Tensor], head: nn.Linear, margin: float
) -> tuple[Tensor, dict[int, int | None]]:
    """The mean over classes of the largest hinge, and its i for each class (None: inactive)."""
    weight = head.weight.detach()
    bias = torch.zeros_like(weight[:, 0]) if head.bias is None else head.bias.detach()
    total = weight.new_zeros(()) + 0 * sum(m.sum() for m in centroids.values())
    rival: dict[int, int | None] = {}
    for c, m in centroids.items():
        worst, rival[c] = m.new_zeros(()), None
        for i in range(len(weight)):
            length = torch.linalg.vector_norm(weight[c] - weight[i])
            if i == c or length == 0:  # equal rows have no hyperplane
                continue
            distance = ((weight[c] - weight[i]) @ m + bias[c] - bias[i]) / length
            if margin - distance > worst:
                worst, rival[c] = margin - distance, i
        total = total + worst / len(centroids)
    return total, rival
