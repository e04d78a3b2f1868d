"""Do features of new data stay in the sphere of their class (theorem 6.2)?

Two bounds on P(‖f(X) − m‖ > r), for X from a class with centroid m.

`sphere_bound` is the paper's, by Rademacher complexity over all maps f with ‖f‖ <= Λ and all
centroids with ‖m‖ <= R. With probability 1 − δ over N training samples, for any 0 < ρ < r²,

    P(‖f(X) − m‖ > r) <= mean Φ_ρ(r² − ‖f(x_i) − m‖²) + (2/ρ)(Λ² + 2RΛ + R²/√N) + 3√(ln(2/δ)/2N).

It allows every measurable f, and its middle term does not shrink with N. So whenever it is below 1,
r² > ρ > 2Λ² + 4RΛ >= (‖m‖ + Λ)² if ‖m‖ <= min(R, Λ), as is true of a mean of features: the sphere
then contains every point that f can reach, and the probability is 0 without any data. `vacuous` and
`trivial` report which is the case.

`leaving_limits` gives a useful number: an exact confidence limit from held-out data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from noiseproof.geometry import check_samples
from noiseproof.theory.binomial import upper_limit


class SphereBound(NamedTuple):
    """The paper's bound on the probability of leaving the sphere, term by term."""

    bound: float  # the sum of the three terms
    empirical: float  # mean ρ-margin loss on the sample
    complexity: float  # (2/ρ)(Λ² + 2RΛ + R²/√N)
    deviation: float  # 3 sqrt(ln(2/δ) / 2N)
    vacuous: bool  # bound >= 1, which holds for any probability
    trivial: bool  # r >= ‖m‖ + Λ: the sphere contains every point that f can reach

    def sentence(self) -> str:
        """A summary, in words."""
        if self.vacuous:
            return (
                f"The bound is vacuous: {self.bound:.3g} is not below 1. More data would hardly "
                f"reduce its complexity term ({self.complexity:.3g})."
            )
        if self.trivial:
            return (
                f"The bound is {self.bound:.3g}, but trivially so: the sphere contains every "
                "feature of the allowed norm, so the probability is 0 without any data."
            )
        return f"At most {self.bound:.3g} of new samples leave the sphere."


class LeavingLimits(NamedTuple):
    """Held-out samples outside their sphere, and an upper limit on the probability; C each."""

    outside: Tensor  # samples outside
    total: Tensor  # all samples
    limit: Tensor  # Clopper–Pearson upper limit; 1 for classes without samples


def margin_loss(h: Tensor, rho: float) -> Tensor:
    """Φ_ρ(h): 1 for h <= 0, 0 for h >= ρ, and linear, 1 − h/ρ, in between; `rho` is ρ > 0.

    >>> margin_loss(torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0]), 2.0).tolist()
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return (1 - h / rho).clamp(0, 1)


def sphere_bound(
    features: Tensor,
    centroid: Tensor,
    *,
    radius: float,
    rho: float,
    delta: float = 0.05,
    feature_bound: float | None = None,
    centroid_bound: float | None = None,
) -> SphereBound:
    """The paper's bound for one class, from the features of its training samples.

    Assumes independent samples, and Λ and R that were fixed before seeing any data: every feature
    that the network can produce, on any input, has norm <= Λ. If they are not given, the largest
    norm in the sample and ‖m‖ are used, which are smaller than the theorem requires and so make the
    bound look better than it is.

    Args:
        features: N x D, of the training samples of the class.
        centroid: m, D.
        radius: r of the sphere, usually somewhat larger than δ_v.
        rho: ρ in (0, r²); samples with ‖f − m‖² > r² − ρ count as errors in part.
        delta: the probability with which the bound may fail.
        feature_bound: Λ.
        centroid_bound: R.

    >>> q = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    >>> result = sphere_bound(q, torch.zeros(2), radius=1.0, rho=0.5)
    >>> result.empirical, result.complexity, result.vacuous
    (0.0, 1.0, True)
    """
    if features.ndim != 2 or centroid.shape != features.shape[1:] or len(features) == 0:
        raise ValueError(
            "features must be N x D with N >= 1 and the centroid D, got "
            f"{tuple(features.shape)} and {tuple(centroid.shape)}"
        )
    if not 0 < rho < radius**2:
        raise ValueError(f"rho must lie in (0, radius² = {radius**2}), got {rho}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")
    q, m = features.detach().double(), centroid.detach().double()
    q_norm = float(torch.linalg.vector_norm(q, dim=1).max())
    m_norm = float(torch.linalg.vector_norm(m))
    lam = q_norm if feature_bound is None else feature_bound
    m_bound = m_norm if centroid_bound is None else centroid_bound
    for what, norm, allowed in (("feature", q_norm, lam), ("centroid", m_norm, m_bound)):
        if norm > allowed:
            raise ValueError(f"a {what} has norm {norm}, above the {what}_bound {allowed}")

    count = len(q)
    empirical = float(margin_loss(radius**2 - (q - m).square().sum(1), rho).mean())
    complexity = 2 / rho * (lam**2 + 2 * m_bound * lam + m_bound**2 / math.sqrt(count))
    deviation = 3 * math.sqrt(math.log(2 / delta) / (2 * count))
    bound = empirical + complexity + deviation
    return SphereBound(bound, empirical, complexity, deviation, bound >= 1, radius >= m_norm + lam)


def leaving_limits(
    features: Tensor,
    labels: Tensor,
    centroids: Tensor,
    *,
    radius: float,
    confidence: float = 0.95,
) -> LeavingLimits:
    """Per class, an upper limit on P(‖f(X) − m_c‖ > radius) that holds with `confidence`.

    Assumes independent samples of each class that were used neither for training nor for the
    centroids. Each limit holds on its own; for all classes at once use 1 − (1 − confidence) / C.

    Args:
        features: B x D, penultimate features of held-out data.
        labels: B class indices, int64.
        centroids: C x D, the centres of the spheres.
        radius: of every sphere; a point on the sphere counts as inside.
        confidence: of each limit, in (0, 1).

    >>> q = torch.zeros(100, 2)
    >>> result = leaving_limits(q, torch.zeros(100, dtype=int), torch.zeros(1, 2), radius=0.5)
    >>> round(float(result.limit), 4)  # 1 - 0.05^(1/100)
    0.0295
    """
    classes = len(centroids)
    check_samples(features, labels, classes, centroids)
    q, m = features.detach().double(), centroids.detach().double()
    leaves = torch.linalg.vector_norm(q - m[labels], dim=1) > radius
    total = torch.bincount(labels, minlength=classes)
    outside = torch.bincount(labels[leaves], minlength=classes)
    counts = zip(outside.tolist(), total.tolist(), strict=True)
    limits = [upper_limit(k, n, confidence) for k, n in counts]
    return LeavingLimits(outside, total, torch.tensor(limits, dtype=q.dtype, device=q.device))
