"""The benchmark of starts: its sums, what it asks for, and a small start made."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import start, timing


def made(seconds: float, ms: float) -> dict:
    return {"engine": "graph", "note": None, "start_seconds": seconds, "ms": ms}


def test_compiling_pays_when_shorter_steps_have_made_up_for_the_start():
    after = start.pays_after(made(40.0, 2.5), made(10.0, 4.0))
    assert after == pytest.approx(20_000)
    assert 40.0 + after * 2.5e-3 == pytest.approx(10.0 + after * 4.0e-3)  # both have taken as long
    assert start.pays_after(made(40.0, 4.0), made(10.0, 4.0)) == math.inf
    assert start.pays_after(made(40.0, 5.0), made(10.0, 4.0)) == math.inf
    assert start.pays_after(made(5.0, 2.0), made(10.0, 4.0)) == 0.0


def test_each_method_of_each_network_is_started_both_ways(monkeypatch, tmp_path, capsys):
    asked = []

    def started(config, compiled, steps):
        asked.append((config.model.model, config.method.method, config.run.engine, steps))
        return made(20.0, 1.0) if compiled else made(10.0, 1.0 + (config.method.method == "both"))

    monkeypatch.setattr(start, "started", started)
    path = tmp_path / "start.json"
    words = (
        "--models small_cnn mobilenet_v2 --methods normal both --images 20 --steps 7 --device cpu"
    )
    start.main([*words.split(), "--json", str(path)])
    assert asked == [
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


def test_a_start_is_timed_in_a_process_of_its_own(tmp_path):
    data = timing.random_images(tmp_path / "random.npz", 130, 8, 10)
    config = timing.settings(
        data, model="small_cnn", device="cpu", engine="eager", output=str(tmp_path)
    )
    found = start.started(config, compiled=False, steps=2)
    assert found["engine"] == "eager"
    assert found["ms"] > 0
    assert len(found["ms_of_blocks"]) == start.BLOCKS
    assert found["start_seconds"] >= found["ms"] / 1e3  # the first step counts, which is no faster
