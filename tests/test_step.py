"""The average of the weights, and the meter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from noiseproof.lab.training.step import Meter, WeightAverage
from noiseproof.objectives import Outcome

CPU = torch.device("cpu")


def test_an_average_of_constant_weights_equals_them_and_early_steps_weigh_little():
    net = nn.BatchNorm1d(2)
    average = WeightAverage(net, 0.999)
    with torch.no_grad():
        net.weight.fill_(5.0)
        net.running_mean.fill_(3.0)  # pyright: ignore[reportOptionalMemberAccess]
    for _ in range(200):
        average.update()
    with average.applied():
        assert torch.allclose(net.weight, torch.full((2,), 5.0), atol=1e-3)
        assert torch.allclose(net.running_mean, torch.full((2,), 3.0), atol=1e-3)  # pyright: ignore[reportArgumentType]
        assert int(net.num_batches_tracked) == 0  # pyright: ignore[reportArgumentType]
    assert torch.equal(net.weight, torch.full((2,), 5.0))
    assert WeightAverage(net, 0.0).mean == []


def test_averaged_weights_are_removed_after_an_error():
    net = nn.Linear(2, 1)
    average = WeightAverage(net, 0.5)
    with torch.no_grad():
        net.weight.fill_(1.0)
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    assert torch.equal(net.weight, torch.ones(1, 2))


def test_the_meter_adds_up_losses_terms_and_hits_and_continues_saved_sums():
    meter = Meter(CPU)
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    outcome = Outcome(torch.tensor(2.5, requires_grad=True), logits, {"ce": torch.tensor(0.5)})
    meter.add(outcome, torch.tensor([1, 1, 1]))
    meter.add(outcome, torch.tensor([1, 0, 1]))
    sums = dict(zip(meter.names, meter.sums.tolist(), strict=True))
    assert sums == {"loss": 5.0, "hits": 5.0, "ce": 1.0}
    again = Meter(CPU)
    again.load(sums)
    again.add(outcome, torch.tensor([0, 1, 0]))
    assert again.sums.tolist() == [7.5, 5.0, 1.5]
    tensor = again.sums
    again.reset()
    again.load(sums)
    assert again.sums is tensor
