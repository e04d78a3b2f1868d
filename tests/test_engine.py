"""Every engine against a plain loop written out in `tests.engines`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from noiseproof.lab.config import METHODS
from noiseproof.lab.device import make_fabric
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.choose_engine import make_engine, missing_compiler
from noiseproof.lab.training.session import Session
from noiseproof.lab.training.step import TrainStep
from tests.engines import CPU, EPOCHS, OnCpu, assert_agrees, components, trained
from tests.flat import Flat, digits
from tests.operations import UNCAPTURABLE, RecordOperations

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)


SETTINGS = {
    **{method: {"method": method} for method in METHODS},
    "spheres": {"method": "spheres", "lr": 0.005},  # at 0.05, rounding grows to 4e-5 in 50 steps
    "adam": {"opt": "adam", "lr": 0.01, "sched": "cosine", "warmup_epochs": 1.0},
    "adamw": {"opt": "adamw", "lr": 0.01, "weight_decay": 0.1, "ema_decay": 0.95},
    "all": {"clip_grad": 0.3, "ramp_epochs": 2.0, "ema_decay": 0.5, "smoothing": 0.2},
    "together": {"method": "discriminative", "batch_norm": "together"},
    "mixed": {"method": "discriminative", "augment": "crop-flip+trivial+erase+cutmix"},
    "mixup": {"method": "both", "augment": "mixup", "noise": "gaussian:0..0.2@0.8"},
    "plain": {"momentum": 0.0, "weight_decay": 0.0, "sched": "constant", "method": "normal"},
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_the_eager_engine_agrees_with_the_plain_loop(case, tmp_path):
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, device="cpu", **SETTINGS[case])
    assert_agrees(trained(config), config, 1e-12)


@pytest.mark.parametrize("case", ["normal", "both", "stability", "discriminative", "all", "mixed"])
def test_the_graph_engine_agrees_with_the_plain_loop_after_its_warm_up_is_undone(case, tmp_path):
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, **SETTINGS[case])
    assert_agrees(trained(config, OnCpu), config, 1e-7)  # its learning rates are in float32


@needs_gpu
@pytest.mark.parametrize("case", SETTINGS)
def test_a_captured_step_agrees_with_the_plain_loop_over_fifty_steps(case, tmp_path):
    settings = SETTINGS[case] | {"device": "cuda", "engine": "graph"}  # compiles for any length
    if case == "mixed":  # TrivialAugment rounds to bytes, not always as on a CPU
        settings["augment"] = settings["augment"].replace("+trivial", "")
    config = digits(tmp_path, amp="float64", epochs=10, **settings)
    assert_agrees(trained(config, "graph", 10), config, 1e-6, 10)


def side_by_side(reference: Any, other: Any, steps: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each step of two engines from the same state: momentum, which holds the gradients, and
    weights after it. Left alone, rounding would drive the engines apart within ten steps."""
    for k in range(steps):
        other.step.load_state_dict(reference.step.state_dict())
        if k:
            other.load_optimizer(reference.optimizer.state_dict())
        epoch, step = divmod(k, reference.loader.steps)
        for engine in (reference, other):
            engine.run(epoch, step, step + 1)
        for (name, a), b in zip(
            reference.step.state_dict().items(), other.step.state_dict().values(), strict=True
        ):
            yield f"{name} after step {k}", a, b
        states = (engine.optimizer.state_dict()["state"] for engine in (reference, other))
        for number, (a, b) in enumerate(zip(*(s.values() for s in states), strict=True)):
            yield f"momentum {number} at step {k}", a["momentum_buffer"], b["momentum_buffer"]


def convolutional(tmp_path: Any, model: str, method: str, kind: Any, device: str) -> Any:
    """An engine for a network with batch-norm in float64, at a learning rate that float32 holds
    exactly and at which fifty steps on random images do not diverge."""
    config = digits(
        tmp_path, amp="float64", method=method, model=model, lr=2**-13, sched="constant",
        device=device, engine="auto" if device == "cpu" else "graph",
    )  # fmt: skip
    return trained(config, kind, epochs=0)


@pytest.mark.parametrize("method", ["normal", "discriminative"])
def test_steps_of_a_convolutional_network_agree(tmp_path, method):
    """Joined passes, compared with two passes."""
    reference = convolutional(tmp_path, "small_cnn", method, "eager", "cpu")
    other = convolutional(tmp_path, "small_cnn", method, OnCpu, "cpu")
    for name, a, b in side_by_side(reference, other, 3):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), name


@needs_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler
@pytest.mark.parametrize("method", ["both", "discriminative"])
def test_fifty_captured_steps_of_a_convolutional_network_agree(tmp_path, method):
    reference = convolutional(tmp_path, "resnet18", method, "eager", "cuda")
    other = convolutional(tmp_path, "resnet18", method, "graph", "cuda")
    assert other.note is None
    for name, a, b in side_by_side(reference, other, 50):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), name


