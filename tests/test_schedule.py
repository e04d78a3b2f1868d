"""The learning rate's course against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch

from noiseproof.lab.config import Optim
from noiseproof.lab.training.optimizer import learning_rate


def course(scheduler, steps):
    """The rates that a torch scheduler gives to its optimiser, step by step."""
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
def test_one_cycle_is_torchs_at_its_defaults(epochs, steps):
    optim, total = Optim(sched="onecycle", lr=0.07, epochs=epochs), epochs * steps
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer(0.07), max_lr=0.07, total_steps=total, cycle_momentum=False
    )
    assert ours(optim, steps) == pytest.approx(course(torchs, total), rel=1e-12)


def optim_of(total):
    return Optim(sched="onecycle", lr=0.07, epochs=total)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_of_a_few_steps_stays_between_its_ends(total):
    rates = ours(optim_of(total), 1)
    assert all(0 < rate <= 0.07 for rate in rates)


def test_cosine_is_torchs_over_the_steps():
    optim = Optim(sched="cosine", lr=0.3, epochs=4)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer(0.3), T_max=4 * 11)
    assert ours(optim, 11) == pytest.approx(course(torchs, 44), abs=1e-12)


def test_multistep_is_torchs_over_the_epochs():
    optim = Optim(sched="multistep", lr=0.3, epochs=6, decay_milestones=(2, 4), decay_rate=0.5)
    torchs = torch.optim.lr_scheduler.MultiStepLR(optimizer(0.3), [2, 4], gamma=0.5)
    by_epoch = course(torchs, 6)
    assert ours(optim, 3) == pytest.approx([rate for rate in by_epoch for _ in range(3)])


def test_warm_up_rises_in_equal_steps_and_the_schedule_follows():
    optim = Optim(sched="cosine", lr=1.0, epochs=3, warmup_epochs=1.0)
    rates = ours(optim, 4)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    after = Optim(sched="cosine", lr=1.0, epochs=2)
    assert rates[4:] == pytest.approx(ours(after, 4))


def test_a_constant_rate_is_constant_after_its_warm_up():
    optim = Optim(sched="constant", lr=0.2, epochs=2, warmup_epochs=0.5)
    assert ours(optim, 4) == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2])
