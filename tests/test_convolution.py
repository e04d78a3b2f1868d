"""Convolutions as matrix products against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from noiseproof.lab.config import Model
from noiseproof.lab.models.classifier import build
from noiseproof.lab.training import convolution
from noiseproof.lab.training.convolution import ProductConv2d, use_products


@pytest.fixture(autouse=True)
def arm(monkeypatch):
    monkeypatch.setattr(convolution.platform, "machine", lambda: "aarch64")


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(8, 8), (5, 7), (1, 4)])
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_product_is_the_convolution_in_value_and_gradients(stride, size, channels, channels_last):
    torch.manual_seed(0)
    theirs = nn.Conv2d(channels, 5, 3, stride, padding=1, bias=False, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    assert use_products(ours) == 1
    x = torch.randn(4, channels, *size, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = theirs(a), ours(b)
    assert y.shape == z.shape
    assert torch.allclose(y, z, atol=1e-12)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (z * weights).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.allclose(a.grad, b.grad, atol=1e-12)
    assert theirs.weight.grad is not None
    assert ours.weight.grad is not None
    assert torch.allclose(theirs.weight.grad, ours.weight.grad, atol=1e-12)
    assert ours.weight.grad.is_contiguous()


def test_a_net_keeps_its_names_values_and_gradients():
    torch.manual_seed(0)
    plain = build(Model(), num_classes=3, size=(1, 8, 8), mean=[0.5], std=[0.2]).double()
    ours = copy.deepcopy(plain)
    assert use_products(ours) == 6  # four convolutions and two linear layers
    assert list(ours.state_dict()) == list(plain.state_dict())
    x = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    for net in (plain, ours):
        net(x).square().sum().backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, atol=1e-12)


@pytest.mark.parametrize("channels", [2, 16])
def test_gradients_that_nobody_wants_are_not_made(channels):
    conv = nn.Conv2d(channels, 2, 3, padding=1, bias=False)
    use_products(conv)
    conv.weight.requires_grad_(False)
    x = torch.randn(1, channels, 4, 4, requires_grad=True)
    conv(x).sum().backward()
    assert x.grad is not None
    assert conv.weight.grad is None


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 1, bias=False),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, dilation=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, stride=(1, 2), bias=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(4, 4, 3, padding="same", bias=False),
    ],
)
def test_other_convolutions_stay_as_they_are(conv):
    assert use_products(conv) == 0
    assert type(conv) is nn.Conv2d


def test_other_processors_large_images_and_evaluation_keep_torchs_kernel(monkeypatch):
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    use_products(conv)
    used = []
    monkeypatch.setattr(
        convolution._Convolution, "apply", lambda x, *_: used.append(tuple(x.shape)) or x
    )
    conv(torch.zeros(1, 1, 33, 8))
    with torch.no_grad():
        conv(torch.zeros(1, 1, 8, 8))
    assert used == []
    conv(torch.zeros(1, 1, 8, 8))
    assert used == [(1, 1, 8, 8)]
    monkeypatch.setattr(convolution.platform, "machine", lambda: "x86_64")
    assert use_products(nn.Conv2d(1, 1, 3, padding=1, bias=False)) == 0
    assert isinstance(conv, ProductConv2d)
