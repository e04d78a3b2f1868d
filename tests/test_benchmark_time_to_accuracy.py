"""The benchmark of time to robust accuracy: its schedule, its clock and its report."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_to_accuracy, timing
from noiseproof.lab.recipes import recipe
from noiseproof.lab.training import choose_engine
from noiseproof.lab.training.train import train

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Arguments of a short training on the digits."""
    file = tmp_path / "small.json"
    file.write_text('{"epochs": 1, "batch_size": 400, "lr": 0.02}')
    return ["--schedule", str(file), "--data", "digits", "--draws", "2", "--device", "cpu"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings in this process."""

    def in_this_process(_: str, worker: Any, *arguments: Any) -> Any:
        pipe, worker_pipe = multiprocessing.Pipe()
        worker(worker_pipe, *arguments)
        return pipe.recv()

    monkeypatch.setattr(timing, "in_new_process", in_this_process)
    monkeypatch.setattr(choose_engine, "missing_compiler", choose_engine.missing_compiler)


def test_a_schedule_is_trained_with_each_seed_and_tested(
    here: None, small: list[str], tmp_path: Path, capsys: Any
):
    file = tmp_path / "result.json"
    words = ["--seeds", "2", "--modes", "uncompiled", "--json", str(file)]
    time_to_accuracy.main([*small, *words])
    text = file.read_text()
    report = json.loads(text)
    assert report["settings"]["optim"]["epochs"] == 1
    assert report["settings"]["tested_on"] == "test images"
    first, second = report["rows"]
    assert (first["seed"], second["seed"], first["engine"]) == (0, 1, "eager")
    assert first["accuracy"] != second["accuracy"]
    for row in report["rows"]:
        assert 0 < row["step_seconds"] < row["seconds"]
        assert list(row["accuracy"]) == ["clean", "gaussian:16/255"]
        assert 0 < row["accuracy"]["clean"] <= 100
    results = report["summary"]["uncompiled"]
    mean = (first["accuracy"]["clean"] + second["accuracy"]["clean"]) / 2
    assert results["clean"]["mean"] == pytest.approx(mean)
    assert results["clean"]["std"] > 0
    assert f"clean {mean:.2f} ± " in capsys.readouterr().out
    assert str(tmp_path) not in text
    assert "/tmp" not in text


def test_held_out_images_are_tested_instead_of_the_test_images(
    here: None, small: list[str], tmp_path: Path
):
    file = tmp_path / "result.json"
    words = ["--held-out", "0.2", "--seeds", "1", "--modes", "uncompiled", "--json", str(file)]
    time_to_accuracy.main([*small, *words])
    report = json.loads(file.read_text())
    assert report["settings"]["tested_on"] == "held-out images"
    accuracy = report["rows"][0]["accuracy"]["clean"]
    assert accuracy * 252 / 100 == pytest.approx(round(accuracy * 252 / 100))  # of 252 images


def test_the_accuracy_is_the_one_that_evaluate_reports(small: list[str], tmp_path: Path):
    from noiseproof.lab.evaluation.evaluate import evaluate

    config = time_to_accuracy.schedule(
        time_to_accuracy.Arguments(schedule=small[1], data="digits", device="cpu"),
        str(tmp_path),
    )
    run = train(config, progress=False)
    reached = time_to_accuracy.reached(run, ["clean", "gaussian:0.2"], draws=2)
    rows = evaluate(run, ["clean", "gaussian:0.2"], draws=2, device="cpu", progress=False)
    clean, *noisy = [100 * row["value"] for row in rows]
    assert reached["clean"] == pytest.approx(clean)
    assert reached["gaussian:0.2"] == pytest.approx(sum(noisy) / 2)


def test_other_settings_come_from_the_recipe(tmp_path: Path):
    file = tmp_path / "settings.json"
    file.write_text('{"ema_decay": 0.9, "smoothing": 0.1}')
    a = time_to_accuracy.Arguments(schedule=str(file))
    config, usual = time_to_accuracy.schedule(a, "runs"), recipe("robust", "cifar10")
    assert (config.optim.ema_decay, config.method.smoothing) == (0.9, 0.1)
    assert config.data.augment == usual.data.augment
    assert config.model == usual.model


@pytest.mark.parametrize("name", time_to_accuracy.SCHEDULES)
def test_the_published_seconds_are_those_of_the_schedule(name: str):
    config = time_to_accuracy.schedule(time_to_accuracy.Arguments(schedule=name), "runs")
    report = json.loads((RESULTS / f"time-to-accuracy-{name}-nvidia-h200.json").read_text())
    settings = json.loads(json.dumps(time_to_accuracy.recorded(config)))
    assert settings.items() <= report["settings"].items()
    assert report["settings"]["tested_on"] == "test images"


def test_every_mode_is_trained_with_its_own_engine(
    small: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
):
    trained = []

    def measured(name: str, worker: Any, config: Any, mode: str, *rest: Any) -> dict[str, Any]:
        trained.append((mode, config.run.engine, config.run.seed))
        assert name == f"{mode}, seed {config.run.seed}"
        times = {"seconds": 9.0, "step_seconds": 8.0}
        return {"engine": "eager", "note": "engine: eager", "accuracy": {"clean": 95.0}, **times}

    monkeypatch.setattr(timing, "in_new_process", measured)
    file = tmp_path / "result.json"
    time_to_accuracy.main([*small, "--seeds", "2", "--json", str(file)])
    expected = [("compiled", "compile"), ("uncompiled", "eager")]
    assert trained == [(*pair, seed) for pair in expected for seed in (0, 1)]
    printed = capsys.readouterr().out
    assert "uncompiled (2 trainings): seconds 9.00 ± 0.00" in printed
    assert printed.count("  engine: eager") == 4
    assert set(json.loads(file.read_text())["summary"]) == {"compiled", "uncompiled"}
    with pytest.raises(ValueError, match="at least one seed"):
        time_to_accuracy.main([*small, "--seeds", "0"])
    trained.clear()
    with pytest.raises(ValueError, match="unknown perturbation 'gausian'"):
        time_to_accuracy.main([*small, "--perturb", "gausian:0.1"])
    assert trained == []
