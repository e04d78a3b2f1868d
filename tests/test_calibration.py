"""Calibration: sums over batches against hand-computed cases, loops and torchmetrics."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from noiseproof.lab.evaluation import severities, tables, writers
from noiseproof.lab.evaluation.calibration import (
    BINS,
    Calibration,
    CalibrationSums,
    is_calibrated,
    mean_scores,
)
from noiseproof.perturb import CORRUPTIONS

CPU = torch.device("cpu")


def calibration(logits: Tensor, labels: Tensor, batch_size: int = 1000) -> Calibration:
    sums = CalibrationSums(1, CPU)
    for batch in zip(logits.split(batch_size), labels.split(batch_size), strict=True):
        sums.add(0, *batch)
    (result,) = sums.result()
    return result


def random_case(n: int = 500, classes: int = 7, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (n,), generator=generator)


def test_three_images_computed_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.69, 0.3, 0.01], [0.1, 0.5, 0.4]], dtype=torch.float64)
    found = calibration(p.log(), torch.tensor([0, 1, 1]))
    assert found.nll == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.5)) / 3)
    brier = (0.09 + 0.04 + 0.01) + (0.69**2 + 0.49 + 0.0001) + (0.01 + 0.25 + 0.16)
    assert found.brier == pytest.approx(brier / 3)
    # 0.70 and 0.69 are in bin 10, from 10/15 to 11/15, with one correct; 0.5 is in bin 7
    assert found.ece == pytest.approx((abs(1 - 0.7 - 0.69) + abs(1 - 0.5)) / 3)
    assert [i for i, count in enumerate(found.bins.images) if count] == [7, 10]
    assert (found.bins.images[10], found.bins.correct[10]) == (2, 1)
    assert found.bins.confidence[10] == pytest.approx(1.39)


@pytest.mark.parametrize("scale", [0.1, 2.0, 5.0])
def test_ece_is_that_of_torchmetrics(scale):
    logits, labels = random_case(scale=scale)
    found = calibration(logits, labels)
    expected = multiclass_calibration_error(
        logits.softmax(1), labels, num_classes=7, n_bins=BINS, norm="l1"
    )
    assert found.ece == pytest.approx(float(expected), abs=1e-6)


def test_nll_and_brier_are_those_of_loops_over_images_and_classes():
    logits, labels = random_case(n=40)
    nll = brier = 0.0
    for row, label in zip(logits.softmax(1).tolist(), labels.tolist(), strict=True):
        nll -= math.log(row[label]) / 40
        brier += sum((p - (k == label)) ** 2 for k, p in enumerate(row)) / 40
    found = calibration(logits, labels)
    assert (found.nll, found.brier) == (pytest.approx(nll), pytest.approx(brier))


@pytest.mark.parametrize("classes", [3, 5, 15])
def test_a_bin_includes_its_lower_edge(classes: int):
    found = calibration(torch.zeros(1, classes, dtype=torch.float64), torch.tensor([0]))
    assert found.bins.images.index(1) == BINS // classes


def test_a_confidence_of_one_is_in_the_last_bin():
    logits = torch.tensor([[0.0, -800.0], [0.0, -800.0], [0.0, math.log(1 / 19)]])  # 1, 1, 0.95
    found = calibration(logits.double(), torch.tensor([0, 1, 1]))
    assert found.bins.images[14] == 3
    assert found.ece == pytest.approx(abs(1 - 2.95) / 3)


def test_batches_and_draws_add_up():
    logits, labels = random_case()
    whole = calibration(logits, labels)
    parts = calibration(logits, labels, batch_size=7)
    assert parts[:3] == pytest.approx(whole[:3], abs=1e-12)
    assert parts.bins.images == whole.bins.images
    assert sum(whole.bins.images) == 500
    assert sum(whole.bins.correct) == int((logits.argmax(1) == labels).sum())
    sums = CalibrationSums(2, CPU)
    sums.add(1, logits, labels)
    sums.add(0, 3 * logits, labels)
    assert sums.result() == [calibration(3 * logits, labels), whole]


def test_bfloat16_logits_are_summed_in_float64():
    logits, labels = random_case(n=300)
    half = logits.bfloat16()
    assert calibration(half, labels)[:3] == pytest.approx(calibration(half.double(), labels)[:3])


def test_a_true_class_of_probability_zero_gives_an_infinite_nll_that_json_can_hold():
    logits = torch.tensor([[0.0, -math.inf], [0.0, -1.0]])
    found = calibration(logits, torch.tensor([1, 0]))
    assert found.nll == math.inf
    assert 0 < found.brier < 2
    row = json.loads(json.dumps(found.row(), allow_nan=False))
    assert row["nll"] is None
    assert is_calibrated(row)
    assert mean_scores([row, {"ece": 0.0, "nll": 1.0, "brier": 0.0}])["nll"] is None


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_without_a_largest_value_make_every_score_nan(bad):
    found = calibration(torch.tensor([[1.0, 0.0], bad]), torch.tensor([0, 0]))
    assert all(math.isnan(score) for score in found[:3])


def test_mean_scores_need_every_row():
    rows = [{"ece": 0.1, "nll": 1.0, "brier": 0.2}, {"ece": 0.3, "nll": 2.0, "brier": 0.4}]
    assert mean_scores(rows) == pytest.approx({"ece": 0.2, "nll": 1.5, "brier": 0.3})
    assert mean_scores([*rows, {"value": 0.5}]) == {}


def row(seed: int, draw: int = 0, spec: str = "gaussian:0.1", **changes: object) -> dict[str, Any]:
    shared = {"method": "both", "weights": "last", "fingerprint": "f", "noise_seed": 0, "n": 1000}
    scores = {"ece": 0.1 * draw, "nll": seed + 1.0, "brier": 0.5, "bins": {}}
    own = {"run": f"both-s{seed}", "perturbation": spec, "draw": draw, "value": 0.9, "seconds": 1.0}
    return {**shared, **own, **scores, **changes}


def test_a_cell_has_the_means_over_draws_and_then_over_trainings():
    table = tables.build([row(0), row(0, 1), row(0, 2, ece=0.5), row(1)])
    (cell,) = table.cells.values()
    assert cell.calibration == pytest.approx({"ece": 0.1, "nll": 1.5, "brier": 0.5})
    text = writers.calibration_markdown(table)
    assert "| σ=0.1 | both | 10.00 | 1.500 | 0.500 |" in text
    assert "Means over noise draws and trainings." in text


def test_an_infinite_nll_is_shown_and_results_without_calibration_are_left_out():
    old = {k: v for k, v in row(1, method="old").items() if k not in ("ece", "nll", "brier")}
    table = tables.build([row(0, nll=None), old])
    assert "| σ=0.1 | both | 0.00 | ∞ | 0.500 |" in writers.calibration_markdown(table)
    assert "$\\infty$" in writers.calibration_latex(table)
    assert "old" not in writers.calibration_markdown(table)
    json.dumps(writers.as_dict(table), allow_nan=False)


def test_a_mean_over_severities_has_the_mean_of_their_scores():
    rows = [row(0, spec=spec, nll=float(spec[-1])) for spec in CORRUPTIONS]
    means = severities.averaged(rows)
    assert {r["nll"] for r in means} == {3.0}
    assert all("bins" not in r for r in means)
    del rows[0]["nll"]
    lacking = [r["perturbation"] for r in severities.averaged(rows) if "nll" not in r]
    assert lacking == [severities.ALL, f"{rows[0]['perturbation'][:-2]}:1..5"]
