"""Temperature scaling: the fitted number, the run folder that it is written to, and the report."""

from __future__ import annotations

import math
import shlex

import pytest
import torch

from noiseproof.__main__ import main
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.temperature import _NOISE_SEED, calibrate, fit_temperature
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.calibration_section import calibration_section
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.perturb import parse
from noiseproof.robustness import perturb_samples
from tests.flat import Flat, digits


def test_the_temperature_that_scaled_the_logits_is_found():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    assert fit_temperature(2.5 * logits, labels) == pytest.approx(2.5, rel=0.05)
    one = fit_temperature(logits, labels)
    assert fit_temperature(10 * logits, labels) == pytest.approx(10 * one, rel=1e-3)


def test_two_classes_with_one_margin_have_a_closed_form():
    logits = torch.tensor([[3.0, 0.0]]).expand(10, 2)
    labels = torch.tensor([0] * 8 + [1] * 2)  # right for 80 %: 3 / T = log 4
    assert fit_temperature(logits, labels) == pytest.approx(3 / math.log(4), rel=1e-4)


def test_labels_that_no_temperature_fits_raise():
    logits = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    with pytest.raises(ValueError, match="all 2 predictions for validation images are right"):
        fit_temperature(logits, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="no better than equal ones"):
        fit_temperature(logits, torch.tensor([1, 0]))


def test_only_the_head_changes_and_the_report_states_what_that_did(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    run = train(digits(tmp_path, method="both", epochs=2), progress=False)
    before = {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    noise = ["clean", "gaussian:0.5"]
    assert main(["calibrate", str(run.path), "--noise", *noise, "--device", "cpu"]) == 0
    new = RunFolder.open(run.path.parent / f"{run.name}-calibrated")
    assert shlex.join(["noiseproof", "evaluate", str(run.path)]) in capsys.readouterr().out
    assert before == {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    facts = new.info["calibrated"]
    assert facts["noise"] == noise
    for weights in ("last", "best"):
        fitted = facts["weights"][weights]
        assert fitted["hash"] == run.weights_hash(weights)
        old_state, new_state = (r.model(weights).state_dict() for r in (run, new))
        for name, value in old_state.items():
            scale = fitted["temperature"] if name.startswith("head.") else 1.0
            assert torch.allclose(new_state[name].double() * scale, value.double(), rtol=1e-6)
    with pytest.raises(ValueError, match="already exists"):
        calibrate(run)

    for each in (run, new):
        evaluate(each, ["clean", "gaussian:0.4"], draws=2, device="cpu", progress=False)
    results = gather([run, new])
    section = calibration_section(results)
    assert section is not None
    temperature = facts["weights"]["last"]["temperature"]
    assert f"with its logits divided by {temperature:.2f}" in section.intro
    (old, changed), percent = results.table.labels, results.table.percent
    errors = {x: results.table.cells[x, "clean"].calibration["ece"] or 0.0 for x in (old, changed)}
    word = "lower" if errors[changed] < errors[old] else "not lower"
    clean = f"clean ({percent(errors[old])} to {percent(errors[changed])} %)"
    assert clean in section.intro.partition(f" {word} for ")[2]


def test_one_temperature_is_fitted_to_all_conditions_with_noise_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    run = train(digits(tmp_path, method="both", epochs=2), progress=False)
    noise = ("clean", "gaussian:0.5")
    fitted = calibrate(run, noise=noise, device="cpu").info["calibrated"]["weights"]["last"]
    validation, model = run.dataset().validation, run.model("last")
    assert validation is not None

    def expected(seed: int) -> float:
        pixels, index = validation.pixels.float() / 255, torch.arange(validation.count)
        with torch.no_grad():
            views = [perturb_samples(pixels, index, parse(text), 0, seed) for text in noise]
            logits = torch.cat([model(view) for view in views])
        return fit_temperature(logits, validation.labels.repeat(len(noise)))

    assert fitted["temperature"] == pytest.approx(expected(_NOISE_SEED), rel=1e-4)
    assert fitted["temperature"] != pytest.approx(expected(0), rel=1e-4)  # that of an evaluation


def test_a_run_without_validation_images_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    run = train(digits(tmp_path, val_share=0.0, epochs=1), progress=False)
    monkeypatch.delattr(RunFolder, "dataset")  # nothing is downloaded in vain
    with pytest.raises(ValueError, match=r"kept no validation images.* --val-share 0.1"):
        calibrate(run, device="cpu")
    assert not (tmp_path / "one-calibrated").exists()
