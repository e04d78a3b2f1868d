"""Batch-norm statistics estimated again: what they are, and the run folder they are written to."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from noiseproof.__main__ import main
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.provenance import commands
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.renormalise import renormalise, renormalised
from noiseproof.lab.training.train import train
from noiseproof.perturb import parse
from tests.flat import Flat, digits
from tools import running_statistics


def test_statistics_are_means_over_those_of_the_batches_and_nothing_else_changes():
    norm = nn.BatchNorm2d(2)
    norm.get_buffer("running_mean").fill_(7.0)
    model = nn.Sequential(norm, nn.Dropout(0.5), nn.Flatten())
    batches = [torch.randn(5, 2, 3, 3), 2 + torch.randn(5, 2, 3, 3)]
    copied = renormalised(model, batches)
    for name, moment in (("running_mean", torch.mean), ("running_var", torch.var)):
        expected = [moment(b.transpose(0, 1).flatten(1), dim=1) for b in batches]
        mean = torch.stack(expected).mean(0)
        assert torch.allclose(copied.get_buffer(f"0.{name}"), mean, atol=1e-6)
    assert not any(module.training for module in copied.modules())
    assert model.training
    assert torch.equal(norm.get_buffer("running_mean"), torch.full((2,), 7.0))


def test_with_momentum_the_last_batches_have_the_largest_weights():
    batches = [torch.full((2, 1, 2, 2), value) for value in (1.0, 3.0)]
    copied = renormalised(nn.BatchNorm2d(1), batches, momentum=0.1)
    assert copied.get_buffer("running_mean").item() == pytest.approx(0.9 * 0.1 * 1 + 0.1 * 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    """Two epochs on the digits, with a best epoch."""
    folder = tmp_path_factory.mktemp("runs")
    return train(digits(folder, method="both", epochs=2, model="small_cnn"), progress=False)


def test_only_the_statistics_of_all_weights_change_and_the_original_stays(run: RunFolder, tmp_path):
    before = {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    new = renormalise(run, batches=3, output=tmp_path, device="cpu")
    assert before == {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    assert new.path == tmp_path / "one-renormalised"
    assert RunFolder.open(new.path).finished
    for weights in ("last", "best"):
        old_state, new_state = (r.model(weights).state_dict() for r in (run, new))
        changed = [k for k, v in old_state.items() if not torch.equal(v, new_state[k])]
        assert {k.rpartition(".")[2] for k in changed} == {
            "running_mean", "running_var", "num_batches_tracked",
        }  # fmt: skip
    facts = new.info["renormalised"]
    assert facts["run"] == str(run.path.absolute())
    assert facts["noise"] == [run.config.method.noise]  # by default that of the training
    assert (facts["batches"], facts["views"]) == (3, 3 * 64)
    assert facts["weights"] == {w: run.weights_hash(w) for w in ("last", "best")}


def test_every_batch_holds_the_training_images_under_each_perturbation(run: RunFolder, tmp_path):
    noise = ["clean", "gaussian:0.3"]
    new = renormalise(run, noise=noise, batches=2, output=tmp_path, device="cpu")
    data = run.dataset()
    options = {"batch_size": 64, "seed": run.config.run.seed, "device": torch.device("cpu")}
    loader = Loader(data.train, data.size, **options)
    prepared = [loader.prepare(ticket) for ticket in itertools.islice(loader.tickets(0), 2)]
    views = [torch.cat([b.images, parse(noise[1])(b.images, b.source)]) for b in prepared]
    expected = renormalised(run.model("last"), views).state_dict()
    for name, value in new.model("last").state_dict().items():
        assert torch.equal(value, expected[name])
    assert new.info["renormalised"]["views"] == 2 * 2 * 64


def test_images_of_a_folder_need_no_labels_and_are_used_in_random_order(
    run: RunFolder, tmp_path, capsys
):
    folder = tmp_path / "new"
    for part, brightness in (("dark", 20), ("light", 220)):
        (folder / part).mkdir(parents=True)
        for i in range(70):
            Image.new("L", (8, 8), brightness + i % 5).save(folder / part / f"{i:02}.png")
    (folder / "notes.txt").write_text("not an image")
    new = renormalise(run, images=folder, output=tmp_path, device="cpu")
    facts = new.info["renormalised"]
    assert (facts["batches"], facts["views"], facts["images"]) == (2, 140, str(folder))
    assert "noise" not in facts
    assert "skipped" in capsys.readouterr().err
    variances = [v for k, v in new.model("last").state_dict().items() if k.endswith("running_var")]
    assert variances[0].max() > 1e-3  # batches of one brightness each would have next to none


def test_the_command_writes_a_run_that_evaluate_and_report_take(
    run: RunFolder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    command = ["renormalise", str(run.path), "--noise", "clean", "gaussian:0.4",
               "--batches", "3", "--output", "runs", "--name", "new"]  # fmt: skip
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "runs/new, with batch-norm statistics of 192 images" in text
    evaluation = shlex.split(text.splitlines()[-1])[1:]
    assert evaluation == ["evaluate", str(run.path), "runs/new"]
    assert main([*evaluation, "--perturb", "gaussian:0.4", "--draws", "2"]) == 0
    old, new = run.evaluation(), RunFolder.open("runs/new").evaluation()
    assert {r["model"] for r in old}.isdisjoint(r["model"] for r in new)
    assert new[0]["value"] != old[0]["value"]
    results = gather([run, RunFolder.open("runs/new")])
    assert results.by == "run"
    assert shlex.join(["noiseproof", *command]) in commands(results, Path("out"))
    assert gather([RunFolder.open("runs/new")]).by == "run"  # not one of the method's trainings
    recorded = json.loads(Path("runs/new/config.json").read_text())["info"]
    assert recorded["renormalised"]["command"] == shlex.join(["noiseproof", *command])
    assert main(command) == 2
    assert "runs/new already exists" in capsys.readouterr().err


def test_the_spread_over_the_last_batches_is_that_of_the_statistics_alone(
    run: RunFolder, tmp_path, capsys
):
    file = tmp_path / "statistics.json"
    noise = ("clean", "gaussian:0.4")
    running_statistics.measure(run.path, file, noise, repeats=3, batches=4, device="cpu")
    content = json.loads(file.read_text())
    assert content["batches"] == 4
    assert content["small"] == 1131 % 64  # training images of the digits
    assert list(content["accuracy"]) == ["full", "small", "mean"]
    full = content["accuracy"]["full"]["gaussian:0.4"]
    assert len(set(full)) > 1
    assert capsys.readouterr().out.count(" ± ") == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--noise gausian:0.1", "did you mean 'gaussian:0.1'?"),
        ("--noise clean --images .", "expected one"),
        ("--images nowhere", "--images nowhere is not a folder"),
        ("--images .", "there are no images in ."),
        ("--batches 0", "--batches must be at least 1, got 0"),
        ("--name one", "already exists"),
    ],
)
def test_an_invalid_command_fails_with_one_line(
    flags, message, run: RunFolder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["renormalise", str(run.path), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_without_batch_norm_and_an_unfinished_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    config = digits(tmp_path, epochs=1)
    flat = train(config, progress=False)
    with pytest.raises(ValueError, match="no batch-norm"):
        renormalise(flat, device="cpu")
    assert not (tmp_path / "one-renormalised").exists()
    unfinished = RunFolder.create(replace(config, run=replace(config.run, name="two")), flat.info)
    with pytest.raises(ValueError, match="is not finished"):
        renormalise(unfinished, device="cpu")
