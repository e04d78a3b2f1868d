"""The unconditional guarantees, on spheres placed by hand and on random features."""

import math

import pytest
import torch
from torch import Tensor, nn

from noiseproof.theory import (
    class_radius,
    dispersion_guarantee,
    margin_guarantee,
    separation_guarantee,
)


def make_head(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    head = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    head.weight.data.copy_(torch.tensor(weight))
    if bias is not None:
        head.bias.data.copy_(torch.tensor(bias))
    return head


def two_spheres(centre: float, radius: float) -> tuple[Tensor, Tensor, nn.Linear, Tensor]:
    """Class 0 around (centre, 0), class 1 around (-centre, 0); the boundary is the second axis."""
    ring = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]) * radius
    m = torch.tensor([[centre, 0.0], [-centre, 0.0]])
    q = torch.cat([m[0] + ring, m[1] + ring])
    return q, torch.tensor([0] * 4 + [1] * 4), make_head([[1.0, 0.0], [-1.0, 0.0]]), m


def test_spheres_placed_by_hand_meet_the_bounds_with_equality():
    q, y, head, m = two_spheres(centre=5.0, radius=1.0)
    margin = margin_guarantee(q, y, head, m)
    dispersion = dispersion_guarantee(q, y, m)
    assert margin.measured.tolist() == pytest.approx([4.0, 4.0])
    assert margin.bound.tolist() == pytest.approx([4.0, 4.0])
    assert dispersion.measured.tolist() == pytest.approx([2.0, 2.0])
    assert dispersion.bound.tolist() == pytest.approx([2.0, 2.0])
    assert margin.holds.all()
    assert dispersion.holds.all()
    assert margin.verdict == dispersion.verdict == ["holds", "holds"]
    assert margin.factor == pytest.approx(1)


@pytest.mark.parametrize("seed", range(20))
def test_the_bounds_hold_for_any_features_head_and_centroids(seed: int):
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(60, 3, generator=make)
    y = torch.randint(0, 4, (60,), generator=make)
    m = 2 * torch.randn(5, 3, generator=make)  # arbitrary; class 4 has no samples
    head = nn.Linear(3, 5)
    head.weight.data = torch.randn(5, 3, generator=make)
    head.bias.data = torch.randn(5, generator=make)
    margin = margin_guarantee(q, y, head, m)
    dispersion = dispersion_guarantee(q, y, m)
    for c in range(4):
        own = q[y == c]
        radius = max(math.dist(p.tolist(), m[c].tolist()) for p in own)
        assert float(class_radius(q, y, m)[c]) == pytest.approx(radius, rel=1e-5)
        rows = head.weight.data
        reach = min(
            float(((rows[c] - rows[i]) @ m[c] + head.bias[c] - head.bias[i]).detach())
            / math.dist(rows[c].tolist(), rows[i].tolist())
            for i in range(5)
            if i != c
        )
        assert float(margin.bound[c]) == pytest.approx(reach - radius, rel=1e-4, abs=1e-4)
    assert margin.holds.all()
    assert dispersion.holds.all()
    assert margin.verdict == ["holds" if b > 0 else "vacuous" for b in margin.bound[:4]] + [
        "vacuous"
    ]
    assert dispersion.verdict == ["holds"] * 4 + ["vacuous"]
    assert margin.measured[4] == margin.bound[4] == math.inf
    assert dispersion.measured[4] == dispersion.bound[4] == 0


def test_a_misclassified_sample_makes_the_margin_negative():
    q, y, head, m = two_spheres(centre=0.5, radius=1.0)
    margin = margin_guarantee(q, y, head, m)
    assert margin.measured.tolist() == pytest.approx([-0.5, -0.5])
    assert margin.holds.all()
    assert margin.verdict == ["vacuous", "vacuous"]  # the bound is not positive
    assert margin._replace(holds=~margin.holds).verdict == ["violated", "violated"]


def test_separation_is_guaranteed_just_above_twice_the_radius():
    near, far = (separation_guarantee(*two_spheres(c, 1.0)) for c in (2.0, 2.01))
    assert (near.distance, near.radius) == pytest.approx((2.0, 1.0))
    assert not near.guaranteed  # the spheres' nearest and farthest points are both 2 apart
    assert (near.within, near.between) == pytest.approx((2.0, 2.0))
    assert far.guaranteed
    assert far.separated
    assert far.holds
    assert (near.verdict, far.verdict) == ("vacuous", "holds")
    assert far._replace(holds=False).verdict == "violated"


def test_separation_can_be_seen_without_being_guaranteed():
    q, y, head, _ = two_spheres(centre=5.0, radius=1.0)
    poor = separation_guarantee(q, y, head, torch.zeros(2, 2))
    assert poor.separated
    assert not poor.guaranteed
    assert poor.holds


def test_equal_rows_of_the_head_guarantee_no_separation():
    # Classes 0 and 1 have the same row and the same centroid; class 2 is far away.
    head = make_head([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    q = torch.tensor([[5.0, 0.0], [5.1, 0.0], [-5.0, 0.0]])
    result = separation_guarantee(q, torch.arange(3), head, q)
    assert result.distance > 2 * result.radius
    assert not result.guaranteed


def test_the_smallest_distance_between_classes_is_that_of_all_pairs():
    q = torch.randn(1500, 2, generator=torch.Generator().manual_seed(1)) * 50  # more than a block
    y = torch.arange(1500) % 3
    result = separation_guarantee(q, y, make_head([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]), q[:3])
    apart = torch.linalg.vector_norm(q[:, None].double() - q.double(), dim=2)
    expected = apart[y[:, None] != y].min()
    assert result.between == pytest.approx(float(expected), rel=1e-6)


def test_invalid_shapes_and_labels_raise_errors_that_name_them():
    q, y, head, m = two_spheres(5.0, 1.0)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 2\), got 7 at index 2"):
        margin_guarantee(q, torch.tensor([0, 0, 7, 0, 1, 1, 1, 1]), head, m)
    with pytest.raises(ValueError, match="centroids must be 2 x 2, got"):
        dispersion_guarantee(q, y, torch.zeros(2, 3))


def test_a_distant_origin_does_not_undo_a_proved_separation():
    q, y, head, m = two_spheres(centre=3.0, radius=1.499)
    q, y = q.repeat(10, 1).double(), y.repeat(10)  # cdist expands squares from 26 rows on
    offset = torch.tensor([0.0, 1e7], dtype=torch.float64)  # along the boundary
    result = separation_guarantee(q + offset, y, head, m + offset)
    assert result.guaranteed
    assert result.holds
    assert result.between == pytest.approx(3.002, abs=1e-6)
