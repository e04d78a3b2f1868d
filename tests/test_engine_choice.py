"""Which engine is tried where, and the note about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from noiseproof.lab.training.choose_engine import choose_engine, missing_compiler
from tests.engines import CPU
from tests.flat import digits


class Fabric:
    def __init__(self, device="cuda", world_size=1):
        self.device, self.world_size = torch.device(device), world_size


def choice(requested, monkeypatch, device="cuda", world=1, memory=True, amp="auto", missing=None):
    monkeypatch.setattr("noiseproof.lab.training.choose_engine.missing_compiler", lambda _: missing)
    loader: Any = SimpleNamespace(in_memory=memory)
    fabric: Any = Fabric(device, world)
    return choose_engine(digits("x", engine=requested, amp=amp), fabric, loader)


def test_a_cpu_trains_eagerly_without_a_note(monkeypatch):
    assert choice("auto", monkeypatch, device="cpu") == ("eager", None)
    assert choice("eager", monkeypatch) == ("eager", None)


def test_a_gpu_gets_a_graph_unless_there_is_an_obstacle_which_is_named(monkeypatch):
    assert choice("auto", monkeypatch) == ("graph", None)
    assert choice("auto", monkeypatch, world=2) == (
        "eager", "engine: eager, because several processes train together",
    )  # fmt: skip
    assert "images are streamed" in str(choice("graph", monkeypatch, memory=False)[1])
    assert "fp16" in str(choice("graph", monkeypatch, amp="fp16")[1])
    assert choice("auto", monkeypatch, missing="there is no Triton") == ("graph", None)


def test_a_requested_engine_that_is_not_available_is_explained(monkeypatch):
    assert choice("graph", monkeypatch, device="cpu") == (
        "eager", "engine: eager, because there is no GPU",
    )  # fmt: skip
    assert choice("compile", monkeypatch, device="cpu") == ("compile", None)
    name, note = choice("compile", monkeypatch, device="cpu", missing="there is no C++ compiler")
    assert (name, note) == ("eager", "engine: eager, because there is no C++ compiler")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert missing_compiler(CPU) == "there is no C++ compiler"
    assert missing_compiler(torch.device("cuda")) in (
        "there is no C compiler", "there is no Triton",
    )  # fmt: skip
