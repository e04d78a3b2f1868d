"""Which engine is tried where, and what is said about it."""

from __future__ import annotations

from typing import Any

import torch

from noiseproof.lab.data.loader import MemoryLoader
from noiseproof.lab.training.choose_engine import choose_engine, missing_compiler
from tests.flat import digits

CPU = torch.device("cpu")


class Fabric:
    def __init__(self, device="cuda", world_size=1):
        self.device, self.world_size = torch.device(device), world_size


def choice(wanted, monkeypatch, device="cuda", world=1, memory=True, amp="auto", missing=None):
    monkeypatch.setattr("noiseproof.lab.training.choose_engine.missing_compiler", lambda _: missing)
    loader: Any = object.__new__(MemoryLoader) if memory else object()
    fabric: Any = Fabric(device, world)
    return choose_engine(digits("x", engine=wanted, amp=amp), fabric, loader)


def test_a_cpu_trains_eagerly_without_a_word(monkeypatch):
    assert choice("auto", monkeypatch, device="cpu") == ("eager", None)
    assert choice("eager", monkeypatch) == ("eager", None)


def test_a_gpu_gets_a_graph_unless_there_is_a_reason_which_is_said(monkeypatch):
    assert choice("auto", monkeypatch) == ("graph", None)
    assert choice("auto", monkeypatch, world=2) == (
        "eager", "engine: eager, because several processes train together",
    )  # fmt: skip
    assert "images are streamed" in str(choice("graph", monkeypatch, memory=False)[1])
    assert "fp16" in str(choice("graph", monkeypatch, amp="fp16")[1])
    assert choice("auto", monkeypatch, missing="there is no Triton") == ("graph", None)


def test_what_was_asked_for_and_cannot_be_had_is_said(monkeypatch):
    assert choice("graph", monkeypatch, device="cpu") == (
        "eager", "engine: eager, because there is no GPU",
    )  # fmt: skip
    assert choice("compile", monkeypatch, device="cpu") == ("compile", None)
    name, why = choice("compile", monkeypatch, device="cpu", missing="there is no C++ compiler")
    assert (name, why) == ("eager", "engine: eager, because there is no C++ compiler")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert missing_compiler(CPU) == "there is no C++ compiler"
    assert missing_compiler(torch.device("cuda")) in (
        "there is no C compiler",
        "there is no Triton",
    )
