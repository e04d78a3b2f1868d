"""Jensen–Shannon divergence (in nats) between two classes, at any stage (theorem 6.3).

If a feature of class y is in the sphere C(m_y, r) with probability >= τ, for both of two classes
whose spheres are disjoint, then the distributions of the two classes at *every* stage that the
features are computed from satisfy

    JSD >= max(0, 2τ − 1)² / 2,                 and more sharply
    JSD >= ln 2 − h(τ)  for τ >= ½,             h(τ) = −τ ln τ − (1 − τ) ln(1 − τ).

Proof of the second. No map increases JSD (data processing inequality), so it is at least that of
the answer to "is the feature in C(m_y, r)?": two Bernoulli variables with a = P(yes | y) >= τ and,
since the spheres are disjoint, b = P(yes | y') <= 1 − τ. Their divergence,
h((a+b)/2) − (h(a) + h(b))/2, is convex in (a, b) and 0 at a = b, so it only grows as a rises or b
falls from there; at a = τ and b = 1 − τ it is h(½) − h(τ) = ln 2 − h(τ). By Pinsker's inequality
this is never below (2τ − 1)²/2, the paper's bound.

A stage is the whole activation from which later layers compute the features. The bound does not
apply to a pooled or sampled copy of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from noiseproof.draws import Source, uniform
from noiseproof.geometry import check_samples
from noiseproof.theory.binomial import lower_limit


class DivergenceBound(NamedTuple):
    """Lower bounds on the divergence between classes, at every stage before the features."""

    inside: Tensor  # C, share of held-out features in their own sphere; NaN without samples
    limits: Tensor  # C, lower confidence limits on that probability, jointly valid
    tau: float  # the smallest limit
    disjoint: Tensor  # C x C, whether ‖m_y − m_y'‖ > 2r; False on the diagonal
    bound: float  # the paper's, for every pair of classes; 0 unless all spheres are disjoint
    sharper: float  # ln 2 − h(τ), likewise
    pairs: Tensor  # C x C, the sharper one with τ of the two classes; 0 without a bound

    def sentence(self) -> str:
        """The bound for all classes, or why there is none and which pairs have one, in words."""
        if self.sharper > 0:
            return f"Any two classes are at least {self.sharper:.3g} nats apart (at most ln 2)."
        classes = len(self.limits)
        if classes < 2:
            return "No bound: there is only one class."
        total, disjoint = classes * (classes - 1) // 2, int(self.disjoint.sum()) // 2
        reasons = []
        if disjoint < total:
            which = f"{total - disjoint} of {total} pairs of" if total > 1 else "the two"
            reasons.append(f"the spheres of {which} classes overlap")
        if self.tau <= 0.5:
            reasons.append(
                f"a sphere may hold as little as {100 * self.tau:.3g} % of its class, where more "
                "than half is needed"
            )
        reason = ", and ".join(reasons)
        if classes == 2:
            return f"No bound: {reason}."
        bounds = self.pairs[self.pairs > 0]
        count = len(bounds) // 2
        others = (
            f"Only {count} of {total} pairs {'has' if count == 1 else 'have'} one, of at least "
            f"{float(bounds.min()):.3g} nats."
            if count
            else "No pair has one either."
        )
        return f"No bound for all classes: {reason}. {others}"


class DivergenceEstimate(NamedTuple):
    """Estimates, not bounds, of the divergence between classes."""

    pairs: Tensor  # C x C, nats, symmetric, 0 on the diagonal; NaN for classes without samples
    mean: float  # over the pairs
    smallest: float
    ceiling: float  # the largest estimate possible with this many neighbours, below ln 2
    samples: int  # per class


def pinsker_bound(tau: float) -> float:
    """The paper's bound, max(0, 2τ − 1)² / 2, for a probability `tau` of being in one's sphere.

    >>> pinsker_bound(0.75), pinsker_bound(0.3)
    (0.125, 0.0)
    """
    return max(0.0, 2 * tau - 1) ** 2 / 2


def sharper_bound(tau: float) -> float:
    """ln 2 − h(τ) for τ >= ½, else 0; `tau` as for `pinsker_bound`.

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

    Assumes independent samples of each class that were used neither for training nor for the
    centroids. τ is the smallest Clopper–Pearson lower limit over the C classes, each at confidence
    1 − (1 − confidence) / C. A class without samples has limit 0. `bound` and `sharper` are about
    all pairs of classes, so they are 0 if any two spheres overlap; `pairs` has the bound of each.

    Args:
        features: B x D, penultimate features of held-out data.
        labels: B class indices, int64.
        centroids: C x D, the centres of the spheres.
        radius: δ_v, of every sphere; a point on the sphere counts as inside.
        confidence: of all limits together, in (0, 1).
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
    # The proof needs the spheres of both classes to be disjoint, so a bound for all needs all.
    separate = classes > 1 and bool(
        (apart | torch.eye(classes, dtype=torch.bool, device=q.device)).all()
    )
    return DivergenceBound(
        inside=hits / total.double(),
        limits=torch.tensor(limits, dtype=q.dtype, device=q.device),
        tau=tau,
        disjoint=apart,
        bound=pinsker_bound(tau) if separate else 0.0,
        sharper=sharper_bound(tau) if separate else 0.0,
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
    """JSD of each pair of classes, as ln 2 minus the cross-entropy of a nearest-neighbour rule.

    JSD is the mutual information of a feature and a class drawn with equal odds,
    ln 2 − E[−ln P(y | q)]. The cross-entropy of any classifier is at least that expectation, so
    ln 2 − cross-entropy underestimates the divergence on average, more so in high dimension. Here
    P(y | q) = (k_y + ½) / (k + 1), where k_y of the k nearest neighbours among the other samples of
    the two classes are in y; ties are shared. Negative estimates are set to 0. With the sampling
    error on top it is an estimate, not a bound.

    Args:
        features: B x D, of any stage; distances are Euclidean, so the scale of columns matters.
        labels: B class indices, int64.
        num_classes: C.
        neighbours: k.
        limit: samples per class at most; all classes are cut to the same number.
        generator: source of the random choice of samples.
    """
    check_samples(features, labels, num_classes)
    total = torch.bincount(labels, minlength=num_classes)
    count = min(limit, int(total[total > 0].min()))
    if not 1 <= neighbours < count:
        raise ValueError(
            f"neighbours must lie in [1, {count}), the samples used per class, got {neighbours}"
        )
    order = uniform(labels.shape, features, generator)
    groups = {}
    for c in total.nonzero().flatten().tolist():
        own = (labels == c).nonzero().flatten()
        groups[c] = features[own[order[own].argsort()[:count]]]
    points = torch.stack(list(groups.values()))  # P x n x D, the classes present
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    points = points - points.mean((0, 1))  # cdist expands the square, accurate near 0 only

    surprise = torch.stack([_surprise(points, c, neighbours) for c in range(len(points))])
    estimates = (math.log(2) - (surprise + surprise.T) / 2).clamp(min=0).fill_diagonal_(0)
    pairs = estimates.new_full((num_classes, num_classes), torch.nan)
    present = torch.tensor(list(groups), device=pairs.device)
    pairs[present[:, None], present] = estimates
    off = estimates[~torch.eye(len(estimates), dtype=torch.bool, device=pairs.device)]
    ceiling = math.log(2) - math.log((neighbours + 1) / (neighbours + 0.5))
    mean, smallest = (float(off.mean()), float(off.min())) if len(off) else (math.nan, math.nan)
    return DivergenceEstimate(pairs, mean, smallest, ceiling, count)


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
