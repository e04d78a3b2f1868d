"""An engine that cannot be built, or computes wrong results, is replaced, and a note says why."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training import choose_engine
from tests.engines import EPOCHS, OnCpu, assert_agrees, trained
from tests.flat import Flat, digits


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)


class Failing(OnCpu):
    """Fails as a compiler would, or as a capture would, after it has changed the weights."""

    compiles, captures = False, True

    def _capture(self, compiled, tuned):
        graph = super()._capture(compiled, tuned)
        if compiled and not self.compiles:
            raise RuntimeError("no code for this.\nA long story")
        if not self.captures:
            raise ValueError("")
        return graph


def trained_with(kind: type, monkeypatch, tmp_path, missing=None, requested="auto", min_views=0):
    """The engine that replaces the graph engine `kind`, if need be, trained; and its config."""
    monkeypatch.setattr(choose_engine, "missing_compiler", lambda _: missing)
    monkeypatch.setattr(choose_engine, "_MIN_VIEWS_TO_COMPILE", min_views)
    monkeypatch.setattr("noiseproof.lab.training.cuda_graph.GraphEngine", kind)
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, engine=requested, device="cpu")
    return trained(config, "graph"), config


def test_a_step_that_does_not_compile_is_captured_uncompiled(monkeypatch, tmp_path):
    engine, config = trained_with(Failing, monkeypatch, tmp_path)
    assert engine.name == "graph"
    assert engine.note == (
        "engine: graph of uncompiled kernels, because the step does not compile: "
        "RuntimeError: no code for this"
    )
    assert_agrees(engine, config, 1e-7)
    engine, _ = trained_with(Failing, monkeypatch, tmp_path, missing="there is no Triton")
    assert str(engine.note).endswith("because there is no Triton")


def test_a_failed_attempt_does_not_keep_its_memory_during_the_next(monkeypatch, tmp_path):
    attempts, alive = [], []

    class Watched(Failing):
        def _capture(self, compiled, tuned):
            gc.collect()
            alive.append([ref() is not None for ref in attempts])
            attempts.append(weakref.ref(self))
            return super()._capture(compiled, tuned)

    engine, _ = trained_with(Watched, monkeypatch, tmp_path)
    assert engine.name == "graph"
    assert alive == [[], [False]]


def test_a_short_training_is_not_compiled_unless_a_graph_is_requested(monkeypatch, tmp_path):
    monkeypatch.setattr(Failing, "compiles", True)
    # 15 steps, 16 images each, clean and noisy
    engine, config = trained_with(Failing, monkeypatch, tmp_path, min_views=481)
    assert engine.note == (
        "engine: graph of uncompiled kernels, because 480 views are too few to compile for"
    )
    assert_agrees(engine, config, 1e-7)
    assert trained_with(Failing, monkeypatch, tmp_path, min_views=480)[0].note is None
    engine, _ = trained_with(Failing, monkeypatch, tmp_path, min_views=481, requested="graph")
    assert engine.note is None


def test_a_step_that_cannot_be_captured_runs_eagerly_unless_a_graph_is_requested(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(Failing, "captures", False)
    engine, config = trained_with(Failing, monkeypatch, tmp_path)
    assert engine.name == "eager"
    assert engine.note == "engine: eager, because the step cannot be captured: ValueError"
    assert_agrees(engine, config, 1e-12)
    with pytest.raises(ValueError):
        trained_with(Failing, monkeypatch, tmp_path, requested="graph")


class Faulty(OnCpu):
    """Replays are followed by `fault`, where `faulty` says so."""

    def faulty(self, compiled: bool, tuned: bool) -> bool:
        return True

    def fault(self) -> None:
        """A compiler or kernel that turns all gradients round."""
        for p in self.average.trainable:
            if p.grad is not None:
                p.grad.mul_(-1)

    def _capture(self, compiled, tuned) -> Any:
        graph, engine = super()._capture(compiled, tuned), self

        class FaultyGraph:
            def replay(self):
                graph.replay()
                engine.fault()

        return FaultyGraph() if self.faulty(compiled, tuned) else graph


class FaultyCompiler(Faulty):
    def faulty(self, compiled, tuned):
        assert tuned == compiled  # after a wrong result, no kernel is chosen by its speed
        return compiled


class LostGradient(FaultyCompiler):
    """A compiler that loses a fifth of a layer's gradient."""

    def fault(self) -> None:
        gradients = [p.grad for p in self.average.trainable if p.grad is not None]
        max(gradients, key=lambda g: float(g.norm())).mul_(0.8)


