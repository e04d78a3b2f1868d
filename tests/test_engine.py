"""A step, executed in any way, against a plain loop written out here."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from noiseproof.lab import build, engine, models
from noiseproof.lab.config import METHODS, Config
from noiseproof.lab.data import Split
from noiseproof.lab.engine import no_compiler
from noiseproof.lab.graph import GraphEngine
from noiseproof.lab.loader import MemoryLoader
from noiseproof.lab.schedule import learning_rate
from tests.flat import Flat, digits

CLASSES, EPOCHS = 4, 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    monkeypatch.setitem(models.OWN, "flat", Flat)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # the graph engine turns it on


def parts(config: Config, fabric: Any = None) -> Any:
    """Model, objective and loader on images made here, the same at every call."""
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (90, 1, 8, 8), dtype=torch.uint8, generator=g)
    data = Split(images, None, torch.randint(0, CLASSES, (90,), generator=g))
    torch.manual_seed(1)
    model = models.build(config.model, num_classes=CLASSES, size=(1, 8, 8), mean=[0.5], std=[0.3])
    loader = MemoryLoader(
        data, batch_size=16, seed=2, device=fabric.device if fabric else CPU, dtype=torch.float64
    )
    objective = build.objective(config, CLASSES, loader.steps)
    return model, objective, loader


def trained(config: Config, kind: Any = "eager", epochs: int = EPOCHS) -> Any:
    """The engine after `epochs`, each in two strides."""
    fabric = build.fabric(config)
    fabric.launch()
    model, objective, loader = parts(config, fabric)
    step = engine.TrainStep(model, objective)
    make: Any = kind if callable(kind) else lambda *a: engine.make(kind, *a)
    made = make(fabric, step, loader, config)
    for epoch in range(epochs):
        made.run(epoch, 0, 2)
        made.run(epoch, 2, loader.steps)
    return made


@pytest.fixture
def by_hand():
    """The loop below, with quotients of integers in float64 too, as Fabric has them."""

    def run(config: Config, epochs: int = EPOCHS):
        made = parts(config)
        torch.set_default_dtype(torch.float64)
        try:
            return plain_loop(config, epochs, *made)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


def plain_loop(config: Config, epochs: int, model: Any, objective: Any, loader: Any):
    """The same in plain torch, one line a thing; model, objective, averaged weights, losses."""
    model, objective = model.double(), objective.double()
    o = config.optim
    kinds = {
        "sgd": lambda p: torch.optim.SGD(
            p, o.lr, momentum=o.momentum, nesterov=o.momentum > 0, weight_decay=o.weight_decay
        ),
        "adam": lambda p: torch.optim.Adam(p, o.lr, weight_decay=o.weight_decay),
        "adamw": lambda p: torch.optim.AdamW(p, o.lr, weight_decay=o.weight_decay),
    }
    optimizer = kinds[o.opt](model.parameters())
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


def agree(made, by_hand, config, tolerance, epochs=EPOCHS):
    model, objective, mean, losses = by_hand(config, epochs)
    for (name, a), b in zip(
        model.state_dict().items(), made.plain.model.state_dict().values(), strict=True
    ):
        assert torch.allclose(a, b.to("cpu", a.dtype), rtol=0, atol=tolerance), name
    for (name, a), b in zip(
        objective.state_dict().items(), made.plain.objective.state_dict().values(), strict=True
    ):
        assert torch.allclose(a.double(), b.cpu().double(), rtol=0, atol=tolerance), name
    if config.optim.ema_decay:
        for m, a in zip(mean, made.average.mean, strict=False):
            assert torch.allclose(m, a.to("cpu", m.dtype), rtol=0, atol=tolerance)
    sums = dict(zip(made.meter.names, made.meter.sums.tolist(), strict=True))
    assert sums["loss"] == pytest.approx(sum(losses), rel=1e-6)


SETTINGS = {
    **{method: {"method": method} for method in METHODS},
    "adam": {"opt": "adam", "lr": 0.01, "sched": "cosine", "warmup_epochs": 1.0},
    "adamw": {"opt": "adamw", "lr": 0.01, "weight_decay": 0.1, "ema_decay": 0.95},
    "all": {"clip_grad": 0.3, "ramp_epochs": 2.0, "ema_decay": 0.5, "smoothing": 0.2},
    "plain": {"momentum": 0.0, "weight_decay": 0.0, "sched": "constant", "method": "normal"},
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_the_eager_engine_does_what_a_plain_loop_does(case, tmp_path, by_hand):
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, device="cpu", **SETTINGS[case])
    agree(trained(config), by_hand, config, 1e-12)


class OnCpu(GraphEngine):
    """The bookkeeping of the graph engine, with a graph that runs its step when it is replayed."""

    def _captured(self, compiled, tuned):
        self._warm_up(3)
        made = self

        class Graph:
            def replay(self):
                made._whole_step()

        return Graph()


@pytest.mark.parametrize("case", ["normal", "both", "stability", "discriminative", "all"])
def test_the_graph_engine_steps_as_the_plain_loop_after_putting_its_warm_up_back(
    case, tmp_path, by_hand
):
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, **SETTINGS[case])
    agree(trained(config, OnCpu), by_hand, config, 1e-7)  # its learning rates are in float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", SETTINGS)
def test_a_captured_step_agrees_with_the_plain_loop_over_fifty_steps(case, tmp_path, by_hand):
    settings = SETTINGS[case] | {"device": "cuda", "engine": "graph"}  # compiled, few as they are
    config = digits(tmp_path, amp="float64", epochs=10, **settings)
    agree(trained(config, "graph", 10), by_hand, config, 1e-6, 10)


def side_by_side(reference: Any, other: Any, steps: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each step of two engines from the same state: the gradients, as they moved the momentum, and
    the weights after it. Left to themselves, rounding alone would part them within ten steps."""
    for k in range(steps):
        other.plain.load_state_dict(reference.plain.state_dict())
        if k:
            other.load_optimizer(reference.optimizer.state_dict())
        epoch, step = divmod(k, reference.loader.steps)
        for made in (reference, other):
            made.run(epoch, step, step + 1)
        for (name, a), b in zip(
            reference.plain.state_dict().items(), other.plain.state_dict().values(), strict=True
        ):
            yield f"{name} after step {k}", a, b
        states = (made.optimizer.state_dict()["state"] for made in (reference, other))
        for number, (a, b) in enumerate(zip(*(s.values() for s in states), strict=True)):
            yield f"momentum {number} at step {k}", a["momentum_buffer"], b["momentum_buffer"]


