"""What a comparison recommends, from predictions whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from noiseproof.cli.main import run as main
from noiseproof.lab.comparison_files import (
    COMPARISON,
    RECOMMENDATION,
    is_comparison,
    recommended,
    runs_of,
)
from noiseproof.lab.evaluation import tables
from noiseproof.lab.evaluation.recommendation import Recommendation, recommend

IMAGES = 1000
Rights = Mapping[tuple[str, str], float | NDArray[np.floating]]
"""Accuracies by (method, perturbation), of one training or of several."""


def decide(accuracies: Rights, majority_share: float | None = None) -> Recommendation:
    """The recommendation for models that are right on the first images only: methods differ on as
    few images as they can, so that differences of some points are significant."""
    correct: dict[tuple[str, str], NDArray[np.bool_]] = {}
    rows = []
    for (method, spec), values in accuracies.items():
        for seed, value in enumerate(np.atleast_1d(values)):
            run, facts = f"{method}-s{seed}", {"weights": "last", "noise_seed": 0}
            correct[run, spec] = (np.arange(IMAGES) < round(value * IMAGES))[None]
            about = {"run": run, "method": method, "perturbation": spec, "draw": 0, "seed": seed}
            rows.append({**about, **facts, "value": value, "n": IMAGES, "fingerprint": "f"})

    def look_up(run: str, _: str, spec: str) -> NDArray[np.bool_] | None:
        return correct.get((run, spec))

    table = tables.build(rows, correct=look_up, majority_share=majority_share)
    return recommend(table, rows, look_up)


def test_a_clear_winner_is_named_with_its_cost_and_its_certainty():
    choice = decide({
        ("normal", "clean"): 0.98, ("normal", "gaussian:0.1"): 0.7, ("normal", "gaussian:0.2"): 0.5,
        ("both", "clean"): 0.95, ("both", "gaussian:0.1"): 0.9, ("both", "gaussian:0.2"): 0.8,
    })  # fmt: skip
    assert choice.label == "both"
    answer, cost, certainty = choice.sentences
    assert answer == (
        "Take `both`: averaged over two levels of noise (σ=0.1 to σ=0.2) it has 85.00 % accuracy, "
        "significantly more than every other method."
    )
    assert cost.startswith(
        "On clean images it has 95.00 %, 3.0 points below the best, `normal` (95 % interval"
    )
    assert certainty.startswith("How sure: the next best, `normal`, is 25.0 points lower (95 % in")
    assert (
        "With one training per method the variation between trainings is not covered" in certainty
    )
    assert (choice.tied, choice.seeds) == ((), 3)


def test_a_tie_is_called_one_and_the_highest_mean_is_taken():
    choice = decide({
        ("normal", "clean"): 0.98, ("normal", "gaussian:0.2"): 0.5,
        ("both", "clean"): 0.979, ("both", "gaussian:0.2"): 0.801,
        ("stability", "clean"): 0.98, ("stability", "gaussian:0.2"): 0.8,
    })  # fmt: skip
    assert (choice.label, choice.tied, choice.seeds) == ("both", ("stability",), 3)
    answer, cost, certainty = choice.sentences
    assert answer.endswith("80.10 % accuracy, the highest, in a statistical tie with `stability`.")
    assert cost.endswith("0.1 points below the best, `normal` (not a significant difference).")
    assert certainty == (
        "How sure: a tie with `stability` 80.00 %, not significantly different; of tied "
        "methods, the highest mean is taken. More trainings (`--seeds 3`) or more test images "
        "would settle it."
    )


def test_of_tied_methods_one_that_is_significantly_worse_on_clean_images_is_not_taken():
    choice = decide({
        ("both", "clean"): 0.98, ("both", "gaussian:0.2"): 0.8,
        ("noisy", "clean"): 0.9, ("noisy", "gaussian:0.2"): 0.801,
    })  # fmt: skip
    assert choice.label == "both"
    assert choice.sentences[0].endswith(
        "statistically tied with the highest, 80.10 % of `noisy`, which is significantly lower on "
        "clean images."
    )
    assert "the highest: robustness costs nothing there" in choice.sentences[1]


def test_a_kind_of_noise_with_another_winner_is_an_exception():
    choice = decide({
        ("both", "clean"): 0.98, ("both", "gaussian:0.2"): 0.8, ("both", "occlusion:2x2"): 0.6,
        ("noisy", "clean"): 0.9, ("noisy", "gaussian:0.2"): 0.5, ("noisy", "occlusion:2x2"): 0.7,
    })  # fmt: skip
    assert choice.label == "both"
    assert "averaged over two noise conditions it has 70.00 %" in choice.sentences[0]
    assert choice.sentences[-1] == (
        "Occlusion: take `noisy` instead, with 70.00 %, 10.0 points more."
    )


def test_three_trainings_that_agree_need_no_more():
    near = np.array([0.0, 0.002, -0.002])
    choice = decide({
        ("normal", "clean"): 0.98 + near, ("normal", "gaussian:0.2"): 0.5 + near,
        ("both", "clean"): 0.98 + near, ("both", "gaussian:0.2"): 0.8 + near,
    })  # fmt: skip
    assert (choice.label, choice.seeds) == ("both", None)
    assert "luck" not in choice.sentences[-1]
    tied = decide({
        (method, "gaussian:0.2"): 0.8 + k * near for k, method in ((1, "both"), (2, "noisy"))
    })  # fmt: skip
    assert tied.seeds == 6


def test_nothing_is_recommended_of_methods_at_chance_or_tested_differently():
    with pytest.raises(ValueError, match="no method is better than always predicting"):
        decide({("both", "clean"): 0.1, ("both", "gaussian:0.2"): 0.1}, majority_share=0.1)
    with pytest.raises(ValueError, match="no noise was tested with every method"):
        decide({("both", "gaussian:0.1"): 0.9, ("normal", "gaussian:0.2"): 0.9})


def test_a_method_at_chance_is_not_compared():
    choice = decide({
        ("both", "clean"): 0.9, ("both", "gaussian:0.2"): 0.8,
        ("normal", "clean"): 0.1, ("normal", "gaussian:0.2"): 0.1,
    }, majority_share=0.1)  # fmt: skip
    assert choice.sentences[0] == "Take `both`: at σ=0.2 it has 80.00 % accuracy."


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """The folder of a comparison that recommends `both`; the runs themselves are empty."""
    runs = [{"run": "normal-s0", "status": "done"}, {"run": "both-s0", "status": "done"}]
    runs.append({"run": "noisy-s0", "status": "diverged"})
    (tmp_path / COMPARISON).write_text(json.dumps({"runs": runs, "command": "noiseproof compare"}))
    choice = {"run": "both-s0", "text": ["Take `both`: it is best."]}
    (tmp_path / RECOMMENDATION).write_text(json.dumps(choice))
    return tmp_path


def test_a_comparison_stands_for_its_finished_runs_or_for_the_recommended_one(comparison: Path):
    assert is_comparison(comparison)
    assert runs_of(comparison) == [comparison / "normal-s0", comparison / "both-s0"]
    assert recommended(comparison) == (comparison / "both-s0", ["Take `both`: it is best."])


def test_a_comparison_without_a_recommendation_says_how_to_get_one(comparison: Path):
    (comparison / RECOMMENDATION).unlink()
    with pytest.raises(ValueError, match=r"`noiseproof report .*` writes it, or name a run: "):
        recommended(comparison)


def test_a_comparison_that_recommends_nothing_says_why(comparison: Path):
    (comparison / RECOMMENDATION).write_text('{"run": null, "text": ["no method is better"]}')
    with pytest.raises(ValueError, match=r"recommends no run: no method is better\. To use one an"):
        recommended(comparison)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": 3, "text": []}', '{"run": "../x"}'])
def test_a_damaged_recommendation_is_refused_and_leads_nowhere_else(comparison: Path, text: str):
    (comparison / RECOMMENDATION).write_text(text)
    with pytest.raises(ValueError, match=r"is damaged|must be a folder in it"):
        recommended(comparison)


def test_predict_says_which_run_it_takes_and_evaluate_takes_all(
    comparison: Path, capsys: pytest.CaptureFixture[str]
):
    (comparison / "x.png").touch()
    assert main(["predict", str(comparison), str(comparison / "x.png")]) == 2
    printed = capsys.readouterr().err
    assert "recommends both-s0. Take `both`: it is best." in printed
    assert f"{comparison / 'both-s0'} is not a run folder" in printed
    assert main(["evaluate", str(comparison)]) == 2
    assert f"{comparison / 'normal-s0'} is not a run folder" in capsys.readouterr().err
