"""Jensen–Shannon bounds and estimates against known divergences."""

import math

import pytest
import torch
from torch import Tensor

from noiseproof.theory import (
    divergence_bound,
    estimate_divergence,
    lower_limit,
    pinsker_bound,
    sharper_bound,
)

LN2 = math.log(2)


def js(p: list[float], q: list[float]) -> float:
    """The definition, for two discrete distributions."""
    mixed = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(one: list[float]) -> float:
        return sum(a * math.log(a / m) for a, m in zip(one, mixed, strict=True) if a > 0)

    return (kl(p) + kl(q)) / 2


@pytest.mark.parametrize("tau", [0.5, 0.6, 0.75, 0.9, 0.99, 1.0])
def test_the_sharper_bound_is_attained_by_two_mirrored_bernoulli_variables(tau: float):
    assert sharper_bound(tau) == pytest.approx(js([tau, 1 - tau], [1 - tau, tau]), abs=1e-12)


def test_the_sharper_bound_lies_between_pinskers_and_every_allowed_divergence():
    grid = [i / 20 for i in range(21)]
    for tau in grid[10:]:
        assert pinsker_bound(tau) <= sharper_bound(tau) + 1e-12
        for a in (a for a in grid if a >= tau):
            for b in (b for b in grid if b <= 1 - tau + 1e-12):
                assert js([a, 1 - a], [b, 1 - b]) >= sharper_bound(tau) - 1e-12


