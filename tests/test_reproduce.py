"""The paper's experiments: their settings and their records."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noiseproof.lab.comparison import workers
from noiseproof.lab.comparison.jobs import JobResult
from noiseproof.lab.config import PAPER_METHODS
from noiseproof.lab.models.backbones import SmallCNN
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.recipes import recipe
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.session import Session
from noiseproof.lab.validate import validate
from noiseproof.objectives import METHODS
from noiseproof.paper import epoch_choice, tables
from noiseproof.paper.experiments import EXPERIMENTS, ReproduceArguments
from noiseproof.paper.reproduce import RowJob, planned, reproduce
from tests.flat import Flat

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_has_a_number_of_the_paper_for_each_column(name):
    experiment = EXPERIMENTS[name]()
    assert set(experiment.paper) <= set(experiment.rows)
    for numbers in experiment.paper.values():
        assert len(numbers) == len(experiment.suite)


def test_the_main_tables_have_the_five_methods_and_the_authors_weights():
    rows = EXPERIMENTS["cifar10"]().rows
    assert set(PAPER_METHODS) < set(rows)
    for method in PAPER_METHODS:
        assert rows[method].method.method == method
        assert rows[method].method.views == "independent"
        assert rows[method].optim.epochs == 200
    code = rows["discriminative-code"].method
    assert (code.compact_weight, code.noisy_weight, code.centroid_momentum) == (0.5, 0.5, 0.99)
    assert rows["discriminative"].method.compact_weight == 1.0


def test_lighter_constraints_have_the_share_of_the_weights_in_their_name():
    rows = EXPERIMENTS["modern-30"]().rows
    whole = rows["discriminative-noisy-ce"].method
    for share in (0.1, 0.01, 0):
        method = rows[f"discriminative-noisy-ce-{share:g}"].method
        for name in ("compact_weight", "margin_weight", "norm_weight", "noisy_weight"):
            assert getattr(method, name) == pytest.approx(share * getattr(whole, name))
        assert method.noisy_ce_weight == whole.noisy_ce_weight == 1.0
    light = rows["discriminative-noisy-ce-0.1"].method
    assert rows["discriminative-noisy-ce-0.1-together"].method == replace(
        light, batch_norm="together"
    )


def test_a_plan_names_runs_resumes_them_and_scales_the_schedule():
    plan = planned(ReproduceArguments("cifar10", ("normal",), 20, 3))
    assert list(plan) == ["normal"]
    assert plan["normal"].run.name == "cifar10-normal-e20-s3"
    assert plan["normal"].run.resume
    assert plan["normal"].optim.decay_milestones == (6, 12, 16)


def test_rows_of_the_paper_s_method_change_one_thing_each():
    experiment = EXPERIMENTS["cifar10"]()
    rows, base = experiment.rows, experiment.rows["discriminative"]
    assert rows["discriminative-together"] == replace(
        base, method=replace(base.method, batch_norm="together")
    )
    assert rows["discriminative-paired"].method == replace(base.method, views="paired")
    assert rows["stability-paired"].method.views == "paired"
    normal = rows["normal"]
    assert rows["normal-float32"] == replace(normal, run=replace(normal.run, amp="no"))
    assert {row: source.noise for row, source in experiment.renormalised.items()} == {
        "normal-renormalised-clean": ("clean",),
        "discriminative-renormalised-noisy": ("gaussian:0.06",),
        "discriminative-renormalised-mixed": ("clean", "gaussian:0.06"),
    }
    assert all(rows[row] == rows[source.row] for row, source in experiment.renormalised.items())


@pytest.mark.parametrize(("name", "data"), [("ablation", "CIFAR-10"), ("ablation-svhn", "SVHN")])
def test_the_ablation_has_the_five_rows_of_table_5(name, data):
    experiment = EXPERIMENTS[name]()
    assert experiment.title == f"Ablation on {data} (table 5)"
    rows = experiment.rows
    weights = [(m.compact_weight, m.margin_weight, m.norm_weight, m.noisy_weight)
               for m in (config.method for config in rows.values())]  # fmt: skip
    assert weights == [
        (1, 0, 1e-3, 0), (0, 1, 1e-3, 0), (1, 1, 1e-3, 0), (1, 1, 0, 0), (1, 1, 1, 0),
    ]  # fmt: skip


def test_the_road_experiments_differ_in_network_and_validation():
    plain, validated = EXPERIMENTS["road"](), EXPERIMENTS["road-efficientnet"]()
    for method, config in validated.rows.items():
        other = plain.rows[method]
        assert config.model.model == "timm:tf_efficientnet_lite0"
        assert config.data == replace(other.data, val_noise="gaussian:40/255")
        assert (config.method, config.optim) == (other.method, other.optim)
    assert validated.weights == "best"


def test_imagenette_is_trained_from_scratch_with_the_stem_for_large_images():
    experiment = EXPERIMENTS["robust-imagenette"]()
    assert experiment.suite[-2:] == ("occlusion:20x20", "stripes:4x4")
    for config in experiment.rows.values():
        assert (config.model.model, config.model.weights) == ("torchvision:resnet18", None)


def test_the_robust_recipe_on_road_photographs_is_tested_like_the_paper_s():
    usual, experiment = EXPERIMENTS["road-efficientnet"](), EXPERIMENTS["robust-road"]()
    assert (experiment.suite, experiment.weights) == (usual.suite, usual.weights)
    for row, config in experiment.rows.items():
        other = usual.rows["both"]
        assert config.model == other.model
        assert config.method == replace(recipe("robust", "road/").method, method=row)
        same = {"augment": config.data.augment, "noisy_augment": config.data.noisy_augment}
        assert config.data == replace(other.data, **same)
    epochs = [config.optim.epochs for config in experiment.rows.values()]
    assert epochs == [140, 70, 70]  # as many views each


def test_an_unknown_row_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'normal'"):
        planned(ReproduceArguments("cifar10", ("norml",)))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_length_of_every_experiment_is_valid(name, tmp_path):
    for epochs in (*range(1, 21), 30, 70, 160, 200, 400):
        for config in EXPERIMENTS[name](epochs).rows.values():
            equal = name.startswith(("robust", "certified"))  # views, not epochs
            views = METHODS[config.method.method].num_views if equal else 2
            assert config.optim.epochs == round(2 * epochs / views)
            data = str(tmp_path) if "road" in name else "digits"
            model = config.model.model.removeprefix("timm:")  # which may not be installed
            validate(
                replace(
                    config,
                    data=replace(config.data, data=data),
                    model=replace(config.model, model=model),
                )
            )
    assert EXPERIMENTS["cifar10"](5).rows["normal"].optim.decay_milestones == (2, 3, 4)


@pytest.fixture(autouse=True)
def quick_network(monkeypatch):
    """Two linear layers in place of the ResNet, except in worker processes."""
    monkeypatch.setitem(BACKBONES, "resnet18", Flat)


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """Options of a reproduction on forty images of 8 x 8."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)
    data = folder / "cifar_small.npz"
    np.savez(data, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return dict(
        only=["normal"], epochs=4, data=str(data), output=str(folder / "runs"),
        results=str(folder / "results"), device="cpu", draws=2,
    ) | changes  # fmt: skip


def words(options: dict[str, Any]) -> list[str]:
    """The options as flags."""
    flags = {name: value for name, value in options.items() if name != "only"}
    return ["--only", *options["only"], *(f"--{name}={value}" for name, value in flags.items())]


def test_a_small_reproduction_writes_records_and_a_second_one_trains_nothing(tmp_path, monkeypatch):
    options = small(tmp_path)
    (path,), status = reproduce(ReproduceArguments("cifar10", **options))
    assert status == 0
    record = json.loads(path.read_text())
    assert record["row"] == "normal"
    assert record["shortened"]
    assert len(record["accuracy"]["gaussian:8/255"]["draws"]) == 2
    assert record["accuracy"]["clean"]["std"] is None
    assert record["calibration"].keys() == record["accuracy"].keys()
    assert set(record["calibration"]["clean"]) == {"ece", "nll", "brier"}
    assert str(tmp_path) not in path.read_text()
    monkeypatch.setattr(Session, "state", lambda self: pytest.fail("trained again"))
    reproduce(ReproduceArguments("cifar10", **options))
    text = tables.section(tmp_path / "results", "cifar10")
    assert "Shortened to 4 epochs" in text
    assert "| `normal` | 0 | not run |" in text


def test_renormalised_rows_share_the_training_of_their_row(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "resnet18", SmallCNN)
    suffixes = ("", "-renormalised-noisy", "-renormalised-mixed")
    rows = [f"discriminative{suffix}" for suffix in suffixes]
    options = small(tmp_path, only=rows[1:], epochs=1)
    records, status = reproduce(ReproduceArguments("cifar10", **options))
    assert status == 0
    assert [record.stem for record in records] == [f"cifar10-{row}-e1-s0" for row in rows[1:]]
    trained = RunFolder.open(tmp_path / "runs" / "cifar10-discriminative-e1-s0")
    contents = [json.loads(record.read_text()) for record in records]
    for row, noise, content in zip(rows[1:], (1, 2), contents, strict=True):
        assert content["row"] == row
        assert len(content["renormalised"]["noise"]) == noise
        assert len(content["accuracy"]["gaussian:8/255"]["draws"]) == 2
        assert content["seconds"] == round(trained.info["seconds"], 1)
        assert str(tmp_path) not in json.dumps(content)
        new = RunFolder.open(tmp_path / "runs" / f"cifar10-{row}-e1-s0")
        assert new.info["renormalised"]["run"] == str(trained.path)
    monkeypatch.setattr(Session, "state", lambda self: pytest.fail("trained again"))
    again, status = reproduce(ReproduceArguments("cifar10", **{**options, "only": rows}))
    assert (len(again), status) == (3, 0)
    assert "renormalised" not in json.loads(again[0].read_text())


def test_several_seeds_are_one_command(tmp_path):
    options = small(tmp_path, only=["normal", "both"], epochs=1, seed=3, seeds=2)
    records, status = reproduce(ReproduceArguments("cifar10", **options))
    assert status == 0
    assert [(r.stem, json.loads(r.read_text())["seed"]) for r in records] == [
        (f"cifar10-{row}-e1-s{seed}", seed) for seed in (3, 4) for row in ("normal", "both")
    ]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_row_that_fails_does_not_stop_the_others(tmp_path, capfd, count):
    options = small(tmp_path, only=["normal", "both"], epochs=1, jobs=count)
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "cifar10-both-e1-s0").write_text("where a folder should be")
    (path,), status = reproduce(ReproduceArguments("cifar10", **options))
    assert (path.name, status) == ("cifar10-normal-e1-s0.json", 1)
    assert json.loads(path.read_text())["row"] == "normal"
    printed = capfd.readouterr().out
    assert "cifar10-normal-e1-s0: done" in printed
    assert "1 of 2 runs did not finish" in printed
    line = [line for line in printed.splitlines() if "cifar10-both-e1-s0: failed" in line][-1]
    assert "File exists" in line
    if count == 2:
        assert "epoch 1/1" in (runs / "logs" / "cifar10-normal-e1-s0.log").read_text()
        share = max(1, workers.usable_cores() // 2)
        assert RunFolder.open(runs / "cifar10-normal-e1-s0").config.run.threads == share

    (runs / "cifar10-both-e1-s0").unlink()
    before = (runs / "cifar10-normal-e1-s0" / "model.safetensors").stat().st_mtime_ns
    records, status = reproduce(ReproduceArguments("cifar10", **options))
    assert [record.stem for record in records] == ["cifar10-normal-e1-s0", "cifar10-both-e1-s0"]
    assert status == 0
    assert before == (runs / "cifar10-normal-e1-s0" / "model.safetensors").stat().st_mtime_ns


def test_a_row_that_diverges_gives_exit_status_3(tmp_path, monkeypatch):
    def diverge(config: Any, each_epoch: Any) -> RunFolder:
        raise Diverged("the loss is nan")

    monkeypatch.setattr("noiseproof.paper.reproduce.train", diverge)
    assert reproduce(ReproduceArguments("cifar10", **small(tmp_path))) == ([], 3)


def test_without_a_finished_row_neither_a_table_nor_records_are_printed(
    tmp_path, monkeypatch, capfd
):
    from noiseproof.cli.main import run

    def offline(config: Any, each_epoch: Any) -> RunFolder:
        raise ValueError("the weights could not be downloaded")

    with monkeypatch.context() as patched:
        patched.setattr("noiseproof.paper.reproduce.train", offline)
        assert run(["reproduce", "cifar10", *words(small(tmp_path))]) == 1
    printed = capfd.readouterr().out
    assert "the weights could not be downloaded" in printed
    assert "nothing was recorded" in printed
    assert "|" not in printed
    assert "Records:" not in printed
    assert not (tmp_path / "results").exists()
    assert run(["reproduce", "cifar10", *words(small(tmp_path, epochs=1))]) == 0
    printed = capfd.readouterr().out
    assert "| `normal` |" in printed
    assert f"Records: {tmp_path}/results/cifar10" in printed


def test_a_record_of_the_best_weights_names_their_epoch(tmp_path):
    reproduce(ReproduceArguments("cifar10", **small(tmp_path)))
    run = RunFolder.open(next((tmp_path / "runs").iterdir()))
    run.info["best"] = {"epoch": 2, "accuracy": 0.5}
    job = RowJob(run.config, ("normal",), ReproduceArguments("cifar10"), 1)
    last, best = (job.record("normal", run, [], weights) for weights in ("last", "best"))
    assert "best" not in last
    assert best["best"] == run.info["best"]


def test_tests_during_training_do_not_change_it_and_are_recorded(tmp_path):
    plain, looked = tmp_path / "plain", tmp_path / "looked"
    for folder, every in ((plain, 0), (looked, 3)):
        folder.mkdir()
        reproduce(ReproduceArguments("cifar10", **small(folder, along=every)))
    one, other = (
        json.loads(next(f.glob("results/cifar10/*.json")).read_text()) for f in (plain, looked)
    )
    assert "along" not in one
    assert one["accuracy"] == other["accuracy"]
    seen = other["along"]
    assert [row["epoch"] for row in seen] == [3, 4]  # and the last
    for spec, found in other["accuracy"].items():  # the last look is the first draw of the record
        assert seen[-1]["accuracy"][spec] == found["draws"][0]
    assert "best epoch" in tables.sources(looked / "results", "cifar10")
    assert "best epoch" not in tables.sources(plain / "results", "cifar10")


def test_of_repeated_or_incomplete_tests_the_last_complete_one_is_read(tmp_path):
    run = RunFolder(tmp_path, EXPERIMENTS["cifar10"]().rows["normal"], {})
    assert epoch_choice.read_epoch_tests(run) == []
    lines = ['{"epoch": 4, "accuracy": {"clean": 1.0}}', '{"epoch": 2, "accuracy": {"clean": 2.0}}',
             '{"epoch": 4, "acc', '{"epoch": 4, "accuracy": {"clean": 3.0}}']  # fmt: skip
    (tmp_path / epoch_choice.FILE).write_text("\n".join(lines))
    assert [
        (row["epoch"], row["accuracy"]["clean"]) for row in epoch_choice.read_epoch_tests(run)
    ] == [
        (2, 2),
        (4, 3),
    ]


def test_rows_in_workers_start_with_the_longest_and_share_the_cores(tmp_path, monkeypatch):
    seen: list[Any] = []

    def pretend(todo: Any, count: int, folder: Path, out: Any) -> dict[str, JobResult]:
        seen.append((count, [job.config.method.method for job in todo]))
        assert {job.config.run.threads for job in todo} == {3}
        return {job.name: JobResult("done", "", 1.0) for job in todo}

    monkeypatch.setattr(workers, "run_in_workers", pretend)
    monkeypatch.setattr(workers, "usable_cores", lambda: 6)
    rows = ["normal", "noisy", "both", "stability"]
    options = small(tmp_path, only=rows, jobs=2)
    assert len(reproduce(ReproduceArguments("cifar10", **options))[0]) == 4
    assert seen == [(2, ["both", "stability", "normal", "noisy"])]
    options["jobs"] = 0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        reproduce(ReproduceArguments("cifar10", **options))


def test_missing_files_are_an_error_before_any_row_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(RowJob, "run", lambda *_: pytest.fail("a row was run"))
    with pytest.raises(ValueError, match=r"--weights nowhere\.pth does not exist"):
        reproduce(ReproduceArguments("cifar10", **small(tmp_path, weights="nowhere.pth")))
    with pytest.raises(ValueError, match=r"nowhere\.npz"):
        reproduce(
            ReproduceArguments("cifar10", **small(tmp_path, data=str(tmp_path / "nowhere.npz")))
        )


@pytest.mark.long
def test_the_exit_status_is_1_if_the_process_of_a_row_dies(tmp_path, monkeypatch, capfd):
    from noiseproof.cli.main import run

    monkeypatch.setattr(RowJob, "__reduce__", lambda self: (os._exit, (7,)), raising=False)
    options = small(tmp_path, only=["normal", "both"], epochs=1, jobs=2)
    assert run(["reproduce", "cifar10", *words(options)]) == 1
    printed = " ".join(capfd.readouterr().out.split())  # lines are folded where they end
    assert printed.count("exit code 7") == 4  # as they happen, and at the end
    assert "## CIFAR-10 (table 1)" not in printed
