"""Linear layers as plain products against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from noiseproof.lab.training import convolution, linear
from noiseproof.lab.training.convolution import use_products
from noiseproof.lab.training.linear import ProductLinear


@pytest.fixture(autouse=True)
def arm(monkeypatch):
    monkeypatch.setattr(convolution.platform, "machine", lambda: "aarch64")


def test_a_product_is_the_linear_layer_in_value_and_gradients():
    torch.manual_seed(0)
    theirs = nn.Linear(5, 3, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    assert use_products(ours) == 1
    x = torch.randn(4, 5, dtype=torch.float64)
    weights = torch.randn(4, 3, dtype=torch.float64)
    gradients = []
    for layer in (theirs, ours):
        a = x.clone().requires_grad_()
        y = layer(a)
        wanted = (a, layer.weight, layer.bias)
        gradients.append((y, *torch.autograd.grad((y * weights).sum(), wanted)))
    for p, q in zip(*gradients, strict=True):
        assert torch.allclose(p, q, atol=1e-12)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_gradients_that_nobody_wants_are_not_made():
    layer = nn.Linear(2, 2)
    use_products(layer)
    layer.requires_grad_(False)
    x = torch.randn(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_layers_without_bias_evaluation_and_other_shapes_keep_torchs_kernel(monkeypatch):
    assert use_products(nn.Linear(2, 2, bias=False)) == 0
    layer = nn.Linear(2, 2)
    use_products(layer)
    assert isinstance(layer, ProductLinear)
    used = []
    monkeypatch.setattr(linear._Linear, "apply", lambda x, *_: used.append(tuple(x.shape)) or x)
    layer(torch.zeros(3, 4, 2))
    with torch.no_grad():
        layer(torch.zeros(4, 2))
    assert used == []
    layer(torch.zeros(4, 2))
    assert used == [(4, 2)]
