"""Means over the severities of corruptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from noiseproof.lab.evaluation import tables
from noiseproof.lab.evaluation.severities import ALL, averaged, averaged_correct
from noiseproof.lab.evaluation.words import main_sentences, notes
from noiseproof.perturb import CORRUPTIONS, parse


def suite_rows(run: str, draws: int) -> list[dict[str, Any]]:
    rows = []
    for i, name in enumerate(["clean", *CORRUPTIONS]):
        for draw in range(1 if name == "clean" or parse(name).deterministic else draws):
            facts = {"run": run, "weights": "last", "perturbation": name, "draw": draw}
            rows.append({**facts, "value": (i + 100 * draw) / 1000, "seconds": 1.0})
    return rows


def test_severities_become_one_mean_each_and_one_of_all():
    rows = averaged([*suite_rows("a", 1), *suite_rows("b", 1)])
    assert len(rows) == 2 * (1 + 1 + 15)
    assert [row["perturbation"] for row in rows[:4]] == [
        "clean", ALL, "gaussian_noise:1..5", "shot:1..5",
    ]  # fmt: skip
    values = {row["perturbation"]: row["value"] for row in rows if row["run"] == "b"}
    assert values["clean"] == 0
    assert values["gaussian_noise:1..5"] == pytest.approx(np.mean([1, 2, 3, 4, 5]) / 1000)
    assert values[ALL] == pytest.approx(np.mean(np.arange(1, 76)) / 1000)


def test_the_only_draw_of_a_deterministic_corruption_counts_for_every_draw():
    values = {
        (row["perturbation"], row["draw"]): row["value"] for row in averaged(suite_rows("a", 3))
    }
    assert [d for name, d in values if name == "jpeg:1..5"] == [0]
    assert [d for name, d in values if name == ALL] == [0, 1, 2]
    random = np.mean([not parse(name).deterministic for name in CORRUPTIONS])
    assert values[ALL, 2] - values[ALL, 0] == pytest.approx(0.2 * random)


def test_rows_without_corruptions_stay_as_they_are():
    rows = [row for row in suite_rows("a", 1) if row["perturbation"] == "clean"]
    assert averaged(rows) == rows


def test_the_words_below_the_table_explain_and_describe_the_mean():
    rows = averaged([*suite_rows("a", 1), *suite_rows("b", 1)])
    shared = {"fingerprint": "f", "noise_seed": 0, "n": 100}
    raised = [
        {**row, **shared, "value": row["value"] + (0.01 if row["run"] == "b" else 0)}
        for row in rows
    ]
    table = tables.build(raised, by="run")
    assert "1–5 is the mean over the severities" in notes(table)[1]
    sentences = main_sentences(table)
    assert [s.partition(",")[0] for s in sentences[:2]] == ["On clean images", "At corruptions 1–5"]
    assert "1–5" not in "".join(notes(tables.build(raised[:1], by="run")))


def test_predictions_of_a_mean_weigh_every_severity_alike():
    def correct(run: str, weights: str, name: str):
        if run == "unknown" and name == "fog:3":
            return None
        draws = 1 if name == "clean" or parse(name).deterministic else 2
        return np.full((draws, 4), name == "fog:1" or name == "jpeg:1")

    look_up = averaged_correct(correct)
    for name, share in (("fog:1..5", 0.2), ("jpeg:1..5", 0.2), (ALL, 2 / 75), ("clean", 0)):
        found = look_up("known", "last", name)
        assert found is not None
        assert found.mean() == pytest.approx(share)
    assert look_up("unknown", "last", "fog:1..5") is None
