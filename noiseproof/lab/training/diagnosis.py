"""Messages about a training that does not learn, with settings to try."""

from __future__ import annotations

from typing import Any

import torch

from noiseproof.lab.config import Config
from noiseproof.lab.data.datasets import Dataset
from noiseproof.objectives import METHODS

_CHANCE_EPOCH = 3  # the epoch after which accuracy at chance is worth a warning
_LONG_RAMP = 5  # epochs; a shorter ramp can be lengthened
_FEW_STEPS = 10  # per epoch; with fewer, three epochs teach a network little


def divergence_message(
    config: Config, epoch: int, step: int, loss: float, first_loss: float, nonfinite: bool
) -> str:
    """A message about a training that diverged in `epoch`, counted from 1, at `step`: mean loss of
    the last steps, loss of the very first, and whether some weights are not finite."""
    optim = config.optim
    advice = [f"a lower --lr (now {optim.lr:g})", f"--clip-grad 1.0 (now {optim.clip_grad:g})"]
    advice += _ramp_advice(config)
    return (
        f"training diverged in epoch {epoch}, at step {step}: the loss is {loss:.3g}, "
        f"{first_loss:.3g} at the first step"
        + (", and some weights are not finite" if nonfinite else "")
        + f". Try {', '.join(advice[:-1])} or {advice[-1]}"
    )


def chance_warning(config: Config, data: Dataset, metrics: dict[str, Any]) -> str | None:
    """A warning if, by the metrics of an early epoch, the network still ignores its input: it
    guesses, and its cross-entropy is the entropy of the class frequencies."""
    if metrics["epoch"] != _CHANCE_EPOCH:
        return None
    smoothing, classes = config.method.smoothing, len(data.classes)
    frequencies = torch.bincount(data.train.labels, minlength=classes).double()
    frequencies = (1 - smoothing) * frequencies / frequencies.sum() + smoothing / classes
    entropy = float(torch.special.entr(frequencies).sum())
    guessing = metrics["train_accuracy"] < float(frequencies.max()) + 0.05
    if classes == 1 or not guessing or metrics["ce"] < 0.99 * entropy:
        return None
    advice = [*_batch_advice(config, data), _rate_advice(config), *_ramp_advice(config)]
    return (
        f"accuracy is still at chance after {_CHANCE_EPOCH} epochs: the cross-entropy is "
        f"{metrics['ce']:.3f}, and guessing by class frequency gives {entropy:.3f}. "
        f"Try {' or '.join(advice)}"
    )


def _batch_advice(config: Config, data: Dataset) -> list[str]:
    """A smaller batch, if an epoch has few steps."""
    batch = config.optim.batch_size
    steps = max(1, data.train.count // batch)
    if steps >= _FEW_STEPS:
        return []
    return [f"a smaller --batch-size (now {batch}: {steps} step{'s' * (steps > 1)} per epoch)"]


def _rate_advice(config: Config) -> str:
    """Another learning rate: with Adam, about 1e-4 to fine-tune and 1e-3 to train from scratch."""
    optim, usual = config.optim, 1e-4 if config.model.weights else 1e-3
    now = f"(now {optim.lr:g})"
    if optim.opt == "sgd" or usual / 3 < optim.lr < 3 * usual:
        return f"a different --lr {now}"
    return f"a {'higher' if optim.lr < usual else 'lower'} --lr, such as {usual:g} {now}"


def _ramp_advice(config: Config) -> list[str]:
    """A longer ramp, if the method has one."""
    method = config.method
    helps = METHODS[method.method].ramped and method.ramp_epochs < _LONG_RAMP
    return [f"--ramp-epochs {_LONG_RAMP} (now {method.ramp_epochs:g})"] if helps else []
