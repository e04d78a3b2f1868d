"""How far apart two classes are at any stage of a network, in Jensen–Shannon divergence (nats).

If a feature of class y falls in the sphere C(m_y, r) with probability >= τ, for both of two
classes whose spheres do not meet, then the distributions of the two classes at *every* stage that
the features are computed from satisfy

    JSD >= max(0, 2τ − 1)² / 2,                 and more sharply
    JSD >= ln 2 − h(τ)  for τ >= ½,             h(τ) = −τ ln τ − (1 − τ) ln(1 − τ).

Proof of the second. JSD does not grow under any map (data processing), so it is at least that of
the answer to "is the feature in C(m_y, r)?": two coins, a = P(yes | y) >= τ and, as the spheres do
not meet, b = P(yes | y') <= 1 − τ. The divergence of two coins, h((a+b)/2) − (h(a) + h(b))/2, is
convex in (a, b) and 0 at a = b, so it only grows as a rises or b falls from there; at a = τ and
b = 1 − τ it is h(½) − h(τ) = ln 2 − h(τ). By Pinsker's inequality this is never below
(2τ − 1)²/2, the paper's bound.

A stage means the whole activation from which later layers compute the features. A pooled or
sampled copy of it is not one: the bound says nothing about that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from noiseproof.draws import Source, uniform
from noiseproof.geometry import check_samples
from noiseproof.theory.binomial import lower_limit

__all__ = [
    "DivergenceBound",
    "DivergenceEstimate",
    "divergence_bound",
    "estimate_divergence",
    "pinsker_bound",
    "sharper_bound",
]


class DivergenceBound(NamedTuple):
    """Lower bounds on the divergence between classes, at every stage before the features."""

    inside: Tensor  # C, share of held-out features in their own sphere; NaN without samples
    limits: Tensor  # C, lower confidence limits on that probability, jointly valid
    tau: float  # the smallest limit
    disjoint: Tensor  # C x C, whether ‖m_y − m_y'‖ > 2r; False on the diagonal
    bound: float  # the paper's, for every pair of disjoint spheres
    sharper: float  # ln 2 − h(τ), likewise
    pairs: Tensor  # C x C, the sharper one with τ of the two classes; 0 where nothing is known

    def sentence(self) -> str:
        """What the bounds say, in words."""
        classes = len(self.limits)
        met = (classes * (classes - 1) - int(self.disjoint.sum())) // 2
        said = f"Every two classes are at least {self.sharper:.3g} nats apart (the most is ln 2)."
        if self.tau <= 0.5:
            said = (
                f"No bound for all classes: some sphere may hold only {self.tau:.3g} of its own "
                "class, and one half is needed."
            )
        return f"{said} Pairs of spheres that meet, and of which nothing is said: {met}."


class DivergenceEstimate(NamedTuple):
    """An estimate, not a bound, of the divergence between classes."""

    pairs: Tensor  # C x C, nats, symmetric, 0 on the diagonal; NaN for classes without samples
    mean: float  # over the pairs
    smallest: float
    ceiling: float  # the most that this many neighbours can show, below ln 2
    samples: int  # of each class


def pinsker_bound(tau: float) -> float:
    """max(0, 2τ − 1)² / 2.

    >>> pinsker_bound(0.75), pinsker_bound(0.3)
    (0.125, 0.0)
    """
    return max(0.0, 2 * tau - 1) ** 2 / 2


def sharper_bound(tau: float) -> float:
    """ln 2 − h(τ) for τ >= ½, else 0.

    >>> sharper_bound(1.0) == math.log(2), sharper_bound(0.5), sharper_bound(0.2)
    (True, 0.0, 0.0)
    """
    if not 0 <= tau <= 1:
        raise ValueError(f"tau must lie in [0, 1], got {tau}")
    if tau <= 0.5:
        return 0.0
    entropy = -sum(p * math.log(p) for p in (tau, 1 - tau) if p > 0)
    return math.log(2) - entropy


def divergence_bound(
    features: Tensor,
    labels: Tensor,
    centroids: Tensor,
    *,
    radius: float,
    confidence: float = 0.95,
) -> DivergenceBound:
    """Both bounds, with τ replaced by a confidence limit that holds for all classes at once.

    Assumes independent samples of each class that had no part in training or in the centroids. τ
    is the smallest Clopper–Pearson lower limit over the C classes, each at
    1 − (1 − confidence) / C. A class without samples has limit 0.

    Args:
        features: B x D, penultimate features of held-out data.
        radius: δ_v, of every sphere; a point on the sphere counts as inside.
    """
    classes = len(centroids)
    check_samples(features, labels, classes, centroids)
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    q, m = features.detach().double(), centroids.detach().double()
    within = torch.linalg.vector_norm(q - m[labels], dim=1) <= radius
    total = torch.bincount(labels, minlength=classes)
    hits = torch.bincount(labels[within], minlength=classes)
    level = 1 - (1 - confidence) / classes
    limits = [lower_limit(k, n, level) for k, n in zip(hits.tolist(), total.tolist(), strict=True)]
    apart = torch.cdist(m, m, compute_mode="donot_use_mm_for_euclid_dist") > 2 * radius
    pairs = torch.tensor(
        [[sharper_bound(min(a, b)) for b in limits] for a in limits], dtype=q.dtype, device=q.device
    )
    tau = min(limits)
    return DivergenceBound(
        inside=hits / total.double(),
        limits=torch.tensor(limits, dtype=q.dtype, device=q.device),
        tau=tau,
        disjoint=apart,
        bound=pinsker_bound(tau),
        sharper=sharper_bound(tau),
        pairs=torch.where(apart, pairs, 0.0),
    )


@torch.no_grad()
def estimate_divergence(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    neighbours: int = 15,
    limit: int = 500,
    generator: Source = None,
) -> DivergenceEstimate:
    """JSD of each pair of classes, as ln 2 less the cross-entropy of a nearest-neighbour guess.

    JSD is the mutual information of a feature and a fair choice of class, ln 2 − E[−ln P(y | q)].
    Any classifier has a cross-entropy at least that large, so ln 2 − cross-entropy is on average
    at most the divergence: a low estimate, and lower in high dimension. Here
    P(y | q) = (k_y + ½) / (k + 1) with k_y of the k nearest other samples of the two classes in y,
    which leaves out the sample itself; ties are shared. Negative estimates are set to 0. Sampling
    error comes on top: it is an estimate at any stage's features, no bound.

    Args:
        features: B x D, of any stage; distances are Euclidean, so the scale of columns matters.
        neighbours: k.
        limit: samples of each class at most; all classes are cut to the same number.
        generator: which samples are kept.
    """
    check_samples(features, labels, num_classes)
    total = torch.bincount(labels, minlength=num_classes)
    kept = min(limit, int(total[total > 0].min()))
    if not 1 <= neighbours < kept:
        raise ValueError(
            f"neighbours must lie in [1, {kept}), the samples kept of each class, got {neighbours}"
        )
    order = uniform(labels.shape, features, generator)
    groups = {}
    for c in total.nonzero().flatten().tolist():
        own = (labels == c).nonzero().flatten()
        groups[c] = features[own[order[own].argsort()[:kept]]]
    points = torch.stack(list(groups.values()))  # P x n x D, the classes present
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    points = points - points.mean((0, 1))  # the expanded square of a distance stays accurate

    surprise = torch.stack([_surprise(points, c, neighbours) for c in range(len(points))])
    found = (math.log(2) - (surprise + surprise.T) / 2).clamp(min=0).fill_diagonal_(0)
    pairs = found.new_full((num_classes, num_classes), torch.nan)
    present = torch.tensor(list(groups), device=pairs.device)
    pairs[present[:, None], present] = found
    off = found[~torch.eye(len(found), dtype=torch.bool, device=found.device)]
    ceiling = math.log(2) - math.log((neighbours + 1) / (neighbours + 0.5))
    mean, smallest = (float(off.mean()), float(off.min())) if len(off) else (math.nan, math.nan)
    return DivergenceEstimate(pairs, mean, smallest, ceiling, kept)


def _surprise(points: Tensor, c: int, k: int) -> Tensor:
    """Mean of −ln P(c | q) over class c, against each of the P classes: P."""
    classes, n, _ = points.shape
    apart = torch.cdist(points[c], points.flatten(0, 1)).view(n, classes, n)
    apart[:, c].fill_diagonal_(torch.inf)  # a sample is not its own neighbour
    near = apart.topk(k, largest=False).values  # n x P x k
    own = near[:, c : c + 1].expand_as(near)
    union = torch.cat([own, near], 2)
    last = union.kthvalue(k, dim=2, keepdim=True).values
    closer, own_closer = (union < last).sum(2), (own < last).sum(2)
    tied, own_tied = (union == last).sum(2), (own == last).sum(2)
    votes = own_closer + (k - closer) * (own_tied.double() / tied)
    return -torch.log((votes + 0.5) / (k + 1)).mean(0)
