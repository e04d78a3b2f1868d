"""The short way to a step of SGD against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from noiseproof.lab.training.descent import PlainSGD
from noiseproof.lab.training.optimizer import make_optimizer
from tests.flat import digits

OPTIONS = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "fused": True}


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_updates_are_torchs_steps_to_the_bit_and_leave_no_gradients(momentum):
    options = OPTIONS | {"momentum": momentum, "nesterov": momentum > 0}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    nets = [net, copy.deepcopy(net)]
    ours, theirs = (kind(n.parameters(), **options) for kind, n in
                    zip((PlainSGD, torch.optim.SGD), nets, strict=True))  # fmt: skip
    for step in range(5):
        x = torch.randn(7, 5)
        for n, optimizer in zip(nets, (ours, theirs), strict=True):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            n[: 2 if step == 3 else 3](x).square().sum().backward()  # once without the last layer
        assert isinstance(ours, PlainSGD)
        ours.update()
        theirs.step()
        theirs.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        for a, b in zip(*(n.parameters() for n in nets), strict=True):
            assert torch.equal(a, b)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        for name, value in state.items():
            assert value is mine["state"][number][name] is None or torch.equal(
                value, mine["state"][number][name]
            )


def test_after_its_first_step_torchs_own_is_not_called(monkeypatch):
    weight = nn.Parameter(torch.ones(2))
    optimizer, calls = PlainSGD([weight], **OPTIONS), []
    inner = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: calls.append(1) or inner())
    for _ in range(3):
        weight.grad = torch.ones(2)
        optimizer.update()
    assert len(calls) == 1


def test_it_is_used_on_a_cpu_where_no_loss_scale_has_a_say(tmp_path):
    net = nn.Linear(2, 2)
    cpu, gpu = torch.device("cpu"), torch.device("meta")
    plain = digits(tmp_path, opt="sgd", amp="no")
    assert isinstance(make_optimizer(plain, net, cpu), PlainSGD)
    assert type(make_optimizer(plain, net, gpu)) is torch.optim.SGD
    half = digits(tmp_path, opt="sgd", amp="fp16")
    assert type(make_optimizer(half, net, cpu)) is torch.optim.SGD