class NanBuffer(FaultyCompiler):
    """A compiler that leaves NaN in a buffer."""

    def fault(self) -> None:
        floats = (b for b in self.step.buffers() if b.is_floating_point())
        next(floats).view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("kind", "mismatch"),
    [(LostGradient, "the gradient of "), (NanBuffer, "it gives values that are not finite")],
)
def test_a_compiled_step_that_is_wrong_is_not_used(kind, mismatch, monkeypatch, tmp_path):
    engine, config = trained_with(kind, monkeypatch, tmp_path)
    start = "engine: graph of uncompiled kernels, because the compiled step is wrong: "
    assert str(engine.note).startswith(start + mismatch)
    assert_agrees(engine, config, 1e-7)


def test_a_lost_update_of_batch_norm_is_found(monkeypatch, tmp_path):
    class LostStatistics(FaultyCompiler):
        def _run_step(self):
            self.before = {n: b.clone() for n, b in self.step.named_buffers() if "running" in n}
            super()._run_step()

        def fault(self) -> None:
            for name, value in self.before.items():
                self.step.get_buffer(name).copy_(value)

    monkeypatch.setattr(choose_engine, "missing_compiler", lambda _: None)
    monkeypatch.setattr(choose_engine, "_MIN_VIEWS_TO_COMPILE", 0)
    monkeypatch.setattr("noiseproof.lab.training.cuda_graph.GraphEngine", LostStatistics)
    config = digits(tmp_path, amp="float64", model="small_cnn", method="normal", device="cpu")
    engine = trained(config, "graph", epochs=0)
    assert "the compiled step is wrong: " in engine.note
    assert ".running_mean differs by " in engine.note


def test_a_tuned_kernel_that_is_wrong_is_not_used(monkeypatch, tmp_path):
    attempts = []

    class FaultyTuning(Faulty):
        def faulty(self, compiled, tuned):
            attempts.append((compiled, tuned))
            return tuned

    engine, config = trained_with(FaultyTuning, monkeypatch, tmp_path, min_views=481)
    assert attempts == [(False, True), (False, False)]
    assert "too few" in str(engine.note)
    assert_agrees(engine, config, 1e-7)


def test_if_all_captures_are_wrong_eager_steps_are_deterministic(monkeypatch, tmp_path):
    engine, config = trained_with(Faulty, monkeypatch, tmp_path, min_views=481)
    assert engine.name == "eager"
    assert "because the captured step is wrong: the gradient of" in engine.note
    assert not torch.backends.cudnn.deterministic
    assert_agrees(engine, config, 1e-12)
    flags = []
    engine.step.register_forward_pre_hook(
        lambda *_: flags.append(torch.backends.cudnn.deterministic)
    )
    engine.run(0, 0, 2)
    assert flags == [True, True]
    assert not torch.backends.cudnn.deterministic


def test_the_plain_step_is_repeated_with_the_batch_permuted(tmp_path):
    steps = []

    class Watched(OnCpu):
        def _first_step(self, initial, run, seed):
            result = super()._first_step(initial, run, seed)
            steps.append((self.order[0].tolist(), result))
            return result

    engine = trained(digits(tmp_path, amp="float64", device="cpu"), Watched, epochs=0)
    (first, plain), (second, permuted), _, (last, fast) = steps  # the third is in full precision
    assert first == last == engine.order[0].tolist() == engine.loader.order(0)[0].tolist()
    assert sorted(first) == sorted(second)
    assert first != second
    for name, value in plain.tensors.items():
        assert torch.allclose(value, permuted.tensors[name], rtol=1e-9, atol=1e-12), name
        assert torch.equal(value, fast.tensors[name]), name
