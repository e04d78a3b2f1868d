"""The benchmark of starts: its arithmetic, what it measures, and a small start."""

from __future__ import annotations

import json
import math
import multiprocessing
import time

import pytest
import torch

from benchmarks import start, timing
from noiseproof.lab.training import choose_engine


def times(seconds: float, ms: float) -> dict:
    return {"engine": "graph", "note": None, "start_seconds": seconds, "ms": ms}


def test_compiling_pays_off_when_shorter_steps_have_made_up_for_the_start():
    after = start.pays_after(times(40.0, 2.5), times(10.0, 4.0))
    assert after == pytest.approx(20_000)
    assert 40.0 + after * 2.5e-3 == pytest.approx(10.0 + after * 4.0e-3)  # both took as long
    assert start.pays_after(times(40.0, 4.0), times(10.0, 4.0)) == math.inf
    assert start.pays_after(times(40.0, 5.0), times(10.0, 4.0)) == math.inf
    assert start.pays_after(times(5.0, 2.0), times(10.0, 4.0)) == 0.0


def test_each_method_of_each_network_is_started_both_ways(monkeypatch, tmp_path, capsys):
    measured = []

    def measure_start(config, compiled, steps):
        measured.append((config.model.model, config.method.method, config.run.engine, steps))
        return times(20.0, 1.0) if compiled else times(10.0, 1.0 + (config.method.method == "both"))

    monkeypatch.setattr(start, "measure_start", measure_start)
    path = tmp_path / "start.json"
    words = (
        "--models small_cnn mobilenet_v2 --methods normal both --images 20 --steps 7 --device cpu"
    )
    start.main([*words.split(), "--json", str(path)])
    assert measured == [
        (model, method, engine, 7)
        for model in ("small_cnn", "mobilenet_v2")
        for method in ("normal", "both")
        for engine in ("eager", "compile")
    ]
    rows = json.loads(path.read_text())["rows"]
    assert [(row["size"], row["pays_after"]) for row in rows] == [
        (8, None), (8, 10_000), (250, None), (250, 10_000),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "never" in printed
    assert "10,000 steps" in printed


@pytest.mark.parametrize(
    "process", [False, pytest.param(True, marks=pytest.mark.long)], ids=["here", "process"]
)
def test_the_first_step_is_part_of_a_start(process, tmp_path, monkeypatch):
    data = timing.random_images(tmp_path / "random.npz", 130, 8, 10)
    config = timing.benchmark_config(
        data, model="small_cnn", device="cpu", engine="eager", output=str(tmp_path)
    )
    usual = timing.step_runner

    def slow_first_step(session):
        return lambda count: (time.sleep(0.3 if count == 1 else 0), usual(session)(count))

    if process:
        measured = start.measure_start(config, compiled=False, steps=2)
    else:
        monkeypatch.setattr(choose_engine, "missing_compiler", choose_engine.missing_compiler)
        monkeypatch.setattr(timing, "step_runner", slow_first_step)
        pipe, worker_pipe = multiprocessing.Pipe()
        start.worker(worker_pipe, config, compiled=False, steps=2)
        measured = pipe.recv()
        assert choose_engine.missing_compiler(torch.device("cpu")) == "compilation is turned off"
    assert measured["engine"] == "eager"
    assert measured["ms"] > 0
    assert len(measured["ms_of_blocks"]) == start.BLOCKS
    assert measured["start_seconds"] > (0 if process else 0.3)  # it includes the first step
