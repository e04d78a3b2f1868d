"""Convolutions that overlap their two gradients equal torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from noiseproof.lab.models.backbones import ResNet18
from noiseproof.lab.training.overlapped_conv import OverlappedConv2d, overlap_gradients

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip


class Net(nn.Module):
    """Strides, a kernel of one pixel, an image that shrinks to one pixel."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.third = nn.Conv2d(6, 5, 1, stride=2, bias=False)
        self.wide = nn.Conv2d(5, 5, (3, 1), padding=(1, 0), bias=False)

    def forward(self, x):
        return self.wide(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def results(net, x, run=None):
    """Output and all gradients."""
    net.zero_grad()
    y = net(x) if run is None else run(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


def pair(device):
    torch.manual_seed(0)
    net = Net().to(device, torch.float64).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    other = copy.deepcopy(net)
    assert overlap_gradients(other) == 4
    return net, other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [9, 8, 3])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_values_and_gradients_are_those_of_torch(device, size, layout):
    net, other = pair(device)
    x = torch.randn(5, 3, size, size, dtype=torch.float64, device=device)
    x = x.contiguous(memory_format=layout)
    for a, b in zip(results(net, x), results(other, x), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
def test_they_are_equal_when_compiled(device):
    torch.compiler.reset()
    net, other = pair(device)
    backend = "aot_eager" if device == "cpu" else "inductor"
    run = torch.compile(other, fullgraph=True, backend=backend)
    x = torch.randn(5, 3, 9, 9, dtype=torch.float64, device=device)
    for a, b in zip(results(net, x), results(other, x, run), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_under_autocast_outputs_are_in_bf16_and_gradients_of_weights_in_float32():
    _, net = pair("cpu")
    net = net.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = net(torch.randn(2, 3, 8, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    grads = [p.grad for p in net.parameters()]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() for g in grads)


def test_only_plain_convolutions_are_changed_and_their_names_stay():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, dilation=2, bias=False),
        nn.Conv2d(4, 4, 3, padding="same", bias=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(4, 4, 3, bias=False),
    )
    names = list(net.state_dict())
    assert overlap_gradients(net) == 1
    assert type(net[5]) is OverlappedConv2d
    assert list(net.state_dict()) == names
    assert overlap_gradients(ResNet18(3)) == 20


def test_a_frozen_weight_has_no_gradient():
    _, net = pair("cpu")
    net.third.weight.requires_grad_(False)
    net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert net.third.weight.grad is None
    assert net.first.weight.grad is not None
