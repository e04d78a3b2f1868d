"""How much of an analysis a comparison takes: timed once for all its runs, and told beforehand."""

from __future__ import annotations

import json
import time

import pytest
import torch

from noiseproof.lab.analysis.analyse import ALL
from noiseproof.lab.analysis.store import read
from noiseproof.lab.comparison import afford, compare, jobs
from noiseproof.lab.comparison.afford import Share, chosen, pace, recorded, share
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.models.classifier import BACKBONES
from tests.flat import Flat, digits

CPU = torch.device("cpu")
FEW = tuple(part for part in ALL if part not in afford.FIXED)


class Slow(Flat):
    """Takes its time with every image, once it is told to."""

    pause = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause * len(x))
        return super().forward(x)


def test_fast_networks_are_analysed_whole_and_slow_ones_as_far_as_a_minute_goes():
    assert share(0.002, 540) == Share(2000, ALL, 0.002)
    assert share(1e-4, 10_000) == Share(2000, ALL, 1e-4)
    for each in (0.01, 0.1, 0.2, 0.5, 1.0, 2.5):
        for count in (38, 540, 10_000):
            found = share(each, count)
            n = min(found.samples, count)
            assert n * each <= 60
            fixed = set(found.parts) == set(ALL)
            assert fixed == (500 * min(1, n / 64) * each <= 60)
    assert share(5.3, 38)[:2] == (20, FEW)
    assert share(1e6, 38).samples == 20
    many = [share(10**k, 10_000).samples for k in range(-4, 3)]
    assert many == sorted(many, reverse=True)


def test_an_hour_in_which_the_machine_is_slower_by_a_tenth_chooses_the_same():
    assert share(0.5, 540)[:2] == share(0.55, 540)[:2]


def test_a_line_says_what_is_left_out_and_nothing_where_nothing_is():
    assert Share(2000, ALL).told(540) is None
    assert Share(2000, ALL).told(10_000) is None  # as ever
    few = str(Share(30, ALL).told(1478))
    assert few.startswith("Analysis: on 30 of 1,478 test images; more takes long here.")
    left = str(Share(30, FEW).told(24))
    assert "on 24 of 24 test images, without steps, surface, theory;" in left
    assert Share(30, FEW, 1.0).plan(24) == (
        "24 of 24 test images, without steps, surface, theory, about 24 s"
    )
    assert Share(2000, ALL, 1.0).plan(64) == "64 of 64 test images, about 9 min"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    monkeypatch.setitem(BACKBONES, "slow", Slow)

    def made(**changes):
        config = digits(tmp_path, epochs=1, device="cpu", **changes)
        return jobs.train(config, progress=False)

    return made


def test_the_pace_is_that_of_the_network(trained, monkeypatch):
    quick, slow = trained(name="quick"), trained(name="slow", model="slow")
    dataset = load_dataset(quick.config.data)
    fast = pace(quick, CPU, dataset)
    monkeypatch.setattr(Slow, "pause", 0.01)
    # Three gradients and one to be differentiated were timed, for 24, each of 10 ms forward.
    assert pace(slow, CPU, dataset) >= 24 * 0.01 > 5 * fast


def test_what_was_chosen_holds_for_all_runs_of_a_comparison(trained, tmp_path, monkeypatch):
    run = trained()
    dataset = load_dataset(run.config.data)
    assert recorded(tmp_path) is None
    monkeypatch.setattr(afford, "pace", lambda *_: 0.7)
    first = chosen(tmp_path, run, CPU, dataset)
    assert first == share(0.7, 540) == recorded(tmp_path)
    monkeypatch.setattr(afford, "pace", lambda *_: 7.0)
    assert chosen(tmp_path, run, CPU, dataset) == first
    (tmp_path / afford.FILE).write_text('{"samp')  # what a power cut may leave
    assert chosen(tmp_path, run, CPU, dataset) == share(7.0, 540) == recorded(tmp_path)


def test_of_two_runs_that_choose_at_once_the_first_decides(trained, tmp_path, monkeypatch):
    run = trained()
    dataset = load_dataset(run.config.data)

    def meanwhile(*_):
        monkeypatch.setattr(afford, "pace", lambda *_: 7.0)
        chosen(tmp_path, run, CPU, dataset)  # of another run, which is quicker
        return 0.7

    monkeypatch.setattr(afford, "pace", meanwhile)
    assert chosen(tmp_path, run, CPU, dataset) == share(7.0, 540) == recorded(tmp_path)
    assert not list(tmp_path.glob(".*tmp"))


def test_a_comparison_names_its_stages_and_what_its_report_leaves_out(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    monkeypatch.setattr(afford, "pace", lambda *_: 1.5)
    config = digits(tmp_path, epochs=1, device="cpu", name=None)
    assert compare.compare(config, ["normal", "both"], 1, 1, draws=2, report=True) == 0
    out, err = capfd.readouterr()
    said = "Analysis: on 30 of 540 test images, without steps, surface, theory; more takes long"
    assert " ".join(out.split()).count(said) == 1
    for name in ("normal-s0", "both-s0"):
        stages = [line for line in err.splitlines() if line.startswith(f"{name}: ")]
        begun = [line.split()[1].rstrip(",") for line in stages]
        assert begun == ["training", "1,131", "epoch", "evaluating", "analysing"]
        assert "30 of 540 test images, without steps, surface, theory, about 45 s" in stages[-1]
        found = read(jobs.RunFolder.open(tmp_path / "compare-digits" / name))
        assert found is not None
        assert set(found.parts) == set(ALL) - set(afford.FIXED)
        assert found.asked("curvature")["samples"] == 30
    assert (tmp_path / "compare-digits" / "report.html").is_file()
    facts = json.loads((tmp_path / "compare-digits" / "comparison.json").read_text())
    assert facts["analysis"] == {"samples": 30, "parts": list(FEW), "each": 1.5}


def test_the_digits_are_analysed_whole(trained, tmp_path):
    run = trained(model="small_cnn", feature_dim=64)
    dataset = load_dataset(run.config.data)
    assert chosen(tmp_path, run, CPU, dataset)[:2] == (2000, ALL)
