"""The benchmark of trainings that share a machine: its arithmetic, and a small run."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from benchmarks import sharing


def test_time_and_shares_of_trainings_that_share_a_gpu():
    # 100 steps each, timed every 50. The first ends at 6 s, the second, slowed down, at 10 s.
    marks = [[0.0, 3.0, 6.0], [0.0, 6.0, 10.0]]
    rows = [
        {"method": m, "alone_ms": ms, "marks": t,
         "start": {"seconds": s, "engine": "graph", "note": None, "views": 1 + (m == "both")}}
        for m, s, ms, t in zip(("normal", "both"), (3.0, 4.0), (45.0, 70.0), marks, strict=True)
    ]  # fmt: skip
    summary = sharing.summary(rows, [40.0, 70.0], 64, 100)
    assert summary["seconds"] == 10.0
    assert summary["serial_seconds"] == pytest.approx(4 + 7)
    assert summary["time"] == pytest.approx(10 / 11)
    # In the six seconds in which both ran: 100 steps of 60 ms, and 50 of 120 ms.
    assert [row["together_ms"] for row in summary["rows"]] == pytest.approx([60, 120])
    assert summary["shares"] == pytest.approx(40 / 60 + 70 / 120)
    assert summary["views_per_second"] == pytest.approx(64 / 0.060 + 128 / 0.120)
    assert summary["ready_seconds"] == 4.0


class Thread(threading.Thread):
    """In place of a process, whose imports take many seconds; with its own copy of the pipe."""

    def __init__(self, target, args, daemon):
        pipe, *rest = args
        copied = Connection(os.dup(pipe.fileno()))
        super().__init__(target=target, args=(copied, *rest), daemon=daemon)


@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.long)], ids=["threads", "processes"]
)
def test_trainings_that_share_a_machine_are_timed(processes, tmp_path, monkeypatch):
    if not processes:
        context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Thread)
        monkeypatch.setattr(sharing.multiprocessing, "get_context", lambda _: context)
        monkeypatch.setattr(sharing, "STRIDE", 5)
    threads = torch.get_num_threads()
    path = tmp_path / "sharing.json"
    sharing.main(["--methods", "normal", "both", "--steps", "8", "--images", "200",
                  "--device", "cpu", "--json", str(path)])  # fmt: skip
    torch.set_num_threads(threads)
    report = json.loads(path.read_text())
    assert list(report["kernels"]) == ["tuned"]  # nothing to choose on a CPU
    results = report["kernels"]["tuned"]
    assert [row["method"] for row in results["rows"]] == ["normal", "both"]
    assert all(row["start"]["engine"] == "eager" for row in results["rows"])
    assert [row["start"]["views"] for row in results["rows"]] == [1, 2]
    assert results["time"] == pytest.approx(results["seconds"] / results["serial_seconds"])
    # None ends after all of them have; two processes are not ten times as fast as one.
    assert 0 < max(row["seconds"] for row in results["rows"]) <= results["seconds"] + 1e-6
    assert results["time"] > 0.1
