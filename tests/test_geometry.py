"""Distances to decision boundaries, margins and dispersions, against loops over pairs."""

import math

import pytest
import torch
from torch import Tensor, nn

from noiseproof import geometry
from noiseproof.geometry import (
    boundary_distances,
    check_samples,
    class_dispersion,
    class_margin,
    features_and_head,
    hardest_rivals,
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


def test_a_class_of_several_blocks_has_the_dispersion_of_all_its_pairs(monkeypatch):
    torch.manual_seed(1)
    features = torch.randn(50, 3) + 1e4
    expected = max(math.dist(a, b) for a in features.tolist() for b in features.tolist())
    for rows in (7, 25, 64):
        monkeypatch.setattr(geometry._diameter, "__defaults__", (rows,))
        dispersion = class_dispersion(features, torch.zeros(50, dtype=torch.int64), 1)
        assert dispersion.item() == pytest.approx(expected, rel=1e-6)
        assert dispersion.dtype == torch.float32
    assert class_dispersion(features[:2].half(), torch.tensor([0, 1]), 2).tolist() == [0, 0]


def rivals_of_a_loop(points: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> list[int]:
    """The rival of each point, -1 where no class has a boundary with the point's own."""
    rivals = []
    for q, c in zip(points, classes.tolist(), strict=True):
        best, rival = math.inf, -1
        for i in range(len(weight)):
            difference = weight[c] - weight[i]
            length = difference.norm().item()
            if length <= 1e-3 * max(weight[c].norm().item(), weight[i].norm().item()):
                continue
            distance = ((difference * q).sum() + bias[c] - bias[i]).item() / length
            if distance < best:
                best, rival = distance, i
        rivals.append(rival)
    return rivals


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_hardest_rival_is_that_of_a_loop(monkeypatch, searched: bool, scale: float):
    """The search with one candidate per group: it must rank the pairs correctly by itself."""
    if searched:
        monkeypatch.setattr(geometry, "_EXACT_LIMIT", 0)
        monkeypatch.setattr(geometry, "_CANDIDATES", 1)
        monkeypatch.setattr(geometry, "_CHUNK", 40 * 7)  # seven points at a time, and a rest
    torch.manual_seed(2)
    weight, bias = torch.randn(40, 6).double() + 1, torch.randn(40).double()
    weight[:20] *= torch.logspace(-1, 1, 20)[:, None]
    gaps = torch.logspace(-2.5, -0.5, 15).double()  # rows 20 to 34 are close to one another
    weight[20:35] = weight[20] + gaps[:, None] * torch.randn(15, 6)
    bias[20:35] = bias[20] + 10 * gaps * torch.randn(15)
    weight[39], bias[39] = weight[0] * (1 + 5e-4), bias[0] + 0.1  # no boundary with class 0
    weight[38], bias[38] = weight[1] * (1 + 2e-3), bias[1] + 0.1  # one with class 1
    points, classes = torch.randn(80, 6).double(), torch.arange(80) % 40
    weight, bias = scale * weight, scale * bias
    rival, exists = hardest_rivals(points, classes, weight, bias)
    assert exists.all()
    assert rival.tolist() == rivals_of_a_loop(points, classes, weight, bias)
    assert rival[1] == 38


@pytest.mark.parametrize("limit", [geometry._EXACT_LIMIT, 0])
def test_a_class_without_boundaries_has_no_rival(monkeypatch, limit: int):
    monkeypatch.setattr(geometry, "_EXACT_LIMIT", limit)
    weight, bias = torch.ones(3, 2), torch.tensor([0.0, 1.0, 2.0])
    for equal_rows in (weight, 0 * weight):
        assert not hardest_rivals(equal_rows, torch.arange(3), equal_rows, bias).exists.any()
    weight[2] = -1
    rival, exists = hardest_rivals(torch.ones(3, 2), torch.arange(3), weight, bias)
    assert exists.all()
    assert rival[:2].tolist() == [2, 2]


def test_features_and_head_are_those_of_the_model():
    model = nn.Module()
    with pytest.raises(ValueError, match=r"an nn\.Linear head; Module has no features$"):
        features_and_head(model)
    model.features = nn.Identity()
    with pytest.raises(ValueError, match=r"the head of Module is NoneType$"):
        features_and_head(model)
    model.head = nn.Conv2d(1, 1, 1)
    with pytest.raises(ValueError, match=r"the head of Module is Conv2d$"):
        features_and_head(model)
    model.head = nn.Linear(2, 2)
    assert features_and_head(model) == (model.features, model.head)


def test_a_head_without_bias_has_bias_0():
    features, labels, head = sample()
    head.bias.data.zero_()
    expected = boundary_distances(features, labels, head)
    plain = nn.Linear(3, 5, bias=False)
    plain.weight.data = head.weight.data
    assert torch.equal(boundary_distances(features, labels, plain), expected)


def test_features_and_labels_that_do_not_fit_raise_errors():
    features, labels, head = sample()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 3 at index 2"):
        class_dispersion(features, labels, 3)
    with pytest.raises(ValueError, match="labels must be 8 values of int64"):
        class_dispersion(features, labels.int(), 5)
    with pytest.raises(ValueError, match="features have 2 values each, but the head takes 3"):
        boundary_distances(features[:, :2], labels, head)
    with pytest.raises(ValueError, match=r"^there must be at least one sample, got none$"):
        check_samples(features[:0], labels[:0], 5)
    with pytest.raises(ValueError, match=r"centroids must be 5 x 3, got \(5, 2\)"):
        check_samples(features, labels, 5, torch.zeros(5, 2))
    check_samples(features, labels, 5)  # these fit
    check_samples(features, labels, 5, torch.zeros(5, 3))


def test_whether_a_pair_has_a_boundary_does_not_depend_on_its_order():
    head = torch.nn.Linear(1, 2, dtype=torch.float64)
    head.weight.data = torch.tensor([[1.0], [0.9990005]], dtype=torch.float64)  # 1e-3 of the larger
    distances = geometry.boundary_distances(torch.ones(2, 1).double(), torch.arange(2), head)
    assert distances.isinf().all()
