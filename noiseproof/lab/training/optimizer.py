"""The optimiser, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from noiseproof.lab.config import Config, Optim

# One-cycle as in torch's OneCycleLR: initial and final rate relative to the peak, share of the rise
_INITIAL, _FINAL, _RISE = 1 / 25, 1 / 250_000, 0.3


def make_optimizer(
    config: Config, model: nn.Module, *, capturable: bool = False
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, Adam or AdamW for the model's trainable parameters; `capturable`
    if steps go into a CUDA graph."""
    o = config.optim
    parameters = [p for p in model.parameters() if p.requires_grad]
    options: Any = {"lr": o.lr, "weight_decay": o.weight_decay, "fused": True}
    if o.opt == "sgd":
        nesterov = o.momentum > 0
        return torch.optim.SGD(parameters, momentum=o.momentum, nesterov=nesterov, **options)
    adam = torch.optim.Adam if o.opt == "adam" else torch.optim.AdamW
    return adam(parameters, capturable=capturable, **options)


def learning_rate(optim: Optim, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0 over the whole training.

    >>> steps = Optim(sched="multistep", lr=1.0, epochs=4, decay_milestones=(2,), decay_rate=0.1)
    >>> [learning_rate(steps, s, 1) for s in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """
    total = optim.epochs * steps_per_epoch
    if optim.sched == "onecycle":
        return _one_cycle(optim.lr, step, total)
    warmup = round(optim.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.sched == "multistep":
        decays = sum(step // steps_per_epoch >= m for m in optim.decay_milestones)
        return optim.lr * optim.decay_rate**decays
    if optim.sched == "cosine":
        return optim.lr * _cosine((step - warmup) / max(1, total - warmup))
    return optim.lr


def _one_cycle(peak: float, step: int, total: int) -> float:
    """Half a cosine up over the first 30 % of the steps, half a cosine down over the rest."""
    top = _RISE * total - 1
    if step <= top:
        return _interpolate(peak * _INITIAL, peak, step / top)
    return _interpolate(peak, peak * _FINAL, (step - top) / max(1, total - 1 - top))


def _interpolate(start: float, end: float, share: float) -> float:
    return end + (start - end) * _cosine(share)


def _cosine(share: float) -> float:
    """Half a cosine: 1 at 0, 0 at 1."""
    return (1 + math.cos(math.pi * min(1.0, share))) / 2
