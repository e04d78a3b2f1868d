"""How much of an analysis a comparison takes: by arithmetic, and told where it is not all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from noiseproof.lab import afford, compare, jobs, models
from noiseproof.lab.afford import Share, affordable, arithmetic, share
from noiseproof.lab.analyse import ALL
from noiseproof.lab.analysis import read
from noiseproof.lab.data import load
from tests.flat import Flat, digits


def test_arithmetic_is_counted_for_one_image():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3))
    assert arithmetic(net, (3, 2, 2)) == 2 * (12 * 5 + 5 * 3)
    conv = nn.Conv2d(3, 4, 3, padding=1)
    assert arithmetic(conv, [3, 8, 8]) == 2 * 3 * 9 * 4 * 64


def test_small_networks_are_analysed_whole_and_large_ones_by_what_a_pass_costs():
    digits_, resnet18, mobilenet, resnet50 = 7.6e5, 1.11e9, 7.7e8, 8.2e9
    assert share(digits_, "cpu") == share(digits_, "cuda") == Share(2000, ALL)
    for operations in (resnet18, mobilenet):
        found = share(operations, "cpu")
        assert found.samples == 30
        assert set(ALL) - set(found.parts) == {"steps", "surface", "theory"}
        assert share(operations, "cuda") == Share(2000, ALL)
    assert share(resnet50, "cuda").parts == ALL
    assert 100 < share(resnet50, "cuda").samples < 1000
    assert share(1e12, "cuda").samples == 30
    many = [share(10**k, "cpu").samples for k in range(4, 12)]
    assert many == sorted(many, reverse=True)


def test_a_line_says_what_is_left_out_and_nothing_where_nothing_is():
    assert Share(2000, ALL).told(540) is None
    assert Share(2000, ALL).told(10_000) is None  # as ever
    assert Share(540, ALL).told(540) is None
    few = str(Share(30, ALL).told(1478))
    assert few.startswith("Analysis: on 30 of 1,478 test images; more takes long here.")
    parts = tuple(part for part in ALL if part not in afford.FIXED)
    left = str(Share(30, parts).told(24))
    assert "on 24 of 24 test images, without steps, surface, theory;" in left


@pytest.mark.parametrize("large", [False, True])
def test_a_run_is_analysed_as_far_as_it_can_be_afforded(large, tmp_path, monkeypatch):
    monkeypatch.setitem(models.OWN, "flat", Flat)
    if large:
        monkeypatch.setitem(afford._BUDGET, "cpu", 1e6)
    config = digits(tmp_path, epochs=1, device="cpu")
    asked = {}

    def analyse(run, **options):
        asked.update(options)

    monkeypatch.setattr(jobs, "analyse", analyse)
    task = jobs.Task(config, ("clean",), 1, 0, ("last",), analysed=True)
    outcome = task.work(load(config.data))
    assert outcome.status == "done", outcome.message
    run = jobs.RunFolder.open(task.path)
    assert (asked["samples"], asked["parts"]) == affordable(run, torch.device("cpu"))
    assert asked["device"] == "cpu"
    assert asked["samples"] == (30 if large else 2000)


def test_a_comparison_says_what_its_report_leaves_out(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(models.OWN, "flat", Flat)
    monkeypatch.setitem(afford._BUDGET, "cpu", 1e6)
    config = digits(tmp_path, epochs=1, device="cpu", name=None)
    assert compare.compare(config, ["normal", "both"], 1, 1, draws=2, report=True) == 0
    out, _ = capfd.readouterr()
    said = "Analysis: on 30 of 540 test images, without steps, surface, theory; more takes long"
    assert " ".join(out.split()).count(said) == 1
    for name in ("normal-s0", "both-s0"):
        found = read(jobs.RunFolder.open(tmp_path / "compare-digits" / name))
        assert found is not None
        assert set(found.parts) == set(ALL) - set(afford.FIXED)
        assert found.asked("curvature")["samples"] == 30
    assert (tmp_path / "compare-digits" / "report.html").is_file()
