"""Distances to decision boundaries, margins and dispersions, against loops over pairs."""

import math

import pytest
import torch
from torch import Tensor, nn

from noiseproof.geometry import (
    boundary_distances,
    check_samples,
    class_dispersion,
    class_margin,
)


def sample() -> tuple[Tensor, Tensor, nn.Linear]:
    """Features of classes 0, 1 and 3 of five; the rows of W of classes 0 and 4 are equal."""
    torch.manual_seed(0)
    head = nn.Linear(3, 5).double().requires_grad_(False)
    head.weight.data[4] = head.weight.data[0]
    labels = torch.tensor([0, 1, 3, 0, 0, 3, 1, 1])
    return torch.randn(8, 3, dtype=torch.float64), labels, head


def test_distances_and_margins_equal_those_of_a_loop():
    features, labels, head = sample()
    distances = boundary_distances(features, labels, head)
    margins = [math.inf] * 5
    logits = head(features)
    for b, c in enumerate(labels.tolist()):
        for i in range(5):
            expected = math.inf
            if i != c and {i, c} != {0, 4}:
                length = math.dist(head.weight[c].tolist(), head.weight[i].tolist())
                expected = float(logits[b, c] - logits[b, i]) / length
            assert float(distances[b, i]) == pytest.approx(expected)
            margins[c] = min(margins[c], expected)
    assert class_margin(features, labels, head).tolist() == pytest.approx(margins)


def test_the_dispersion_is_the_largest_distance_within_a_class():
    features, labels, _ = sample()
    expected = [0.0] * 5
    for a, c in zip(features.tolist(), labels.tolist(), strict=True):
        for b, other in zip(features.tolist(), labels.tolist(), strict=True):
            expected[c] = max(expected[c], math.dist(a, b) if c == other else 0.0)
    assert class_dispersion(features, labels, 5).tolist() == pytest.approx(expected)


def test_features_and_labels_that_do_not_fit_raise_errors():
    features, labels, head = sample()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 3 at index 2"):
        class_dispersion(features, labels, 3)
    with pytest.raises(ValueError, match="labels must be 8 values of int64"):
        class_dispersion(features, labels.int(), 5)
    with pytest.raises(ValueError, match="features have 2 values each, but the head takes 3"):
        boundary_distances(features[:, :2], labels, head)
    with pytest.raises(ValueError, match="at least one sample"):
        check_samples(features[:0], labels[:0], 5)
    with pytest.raises(ValueError, match=r"centroids must be 5 x 3, got \(5, 2\)"):
        check_samples(features, labels, 5, torch.zeros(5, 2))
