"""Engines on generated images, and the plain loop that they are compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noiseproof.lab.config import Config
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.data.splits import Split
from noiseproof.lab.device import make_fabric
from noiseproof.lab.models.classifier import build_classifier
from noiseproof.lab.training.choose_engine import make_engine
from noiseproof.lab.training.cuda_graph import GraphEngine
from noiseproof.lab.training.optimizer import learning_rate
from noiseproof.lab.training.session import make_objective
from noiseproof.lab.training.step import TrainStep

CLASSES, EPOCHS = 4, 3
CPU = torch.device("cpu")


def components(config: Config, device: torch.device = CPU) -> Any:
    """Model, objective and loader on generated images, the same at every call."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (90, 1, 8, 8), dtype=torch.uint8, generator=g)
    data = Split(images, None, torch.randint(0, CLASSES, (90,), generator=g))
    torch.manual_seed(1)
    model = build_classifier(
        config.model, num_classes=CLASSES, size=(1, 8, 8), mean=[0.5], std=[0.3]
    )
    loader = Loader(
        data, (1, 8, 8), batch_size=16, seed=2, device=device, augment=config.data.augment,
        dtype=torch.float64 if config.run.amp == "float64" else torch.float32,
    )  # fmt: skip
    objective = make_objective(config, CLASSES, loader.steps)
    return model, objective, loader


def trained(config: Config, kind: Any = "eager", epochs: int = EPOCHS) -> Any:
    """The engine after `epochs`, each run in two calls; `kind` is a name or a constructor."""
    fabric = make_fabric(config)
    fabric.launch()
    model, objective, loader = components(config, fabric.device)
    step = TrainStep(model, objective)
    make: Any = kind if callable(kind) else lambda *a: make_engine(kind, *a)
    engine = make(fabric, step, loader, config)
    for epoch in range(epochs):
        engine.run(epoch, 0, 2)
        engine.run(epoch, 2, loader.steps)
    return engine


def plain_loop(config: Config, epochs: int) -> Any:
    """The same training in plain torch, line by line: model, objective, averaged weights, losses.
    Quotients of integers are in float64 too, as under Fabric."""
    model, objective, loader = components(config)
    model, objective = model.double(), objective.double()
    torch.set_default_dtype(torch.float64)
    try:
        return _plain_loop(config, epochs, model, objective, loader)
    finally:
        torch.set_default_dtype(torch.float32)


def _plain_loop(config: Config, epochs: int, model: Any, objective: Any, loader: Any) -> Any:
    o = config.optim
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(
            p, o.lr, momentum=o.momentum, nesterov=o.momentum > 0, weight_decay=o.weight_decay
        ),
        "adam": lambda p: torch.optim.Adam(p, o.lr, weight_decay=o.weight_decay),
        "adamw": lambda p: torch.optim.AdamW(p, o.lr, weight_decay=o.weight_decay),
    }
    optimizer = optimizers[o.opt](model.parameters())
    mean = [p.detach().clone() for p in model.parameters()]
    count, losses = 0, []
    for epoch in range(epochs):
        for k, ticket in enumerate(loader.tickets(epoch)):
            rate = learning_rate(o, epoch * loader.steps + k, loader.steps)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = objective(model, loader.prepare(ticket)).loss
            loss.backward()
            if o.clip_grad:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.sqrt(sum((g.square().sum() for g in grads), torch.zeros(())))
                for g in grads:
                    g.mul_(min(1.0, o.clip_grad / (float(norm) + 1e-6)))
            optimizer.step()
            count += 1
            decay = min(o.ema_decay, (1 + count) / (10 + count))
            for m, p in zip(mean, model.parameters(), strict=True):
                m.copy_(decay * m + (1 - decay) * p.detach())
            losses.append(float(loss.detach()))
    return model, objective, mean, losses


def assert_agrees(engine: Any, config: Config, tolerance: float, epochs: int = EPOCHS) -> None:
    """The engine has the weights, buffers, averages and losses of the plain loop."""
    model, objective, mean, losses = plain_loop(config, epochs)
    for (name, a), b in zip(
        model.state_dict().items(), engine.step.model.state_dict().values(), strict=True
    ):
        assert torch.allclose(a, b.to("cpu", a.dtype), rtol=0, atol=tolerance), name
    for (name, a), b in zip(
        objective.state_dict().items(), engine.step.objective.state_dict().values(), strict=True
    ):
        assert torch.allclose(a.double(), b.cpu().double(), rtol=0, atol=tolerance), name
    if config.optim.ema_decay:
        for m, a in zip(mean, engine.average.mean, strict=False):
            assert torch.allclose(m, a.to("cpu", m.dtype), rtol=0, atol=tolerance)
    sums = dict(zip(engine.meter.names, engine.meter.sums.tolist(), strict=True))
    assert sums["loss"] == pytest.approx(sum(losses), rel=1e-6)


class OnCpu(GraphEngine):
    """The graph engine without a GPU: nothing is compiled, and a replay runs the step."""

    def _compile(self, function):
        return function

    def _record(self):
        engine = self

        class Graph:
            def replay(self):
                engine._run_step()

        return Graph()
