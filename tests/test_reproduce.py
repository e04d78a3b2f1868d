"""The paper's experiments: their settings, their records, and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from noiseproof.lab.config import METHODS
from noiseproof.recipes import publish
from noiseproof.recipes.experiments import EXPERIMENTS, shortened
from noiseproof.recipes.reproduce import planned, reproduce

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_has_a_number_of_the_paper_for_each_column(name):
    experiment = EXPERIMENTS[name]()
    assert set(experiment.paper) <= set(experiment.rows)
    for numbers in experiment.paper.values():
        assert len(numbers) == len(experiment.suite)


def test_the_main_tables_have_the_five_methods_and_the_authors_weights():
    rows = EXPERIMENTS["cifar10"]().rows
    assert set(METHODS) < set(rows)
    for method in METHODS:
        assert rows[method].method.method == method
        assert rows[method].method.views == "independent"
        assert rows[method].optim.epochs == 200
    code = rows["discriminative-code"].method
    assert (code.compact_weight, code.noisy_weight, code.centroid_momentum) == (0.5, 0.5, 0.99)
    assert rows["discriminative"].method.compact_weight == 1.0


def test_a_plan_names_runs_resumes_them_and_shortens_the_schedule():
    plan = planned("cifar10", EXPERIMENTS["cifar10"](), ["normal"], 20, 3)
    assert list(plan) == ["normal"]
    assert plan["normal"].run.name == "cifar10-normal-e20-s3"
    assert plan["normal"].run.resume
    assert plan["normal"].optim.decay_milestones == (6, 12, 16)


def test_an_unknown_row_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'normal'"):
        planned("cifar10", EXPERIMENTS["cifar10"](), ["norml"], None, 0)


def test_shortening_keeps_the_order_of_the_milestones():
    config = EXPERIMENTS["cifar10"]().rows["normal"]
    assert shortened(config, 5).optim.decay_milestones == (2, 3, 4)


def test_a_small_reproduction_writes_records_and_a_second_one_trains_nothing(tmp_path, monkeypatch):
    import numpy as np

    from noiseproof.lab import train

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)
    data = tmp_path / "cifar_small.npz"
    np.savez(data, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    options: dict[str, Any] = dict(
        only=["normal"], epochs=4, data=str(data), output=str(tmp_path / "runs"),
        results=str(tmp_path / "results"), device="cpu", draws=2,
    )  # fmt: skip
    (path,) = reproduce("cifar10", **options)
    record = json.loads(path.read_text())
    assert record["row"] == "normal"
    assert record["shortened"]
    assert len(record["accuracy"]["gaussian:8/255"]["draws"]) == 2
    assert record["accuracy"]["clean"]["std"] is None
    assert str(tmp_path) not in path.read_text()
    monkeypatch.setattr(train.Session, "state", lambda self: pytest.fail("trained again"))
    reproduce("cifar10", **options)
    text = publish.page(tmp_path / "results")
    assert "Shortened to 4 epochs" in text
    assert "92.73 / not run" in text


def test_the_published_page_is_what_the_records_give():
    assert (ROOT / "docs/results.md").read_text() == publish.page(ROOT / "results")
