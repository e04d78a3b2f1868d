"""Validation: its accuracies, its noise, and the epoch that it selects as the best."""

from __future__ import annotations

import pytest
import torch

from noiseproof import draws
from noiseproof.lab.device import make_fabric
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.session import Session
from noiseproof.lab.training.train import train
from noiseproof.perturb import parse
from tests.flat import Flat, digits


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)


def test_the_best_epoch_can_be_selected_by_clean_and_noisy_validation_images(tmp_path):
    config = digits(tmp_path, epochs=8, method="normal", val_noise="gaussian:0.3")
    run = train(config, progress=True)
    rows = run.metrics()
    means = [(row["val_accuracy"] + row["val_noisy_accuracy"]) / 2 for row in rows]
    best = max(range(8), key=lambda epoch: (means[epoch], epoch))  # of equals the last
    assert run.info["best"] == {"epoch": best + 1, "accuracy": pytest.approx(means[best])}
    assert rows[-1]["val_noisy_accuracy"] < rows[-1]["val_accuracy"] - 0.05
    clean = train(digits(tmp_path / "clean", epochs=8, method="normal"), progress=False).metrics()
    for row, other in zip(rows, clean, strict=True):  # validation noise changes nothing else
        assert row["loss"] == other["loss"]
        assert row["val_accuracy"] == other["val_accuracy"]
        assert "val_noisy_accuracy" not in other


def test_validation_noise_is_one_draw_per_image_for_all_epochs_and_seeds(tmp_path):
    def session(seed):
        config = digits(tmp_path, val_noise="gaussian:0.4", seed=seed)
        return Session(config, make_fabric(config))

    first, second = session(0), session(1)
    second.model.load_state_dict(first.model.state_dict())
    accuracies = first.validate()
    first.epoch = 5
    assert first.validate() == second.validate() == accuracies
    split = first.data.validation
    assert split is not None
    assert split.images is not None
    source = draws.PerSample(draws.keys(0, 4, torch.arange(split.count)))
    noisy = parse("gaussian:0.4")(split.images / 255, source)
    with torch.no_grad():
        hits = first.model.eval()(noisy).argmax(1) == split.labels
    assert accuracies["val_noisy_accuracy"] == pytest.approx(float(hits.double().mean()))


def test_validation_noise_without_validation_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--val-noise needs validation images"):
        train(digits(tmp_path, val_noise="gaussian:0.1", val_share=0.0), progress=False)


def test_validation_noise_that_is_larger_than_the_images_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="larger than an image of 8 x 8"):
        train(digits(tmp_path, val_noise="downup:9"), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_validation_counts_hits_on_the_clean_validation_images(tmp_path):
    config = digits(tmp_path)
    fabric = make_fabric(config)
    session = Session(config, fabric)
    split = session.data.validation
    assert split is not None
    assert split.images is not None
    model = session.model.eval()
    with torch.no_grad():
        hits = [
            int(model(x[None] / 255).argmax()) == int(y)
            for x, y in zip(split.images, split.labels, strict=True)
        ]
    assert session.validate() == {"val_accuracy": pytest.approx(sum(hits) / len(hits))}
    assert session.model.training
