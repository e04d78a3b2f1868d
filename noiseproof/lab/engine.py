"""How a training step is executed: eagerly, compiled, or captured as one CUDA graph.

A step is the same everywhere: make the views, run the objective, go backward, clip, step, average
the weights, add to the meters. Nothing in it reads from the device; the loop looks at the meters
once every few dozen steps. `graph` also keeps the order of the epoch and its learning rates on the
device, so that the host only says "next".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noiseproof.lab.config import Config
from noiseproof.lab.loader import Loader, MemoryLoader, Ticket
from noiseproof.lab.schedule import learning_rate
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
    """A running mean of the weights: decay · mean + (1 − decay) · weights, after every step."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        if self.decay:
            torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], 1 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the mean weights inside the block."""
        if not self.decay:
            yield
            return
        kept = [p.detach().clone() for p in self.live]
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.mean)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.live, kept)


class Meter:
    """Sums over steps, on the device: loss, hits, images, and the terms of the objective."""

    def __init__(self, device: torch.device):
        self.device, self.names = device, ["loss", "hits", "images"]
        self.sums = torch.zeros(0, device=device, dtype=torch.float64)

    @torch.no_grad()
    def add(self, outcome: Outcome, labels: Tensor) -> None:
        hits = (outcome.logits.argmax(1) == labels).sum()
        names = ["loss", "hits", "images", *outcome.terms]
        if self.sums.numel() == 0:
            self.names = names
            self.sums = torch.zeros(len(names), device=self.device, dtype=torch.float64)
        images = torch.full_like(hits, len(labels))
        values = [outcome.loss.detach(), hits, images, *outcome.terms.values()]
        self.sums += torch.stack([v.to(torch.float64) for v in values])

    def reset(self) -> None:
        self.sums.zero_()

    def state(self) -> dict[str, Any]:
        return {"names": self.names, "sums": self.sums.cpu()}

    def load(self, state: dict[str, Any]) -> None:
        if state["sums"].numel():
            self.names = list(state["names"])
            if self.sums.numel() == 0:
                self.sums = state["sums"].to(self.device)
            else:
                self.sums.copy_(state["sums"])


class Engine:
    """Eager execution through Fabric: the reference, and the one that runs anywhere."""

    name = "eager"

    def __init__(
        self,
        fabric: Fabric,
        step: TrainStep,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        config: Config,
        compiled: bool = False,
    ):
        self.fabric, self.loader, self.config = fabric, loader, config
        self.step, self.plain, self.optimizer = step, unwrapped(step), optimizer
        self.average = Average(self.plain.model, config.optim.ema_decay)
        self.meter = Meter(fabric.device)
        self._forward = step
        if compiled:
            self.name = "compile"
            self._forward = torch.compile(step)
        self._tickets: tuple[tuple[int, int], Iterator[Ticket]] | None = None

    def run(self, epoch: int, start: int, stop: int) -> None:
        """Steps `start` to `stop` of an epoch, in order, adding to the meter."""
        self.step.train()
        if self._tickets is None or self._tickets[0] != (epoch, start):
            self._tickets = ((epoch, start), self.loader.tickets(epoch, start))
        for k in range(start, stop):
            rate = learning_rate(self.config.optim, epoch * self.loader.steps + k, self.loader.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self._one(next(self._tickets[1]))
        self._tickets = ((epoch, stop), self._tickets[1]) if stop < self.loader.steps else None

    def load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _one(self, ticket: Ticket) -> None:
        batch = self.loader.prepare(ticket)
        outcome = self._forward(batch)
        self.fabric.backward(outcome.loss)
        self._update()
        self.meter.add(outcome, batch.labels)

    def _update(self) -> None:
        if self.config.optim.clip_grad:
            self.fabric.clip_gradients(
                self.step,
                self.optimizer,
                max_norm=self.config.optim.clip_grad,
                error_if_nonfinite=False,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update()


def unwrapped(step: nn.Module) -> TrainStep:
    """The TrainStep inside Fabric's wrapper (and DDP's)."""
    inner: Any = getattr(step, "module", step)
    return inner if isinstance(inner, TrainStep) else unwrapped(inner)


def choose(config: Config, fabric: Fabric, loader: Loader) -> tuple[str, str | None]:
    """The engine to use, and why it is not the one asked for (or, for auto, not the fastest)."""
    wanted = config.run.engine
    if wanted == "eager":
        return "eager", None
    reasons = {
        "there is no GPU": fabric.device.type != "cuda",
        "several processes train together": fabric.world_size > 1,
        "images stream from files": not isinstance(loader, MemoryLoader),
        "fp16 needs a loss scale that the host looks at": config.run.amp == "fp16",
    }
    if wanted == "compile":
        reasons = {"several processes train together": fabric.world_size > 1}
    why = next((text for text, holds in reasons.items() if holds), None)
    if why:
        return "eager", why
    return ("compile", None) if wanted == "compile" else ("graph", None)


def make(name: str, fabric: Fabric, step: TrainStep, loader: Loader, config: Config) -> Engine:
    """The engine called `name`, with its module and optimiser set up on the device."""
    from noiseproof.lab import build

    if name == "graph":
        from noiseproof.lab.graph import GraphEngine

        return GraphEngine(fabric, step, loader, config)
    optimizer = build.optimizer(config, step.model, fabric.device)
    wrapped, wrapped_optimizer = fabric.setup(step, optimizer)
    return Engine(fabric, wrapped, wrapped_optimizer, loader, config, compiled=name == "compile")  # pyright: ignore[reportArgumentType]
