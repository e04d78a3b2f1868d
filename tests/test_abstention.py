"""Abstention: curves and thresholds against direct counting, the command, and what is published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from noiseproof.cli.main import run as main
from noiseproof.lab.analysis.analyse import analyse
from noiseproof.lab.config import Config, Data, Model, Optim, Run
from noiseproof.lab.evaluation.abstention import (
    auroc,
    fit_combination,
    fit_threshold,
    risk_coverage,
    threshold_text,
)
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.predict import abstention_threshold
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train

ANSWERS = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40)


@given(ANSWERS)
def test_the_curve_is_what_counting_gives(answers):
    score, wrong = (np.array(column) for column in zip(*answers, strict=True))
    coverage, risk = risk_coverage(score.astype(float), wrong.astype(bool))
    for value in set(score.tolist()):
        kept = score >= value
        at = np.isclose(coverage, kept.mean())
        assert at.any()
        assert np.allclose(risk[at], wrong[kept].mean())
    assert np.all(np.diff(coverage) >= 0)
    assert coverage[-1] == 1
    assert risk[-1] == pytest.approx(wrong.mean())


@settings(deadline=None)  # the first example imports scikit-learn
@given(ANSWERS)
def test_the_auroc_is_the_share_of_pairs_in_the_right_order(answers):
    score, wrong = (np.array(column) for column in zip(*answers, strict=True))
    wrong = wrong.astype(bool)
    right, bad = score[~wrong][:, None], score[wrong][None]
    expected = ((right > bad) + (right == bad) / 2).mean() if right.size and bad.size else None
    found = auroc(score.astype(float), wrong)
    assert found == (None if expected is None else pytest.approx(expected))


@given(ANSWERS, st.sampled_from([0.05, 0.2, 0.5, 0.9]))
def test_the_threshold_answers_as_many_as_the_estimated_error_allows(answers, error):
    score, wrong = (np.array(column) for column in zip(*answers, strict=True))
    allowed = [
        int(kept.sum())
        for value in set(score.tolist())
        if (wrong[kept := score >= value].sum() + 1) / (kept.sum() + 1) <= error
    ]
    found = fit_threshold(score.astype(float), wrong.astype(bool), error)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.answered == max(allowed) == (score >= found.score).sum()
    assert found.wrong == wrong[score >= found.score].sum()
    assert found.coverage == pytest.approx(found.answered / len(score))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = str(tmp_path_factory.mktemp("runs"))
    return train(
        Config(
            data=Data(val_share=0.3),
            model=Model(feature_dim=16),
            optim=Optim(epochs=3),
            run=Run(output=folder, device="cpu"),
        ),
        progress=False,
    )


def test_the_threshold_of_a_run_is_chosen_on_validation_and_checked_on_test_images(run):
    fitted, checked = abstention_threshold(run, 0.05, device="cpu")
    data, model = run.dataset(), run.model("last", torch.device("cpu"))
    assert data.validation is not None
    for split, found in ((data.validation, fitted), (data.test, checked)):
        with torch.no_grad():
            chances, answers = model(split.pixels.float() / 255).softmax(1).max(1)
        kept = chances >= fitted.score
        assert found.answered == int(kept.sum())
        assert found.wrong == int((answers != split.labels)[kept].sum())
    assert (fitted.wrong + 1) / (fitted.answered + 1) <= 0.05
    assert 0 < checked.coverage < 1


def test_the_command_marks_what_it_does_not_answer(run, tmp_path: Path, capsys):
    data = run.dataset()
    pixels, names = data.test.pixels[:40, 0], []
    for i, image in enumerate(pixels):
        names.append(str(tmp_path / f"{i:02}.png"))
        Image.fromarray(image.numpy()).save(names[-1])
    out = tmp_path / "answers.csv"
    words = ["predict", str(run.path), *names, "--abstain", "0.02", "--device", "cpu"]
    assert main([*words, "--out", str(out)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    fitted, checked = abstention_threshold(run, 0.02, device="cpu")
    assert f"a probability of {threshold_text(fitted.score)}, chosen" in first
    assert f"{100 * checked.coverage:.1f} % are answered" in first
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert rows[0] == ["file", "rank", "class", "probability", "answered"]
    assert {row[4] for row in rows[1:]} == {"yes", "no"}
    for row, line in zip(rows[1:], lines, strict=False):
        unsure = float(row[3]) < fitted.score
        assert (row[4] == "no") == unsure == ("no answer (" in line)


def test_abstention_is_refused_with_a_hint_where_it_cannot_be_fitted(
    run, tmp_path, capsys, monkeypatch
):
    for share in ("0", "1", "-0.1"):
        assert main(["predict", str(run.path), __file__, f"--abstain={share}"]) == 2
        assert "--abstain must be above 0 and below 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hold out more with --val-share"):
        abstention_threshold(run, 1e-4, device="cpu")
    config = Config(
        data=Data(val_share=0.0),
        optim=Optim(epochs=1),
        run=Run(output=str(tmp_path), device="cpu"),
    )
    without = train(config, progress=False)
    monkeypatch.delattr(RunFolder, "dataset")  # nothing is downloaded in vain
    with pytest.raises(ValueError, match=r"kept no validation images.* --val-share 0.1"):
        abstention_threshold(without, 0.05)


def test_a_combination_uses_the_score_that_knows():
    rng = np.random.default_rng(0)
    knows = rng.normal(size=2000)
    wrong = knows + 0.5 * rng.normal(size=2000) < -1
    scores = np.column_stack([rng.random(2000), knows, rng.normal(size=2000)])
    combine = fit_combination(scores[:1000], wrong[:1000])
    assert combine is not None
    found, best = (auroc(x[1000:], wrong[1000:]) for x in (combine(scores), knows))
    assert found == pytest.approx(best, abs=0.01)
    scores[:, 0] = 1.0  # log-odds stay finite
    assert np.isfinite(combine(scores)).all()
    assert fit_combination(scores, np.zeros(2000, dtype=bool)) is None


def test_scores_are_measured_under_every_condition(run):
    tested = ["clean", "gaussian:0.4"]
    accuracies = evaluate(run, tested, draws=2, device="cpu", progress=False)
    options: dict[str, Any] = {
        "parts": ["abstention"],
        "noise": "gaussian:0.3",
        "device": "cpu",
        "progress": False,
    }
    found = analyse(run, **options)
    rows = [row for row in found.rows("abstention") if row["metric"].startswith("AUROC")]
    scores = ("probability", "centroid", "boundary", "combination", "all three")
    noisy = {"noisy": "gaussian:0.3"}
    conditions = ["clean", "noisy", *(("evaluated", spec) for spec in tested)]
    assert [(row["data"], row.get("perturbation"), row["score"]) for row in rows] == [
        (*((c, noisy.get(c)) if isinstance(c, str) else c), score)
        for c in conditions
        for score in scores
    ]
    for row in accuracies:
        if row["draw"] == 0:  # the same noise as in the evaluation
            facts = {"data": "evaluated", "perturbation": row["perturbation"], "coverage": 1.0}
            assert found.value("abstention", "risk", **facts) == pytest.approx(1 - row["value"])
    data, model = run.dataset(), run.model("last", torch.device("cpu"))
    with torch.no_grad():
        chances, answers = model(data.test.pixels.float() / 255).softmax(1).max(1)
    wrong = (answers != data.test.labels).numpy()
    assert rows[0]["value"] == pytest.approx(auroc(chances.numpy(), wrong), abs=1e-3)
    with torch.no_grad():  # distances that do not know the true classes
        known, q = (model.features(s.pixels.float() / 255) for s in (data.train, data.test))
        logits, weight = model.head(q), model.head.weight.detach()
    centroids = torch.stack([known[data.train.labels == i].mean(0) for i in range(10)])
    distance = (q - centroids[answers]).norm(dim=1)
    others = (logits.amax(1, keepdim=True) - logits) / (weight[answers, None] - weight).norm(dim=2)
    boundary = others.nan_to_num(torch.inf).amin(1)  # 0 / 0 for the answer itself
    assert rows[1]["value"] == pytest.approx(auroc(-distance.numpy(), wrong), abs=1e-3)
    assert rows[2]["value"] == pytest.approx(auroc(boundary.numpy(), wrong), abs=1e-3)
    arrays = found.arrays("abstention")
    assert arrays is not None
    for view in ("clean", "noisy"):
        risk = found.value("abstention", "risk", data=view, coverage=1.0)
        assert arrays[f"{view}.probability"][-1] == pytest.approx(risk)

    evaluate(run, ["gaussian:0.5"], draws=1, device="cpu", progress=False)
    more = analyse(run, **options)  # again, since there is a condition more
    assert more.rows("abstention", perturbation="gaussian:0.5", score="combination")
    without = analyse(run, seed=1, dataset=replace(data, validation=None), **options)
    assert not without.rows("abstention", score="combination")
    assert without.rows("abstention", score="all three")
