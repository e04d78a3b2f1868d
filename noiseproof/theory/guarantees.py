"""What compact classes and distant hyperplanes guarantee (the paper's propositions 1 and 2).

The paper assumes that the compactness and margin losses vanish, for one and the same centroid;
training with partial momentum uses two. The statements here assume nothing about training. They
hold for any centroids whatever, means or not, and put what is measured in the place of the
hyper-parameters: with

    radius_c   = max over the class of ‖q − m_c‖             (in place of δ_v)
    distance_c = min over i ≠ c of signed d(m_c, P_ci)       (in place of δ_d)

a class has margin_c >= distance_c − radius_c and dispersion_c <= 2 radius_c, and classes are
separated once the smallest distance exceeds twice the largest radius. P_ci is the hyperplane on
which the logits of c and i agree, and d is positive where c wins.

They speak about the features that are passed in and about no others: take those of unaugmented
data, in eval mode. All is computed in float64, so that a bound met with equality still holds.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import boundary_distances, check_samples, class_dispersion, class_margin

__all__ = [
    "Guarantee",
    "Separation",
    "class_radius",
    "dispersion_guarantee",
    "margin_guarantee",
    "separation_guarantee",
]

_SLACK = 1e-7  # relative; float64 distances by expansion lose about half their digits
_ROWS = 1024  # rows of the distance matrix held at once


class Guarantee(NamedTuple):
    """A measured quantity of each class, its bound, and whether the bound holds: C, C, C."""

    measured: Tensor
    bound: Tensor
    holds: Tensor


class Separation(NamedTuple):
    """Whether every within-class distance is below every between-class distance."""

    within: float  # largest distance in a class, measured
    between: float  # smallest distance between classes, measured; inf with one class
    radius: float  # largest radius
    distance: float  # smallest signed distance of a centroid to its hyperplanes
    guaranteed: bool  # distance > 2 radius, so that the statement is proved
    separated: bool  # within < between, as measured
    holds: bool  # not (guaranteed and not separated)


def class_radius(features: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """radius_c = max over class c of ‖q − m_c‖, C; 0 for a class without samples.

    >>> q = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    >>> class_radius(q, torch.tensor([0, 0, 1]), torch.tensor([[1.5, 0.0], [0.0, 1.0]]))
    tensor([1.5000, 4.0000])
    """
    check_samples(features, labels, len(centroids), centroids)
    distance = torch.linalg.vector_norm(features - centroids[labels], dim=1)
    return distance.new_zeros(len(centroids)).scatter_reduce(0, labels, distance, "amax")


def margin_guarantee(
    features: Tensor, labels: Tensor, head: nn.Linear, centroids: Tensor
) -> Guarantee:
    """margin_c >= distance_c − radius_c, for any centroids.

    A signed distance to a hyperplane changes by no more than the point moves, so a sample of class
    c is at signed distance >= d(m_c, P_ci) − ‖q − m_c‖ from P_ci. The margin is signed: a sample on
    the wrong side makes it negative. A class without samples has margin and bound +inf.

    >>> head = nn.Linear(2, 2)
    >>> _ = head.weight.data.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), head.bias.data.zero_()
    >>> q = torch.tensor([[4.0, 0.0], [6.0, 0.0], [-3.0, 0.0]])
    >>> m = torch.tensor([[5.0, 0.0], [-3.0, 0.0]])
    >>> margin_guarantee(q, torch.tensor([0, 0, 1]), head, m).bound.tolist()
    [4.0, 3.0]
    """
    features, head, centroids = _double(features, head, centroids)
    radius = class_radius(features, labels, centroids)
    measured = class_margin(features, labels, head)
    absent = torch.bincount(labels, minlength=len(centroids)) == 0
    distance = boundary_distances(centroids, _classes(centroids), head).amin(1)
    bound = (distance - radius).masked_fill(absent, torch.inf)
    slack = _SLACK * (1 + bound.abs())
    return Guarantee(measured, bound, (measured >= bound - slack) | (measured == bound))


def dispersion_guarantee(features: Tensor, labels: Tensor, centroids: Tensor) -> Guarantee:
    """dispersion_c <= 2 radius_c, for any centroids: the triangle inequality through m_c."""
    features, centroids = features.detach().double(), centroids.detach().double()
    bound = 2 * class_radius(features, labels, centroids)
    measured = class_dispersion(features, labels, len(centroids))
    scale = torch.linalg.vector_norm(features, dim=1).max()
    return Guarantee(measured, bound, measured <= bound + _SLACK * (1 + scale))


def separation_guarantee(
    features: Tensor, labels: Tensor, head: nn.Linear, centroids: Tensor
) -> Separation:
    """Classes are separated when min distance > 2 max radius, over the classes present.

    Along the unit normal of P_ij the centroids lie d(m_i, P_ij) + d(m_j, P_ji) >= 2·distance apart,
    so points p, q of different classes have ‖p − q‖ >= 2·distance − 2·radius. That exceeds
    2·radius, which no within-class distance does, once distance > 2·radius.

    The argument needs a hyperplane for every pair of classes present: where two of them have equal
    rows of W, nothing is guaranteed.
    """
    features, head, centroids = _double(features, head, centroids)
    present = torch.bincount(labels, minlength=len(centroids)) > 0
    radius = float(class_radius(features, labels, centroids).max())
    # Own classes and pairs without a hyperplane are at +inf; only the former are harmless.
    apart = boundary_distances(centroids, _classes(centroids), head)[present]
    distance = float(apart.min())
    whole = int(apart[:, present].isinf().sum()) == len(apart)
    within = float(class_dispersion(features, labels, len(centroids)).max())
    between = _smallest_between(features, labels)
    guaranteed = distance > 2 * radius and whole
    separated = within < between
    return Separation(
        within, between, radius, distance, guaranteed, separated, separated or not guaranteed
    )


def _double(
    features: Tensor, head: nn.Linear, centroids: Tensor
) -> tuple[Tensor, nn.Linear, Tensor]:
    exact = copy.deepcopy(head).double().requires_grad_(False)
    return features.detach().double(), exact, centroids.detach().double()


def _classes(centroids: Tensor) -> Tensor:
    return torch.arange(len(centroids), device=centroids.device)


def _smallest_between(features: Tensor, labels: Tensor) -> float:
    smallest = torch.full((), torch.inf, dtype=features.dtype, device=features.device)
    for rows, own in zip(features.split(_ROWS), labels.split(_ROWS), strict=True):
        apart = torch.cdist(rows, features)
        apart = apart.masked_fill(own[:, None] == labels, torch.inf)
        smallest = torch.minimum(smallest, apart.min())
    return float(smallest)
