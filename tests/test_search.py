"""`tools.search`: candidates of the loss train and are tested on held-out images."""

from __future__ import annotations

import pytest

from noiseproof.lab.config import from_dict
from tools.search import BASE, NOISE, measure

SMALL = {"data": "digits", "model": "small_cnn", "augment": "none", "epochs": 1, "batch_size": 16}
TRIALS = ({"scale": "cosine", "late": True}, {"scale": "relative", "balanced": True, "joint": True})


@pytest.mark.parametrize("trial", TRIALS)
def test_a_candidate_of_the_loss_is_trained_and_tested(trial, tmp_path):
    config = from_dict({**SMALL, "output": str(tmp_path), "device": "cpu"}, BASE)
    row = measure({"name": "a", "spheres": {"weight": 0.3, **trial}}, config)
    assert row["spheres"] == {"weight": 0.3, **trial}
    assert row["config"]["method"]["method"] == "both"
    assert set(NOISE) <= set(row["accuracy"])
    assert row["accuracy"]["clean"] > 20  # chance is 10
