"""One joined pass must be two separate ones: outputs, gradients, running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from noiseproof.lab.batchnorm import PartedBatchNorm2d, join_views
from noiseproof.lab.config import Model
from noiseproof.lab.models import build


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("piecewise", [("cpu",), ()])
def test_a_joined_pass_equals_two_passes_in_values_gradients_and_statistics(
    channels_last, piecewise, monkeypatch
):
    monkeypatch.setattr(PartedBatchNorm2d, "piecewise", piecewise)
    torch.manual_seed(0)
    apart = build(
        Model(feature_dim=6), num_classes=3, size=(3, 8, 8), mean=[0.5] * 3, std=[0.2] * 3
    )
    if channels_last:
        apart = apart.to(memory_format=torch.channels_last)
    joined = copy.deepcopy(apart)
    assert join_views(joined, 2)
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


def test_models_with_other_norms_keep_their_separate_passes():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert not join_views(net, 2)
    assert not any(isinstance(m, PartedBatchNorm2d) for m in net.modules())


def test_an_uneven_batch_is_refused():
    norm = PartedBatchNorm2d(2)
    norm.parts = 2
    with pytest.raises(ValueError, match="no 2 equal parts"):
        norm(torch.zeros(3, 2, 4, 4))