@pytest.mark.long
@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", ["stability", "all"])
def test_a_compiled_step_agrees_with_the_plain_loop_over_fifty_steps(case, tmp_path):
    config = digits(tmp_path, amp="float64", epochs=10, device="cpu", **SETTINGS[case])
    assert_agrees(trained(config, "compile", 10), config, 1e-6, 10)  # rounding grows


class AotOnCpu(OnCpu):
    """Compiles a step whole, with its gradients, but generates no code."""

    def _compile(self, function):
        return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.long
def test_a_step_with_strong_augmentation_compiles_whole(tmp_path):
    config = digits(tmp_path, amp="float64", epochs=1, **SETTINGS["mixed"])
    assert_agrees(trained(config, AotOnCpu, 1), config, 1e-7, 1)


@pytest.mark.parametrize("method", ["normal", "both", "stability"])
def test_no_operation_of_a_step_prevents_its_capture(method, tmp_path, monkeypatch):
    monkeypatch.setattr("noiseproof.perturb.base.check_range", lambda *_: None)
    config = digits(tmp_path, **SETTINGS["mixed"] | {"method": method})
    engine = trained(config, OnCpu, epochs=0)
    engine.position.zero_()
    with RecordOperations() as recorded:
        engine._run_step()
    assert not recorded.names & UNCAPTURABLE


def test_the_training_accuracy_is_that_of_the_samples_that_are_not_mixed(tmp_path):
    config = digits(tmp_path, method="normal", augment="crop+mixup")
    fabric = make_fabric(config)
    fabric.launch()
    session = Session(config, fabric)
    batch = session.loader.prepare(next(session.loader.tickets(0)))
    assert batch.mixture is not None
    kept = batch.mixture.unmixed.tolist()
    predicted = session.model(batch.images).argmax(1).tolist()  # the first step uses these weights
    hits = [predicted[i] == int(batch.labels[i]) for i in kept]
    assert len(hits) == 32
    assert session.advance()["train_accuracy"] == sum(hits) / 32


def test_an_engine_continues_from_the_optimiser_of_another(tmp_path):
    """Options such as fused or capturable stay with the engine; the moments are taken over."""
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
    for engine in (first, second):
        engine.run(1, 0, 5)
    for a, b in zip(first.step.parameters(), second.step.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_a_step_reaches_the_caller_and_closes_the_epoch(tmp_path):
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
    model, objective, _ = components(config)
    loader: Any = Broken()
    step = TrainStep(model, objective)
    engine = make_engine("eager", make_fabric(config), step, loader, config)
    with pytest.raises(ValueError, match="image 7"), engine:
        engine.run(4, 0, 3)
    assert closed == [4]


def test_a_graph_engine_restores_a_saved_optimiser_in_place(tmp_path):
    config = digits(tmp_path, amp="float64", opt="adamw", lr=0.01, epochs=EPOCHS)
    first, second = trained(config, OnCpu, epochs=1), trained(config, OnCpu, epochs=0)

    def moments() -> list[Tensor]:
        return [t for p in second.average.trainable for t in second.optimizer.state[p].values()]

    captured = moments()
    second.step.load_state_dict(first.step.state_dict())
    second.load_optimizer(copy.deepcopy(first.optimizer.state_dict()))
    assert all(a is b for a, b in zip(captured, moments(), strict=True))
    for engine in (first, second):
        engine.run(1, 0, 5)
    for a, b in zip(first.step.parameters(), second.step.parameters(), strict=True):
        assert torch.equal(a, b)


def test_in_full_precision_a_step_bypasses_fabric(tmp_path):
    """In one process and float32 the step is called directly, which gives the same bytes."""

    def through_fabric(fabric, step, loader, config):
        engine = make_engine("eager", fabric, step, loader, config)
        engine.wrapped = fabric.setup_module(step)
        return engine

    config = digits(tmp_path, amp="no", method="discriminative", device="cpu")
    direct, wrapped = trained(config), trained(config, through_fabric)
    assert direct.wrapped is direct.step
    for a, b in zip(direct.step.parameters(), wrapped.step.parameters(), strict=True):
        assert torch.equal(a, b)
    half = trained(digits(tmp_path, amp="bf16", device="cpu"), epochs=0)
    assert half.wrapped is not half.step


@pytest.mark.parametrize("tuned", [True, False])
def test_cudnn_is_configured_for_the_capture_and_restored(tmp_path, tuned):
    flags = torch.backends.cudnn
    before, recorded = (flags.benchmark, flags.deterministic), []

    class Watched(OnCpu):
        def _record(self):
            recorded.append((flags.benchmark, flags.deterministic))
            return super()._record()

    trained(digits(tmp_path, device="cpu"), lambda *a: Watched(*a, tuned=tuned), epochs=1)
    assert recorded == [(tuned, not tuned)]
    assert (flags.benchmark, flags.deterministic) == before == (False, False)
