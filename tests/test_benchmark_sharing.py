"""The benchmark of trainings that share a machine: its sums, and a small one made."""

from __future__ import annotations

import json

import pytest

from benchmarks import sharing


def test_time_and_shares_of_trainings_that_share_a_gpu():
    # 100 steps each, looked at every 50. The first ends at 6 s, the second, slowed down, at 10 s.
    marks = [[0.0, 3.0, 6.0], [0.0, 6.0, 10.0]]
    rows = [
        {"method": m, "alone_ms": ms, "marks": t,
         "start": {"seconds": s, "engine": "graph", "note": None, "views": 1 + (m == "both")}}
        for m, s, ms, t in zip(("normal", "both"), (3.0, 4.0), (45.0, 70.0), marks, strict=True)
    ]  # fmt: skip
    found = sharing.summary(rows, [40.0, 70.0], 64, 100)
    assert found["seconds"] == 10.0
    assert found["serial_seconds"] == pytest.approx(4 + 7)
    assert found["time"] == pytest.approx(10 / 11)
    # In the six seconds in which both ran: 100 steps of 60 ms, and 50 of 120 ms.
    assert [row["together_ms"] for row in found["rows"]] == pytest.approx([60, 120])
    assert found["shares"] == pytest.approx(40 / 60 + 70 / 120)
    assert found["views_per_second"] == pytest.approx(64 / 0.060 + 128 / 0.120)
    assert found["ready_seconds"] == 4.0


def test_trainings_that_share_a_machine_are_timed_and_written_down(tmp_path):
    path = tmp_path / "sharing.json"
    sharing.main(["--methods", "normal", "both", "--steps", "60", "--images", "200",
                  "--device", "cpu", "--json", str(path)])  # fmt: skip
    report = json.loads(path.read_text())
    assert list(report["kernels"]) == ["tuned"]  # nothing to choose on a CPU
    found = report["kernels"]["tuned"]
    assert [row["method"] for row in found["rows"]] == ["normal", "both"]
    assert all(row["start"]["engine"] == "eager" for row in found["rows"])
    assert [row["start"]["views"] for row in found["rows"]] == [1, 2]
    assert found["time"] == pytest.approx(found["seconds"] / found["serial_seconds"])
    # Neither ends after all of them have; two processes do not get ten times as much done.
    assert 0 < max(row["seconds"] for row in found["rows"]) <= found["seconds"] + 1e-6
    assert found["time"] > 0.1