def convolutional(tmp_path: Any, method: Any, kind: Any, device: str) -> Any:
    """An engine for ResNet18 in float64, at a learning rate that float32 holds exactly and at which
    fifty steps on random images do not diverge."""
    config = digits(
        tmp_path, amp="float64", method=method, model="resnet18", lr=2**-13, sched="constant",
        device=device, engine="auto" if device == "cpu" else "graph",
    )  # fmt: skip
    return trained(config, kind, epochs=0)


@pytest.mark.parametrize("method", ["normal", "discriminative"])
def test_steps_of_a_convolutional_network_agree(tmp_path, method):
    """Joined views and overlapped gradients, against two passes."""
    reference = convolutional(tmp_path, method, "eager", "cpu")
    other = convolutional(tmp_path, method, OnCpu, "cpu")
    for name, a, b in side_by_side(reference, other, 3):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["both", "discriminative"])
def test_fifty_captured_steps_of_a_convolutional_network_agree(tmp_path, method):
    reference = convolutional(tmp_path, method, "eager", "cuda")
    other = convolutional(tmp_path, method, "graph", "cuda")
    assert other.note is None
    for name, a, b in side_by_side(reference, other, 50):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), name


@pytest.mark.long
@pytest.mark.skipif(no_compiler(CPU) is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", ["stability", "all"])
def test_a_compiled_step_agrees_with_the_plain_loop_over_fifty_steps(case, tmp_path, by_hand):
    config = digits(tmp_path, amp="float64", epochs=10, device="cpu", **SETTINGS[case])
    agree(trained(config, "compile", 10), by_hand, config, 1e-6, 10)  # rounding grows


def test_one_engine_goes_on_from_anothers_optimiser(tmp_path):
    """Options such as fused or capturable stay with the engine; the moments travel."""
    config = digits(tmp_path, amp="float64", opt="adamw", lr=0.01, epochs=EPOCHS)
    first = trained(config, epochs=1)
    state = copy.deepcopy(first.optimizer.state_dict())
    for group in state["param_groups"]:
        group |= {"capturable": True, "fused": True, "lr": torch.tensor(7.0)}
    second = trained(config, epochs=0)
    second.plain.load_state_dict(first.plain.state_dict())
    second.load_optimizer(state)
    (group,) = second.optimizer.param_groups
    assert not group["capturable"]
    assert group["lr"] == config.optim.lr
    for made in (first, second):
        made.run(1, 0, 5)
    for a, b in zip(first.plain.parameters(), second.plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_a_step_reaches_the_caller_and_the_epoch_is_closed(tmp_path):
    closed = []

    class Broken:
        steps, batch_size = 3, 2

        def tickets(self, epoch, start=0):
            try:
                yield from range(3)
            finally:
                closed.append(epoch)

        def prepare(self, ticket):
            raise ValueError("image 7 cannot be read")

    config = digits(tmp_path)
    fabric = build.fabric(config)
    model, objective, _ = parts(config)
    loader: Any = Broken()
    made = engine.make("eager", fabric, engine.TrainStep(model, objective), loader, config)
    with pytest.raises(ValueError, match="image 7"), made:
        made.run(4, 0, 3)
    assert closed == [4]


# what cannot be had


class Failing(OnCpu):
    """Fails as a compiler would, or as a capture would, after it has changed the weights."""

    compiles, captures = False, True

    def _captured(self, compiled, tuned):
        graph = super()._captured(compiled, tuned)
        if compiled and not self.compiles:
            raise RuntimeError("no code for this.\nA long story")
        if not self.captures:
            raise ValueError("")
        return graph


def made_by(kind: type, monkeypatch, tmp_path, missing=None, wanted="auto", few=0):
    """What `make` makes of the graph engine `kind`, trained."""
    monkeypatch.setattr(engine, "no_compiler", lambda _: missing)
    monkeypatch.setattr(engine, "_FEW", few)
    monkeypatch.setattr("noiseproof.lab.graph.GraphEngine", kind)
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, engine=wanted, device="cpu")
    return trained(config, "graph"), config


def test_a_step_that_does_not_compile_is_captured_as_it_is(monkeypatch, tmp_path, by_hand):
    made, config = made_by(Failing, monkeypatch, tmp_path)
    assert made.name == "graph"
    assert made.note == (
        "engine: graph of uncompiled kernels, because the step does not compile: "
        "RuntimeError: no code for this"
    )
    agree(made, by_hand, config, 1e-7)
    made, _ = made_by(Failing, monkeypatch, tmp_path, missing="there is no Triton")
    assert str(made.note).endswith("because there is no Triton")


def test_a_failed_attempt_does_not_hold_its_memory_through_the_next(monkeypatch, tmp_path):
    attempts, alive = [], []

    class Watched(Failing):
        def _captured(self, compiled, tuned):
            gc.collect()
            alive.append([ref() is not None for ref in attempts])
            attempts.append(weakref.ref(self))
            return super()._captured(compiled, tuned)

    made, _ = made_by(Watched, monkeypatch, tmp_path)
    assert made.name == "graph"
    assert alive == [[], [False]]


def test_few_steps_are_not_compiled_for_unless_a_graph_was_asked_for(
    monkeypatch, tmp_path, by_hand
):
    monkeypatch.setattr(Failing, "compiles", True)
    made, config = made_by(Failing, monkeypatch, tmp_path, few=16)
    assert made.note == (
        "engine: graph of uncompiled kernels, because 15 steps are too few to compile for"
    )
    agree(made, by_hand, config, 1e-7)
    assert made_by(Failing, monkeypatch, tmp_path, few=15)[0].note is None
    assert made_by(Failing, monkeypatch, tmp_path, few=16, wanted="graph")[0].note is None


def test_a_step_that_cannot_be_captured_runs_eagerly_unless_a_graph_was_asked_for(
    monkeypatch, tmp_path, by_hand
):
    monkeypatch.setattr(Failing, "captures", False)
    made, config = made_by(Failing, monkeypatch, tmp_path)
    assert made.name == "eager"
    assert made.note == "engine: eager, because a step cannot be captured: ValueError"
    agree(made, by_hand, config, 1e-12)
    with pytest.raises(ValueError):
        made_by(Failing, monkeypatch, tmp_path, wanted="graph")


class Wrong(OnCpu):
    """A compiler that loses a fifth of a layer's gradient, or leaves NaN in a buffer."""

    fault = "gradient"

    def _captured(self, compiled, tuned) -> Any:
        graph, made = super()._captured(compiled, tuned), self
        assert tuned == compiled  # after a wrong result, no kernel is chosen by its speed

        class Faulty:
            def replay(self):
                graph.replay()
                if made.fault == "gradient":
                    gradients = [p.grad for p in made.average.live if p.grad is not None]
                    max(gradients, key=lambda g: float(g.norm())).mul_(0.8)
                else:
                    floats = (b for b in made.plain.buffers() if b.is_floating_point())
                    next(floats).view(-1)[0] = float("nan")

        return Faulty() if compiled else graph


def test_the_plain_step_is_taken_again_with_the_same_images_in_other_places(tmp_path):
    seen = []

    class Watched(OnCpu):
        def _taken(self, kept, run, seed):
            found = super()._taken(kept, run, seed)
            seen.append((self.order[0].tolist(), found))
            return found

    made = trained(digits(tmp_path, amp="float64", device="cpu"), Watched, epochs=0)
    (first, plain), (second, again), _, (last, fast) = seen  # in full precision, and captured
    assert first == last == made.order[0].tolist() == made.memory.order(0)[0].tolist()
    assert sorted(first) == sorted(second)
    assert first != second
    for name, value in plain.tensors.items():
        assert torch.allclose(value, again.tensors[name], rtol=1e-9, atol=1e-12), name
        assert torch.equal(value, fast.tensors[name]), name


@pytest.mark.parametrize(
    ("fault", "says"),
    [("gradient", "the gradient of "), ("buffer", "it gives values that are not finite")],
)
def test_a_compiled_step_that_is_wrong_is_not_used(fault, says, monkeypatch, tmp_path, by_hand):
    monkeypatch.setattr(Wrong, "fault", fault)
    made, config = made_by(Wrong, monkeypatch, tmp_path)
    begins = "engine: graph of uncompiled kernels, because the compiled step is wrong: "
    assert str(made.note).startswith(begins + says)
    agree(made, by_hand, config, 1e-7)


def test_a_tuned_kernel_that_is_wrong_is_not_used(monkeypatch, tmp_path, by_hand):
    tried = []

    class Tuned(OnCpu):
        def _captured(self, compiled, tuned) -> Any:
            tried.append((compiled, tuned))
            graph, made = super()._captured(compiled, tuned), self

            class Faulty:
                def replay(self):
                    graph.replay()
                    for p in made.average.live:
                        if p.grad is not None:
                            p.grad.mul_(-1)

            return Faulty() if tuned else graph

    made, config = made_by(Tuned, monkeypatch, tmp_path, few=16)
    assert tried == [(False, True), (False, False)]
    assert "too few" in str(made.note)
    agree(made, by_hand, config, 1e-7)


def test_a_graph_engine_goes_on_from_a_saved_optimiser_in_place(tmp_path):
    config = digits(tmp_path, amp="float64", opt="adamw", lr=0.01, epochs=EPOCHS)
    first, second = trained(config, OnCpu, epochs=1), trained(config, OnCpu, epochs=0)
    held = [t for p in second.average.live for t in second.optimizer.state[p].values()]
    second.plain.load_state_dict(first.plain.state_dict())
    second.load_optimizer(copy.deepcopy(first.optimizer.state_dict()))
    now = [t for p in second.average.live for t in second.optimizer.state[p].values()]
    assert all(a is b for a, b in zip(held, now, strict=True))
    for made in (first, second):
        made.run(1, 0, 5)
    for a, b in zip(first.plain.parameters(), second.plain.parameters(), strict=True):
        assert torch.equal(a, b)