def spheres(leaving: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two classes of 1000 at their centroids, `leaving` of class 0 far away."""
    m = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    y = torch.arange(2000) % 2
    q = m[y].clone()
    q[torch.arange(leaving) * 2] = 100.0
    return q, y, m


def test_tau_is_the_smallest_joint_confidence_limit():
    result = divergence_bound(*spheres(leaving=100), radius=1.0, confidence=0.9)
    assert result.inside.tolist() == pytest.approx([0.9, 1.0])
    assert result.limits.tolist() == pytest.approx(
        [lower_limit(900, 1000, 0.95), 0.05 ** (1 / 1000)]
    )
    assert result.tau == pytest.approx(lower_limit(900, 1000, 0.95))
    assert result.bound == pytest.approx((2 * result.tau - 1) ** 2 / 2)
    assert result.sharper == pytest.approx(
        js([result.tau, 1 - result.tau], [1 - result.tau, result.tau])
    )
    assert result.pairs[0, 1] == pytest.approx(result.sharper)
    assert result.disjoint.tolist() == [[False, True], [True, False]]
    assert result.sentence() == (
        f"Any two classes are at least {result.sharper:.3g} nats apart (at most ln 2)."
    )


def test_one_class_has_no_bound():
    result = divergence_bound(
        torch.zeros(50, 2), torch.zeros(50).long(), torch.zeros(1, 2), radius=1.0
    )
    assert result.bound == result.sharper == 0
    assert result.sentence() == "No bound: there is only one class."


def test_overlapping_spheres_have_no_bound():
    q, y, m = spheres(leaving=0)
    touching = divergence_bound(q, y, m, radius=1.5)  # at exactly twice the radius
    assert not touching.disjoint.any()
    assert touching.pairs.sum() == 0
    assert touching.sentence() == "No bound: the spheres of the two classes overlap."
    assert divergence_bound(q, y, m, radius=1.49).disjoint.sum() == 2


def test_identical_classes_are_not_said_to_be_apart():
    y = torch.arange(2000) % 2
    result = divergence_bound(torch.zeros(2000, 2), y, torch.zeros(2, 2), radius=1.0)
    assert result.tau > 0.99
    assert result.bound == result.sharper == 0
    assert "at least" not in result.sentence()


def test_one_overlapping_pair_leaves_a_bound_for_the_other_pairs_only():
    m = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]])  # the first two overlap
    y = torch.arange(3000) % 3
    result = divergence_bound(m[y], y, m, radius=1.0)
    assert result.bound == result.sharper == 0
    assert result.pairs[0, 1] == 0
    least = min(result.pairs[0, 2], result.pairs[1, 2]).item()
    assert least == pytest.approx(sharper_bound(result.tau))
    assert result.sentence() == (
        "No bound for all classes: the spheres of 1 of 3 pairs of classes overlap. Only 2 of 3 "
        f"pairs have one, of at least {least:.3g} nats."
    )


def test_a_half_empty_sphere_has_no_bound():
    result = divergence_bound(*spheres(leaving=600), radius=1.0)
    assert result.tau < 0.5
    assert result.bound == result.sharper == 0
    assert result.sentence() == (
        f"No bound: a sphere may hold as little as {100 * result.tau:.3g} % of its class, where "
        "more than half is needed."
    )


def test_without_a_bound_for_all_the_sentence_counts_the_pairs_that_have_one():
    m, y = torch.tensor([[0.0], [5.0], [9.0]]), torch.arange(3000) % 3
    lost = torch.where(y == 2, 100.0, 0.0)[:, None]  # none of the third class is in its sphere
    one = divergence_bound(m[y] + lost, y, m, radius=1.0)
    text = one.sentence()
    assert text.endswith(f" Only 1 of 3 pairs has one, of at least {one.pairs[0, 1]:.3g} nats.")
    none = divergence_bound(m[y] + 100, y, m, radius=1.0)
    assert none.sentence().endswith(" No pair has one either.")


def gaussians(gap: float, count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.arange(2 * count) % 2
    q = torch.randn(2 * count, 2, generator=torch.Generator().manual_seed(seed))
    q[:, 0] += gap * y
    return q, y


def true_divergence(gap: float) -> float:
    """JSD of N(0, 1) and N(gap, 1), by integration on a fine grid."""
    t = torch.linspace(-12, 12 + gap, 200_001, dtype=torch.float64)
    p, q = (torch.exp(-0.5 * (t - c) ** 2) / math.sqrt(2 * math.pi) for c in (0.0, gap))
    mixed = (p + q) / 2 + 1e-300
    terms = torch.xlogy(p, p / mixed) + torch.xlogy(q, q / mixed)
    return float(torch.trapezoid(terms / 2, t))


@pytest.mark.parametrize("gap", [1.0, 2.0, 4.0])
def test_the_estimate_is_near_the_true_divergence_and_below_it(gap: float):
    result = estimate_divergence(*gaussians(gap), 2)
    truth = true_divergence(gap)
    assert truth - 0.08 < result.mean < truth + 0.02
    assert result.pairs[0, 1] == result.pairs[1, 0] == pytest.approx(result.mean)
    assert result.samples == 400


def test_equal_distributions_are_estimated_at_almost_nothing():
    assert estimate_divergence(*gaussians(0.0), 2).mean < 0.01


def test_far_classes_reach_the_ceiling_and_collapsed_ones_nothing():
    result = estimate_divergence(*gaussians(1000.0, 30), 2, neighbours=5)
    assert result.mean == pytest.approx(result.ceiling) == pytest.approx(LN2 - math.log(6 / 5.5))
    # All features equal: every distance ties, and ties must not go to the sample's own class.
    flat = estimate_divergence(torch.zeros(40, 3), torch.arange(40) % 2, 2, neighbours=5)
    assert flat.mean == pytest.approx(0, abs=1e-12)


def test_votes_agree_with_a_search_over_sorted_neighbours():
    q, y = gaussians(1.5, 25)
    k = 4
    result = estimate_divergence(q, y, 2, neighbours=k)
    surprise = 0.0
    for i in range(50):
        others = sorted((math.dist(q[i].tolist(), q[j].tolist()), j) for j in range(50) if j != i)
        votes = sum(int(y[j] == y[i]) for _, j in others[:k])
        surprise -= math.log((votes + 0.5) / (k + 1)) / 50
    assert result.mean == pytest.approx(max(0, LN2 - surprise), abs=1e-9)


def test_classes_are_cut_to_the_same_number_and_absent_ones_left_out():
    q = torch.randn(90, 2, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0] * 50 + [2] * 40)
    q[y == 2] += 50
    result = estimate_divergence(q, y, 3, neighbours=5, generator=torch.Generator().manual_seed(0))
    assert result.samples == 40
    assert result.pairs[1].isnan().all()
    assert result.pairs[0, 2] == pytest.approx(result.ceiling)
    assert result.smallest == pytest.approx(result.ceiling)
    assert estimate_divergence(q, y, 3, neighbours=5, limit=20).samples == 20


def test_invalid_arguments_raise_errors_that_name_them():
    q, y = gaussians(1.0, 10)
    with pytest.raises(ValueError, match=r"neighbours must lie in \[1, 10\)"):
        estimate_divergence(q, y, 2, neighbours=10)
    with pytest.raises(ValueError, match="radius must be positive"):
        divergence_bound(q, y, torch.zeros(2, 2), radius=0.0)
    with pytest.raises(ValueError, match="tau must lie in"):
        sharper_bound(1.5)
