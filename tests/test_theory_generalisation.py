"""The paper's bound on leaving a sphere, where it is vacuous, and the confidence limit."""

import math

import pytest
import torch

from noiseproof.theory import leaving_limits, margin_loss, sphere_bound


def test_the_margin_loss_is_a_ramp_between_two_radii():
    # With r = 2 and ρ = 3 the ramp runs from ‖q − m‖ = 1 to 2.
    away = torch.tensor([0.5, 1.0, math.sqrt(2.5), 2.0, 3.0])
    assert margin_loss(4 - away**2, 3.0).tolist() == pytest.approx([0, 0, 0.5, 1, 1], abs=1e-6)


def test_the_three_terms_have_the_values_computed_by_hand():
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.5], [0.5, 0.0]])
    result = sphere_bound(
        q, torch.zeros(2), radius=2.0, rho=3.0, delta=0.1, feature_bound=3.0, centroid_bound=1.0
    )
    assert result.empirical == pytest.approx(0.25)  # only the second sample, on the sphere
    assert result.complexity == pytest.approx(2 / 3 * (9 + 6 + 1 / 2))
    assert result.deviation == pytest.approx(3 * math.sqrt(math.log(20) / 8))
    assert result.bound == pytest.approx(result.empirical + result.complexity + result.deviation)
    assert result.vacuous
    assert "vacuous" in result.sentence()


def test_more_data_does_not_rescue_the_bound():
    q = torch.full((1_000_000, 1), 1.0)
    result = sphere_bound(q, torch.ones(1), radius=1.0, rho=0.9)
    assert result.empirical == 0
    assert result.complexity > 2 / 0.9 * 3
    assert result.vacuous


@pytest.mark.parametrize("seed", range(30))
def test_if_the_bound_is_not_vacuous_the_sphere_contains_every_feature(seed: int):
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(3000, 3, generator=make)
    size = float(torch.rand((), generator=make)) * 8 + 1
    result = sphere_bound(q, q.mean(0), radius=size, rho=0.999 * size**2)
    assert result.vacuous or result.trivial


def test_a_wide_sphere_gives_a_small_bound_that_is_trivial():
    q = torch.full((100_000, 1), 0.1)
    result = sphere_bound(q, torch.full((1,), 0.1), radius=10.0, rho=99.0)
    assert not result.vacuous
    assert result.trivial
    assert "trivially" in result.sentence()


def test_norms_above_the_given_bounds_raise_errors():
    q = torch.ones(4, 1)
    with pytest.raises(ValueError, match=r"a feature has norm 1.0, above the feature_bound 0.5"):
        sphere_bound(q, torch.ones(1), radius=1.0, rho=0.5, feature_bound=0.5)
    with pytest.raises(ValueError, match=r"rho must lie in \(0, radius² = 1.0\), got 1.0"):
        sphere_bound(q, torch.ones(1), radius=1.0, rho=1.0)
    with pytest.raises(ValueError, match="features must be N x D"):
        sphere_bound(q, torch.ones(2), radius=1.0, rho=0.5)


def test_the_limits_count_each_class_and_match_closed_forms():
    centroids = torch.tensor([[0.0], [10.0], [20.0], [30.0]])
    q = torch.tensor([[0.1], [0.5], [0.2], [11.0], [12.0], [20.0]])
    result = leaving_limits(q, torch.tensor([0, 0, 0, 1, 1, 2]), centroids, radius=0.5)
    assert result.outside.tolist() == [0, 2, 0, 0]  # a point on the sphere is inside
    assert result.total.tolist() == [3, 2, 1, 0]
    expected = [1 - 0.05 ** (1 / 3), 1.0, 0.95, 1.0]
    assert result.limit.tolist() == pytest.approx(expected)
