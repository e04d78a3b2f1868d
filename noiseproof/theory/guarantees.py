"""What compact classes and distant hyperplanes guarantee (propositions 5.1 and 5.2).

The paper assumes that the compactness and margin losses are 0, for one and the same centroid;
training with partial momentum uses two. The statements here assume nothing about training: they
hold for any centroids, means or not, with measured values in place of the hyperparameters. With

    radius_c   = max over the class of ‖q − m_c‖             (in place of δ_v)
    distance_c = min over i ≠ c of signed d(m_c, P_ci)       (in place of δ_d)

a class has margin_c >= distance_c − radius_c and dispersion_c <= 2 radius_c, and classes are
separated once the smallest distance exceeds twice the largest radius. P_ci is the hyperplane on
which the logits of c and i agree, and d is positive where c wins.

These follow from the triangle inequality, so that `holds` can only be False by a rounding error:
what a measurement shows is whether they say anything. `verdict` is "vacuous" where they do not.
They are about the features that are passed in and no others: use those of unaugmented data, in eval
mode. Everything is computed in float64, so that a bound met with equality still holds.

In all functions `features` are B x D, `labels` B class indices (int64), `centroids` C x D, and
`head` is the linear softmax layer, D -> C.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import boundary_distances, check_samples, class_dispersion, class_margin
from noiseproof.theory.verdict import Cases, Verdict, verdict

_TOLERANCE = 1e-7  # relative; cdist in float64 loses about half the digits
_ROWS = 1024  # rows of the distance matrix in memory at a time


class Guarantee(Cases):
    """A measured quantity of each class, its bound, and whether the bound holds, C each; and
    whether it is vacuous."""


class Separation(NamedTuple):
    """Whether every within-class distance is below every between-class distance."""

    within: float  # largest distance in a class, measured
    between: float  # smallest distance between classes, measured; inf with one class
    radius: float  # largest radius
    distance: float  # smallest signed distance of a centroid to its hyperplanes
    guaranteed: bool  # distance > 2 radius, which proves separation
    separated: bool  # measured: within < between
    holds: bool  # not (guaranteed and not separated)

    @property
    def verdict(self) -> Verdict:
        """Vacuous unless separation is guaranteed."""
        return verdict(self.holds, vacuous=not self.guaranteed)


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
    """margin_c >= distance_c − radius_c, for any centroids (proposition 5.2, part 1).

    Vacuous unless it is positive: the proposition requires δ_d > δ_v.

    The signed distance to a hyperplane changes by at most the distance between two points, so a
    sample of class c is at signed distance >= d(m_c, P_ci) − ‖q − m_c‖ from P_ci. A sample on the
    wrong side makes the margin negative. A class without samples has margin and bound +inf.

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
    tolerance = _TOLERANCE * (1 + bound.abs())
    holds = (measured >= bound - tolerance) | (measured == bound)
    return Guarantee(measured, bound, holds, absent | (bound <= 0))


def dispersion_guarantee(features: Tensor, labels: Tensor, centroids: Tensor) -> Guarantee:
    """dispersion_c <= 2 radius_c, for any centroids (proposition 5.1): the triangle inequality
    through m_c. Vacuous for classes with fewer than two samples."""
    features, centroids = features.detach().double(), centroids.detach().double()
    bound = 2 * class_radius(features, labels, centroids)
    measured = class_dispersion(features, labels, len(centroids))
    scale = torch.linalg.vector_norm(features, dim=1).max()
    few = torch.bincount(labels, minlength=len(centroids)) < 2
    return Guarantee(measured, bound, measured <= bound + _TOLERANCE * (1 + scale), few)


def separation_guarantee(
    features: Tensor, labels: Tensor, head: nn.Linear, centroids: Tensor
) -> Separation:
    """Classes are separated when min distance > 2 max radius, over the classes present
    (proposition 5.2, part 2).

    Along the unit normal of P_ij the centroids are d(m_i, P_ij) + d(m_j, P_ji) >= 2·distance apart,
    so points p, q of different classes have ‖p − q‖ >= 2·distance − 2·radius. If
    distance > 2·radius, that exceeds 2·radius, which no within-class distance does.

    The proof needs a hyperplane for every pair of classes present: if two of them have equal rows
    of W, nothing is guaranteed.
    """
    features, head, centroids = _double(features, head, centroids)
    present = torch.bincount(labels, minlength=len(centroids)) > 0
    radius = float(class_radius(features, labels, centroids).max())
    # Infinite on the diagonal, and for pairs without a hyperplane, of which there must be none.
    distances = boundary_distances(centroids, _classes(centroids), head)[present]
    distance = float(distances.min())
    complete = int(distances[:, present].isinf().sum()) == len(distances)
    within = float(class_dispersion(features, labels, len(centroids)).max())
    between = _smallest_between(features, labels)
    guaranteed = distance > 2 * radius and complete
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
    features = features - features.mean(0)  # cdist expands the square: accurate near 0 only
    smallest = torch.full((), torch.inf, dtype=features.dtype, device=features.device)
    for rows, own in zip(features.split(_ROWS), labels.split(_ROWS), strict=True):
        distances = torch.cdist(rows, features).masked_fill(own[:, None] == labels, torch.inf)
        smallest = torch.minimum(smallest, distances.min())
    return float(smallest)
