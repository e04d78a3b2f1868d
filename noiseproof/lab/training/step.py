"""What one training step consists of: objective with model, averaged weights, sums for the log."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from noiseproof.objectives import Batch, Objective, Outcome


class TrainStep(nn.Module):
    """Objective and model as one module: the one that Fabric, DDP and compilers see."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> Outcome:
        return self.objective(self.model, batch)


def counted(outcome: Outcome, batch: Batch) -> tuple[Outcome, Tensor]:
    """The outcome with the logits, and the labels, that the training accuracy counts: those of the
    samples that are not mixed, since a mixed one has two labels."""
    counted = Outcome(outcome.loss, batch.unmixed(outcome.logits), outcome.terms)
    return counted, batch.unmixed(batch.labels)  # dynamo of torch 2.11 cannot return a _replace


class WeightAverage:
    """An exponential moving average of weights and running statistics, updated after every step:
    mean ← d · mean + (1 − d) · current.

    At step t, d = min(decay, (1 + t) / (10 + t)), so that the average of a short run forgets its
    random initial weights.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay  # 0 keeps no average
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.tracked = [*self.trainable, *buffers] if decay else []
        self.mean = [t.detach().clone() for t in self.tracked]
        self.steps = torch.zeros((), dtype=torch.float64, device=self.trainable[0].device)

    def reset(self) -> None:
        """Starts again from the current weights, in place."""
        self.load([torch.zeros_like(self.steps), *self.tracked])

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average."""
        if self.decay:
            self.steps += 1
            decay = ((1 + self.steps) / (10 + self.steps)).clamp(max=self.decay)
            torch._foreach_mul_(self.mean, decay)  # pyright: ignore[reportPrivateImportUsage]
            share = torch._foreach_mul(self.tracked, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(self.mean, share)  # pyright: ignore[reportPrivateImportUsage]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has its averaged weights inside the block."""
        current = [t.detach().clone() for t in self.tracked]
        _copy(self.mean, self.tracked)
        try:
            yield
        finally:
            _copy(current, self.tracked)

    def state(self) -> list[Tensor]:
        """What a checkpoint holds: the number of steps, then the averages."""
        return [self.steps, *self.mean]

    def load(self, state: list[Tensor]) -> None:
        """Restores `state()` in place: a captured step refers to these tensors."""
        _copy(state, self.state())


@torch.no_grad()
def _copy(values: list[Tensor], tensors: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


class Meter:
    """Sums over steps, on the device: loss, correct predictions ("hits"), terms of the loss."""

    def __init__(self, device: torch.device):
        self.device, self.names = device, ["loss", "hits"]
        self.sums = torch.zeros(0, device=device, dtype=torch.float64)

    @torch.no_grad()
    def add(self, outcome: Outcome, labels: Tensor) -> None:
        """Adds one step; `counted` selects the logits and labels."""
        if self.sums.numel() == 0:
            self.load(dict.fromkeys(["loss", "hits", *outcome.terms], 0.0))
        hits = (outcome.logits.argmax(1) == labels).sum()
        # A float holds the number of hits exactly: it is at most the batch size.
        values = [outcome.loss.detach(), hits.to(outcome.loss.dtype), *outcome.terms.values()]
        self.sums += torch.stack(values)

    def reset(self) -> None:
        """Starts again from zero."""
        self.sums.zero_()

    def load(self, sums: dict[str, float]) -> None:
        """Continues from these sums; in place, unless they are the first."""
        if sums:
            self.names = list(sums)
            values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.device)
            self.sums = self.sums.copy_(values) if self.sums.numel() else values


@torch.no_grad()
def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """How many of the tensors contain NaN or infinity, as a tensor on their device."""
    floats = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    largest = torch._foreach_norm(floats, math.inf)  # pyright: ignore[reportPrivateImportUsage]
    return (~torch.stack([n.float() for n in largest]).isfinite()).sum()
