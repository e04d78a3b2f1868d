"""What counts as the same step, and what does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from noiseproof.lab.verify import TOLERANCE, Taken, disagreement, taken

DTYPES = list(TOLERANCE)


def step(loss=2.0, scale=1.0, change=0.0, finite=True) -> Taken:
    g = torch.Generator().manual_seed(0)
    gradients = [scale * torch.randn(n, generator=g, dtype=torch.float64) for n in (30, 5)]
    gradients[1] = gradients[1] + change
    return Taken(loss, gradients, finite)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_that_differ_by_rounding_agree(dtype):
    near = TOLERANCE[dtype] / 2
    plain = step()
    assert disagreement(plain, plain, plain, dtype) is None
    assert disagreement(step(2 * (1 + near), 1 + near), plain, plain, dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_gradients_are_seen_behind_the_same_loss(dtype):
    plain, far = step(), 2 * TOLERANCE[dtype]
    said = disagreement(step(scale=1 + far), plain, plain, dtype)
    assert said is not None
    assert said.startswith("its gradients differ")
    one_layer = disagreement(step(change=5 * far), plain, plain, dtype)
    assert one_layer is not None
    assert "gradients" in one_layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_loss_is_seen_behind_the_same_gradients(dtype):
    plain = step()
    said = disagreement(step(2 * (1 + 2 * TOLERANCE[dtype])), plain, plain, dtype)
    assert said is not None
    assert said.startswith("its loss is")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong_unless_the_plain_step_is_so_too(loss):
    plain, dtype = step(), torch.bfloat16
    for bad in (step(loss), step(finite=False)):
        assert "not finite" in str(disagreement(bad, plain, plain, dtype))
        assert disagreement(bad, bad, bad, dtype) is None
    gradient = step()
    gradient.gradients[0][3] = math.nan
    assert disagreement(gradient, plain, plain, dtype) is not None


def test_as_much_difference_is_allowed_as_dropout_makes():
    plain, dropped = step(), step(2.5, 1.4)
    assert disagreement(step(2.4, 0.7), plain, plain, torch.float32) is not None
    assert disagreement(step(2.4, 0.7), plain, dropped, torch.float32) is None


def test_a_step_is_taken_down_with_missing_gradients_as_zeros():
    layer = nn.Linear(3, 2)
    (layer.weight.sum() * 2).backward()
    found = taken(torch.tensor(1.5), layer, layer.parameters())
    assert found.loss == 1.5
    assert found.finite
    assert torch.equal(found.gradients[0], torch.full((2, 3), 2.0))
    assert torch.equal(found.gradients[1], torch.zeros(2))
    assert layer.weight.grad is not None
    layer.weight.grad.zero_()
    assert found.gradients[0].min() == 2.0  # a copy
    with torch.no_grad():
        layer.bias[0] = math.inf
    assert not taken(torch.tensor(1.5), layer, layer.parameters()).finite
