"""The eager engine: the reference that the others must agree with, and the one that runs anywhere.

A step is the same in every engine: make the views, evaluate the objective, go backward, clip,
update, average the weights, add to the meter. Nothing in it reads from the device; the training
loop reads the meter once every few dozen steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noiseproof.lab.config import Config
from noiseproof.lab.data.loader import Loader, Ticket
from noiseproof.lab.training.optimizer import learning_rate
from noiseproof.lab.training.step import Meter, TrainStep, WeightAverage, counted
from noiseproof.modes import deterministic

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Engine:
    """Executes training steps one by one through Fabric; at the end of the block it stops the
    loader's workers."""

    name = "eager"
    note: str | None = None  # why this is not the engine that was asked for

    def __init__(
        self,
        fabric: Fabric,
        step: TrainStep,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        config: Config,
        wrapped: nn.Module | None = None,  # `step`, compiled or wrapped by Fabric: what is called
        deterministic: bool = False,  # whether steps use deterministic cuDNN kernels
    ):
        self.fabric, self.loader, self.config = fabric, loader, config
        self.step, self.wrapped, self.optimizer = step, wrapped or step, optimizer
        self.deterministic = deterministic
        self.average = WeightAverage(step.model, config.optim.ema_decay)
        self.meter = Meter(fabric.device)
        self._tickets: Generator[Ticket] | None = None
        self._next = (-1, -1)  # epoch and step of the next ticket

    def run(self, epoch: int, start: int, stop: int) -> None:
        """Trains steps `start` to `stop` of an epoch, in order, and adds them to the meter."""
        self.wrapped.train()
        steps = self.loader.steps
        if self._tickets is None or self._next != (epoch, start):
            self.close()
            self._tickets = self.loader.tickets(epoch, start)
        with deterministic() if self.deterministic else contextlib.nullcontext():
            for k in range(start, stop):
                rate = learning_rate(self.config.optim, epoch * steps + k, steps)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self._train_on(next(self._tickets))
        self._next = (epoch, stop)
        if stop == steps:
            self.close()

    def close(self) -> None:
        """Stops the loader's workers, if any."""
        if self._tickets is not None:
            self._tickets.close()
        self._tickets = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Restores saved moments but keeps this optimiser's options: the run may have been saved by
        another engine or on another device, whose options (fused, capturable) do not apply here."""
        options = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": options})

    def _train_on(self, ticket: Ticket) -> None:
        batch = self.loader.prepare(ticket)
        outcome = self.wrapped(batch)
        self.fabric.backward(outcome.loss)
        self._update()
        self.optimizer.zero_grad()
        self.meter.add(*counted(outcome, batch))

    def _update(self) -> None:
        if self.config.optim.clip_grad:
            self.fabric.clip_gradients(
                self.wrapped,  # pyright: ignore[reportArgumentType]
                self.optimizer,
                max_norm=self.config.optim.clip_grad,
                error_if_nonfinite=False,
            )
        self.optimizer.step()
        self.average.update()
