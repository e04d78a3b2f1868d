"""Attacks on linear classifiers, whose worst case is known, and on a network."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from noiseproof.adversarial import Norm, pgd

NORMS: tuple[Norm, Norm] = ("l2", "linf")


def length(change: Tensor, norm: Norm) -> Tensor:
    return change.flatten(1).norm(dim=1, p=2 if norm == "l2" else math.inf)


class Linear(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def linear(classes: int = 2) -> Linear:
    torch.manual_seed(0)
    return Linear(classes).double()


def pixels(low: float, high: float) -> Tensor:
    x = torch.rand(20, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    return low + (high - low) * x


@pytest.mark.parametrize("norm", NORMS)
def test_on_a_linear_model_it_reaches_the_worst_case(norm):
    """Far from 0 and 1, the margin grows by ε times the dual norm of w_c − w_y."""
    model, x, epsilon = linear(), pixels(0.3, 0.7), 0.1
    labels = torch.arange(20) % 2
    worst = pgd(model, x, labels, norm, epsilon)
    difference = model.head.weight[1] - model.head.weight[0]
    dual = difference.norm(p=2 if norm == "l2" else 1)

    def margin(images: Tensor) -> Tensor:
        logits = model(images)
        return logits.gather(1, 1 - labels[:, None])[:, 0] - logits.gather(1, labels[:, None])[:, 0]

    growth = (margin(worst) - margin(x)) / (epsilon * dual)
    torch.testing.assert_close(growth, torch.ones_like(growth), atol=1e-3, rtol=0)
    assert (growth <= 1 + 1e-9).all()


def test_at_the_limits_of_pixels_it_reaches_the_worst_case_in_the_largest_change():
    """The box of L∞ and [0, 1] has its worst corner where each pixel follows its own sign."""
    model, x, epsilon = linear(), pixels(0.0, 1.0), 0.2
    labels = torch.zeros(20, dtype=torch.int64)
    sign = (model.head.weight[1] - model.head.weight[0]).sign().view(3, 4, 4)
    expected = (x + epsilon * sign).clamp(0, 1)
    torch.testing.assert_close(pgd(model, x, labels, "linf", epsilon), expected)


def test_the_end_of_the_last_step_counts():
    model, x, labels = linear(), pixels(0.3, 0.7), torch.arange(20) % 2
    one, many = (pgd(model, x, labels, "linf", 0.1, steps=steps) for steps in (1, 20))
    torch.testing.assert_close(one, many)  # a single step of 2.5 ε reaches the corner of the box


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 30.0])
def test_it_never_leaves_the_ball_or_the_range_of_pixels(norm, epsilon):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 30), nn.ReLU(), nn.Linear(30, 5))
    x = pixels(0.0, 1.0).float()
    worst = pgd(net, x, torch.arange(20) % 5, norm, epsilon, steps=7)
    assert float(length(worst - x, norm).max()) <= epsilon + 1e-6
    assert 0 <= float(worst.min()) <= float(worst.max()) <= 1


@pytest.mark.parametrize("norm", NORMS)
def test_more_distance_is_worse_and_the_image_itself_counts(norm):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 30), nn.ReLU(), nn.Linear(30, 5))
    x = pixels(0.0, 1.0).float()
    labels = net(x).argmax(1)
    labels[0] = (labels[0] + 1) % 5  # wrong without an attack
    wrong = [
        net(pgd(net, x, labels, norm, epsilon)).argmax(1) != labels for epsilon in (1e-6, 0.1, 2.0)
    ]
    assert [w[0].item() for w in wrong] == [True, True, True]
    first, second, third = (int(w.sum()) for w in wrong)
    assert 1 == first < second <= third == 20


def test_a_confident_model_is_attacked_all_the_same():
    """The cross-entropy of such a model and its gradient are 0 in float32."""
    model = linear().float()
    with torch.no_grad():
        model.head.weight.mul_(1e6)
        model.head.bias.zero_()
    x = pixels(0.3, 0.7).float()
    labels = model(x).argmax(1)
    assert nn.functional.cross_entropy(model(x), labels).item() == 0
    worst = pgd(model, x, labels, "linf", 0.3)
    assert (model(worst).argmax(1) != labels).all()


def test_an_image_is_attacked_alike_in_any_batch():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 30), nn.ReLU(), nn.Linear(30, 5)).double()
    x, labels, some = pixels(0.0, 1.0), torch.arange(20) % 5, torch.tensor([11, 3])
    whole = pgd(net, x, labels, "l2", 0.3)
    part = pgd(net, x[some], labels[some], "l2", 0.3, index=some)
    torch.testing.assert_close(whole[some], part)


def test_the_model_is_left_as_it_was():
    model = linear(3)
    model.train()
    with torch.no_grad():
        pgd(model, pixels(0.0, 1.0), torch.zeros(20, dtype=torch.int64), "l2", 0.1)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "l1"}, "norm must be l2 or linf, got 'l1'"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"steps": 0}, "steps at least 1"),
        ({"labels": torch.full((20,), 7)}, "labels must lie in"),
    ],
)
def test_invalid_arguments_are_named(changes, message):
    arguments = {"labels": torch.zeros(20, dtype=torch.int64), "norm": "l2", "epsilon": 0.1}
    with pytest.raises(ValueError, match=message):
        pgd(linear(), pixels(0.0, 1.0), **{**arguments, **changes})  # pyright: ignore
