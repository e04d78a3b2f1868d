"""What happens where an engine cannot be had, or gives wrong results: others are used, and told."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from noiseproof.lab.training import choose_engine as choice
from tests.engines import EPOCHS, OnCpu, agree, prepare, trained
from tests.flat import digits


@pytest.fixture(autouse=True)
def ready(monkeypatch):
    prepare(monkeypatch)


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


def made_by(kind: type, monkeypatch, tmp_path, missing=None, wanted="auto", few=0):
    """What `make` makes of the graph engine `kind`, trained."""
    monkeypatch.setattr(choice, "missing_compiler", lambda _: missing)
    monkeypatch.setattr(choice, "_MIN_STEPS_TO_COMPILE", few)
    monkeypatch.setattr("noiseproof.lab.training.cuda_graph.GraphEngine", kind)
    config = digits(tmp_path, amp="float64", epochs=EPOCHS, engine=wanted, device="cpu")
    return trained(config, "graph"), config


def test_a_step_that_does_not_compile_is_captured_as_it_is(monkeypatch, tmp_path):
    made, config = made_by(Failing, monkeypatch, tmp_path)
    assert made.name == "graph"
    assert made.note == (
        "engine: graph of uncompiled kernels, because the step does not compile: "
        "RuntimeError: no code for this"
    )
    agree(made, config, 1e-7)
    made, _ = made_by(Failing, monkeypatch, tmp_path, missing="there is no Triton")
    assert str(made.note).endswith("because there is no Triton")


def test_a_failed_attempt_does_not_hold_its_memory_through_the_next(monkeypatch, tmp_path):
    attempts, alive = [], []

    class Watched(Failing):
        def _capture(self, compiled, tuned):
            gc.collect()
            alive.append([ref() is not None for ref in attempts])
            attempts.append(weakref.ref(self))
            return super()._capture(compiled, tuned)

    made, _ = made_by(Watched, monkeypatch, tmp_path)
    assert made.name == "graph"
    assert alive == [[], [False]]


def test_few_steps_are_not_compiled_for_unless_a_graph_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(Failing, "compiles", True)
    made, config = made_by(Failing, monkeypatch, tmp_path, few=16)
    assert made.note == (
        "engine: graph of uncompiled kernels, because 15 steps are too few to compile for"
    )
    agree(made, config, 1e-7)
    assert made_by(Failing, monkeypatch, tmp_path, few=15)[0].note is None
    assert made_by(Failing, monkeypatch, tmp_path, few=16, wanted="graph")[0].note is None


def test_a_step_that_cannot_be_captured_runs_eagerly_unless_a_graph_was_asked_for(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(Failing, "captures", False)
    made, config = made_by(Failing, monkeypatch, tmp_path)
    assert made.name == "eager"
    assert made.note == "engine: eager, because the step cannot be captured: ValueError"
    agree(made, config, 1e-12)
    with pytest.raises(ValueError):
        made_by(Failing, monkeypatch, tmp_path, wanted="graph")


class Wrong(OnCpu):
    """A compiler that loses a fifth of a layer's gradient, or leaves NaN in a buffer."""

    fault = "gradient"

    def _capture(self, compiled, tuned) -> Any:
        graph, made = super()._capture(compiled, tuned), self
        assert tuned == compiled  # after a wrong result, no kernel is chosen by its speed

        class Faulty:
            def replay(self):
                graph.replay()
                if made.fault == "gradient":
                    gradients = [p.grad for p in made.average.trainable if p.grad is not None]
                    max(gradients, key=lambda g: float(g.norm())).mul_(0.8)
                else:
                    floats = (b for b in made.step.buffers() if b.is_floating_point())
                    next(floats).view(-1)[0] = float("nan")

        return Faulty() if compiled else graph


def test_the_plain_step_is_taken_again_with_the_same_images_in_other_places(tmp_path):
    seen = []

    class Watched(OnCpu):
        def _first_step(self, initial, run, seed):
            found = super()._first_step(initial, run, seed)
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
def test_a_compiled_step_that_is_wrong_is_not_used(fault, says, monkeypatch, tmp_path):
    monkeypatch.setattr(Wrong, "fault", fault)
    made, config = made_by(Wrong, monkeypatch, tmp_path)
    begins = "engine: graph of uncompiled kernels, because the compiled step is wrong: "
    assert str(made.note).startswith(begins + says)
    agree(made, config, 1e-7)


def test_a_tuned_kernel_that_is_wrong_is_not_used(monkeypatch, tmp_path):
    tried = []

    class Tuned(OnCpu):
        def _capture(self, compiled, tuned) -> Any:
            tried.append((compiled, tuned))
            graph, made = super()._capture(compiled, tuned), self

            class Faulty:
                def replay(self):
                    graph.replay()
                    for p in made.average.trainable:
                        if p.grad is not None:
                            p.grad.mul_(-1)

            return Faulty() if tuned else graph

    made, config = made_by(Tuned, monkeypatch, tmp_path, few=16)
    assert tried == [(False, True), (False, False)]
    assert "too few" in str(made.note)
    agree(made, config, 1e-7)


def test_after_wrong_captures_eager_steps_alone_are_deterministic(monkeypatch, tmp_path):
    class AlwaysWrong(OnCpu):
        def _record(self) -> Any:
            graph, made = super()._record(), self

            class Faulty:
                def replay(self):
                    graph.replay()
                    for p in made.average.trainable:
                        if p.grad is not None:
                            p.grad.mul_(-1)

            return Faulty()

    made, config = made_by(AlwaysWrong, monkeypatch, tmp_path, few=16)
    assert made.name == "eager"
    assert not torch.backends.cudnn.deterministic
    agree(made, config, 1e-12)
    seen = []
    made.step.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.deterministic))
    made.run(0, 0, 2)
    assert seen == [True, True]
    assert not torch.backends.cudnn.deterministic
