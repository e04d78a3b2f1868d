"""Running statistics estimated again: what they are, and that evaluation with them is the run's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import tyro
from torch import nn

from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.training import renormalise
from noiseproof.lab.training.train import train
from tests.flat import digits


def test_statistics_are_means_over_those_of_the_batches_and_nothing_else_changes():
    norm = nn.BatchNorm2d(2)
    norm.get_buffer("running_mean").fill_(7.0)
    model = nn.Sequential(norm, nn.Dropout(0.5), nn.Flatten())
    batches = [torch.randn(5, 2, 3, 3), 2 + torch.randn(5, 2, 3, 3)]
    copied = renormalise.renormalised(model, batches)
    for name, moment in (("running_mean", torch.mean), ("running_var", torch.var)):
        expected = [moment(b.transpose(0, 1).flatten(1), dim=1) for b in batches]
        mean = torch.stack(expected).mean(0)
        assert torch.allclose(copied.get_buffer(f"0.{name}"), mean, atol=1e-6)
    assert not any(module.training for module in copied.modules())
    assert model.training
    assert torch.equal(norm.get_buffer("running_mean"), torch.full((2,), 7.0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        config = digits(tmp_path_factory.mktemp("runs"), method="both", epochs=2, model="small_cnn")
        yield train(replace(config, run=replace(config.run, device="cpu")))


def test_every_kind_is_evaluated_and_that_of_the_training_agrees_with_evaluate(
    run, tmp_path, capsys
):
    file = tmp_path / "new" / "rows.json"
    specs = ["clean", "gaussian:0.4"]
    flags = ["--steps", "3", "--draws", "2", "--device", "cpu", "--perturb", *specs]
    tyro.cli(renormalise.evaluate_statistics, args=[str(file), str(run.path), *flags])
    content = json.loads(file.read_text())
    rows = {row["statistics"]: row["accuracy"] for row in content["rows"]}
    assert list(rows) == ["training", "clean", "noisy", "apart", "mixed"]
    assert content["rows"][0]["batches"] == 3
    assert rows["clean"] != rows["noisy"] != rows["training"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == list(rows)
    evaluated = evaluate(run, specs, draws=2, device="cpu", weights=("last",))
    assert list(rows["mixed"]) == specs
    for spec in specs:
        values = [100 * r["value"] for r in evaluated if r["perturbation"] == spec]
        assert rows["training"][spec] == pytest.approx(sum(values) / len(values), abs=1e-3)
    assert str(tmp_path) not in file.read_text()
