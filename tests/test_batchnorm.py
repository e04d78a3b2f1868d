"""One joined pass equals two separate ones in outputs, gradients and running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from noiseproof.lab.config import Model
from noiseproof.lab.models.classifier import Classifier, build_classifier
from noiseproof.lab.training.split_batchnorm import SplitBatchNorm2d, join_passes, moments


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("chunked", [("cpu",), ()])
def test_a_joined_pass_equals_two_passes_in_values_gradients_and_statistics(
    channels_last, chunked, monkeypatch
):
    monkeypatch.setattr(SplitBatchNorm2d, "chunked_devices", chunked)
    torch.manual_seed(0)
    apart = build_classifier(
        Model(feature_dim=6), num_classes=3, size=(3, 8, 8), mean=[0.5] * 3, std=[0.2] * 3
    )
    assert isinstance(apart, Classifier)
    if channels_last:
        apart = apart.to(memory_format=torch.channels_last)
    joined = copy.deepcopy(apart)
    assert join_passes(joined, 2)
    for _ in range(3):
        a, b = torch.rand(5, 3, 8, 8), 3 * torch.rand(5, 3, 8, 8)
        results = []
        for net in (apart, joined):
            net.zero_grad()
            first, second = net.features_of(a, b)
            (first.square().sum() + (first * second).sum()).backward()
            results.append(
                (first, second, *[p.grad for p in net.parameters() if p.grad is not None])
            )
        for x, y in zip(*results, strict=True):
            assert torch.allclose(x, y, atol=1e-5, rtol=1e-4)
        for (name, x), y in zip(apart.named_buffers(), joined.buffers(), strict=True):
            assert torch.allclose(x.double(), y.double(), atol=1e-5), name
    apart.eval()
    joined.eval()
    x = torch.rand(4, 3, 8, 8)
    assert torch.allclose(apart(x), joined(x), atol=1e-6)
    assert list(apart.state_dict()) == list(joined.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [2, 3])
def test_each_part_is_normalised_and_differentiated_as_torch_does_alone(dtype, parts, monkeypatch):
    monkeypatch.setattr(SplitBatchNorm2d, "chunked_devices", ())
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4 * parts, 5, 6, 6, generator=g, dtype=torch.float64)
    x = (x * torch.arange(1, 6).view(5, 1, 1)).to(dtype).to(memory_format=torch.channels_last)
    grad = torch.randn(x.shape, generator=g, dtype=torch.float64)
    ours, torchs = SplitBatchNorm2d(5), nn.BatchNorm2d(5).double()
    ours.parts = parts
    with torch.no_grad():
        for p, q in zip(ours.parameters(), torchs.parameters(), strict=True):
            q.copy_(torch.randn(5, generator=g))
            p.copy_(q)
    ours = ours.double() if dtype == torch.float64 else ours
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    y = ours(a)
    expected = torch.cat([torchs(part) for part in b.chunk(parts)])
    y.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).double())
    assert y.dtype == dtype
    assert a.grad is not None
    assert b.grad is not None
    close = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    sums = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-3}[dtype]  # in float32
    for value, exact, tolerance in (
        (y, expected, close),
        (a.grad, b.grad, close),
        (ours.weight.grad, torchs.weight.grad, sums),
        (ours.bias.grad, torchs.bias.grad, sums),
        (ours.running_mean, torchs.running_mean, 1e-5 if dtype != torch.float64 else 1e-10),
        (ours.running_var, torchs.running_var, 1e-4 if dtype != torch.float64 else 1e-10),
    ):
        assert value is not None
        assert exact is not None
        assert torch.allclose(value.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_moments_are_accurate_far_from_zero(offset):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(8, 3, 5, 5, generator=g) + offset).requires_grad_()
    mean, variance = moments(x, 2)
    assert not mean.requires_grad
    exact = x.detach().double().view(2, 4, 3, 5, 5)
    variance64, mean64 = torch.var_mean(exact, dim=(1, 3, 4), correction=0, keepdim=True)
    assert torch.allclose(mean.double(), mean64, rtol=1e-6, atol=1e-6)
    assert torch.allclose(variance.double(), variance64, rtol=1e-5)
    assert (moments(torch.full((4, 1, 2, 2), 0.1), 2)[1] == 0).all()


def test_models_with_other_norms_keep_separate_passes():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert not join_passes(net, 2)
    assert not any(isinstance(m, SplitBatchNorm2d) for m in net.modules())


def test_an_uneven_batch_is_refused():
    norm = SplitBatchNorm2d(2)
    norm.parts = 2
    with pytest.raises(ValueError, match="cannot be split into 2 equal parts"):
        norm(torch.zeros(3, 2, 4, 4))


@pytest.mark.parametrize("chunked", [("cpu",), ()])
def test_an_activation_may_change_its_output_in_place(chunked, monkeypatch):
    """As in torchvision's networks; followed by a sum, as in a residual block."""
    monkeypatch.setattr(SplitBatchNorm2d, "chunked_devices", chunked)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, 5, 5, generator=g, dtype=torch.float64)
    ours = nn.Sequential(SplitBatchNorm2d(4), nn.ReLU6(inplace=True)).double()
    theirs = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU6()).double()
    ours[0].parts = 2  # pyright: ignore[reportArgumentType]
    results = []
    for run in (lambda x: ours(x), lambda x: torch.cat([theirs(part) for part in x.chunk(2)])):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out += leaf
        out.square().sum().backward()
        results.append((out.detach(), leaf.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
