"""Randomised smoothing on classifiers whose probabilities and radii are known in closed form."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

from noiseproof.smoothing import certified_accuracy, certify, largest_radius, radius
from noiseproof.theory import lower_limit

SIGMA = 0.3


class HalfSpaces(nn.Module):
    """Class 1 where w · x > b, class 0 elsewhere; w has unit length, so that w · x − b is the
    distance to the boundary. Records the range of its inputs."""

    def __init__(self, size: tuple[int, int, int], offset: float):
        super().__init__()
        weight = torch.linspace(-1, 2, math.prod(size))
        self.weight = nn.Parameter(weight / weight.norm())
        self.offset = offset
        self.low, self.high = math.inf, -math.inf

    def distance(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight - self.offset

    def forward(self, x: Tensor) -> Tensor:
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
        d = self.distance(x)
        return torch.stack([-d, d], 1)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(images: Tensor) -> HalfSpaces:
    made = HalfSpaces((3, 4, 4), 0.0)
    made.offset = float(made.distance(images).detach().mean())
    return made


def test_a_linear_classifier_has_its_distance_to_the_boundary_as_radius(images, model):
    n, alpha = 10_000, 0.001
    result = certify(model, images, SIGMA, samples=n, alpha=alpha)
    distance = model.distance(images).detach().double()
    for i, d in enumerate(distance.tolist()):
        p = NormalDist().cdf(abs(d) / SIGMA)  # of the right side
        assert abs(result.counts[i] / n - p) < 4.5 * math.sqrt(p * (1 - p) / n) + 1e-4
        assert result.limits[i] == lower_limit(int(result.counts[i]), n, 1 - alpha)
        if result.classes[i] >= 0:
            assert result.classes[i] == (d > 0)
            assert 0 < result.radii[i] <= abs(d)  # the exact radius
            assert result.radii[i] > min(abs(d), largest_radius(SIGMA, n, alpha)) - 0.1 * SIGMA
        else:
            assert abs(d) < 0.05 * SIGMA
    assert (result.classes >= 0).sum() >= 9


def test_noise_is_not_clipped(images, model):
    certify(model, images, 0.5, samples=200)
    assert model.low < -0.5
    assert model.high > 1.5


def test_close_to_the_boundary_it_abstains():
    model = HalfSpaces((1, 1, 2), 0.0)
    x = torch.full((1, 1, 1, 2), 0.5)
    model.offset = float(model.distance(x).detach())
    result = certify(model, x, SIGMA, samples=500)
    assert result.classes.tolist() == [-1]
    assert result.radii.tolist() == [0.0]
    assert result.limits[0] <= 0.5


def test_results_do_not_depend_on_the_batches_or_the_other_images(images, model):
    whole = certify(model, images, SIGMA, samples=300, selection=30)
    small = certify(model, images, SIGMA, samples=300, selection=30, batch_size=7)
    some = torch.tensor([9, 4])
    alone = certify(model, images[some], SIGMA, samples=300, selection=30, index=some)
    for expected, other, part in zip(whole, small, alone, strict=True):
        assert torch.equal(expected, other)
        assert torch.equal(expected[some], part)
    other_seed = certify(model, images, SIGMA, samples=300, seed=1)
    assert not torch.equal(whole.counts, other_seed.counts)


def test_images_seeds_and_the_two_stages_have_noise_of_their_own():
    """Equal images have different counts, and the selection is no part of the estimate."""
    seen: list[Tensor] = []

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.flatten())
            return torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], 1)

    certify(Recorder(), torch.full((2, 1, 1, 3), 0.5), 0.1, samples=50, selection=20)
    numbers = torch.cat(seen)
    assert len(numbers) == 2 * 70 * 3
    assert len(numbers.unique()) > 0.99 * len(numbers)


def test_the_limit_covers_the_probability_as_often_as_promised():
    """2,000 certificates of equal images, whose probability is known."""
    alpha, distance = 0.1, 0.1
    model = HalfSpaces((1, 1, 2), 0.0)
    x = torch.full((1, 1, 1, 2), 0.5)
    model.offset = float(model.distance(x).detach()) - distance
    result = certify(model, x.expand(2000, 1, 1, 2), SIGMA, samples=100, selection=5, alpha=alpha)
    wrong = (result.classes == 0) | (result.radii > distance)
    assert wrong.double().mean() <= alpha + 3 * math.sqrt(alpha * 0.9 / 2000)
    assert wrong.double().mean() > 0.02  # so the limit is not needlessly low either


def test_models_are_used_in_eval_mode_and_keep_their_modes(images):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 3))
    model[1].eval()
    first, second = (certify(model, images, 0.1, samples=50) for _ in range(2))
    assert torch.equal(first.counts, second.counts)
    assert [model.training, model[1].training] == [True, False]


def test_logits_that_are_not_finite_have_no_vote(images):
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits = torch.stack([x.flatten(1).sum(1), x.new_zeros(len(x))], 1)
            logits[::2] = math.nan
            return logits

    result = certify(Broken(), images, 0.1, samples=400, selection=10)
    assert (result.counts <= 200).all()
    assert (result.classes == -1).all()


def test_certified_accuracy_counts_what_is_right_and_far_enough():
    classes, labels = torch.tensor([1, 1, -1, 0]), torch.tensor([1, 1, 1, 1])
    radii = torch.tensor([0.5, 0.2, 0.0, 0.9]).double()
    found = [certified_accuracy(classes, radii, labels, r) for r in (0, 0.2, 0.25, 0.5, 0.6)]
    assert found == [0.5, 0.5, 0.25, 0.25, 0.0]


def test_the_largest_radius_is_that_of_unanimous_samples():
    unanimous = radius(lower_limit(1000, 1000, 0.999), 0.25)
    assert largest_radius(0.25, 1000, 0.001) == pytest.approx(unanimous, abs=1e-12)
    assert largest_radius(0.25, 1, 0.6) > 0 == largest_radius(0.25, 1, 0.001)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": 0.0}, "sigma must be finite and above 0, got 0.0"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"selection": 0}, "selection must be at least 1"),
        ({"alpha": 1.0}, r"alpha must lie in \(0, 1\), got 1.0"),
        ({"index": torch.arange(3)}, "index must have 12 entries"),
        ({"images": torch.zeros(0, 3, 4, 4)}, "no images"),
        ({"images": torch.full((1, 3, 4, 4), 2.0)}, "must lie in"),
    ],
)
def test_invalid_arguments_are_named(images, model, changes, message):
    with pytest.raises(ValueError, match=message):
        certify(**{"model": model, "images": images, "sigma": 0.1, **changes})
