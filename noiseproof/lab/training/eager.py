"""How a training step is executed: eagerly, compiled, or captured as one CUDA graph.

A step is the same everywhere: make the views, run the objective, go backward, clip, step, average
the weights, add to the meters. Nothing in it reads from the device; the loop looks at the meters
once every few dozen steps. `graph` also keeps the order of the epoch and its learning rates on the
device, so that the host only says "next". Which engine a training gets, `choice` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noiseproof.lab.config import Config
from noiseproof.lab.data.loader import Loader, Ticket
from noiseproof.lab.training.optimizer import learning_rate
from noiseproof.modes import deterministic
from noiseproof.objectives import Batch, Objective, Outcome

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class TrainStep(nn.Module):
    """The objective with its model, as the one module that Fabric, DDP and compilers see."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> Outcome:
        return self.objective(self.model, batch)


class Average:
    """A running mean of the weights and running statistics: mean ← d · mean + (1 − d) · now, after
    every step. At step t, d = min(decay, (1 + t) / (10 + t)), so that a short run's mean does not
    remember the random weights that it began with.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.live = [p for p in model.parameters() if p.requires_grad]
        floats = [b for b in model.buffers() if b.is_floating_point()]
        self.tracked = [*self.live, *floats] if decay else []
        self.mean = [t.detach().clone() for t in self.tracked]
        self.count = torch.zeros((), dtype=torch.float64, device=self.live[0].device)

    @torch.no_grad()
    def update(self) -> None:
        if self.decay:
            self.count += 1
            decay = ((1 + self.count) / (10 + self.count)).clamp(max=self.decay)
            torch._foreach_mul_(self.mean, decay)  # pyright: ignore[reportPrivateImportUsage]
            share = torch._foreach_mul(self.tracked, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(self.mean, share)  # pyright: ignore[reportPrivateImportUsage]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the mean weights inside the block."""
        if not self.decay:
            yield
            return
        kept = [t.detach().clone() for t in self.tracked]
        with torch.no_grad():
            torch._foreach_copy_(self.tracked, self.mean)  # pyright: ignore[reportPrivateImportUsage]
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.tracked, kept)  # pyright: ignore[reportPrivateImportUsage]

    def state(self) -> list[Tensor]:
        return [self.count, *self.mean]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        """In place: a captured step holds on to these tensors."""
        for mine, saved in zip(self.state(), state, strict=True):
            mine.copy_(saved)


class Meter:
    """Sums over steps, on the device: loss, hits, and the terms of the objective."""

    def __init__(self, device: torch.device):
        self.device, self.names = device, ["loss", "hits"]
        self.sums = torch.zeros(0, device=device, dtype=torch.float64)

    @torch.no_grad()
    def add(self, outcome: Outcome, labels: Tensor) -> None:
        if self.sums.numel() == 0:
            self.load(dict.fromkeys(["loss", "hits", *outcome.terms], 0.0))
        hits = (outcome.logits.argmax(1) == labels).sum()
        # hits, at most the batch size, is exact as a float too
        values = [outcome.loss.detach(), hits.to(outcome.loss.dtype), *outcome.terms.values()]
        self.sums += torch.stack(values)

    def reset(self) -> None:
        self.sums.zero_()

    def load(self, sums: dict[str, float]) -> None:
        """Goes on from these sums; in place where there are some already."""
        if sums:
            self.names = list(sums)
            values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.device)
            self.sums = self.sums.copy_(values) if self.sums.numel() else values


class Engine:
    """Eager execution through Fabric: the reference, and the one that runs anywhere.

    `step` is what Fabric has made of `plain`, which may be compiled.
    """

    name = "eager"
    note: str | None = None  # why it is not the one that was to be made

    def __init__(
        self,
        fabric: Fabric,
        step: nn.Module,
        plain: TrainStep,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        config: Config,
        deterministic: bool = False,
    ):
        self.deterministic = deterministic  # whether steps take deterministic kernels
        self.fabric, self.loader, self.config = fabric, loader, config
        self.step, self.plain, self.optimizer = step, plain, optimizer
        self.average = Average(plain.model, config.optim.ema_decay)
        self.meter = Meter(fabric.device)
        self._tickets: Generator[Ticket] | None = None
        self._next = (-1, -1)  # epoch and step that the next ticket is for

    def run(self, epoch: int, start: int, stop: int) -> None:
        """Steps `start` to `stop` of an epoch, in order, adding to the meter."""
        self.step.train()
        steps = self.loader.steps
        if self._tickets is None or self._next != (epoch, start):
            self.close()
            self._tickets = self.loader.tickets(epoch, start)
        with deterministic() if self.deterministic else contextlib.nullcontext():
            for k in range(start, stop):
                rate = learning_rate(self.config.optim, epoch * steps + k, steps)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self._one(next(self._tickets))
        self._next = (epoch, stop)
        if stop == steps:
            self.close()

    def close(self) -> None:
        """Ends the workers of the loader, if there are any."""
        if self._tickets is not None:
            self._tickets.close()
        self._tickets = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Takes the saved moments, and keeps its own options: a run may go on with another engine
        or on another device, where those of the saved optimiser (fused, capturable) do not hold."""
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": own})

    def _one(self, ticket: Ticket) -> None:
        batch = self.loader.prepare(ticket)
        outcome = self.step(batch)
        self.fabric.backward(outcome.loss)
        self._update()
        self.meter.add(outcome, batch.labels)

    def _update(self) -> None:
        if self.config.optim.clip_grad:
            self.fabric.clip_gradients(
                self.step,  # pyright: ignore[reportArgumentType]
                self.optimizer,
                max_norm=self.config.optim.clip_grad,
                error_if_nonfinite=False,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update()
