"""The learning rate compared with torch's own schedulers."""

from __future__ import annotations

import pytest
import torch

from noiseproof.lab.config import Optim
from noiseproof.lab.training.optimizer import learning_rate


def torch_rates(scheduler, steps):
    """The rates that a torch scheduler sets, step by step."""
    rates = []
    for _ in range(steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def optimizer(lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def ours(optim, steps_per_epoch):
    total = optim.epochs * steps_per_epoch
    return [learning_rate(optim, step, steps_per_epoch) for step in range(total)]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (3, 19), (40, 17), (5, 1)])
def test_one_cycle_equals_torchs_defaults(epochs, steps):
    optim, total = Optim(sched="onecycle", lr=0.07, epochs=epochs), epochs * steps
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer(0.07), max_lr=0.07, total_steps=total, cycle_momentum=False
    )
    assert ours(optim, steps) == pytest.approx(torch_rates(scheduler, total), rel=1e-12)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_of_a_few_steps_stays_in_range(total):
    rates = ours(Optim(sched="onecycle", lr=0.07, epochs=total), 1)
    assert all(0 < rate <= 0.07 for rate in rates)


def test_cosine_equals_torchs_over_the_steps():
    optim = Optim(sched="cosine", lr=0.3, epochs=4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer(0.3), T_max=4 * 11)
    assert ours(optim, 11) == pytest.approx(torch_rates(scheduler, 44), abs=1e-12)


def test_multistep_equals_torchs_over_the_epochs():
    optim = Optim(sched="multistep", lr=0.3, epochs=6, decay_milestones=(2, 4), decay_rate=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer(0.3), [2, 4], gamma=0.5)
    by_epoch = torch_rates(scheduler, 6)
    assert ours(optim, 3) == pytest.approx([rate for rate in by_epoch for _ in range(3)])


def test_warm_up_rises_in_equal_steps_and_the_schedule_follows():
    optim = Optim(sched="cosine", lr=1.0, epochs=3, warmup_epochs=1.0)
    rates = ours(optim, 4)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    without = Optim(sched="cosine", lr=1.0, epochs=2)
    assert rates[4:] == pytest.approx(ours(without, 4))


def test_a_constant_rate_is_constant_after_its_warm_up():
    optim = Optim(sched="constant", lr=0.2, epochs=2, warmup_epochs=0.5)
    assert ours(optim, 4) == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2])
