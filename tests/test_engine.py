"""A step, executed in any way, against a plain loop written out in `tests.engines`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from noiseproof.lab.config import METHODS
from noiseproof.lab.device import make_fabric
from noiseproof.lab.training.choose_engine import make_engine, missing_compiler
from noiseproof.lab.training.step import TrainStep
from tests.engines import CPU, EPOCHS, OnCpu, agree, parts, prepare, trained
from tests.flat import digits


@pytest.fixture(autouse=True)
def ready(monkeypatch):
    prepare(monkeypatch)


SETTINGS = {
    **{method: {"method": method} for method in METHODS},
    "adam": {"opt": "adam", "lr": 0.01, "sched": "cosine", "warmup_epochs": 1.0},
    "adamw": {"opt": "adamw", "lr": 0.01, "weight_decay": 0.1, "ema_decay": 0.95},
    "all": {"clip_grad": 0.3, "ramp_epochs": 2.0, "ema_decay": 0.5, "smoothing": 0.2},
    "together": {"method": "discriminative", "batch_norm": "together"},
    "plain": {"momentum": 0.0, "weight_decay": 0.0, "sched": "constant", "method": "normal"},
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_the_eager_engine_does_what_a_plain_loop_does(case, tmp_path):
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, device="cpu", **SETTINGS[case])
    agree(trained(config), config, 1e-12)


@pytest.mark.parametrize("case", ["normal", "both", "stability", "discriminative", "all"])
def test_the_graph_engine_steps_as_the_plain_loop_after_putting_its_warm_up_back(case, tmp_path):
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, **SETTINGS[case])
    agree(trained(config, OnCpu), config, 1e-7)  # its learning rates are in float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", SETTINGS)
def test_a_captured_step_agrees_with_the_plain_loop_over_fifty_steps(case, tmp_path):
    settings = SETTINGS[case] | {"device": "cuda", "engine": "graph"}  # compiled, few as they are
    config = digits(tmp_path, amp="float64", epochs=10, **settings)
    agree(trained(config, "graph", 10), config, 1e-6, 10)


def side_by_side(reference: Any, other: Any, steps: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each step of two engines from the same state: the gradients, as they moved the momentum, and
    the weights after it. Left to themselves, rounding alone would part them within ten steps."""
    for k in range(steps):
        other.step.load_state_dict(reference.step.state_dict())
        if k:
            other.load_optimizer(reference.optimizer.state_dict())
        epoch, step = divmod(k, reference.loader.steps)
        for made in (reference, other):
            made.run(epoch, step, step + 1)
        for (name, a), b in zip(
            reference.step.state_dict().items(), other.step.state_dict().values(), strict=True
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
@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", ["stability", "all"])
def test_a_compiled_step_agrees_with_the_plain_loop_over_fifty_steps(case, tmp_path):
    config = digits(tmp_path, amp="float64", epochs=10, device="cpu", **SETTINGS[case])
    agree(trained(config, "compile", 10), config, 1e-6, 10)  # rounding grows


def test_one_engine_goes_on_from_anothers_optimiser(tmp_path):
    """Options such as fused or capturable stay with the engine; the moments travel."""
    config = digits(tmp_path, amp="float64", opt="adamw", lr=0.01, epochs=EPOCHS)
    first = trained(config, epochs=1)
    state = copy.deepcopy(first.optimizer.state_dict())
    for group in state["param_groups"]:
        group |= {"capturable": True, "fused": True, "lr": torch.tensor(7.0)}
    second = trained(config, epochs=0)
    second.step.load_state_dict(first.step.state_dict())
    second.load_optimizer(state)
    (group,) = second.optimizer.param_groups
    assert not group["capturable"]
    assert group["lr"] == config.optim.lr
    for made in (first, second):
        made.run(1, 0, 5)
    for a, b in zip(first.step.parameters(), second.step.parameters(), strict=True):
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
    fabric = make_fabric(config)
    model, objective, _ = parts(config)
    loader: Any = Broken()
    made = make_engine("eager", fabric, TrainStep(model, objective), loader, config)
    with pytest.raises(ValueError, match="image 7"), made:
        made.run(4, 0, 3)
    assert closed == [4]


def test_a_graph_engine_goes_on_from_a_saved_optimiser_in_place(tmp_path):
    config = digits(tmp_path, amp="float64", opt="adamw", lr=0.01, epochs=EPOCHS)
    first, second = trained(config, OnCpu, epochs=1), trained(config, OnCpu, epochs=0)
    held = [t for p in second.average.trainable for t in second.optimizer.state[p].values()]
    second.step.load_state_dict(first.step.state_dict())
    second.load_optimizer(copy.deepcopy(first.optimizer.state_dict()))
    now = [t for p in second.average.trainable for t in second.optimizer.state[p].values()]
    assert all(a is b for a, b in zip(held, now, strict=True))
    for made in (first, second):
        made.run(1, 0, 5)
    for a, b in zip(first.step.parameters(), second.step.parameters(), strict=True):
        assert torch.equal(a, b)


def test_full_precision_needs_nothing_of_fabric_in_a_step(tmp_path):
    """In one process and float32 the step is called as it is, which gives the same bytes."""

    def through_fabric(fabric, step, loader, config):
        made = make_engine("eager", fabric, step, loader, config)
        made.wrapped = fabric.setup_module(step)
        return made

    config = digits(tmp_path, amp="no", method="discriminative", device="cpu")
    ours, theirs = trained(config), trained(config, through_fabric)
    assert ours.wrapped is ours.step
    for a, b in zip(ours.step.parameters(), theirs.step.parameters(), strict=True):
        assert torch.equal(a, b)
    half = trained(digits(tmp_path, amp="bf16", device="cpu"), epochs=0)
    assert half.wrapped is not half.step


@pytest.mark.parametrize("tuned", [True, False])
def test_cudnn_is_set_for_the_capture_and_put_back(tmp_path, tuned):
    flags = torch.backends.cudnn
    before, seen = (flags.benchmark, flags.deterministic), []

    class Watched(OnCpu):
        def _record(self):
            seen.append((flags.benchmark, flags.deterministic))
            return super()._record()

    trained(digits(tmp_path, device="cpu"), lambda *a: Watched(*a, tuned=tuned), epochs=1)
    assert seen == [(tuned, not tuned)]
    assert (flags.benchmark, flags.deterministic) == before == (False, False)
