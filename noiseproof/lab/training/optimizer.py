"""The optimiser, and the course of its learning rate as a plain function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from noiseproof.lab.config import Config, Optim

_START, _END, _RISE = 1 / 25, 1 / 250_000, 0.3  # of one-cycle: as torch's OneCycleLR by default


def make_optimizer(
    config: Config, model: nn.Module, device: torch.device, captured: bool = False
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, Adam or AdamW, fused where the device has that."""
    o = config.optim
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = device.type in ("cuda", "cpu")
    if o.opt == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=o.lr,
            momentum=o.momentum,
            nesterov=o.momentum > 0,
            weight_decay=o.weight_decay,
            fused=fused,
        )
    kind = torch.optim.Adam if o.opt == "adam" else torch.optim.AdamW
    return kind(parameters, lr=o.lr, weight_decay=o.weight_decay, fused=fused, capturable=captured)


def learning_rate(optim: Optim, step: int, steps_per_epoch: int) -> float:
    """Learning rate of step `step`, counted from 0 over the whole run.

    >>> steps = Optim(sched="multistep", lr=1.0, epochs=4, decay_milestones=(2,), decay_rate=0.1)
    >>> [learning_rate(steps, s, 1) for s in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """
    total = optim.epochs * steps_per_epoch
    if optim.sched == "onecycle":
        return _one_cycle(optim.lr, step, total)
    warm = round(optim.warmup_epochs * steps_per_epoch)
    if step < warm:
        return optim.lr * (step + 1) / warm
    if optim.sched == "multistep":
        passed = sum(step // steps_per_epoch >= m for m in optim.decay_milestones)
        return optim.lr * optim.decay_rate**passed
    if optim.sched == "cosine":
        return optim.lr * _ease((step - warm) / max(1, total - warm))
    return optim.lr


def _one_cycle(peak: float, step: int, total: int) -> float:
    """Half a cosine up over the first 30 % of the steps, half a cosine down over the rest."""
    top = _RISE * total - 1
    if step <= top:
        return _between(peak * _START, peak, step / top)
    return _between(peak, peak * _END, (step - top) / max(1, total - 1 - top))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * _ease(share)


def _ease(share: float) -> float:
    """From 1 at 0 to 0 at 1, along a cosine."""
    return (1 + math.cos(math.pi * min(1.0, share))) / 2
