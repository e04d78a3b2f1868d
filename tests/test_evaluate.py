"""Evaluation of tiny linear runs on the digits."""

from __future__ import annotations

import csv
import re
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import ImageOps
from torch import Tensor, nn

from noiseproof import draws, robustness
from noiseproof.lab import console
from noiseproof.lab.config import Config, Data, Method, MethodName, Run
from noiseproof.lab.data import batches
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.evaluation import evaluate as evaluate_module
from noiseproof.lab.evaluation import suites
from noiseproof.lab.evaluation.evaluate import evaluate, evaluate_runs
from noiseproof.lab.evaluation.predictions import Predictor, correct, predictions
from noiseproof.lab.evaluation.suites import SuiteName
from noiseproof.lab.recipes import suite
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.perturb import CORRUPTIONS
from noiseproof.perturb.text import read

NOISE = "gaussian:0.3"
BOTH: tuple[Weights, Weights] = ("last", "best")


class Linear(nn.Module):
    """Pixels to logits in one matrix; counts the images that it classifies."""

    images = 0

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        Linear.images += len(x)
        return self.head(x.flatten(1))


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(Data())


@pytest.fixture(autouse=True)
def linear_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(self: RunFolder, weights: str = "last", device: str = "cpu") -> nn.Module:
        from safetensors.torch import load_file

        made = Linear()
        made.load_state_dict(load_file(self.weights_path(weights)))  # pyright: ignore
        return made.to(device).eval()

    monkeypatch.setattr(RunFolder, "model", model)
    Linear.images = 0


def make_run(folder: Path, digits: Dataset, *, method: MethodName = "both", ridge=1.0, name=None):
    """A run folder whose model is a ridge regression onto the labels."""
    config = Config(method=Method(method=method), run=Run(output=str(folder), name=name))
    info = {"fingerprint": digits.fingerprint, "classes": list(digits.classes)}
    run = RunFolder.create(config, info)
    fit(run, digits, ridge)
    return run


def fit(run: RunFolder, digits: Dataset, ridge: float, weights: Weights = "last") -> None:
    assert digits.train.images is not None
    x = digits.train.images.flatten(1).double() / 255 - 0.5
    y = torch.eye(10, dtype=torch.float64)[digits.train.labels] - 0.1
    w = torch.linalg.solve(x.T @ x + ridge * torch.eye(64), x.T @ y).T.float()
    run.save_weights(weights, {"head.weight": w, "head.bias": -0.5 * w.sum(1)})


def pixels(digits: Dataset) -> Tensor:
    assert digits.test.images is not None
    return digits.test.images.float() / 255


def test_a_row_holds_the_accuracy_under_noise_keyed_by_seed_spec_draw_and_image(tmp_path, digits):
    run = make_run(tmp_path, digits)
    rows = evaluate(run, [NOISE], draws=2, noise_seed=5)
    x, model = pixels(digits), run.model()
    for row in rows:
        right = 0
        for i in range(digits.test.count):  # one image at a time, its key written out
            parts = (zlib.crc32(NOISE.encode()), row["draw"], i)
            key = draws.keys(5, *(torch.tensor(part) for part in parts))
            noise = draws.PerSample(key[None]).normal(1, 8, 8)
            logits = model((x[i : i + 1] + 0.3 * noise).clamp(0, 1))
            right += int(logits.argmax() == digits.test.labels[i])
        assert row["value"] == pytest.approx(right / 540, abs=1.5 / 540)  # rounding may flip one
    assert [row["draw"] for row in rows] == [0, 1]
    found = predictions(run, NOISE, noise_seed=5)
    assert found is not None
    assert not np.array_equal(found.classes[0], found.classes[1])


def test_rows_name_everything_that_a_table_needs(tmp_path, digits):
    run = make_run(tmp_path, digits)
    (row,) = evaluate(run, ["gaussian:8/255"], draws=1)
    expected = {
        "schema": 1, "run": "digits-both-s0", "data": "digits", "method": "both", "seed": 0,
        "fingerprint": digits.fingerprint, "weights": "last", "perturbation": "gaussian:8/255",
        "level": 8 / 255, "draw": 0, "noise_seed": 0, "metric": "accuracy", "n": 540,
        "precision": "float32", "device": "cpu",
    }  # fmt: skip
    assert expected.items() <= row.items()
    assert run.evaluation() == [row]
    assert row["value"] > 0.8


def test_rows_on_unbalanced_images_have_macro_f1_and_recalls(tmp_path, digits):
    keep = torch.cat([(digits.test.labels > 0).nonzero()[:, 0], torch.tensor([0])])
    test = digits.test.take(keep)._replace(labels=digits.test.labels[keep].clamp(max=3))
    few = replace(digits, test=test)
    run = make_run(tmp_path, few)
    (balanced,) = evaluate(run, ["clean"], device="cpu", dataset=digits, progress=False)
    assert "class_scores" not in balanced
    run = make_run(tmp_path, few, name="unbalanced")
    (row,) = evaluate(run, ["clean"], device="cpu", dataset=few, progress=False)
    stored = predictions(run, "clean")
    assert stored is not None
    counts = np.zeros((10, 10))
    np.add.at(counts, (stored.labels, stored.classes[0]), 1)
    present = np.flatnonzero(counts.sum(1))
    right = counts.diagonal()[present]
    f1 = 2 * right / (counts.sum(1) + counts.sum(0))[present]
    assert row["class_scores"]["macro_f1"] == pytest.approx(f1.mean())
    recall = dict(zip(map(str, present), right / counts.sum(1)[present], strict=True))
    assert row["class_scores"]["recall"] == pytest.approx(recall)


def test_the_batch_size_does_not_change_what_is_predicted(tmp_path, digits):
    specs = [NOISE, "uniform:0.4", "occlusion:3x3"]
    one, other = (make_run(tmp_path / n, digits) for n in "ab")
    evaluate(one, specs, draws=2, batch_size=540)
    evaluate(other, specs, draws=2, batch_size=7)
    for spec in specs:
        a, b = predictions(one, spec), predictions(other, spec)
        assert a is not None
        assert b is not None
        assert (a.classes != b.classes).mean() < 0.002  # rounding may flip a near-tie


def test_all_runs_see_the_same_noise(tmp_path, digits, monkeypatch):
    seen: list[Tensor] = []
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: (seen.append(x), forward(self, x))[1])
    methods: tuple[MethodName, ...] = ("normal", "noisy")
    for method in methods:
        evaluate(make_run(tmp_path, digits, method=method), [NOISE], draws=2)
    first, second, third, fourth = seen
    assert torch.equal(first, third)
    assert torch.equal(second, fourth)
    assert not torch.equal(first, second)


def test_a_deterministic_perturbation_has_one_draw(tmp_path, digits):
    run = make_run(tmp_path, digits)
    rows = evaluate(run, ["clean", "downup:2", "gaussian:0"], draws=10)
    assert [(r["perturbation"], r["draw"]) for r in rows] == [
        ("clean", 0),
        ("downup:2", 0),
        ("gaussian:0", 0),
    ]
    right = (run.model()(pixels(digits)).argmax(1) == digits.test.labels).float().mean()
    assert rows[0]["value"] == pytest.approx(float(right))
    assert rows[0]["level"] == 0.0
    assert rows[1]["level"] is None


def test_existing_results_are_not_computed_again(tmp_path, digits):
    run = make_run(tmp_path, digits)
    first = evaluate(run, ["clean", NOISE], draws=3)
    assert Linear.images == 540 * 4
    Linear.images = 0
    again = evaluate(RunFolder.open(run.path), ["identity", NOISE], draws=3)
    assert Linear.images == 0
    assert again == first
    assert len(run.evaluation()) == 4


def test_more_draws_are_added_to_the_existing_ones(tmp_path, digits):
    run = make_run(tmp_path, digits)
    first = evaluate(run, [NOISE], draws=2)
    Linear.images = 0
    more = evaluate(run, [NOISE], draws=5)
    assert Linear.images == 540 * 3
    assert more[:2] == first
    right = correct(run, NOISE)
    assert right is not None
    assert right.mean(axis=1) == pytest.approx([row["value"] for row in more])
    fewer = correct(run, NOISE, draws=2)
    assert fewer is not None
    assert np.array_equal(fewer, right[:2])


def without_calibration(run: RunFolder) -> None:
    """Makes the rows of the run those of a version without calibration."""
    rows = run.evaluation()
    (run.path / "evaluation.jsonl").unlink()
    new = ("ece", "nll", "brier", "bins")
    run.append_evaluation({k: v for k, v in row.items() if k not in new} for row in rows)


def test_a_row_has_the_calibration_of_its_draw_from_the_same_pass(tmp_path, digits):
    run = make_run(tmp_path, digits)
    rows = evaluate(run, ["clean", NOISE], draws=2, batch_size=100)
    assert Linear.images == 540 * 3
    p = run.model()(pixels(digits)).detach().double().softmax(1)
    labels = digits.test.labels
    assert rows[0]["nll"] == pytest.approx(-float(p[range(540), labels].log().mean()), rel=1e-5)
    brier = (p - torch.eye(10)[labels]).square().sum(1).mean()
    assert rows[0]["brier"] == pytest.approx(float(brier), rel=1e-5)
    for row in rows:
        bins = row["bins"]
        assert sum(bins["images"]) == 540
        assert sum(bins["correct"]) == round(540 * row["value"])
        gaps = zip(bins["correct"], bins["confidence"], strict=True)
        assert row["ece"] == pytest.approx(sum(abs(a - b) for a, b in gaps) / 540)
    assert rows[1]["nll"] != rows[2]["nll"]


def test_rows_of_older_versions_get_calibration_only_on_request(tmp_path, digits):
    run = make_run(tmp_path, digits)
    new = evaluate(run, [NOISE], draws=2)
    without_calibration(run)
    Linear.images = 0
    old = evaluate(run, [NOISE], draws=2)
    assert Linear.images == 0
    assert all("nll" not in row for row in old)
    filled = evaluate(run, [NOISE, "clean"], draws=3, calibration=True)
    assert Linear.images == 540 * 4
    assert [row["nll"] for row in filled[:2]] == [row["nll"] for row in new]
    assert [row["value"] for row in filled[:2]] == [row["value"] for row in new]
    Linear.images = 0
    assert evaluate(run, [NOISE, "clean"], draws=3, calibration=True) == filled
    assert evaluate(run, [NOISE, "clean"], draws=3) == filled
    assert Linear.images == 0


def test_another_noise_seed_or_model_is_computed_from_scratch(tmp_path, digits):
    run = make_run(tmp_path, digits)
    for seed in (0, 1):
        evaluate(run, [NOISE], draws=1, noise_seed=seed)
    assert Linear.images == 2 * 540
    one, other = (predictions(run, NOISE, noise_seed=seed) for seed in (0, 1))
    assert one is not None
    assert other is not None
    assert not np.array_equal(one.classes, other.classes)
    fit(run, digits, ridge=500.0)
    assert correct(run, NOISE) is None  # the old model's predictions
    (new,) = evaluate(run, [NOISE], draws=1)
    assert Linear.images == 3 * 540
    assert new["value"] != run.evaluation()[0]["value"]
    assert len(run.evaluation()) == 3


def test_lost_predictions_are_recomputed_without_duplicate_rows(tmp_path, digits):
    run = make_run(tmp_path, digits)
    rows = evaluate(run, [NOISE], draws=2)
    for file in (run.path / "predictions").iterdir():
        file.unlink()
    assert correct(run, NOISE) is None
    assert evaluate(run, [NOISE], draws=2) == rows
    assert correct(run, NOISE) is not None
    assert len(run.evaluation()) == 2


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_damaged_row_is_named_by_a_report_and_measured_again(tmp_path, digits, line, capsys):
    run = make_run(tmp_path, digits)
    rows = evaluate(run, [NOISE], draws=3)
    file = run.path / "evaluation.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[line] = lines[line].replace('"n": 540', '"n": 541')
    file.write_text("".join(lines))
    with pytest.raises(ValueError, match=rf"line {line + 1} of .*jsonl is damaged; repeat"):
        run.evaluation()
    values = [(row["draw"], row["value"]) for row in rows]
    assert [(row["draw"], row["value"]) for row in evaluate(run, [NOISE], draws=3)] == values
    assert "damaged lines removed from evaluation.jsonl: 1" in capsys.readouterr().err
    assert sorted((row["draw"], row["value"]) for row in run.evaluation()) == values


def test_predictions_are_stored_compactly_with_their_labels(tmp_path, digits):
    run = make_run(tmp_path, digits)
    evaluate(run, [NOISE], draws=4)
    found = predictions(run, NOISE)
    assert found is not None
    assert found.classes.dtype == np.uint8
    assert found.classes.shape == (4, 540)
    assert np.array_equal(found.labels, digits.test.labels.numpy())
    (file,) = (run.path / "predictions").iterdir()
    assert file.stat().st_size < 8_000


def test_best_weights_are_evaluated_if_the_run_has_them(tmp_path, digits):
    run = make_run(tmp_path, digits)
    assert len(evaluate(run, ["clean"], weights=("last", "best"))) == 1
    fit(run, digits, ridge=1000.0, weights="best")
    last, best = evaluate(run, ["clean"], weights=("last", "best"))
    assert (last["weights"], best["weights"]) == ("last", "best")
    assert last["value"] != best["value"]


def test_best_weights_that_are_the_last_are_not_evaluated_twice(tmp_path, digits, monkeypatch):
    run, specs = make_run(tmp_path, digits), ["clean", "gaussian:0.3"]
    evaluate(run, specs[:1], draws=2)
    fit(run, digits, ridge=1.0, weights="best")
    shutil.copy(run.weights_path("last"), run.weights_path("best"))
    asked = []
    predict = Predictor.predict
    monkeypatch.setattr(
        Predictor, "predict", lambda self, *args: asked.append(str(args[0])) or predict(self, *args)
    )
    rows = evaluate(run, specs, draws=2, weights=("last", "best"))
    assert asked == ["gaussian:0.3"]
    half = len(rows) // 2
    assert [{**row, "weights": "best"} for row in rows[:half]] == rows[half:]
    for spec in specs:
        last, best = (predictions(run, spec, weights=w) for w in ("last", "best"))
        assert last is not None
        assert best is not None
        assert (last.classes == best.classes).all()
    assert evaluate(run, specs, draws=3, weights=("best",))[-1]["draw"] == 2
    assert asked == ["gaussian:0.3", "gaussian:0.3"]


def test_a_log_shows_the_progress_of_an_evaluation(tmp_path, digits, monkeypatch, capsys):
    run = make_run(tmp_path, digits)
    evaluate(run, ["gaussian:0.1"], draws=3, batch_size=100)
    assert capsys.readouterr().err == ""  # it took no time
    monkeypatch.setattr(console, "_PAUSE", 0.0)
    evaluate(run, ["gaussian:0.2"], draws=3, batch_size=100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{run.name}: evaluating, gaussian:0.2, last weights")
    shares = [int(line.split()[-2]) for line in lines]
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    evaluate(run, ["gaussian:0.3"], draws=3, batch_size=100, progress=False)
    assert capsys.readouterr().err == ""


def test_a_long_evaluation_announces_its_duration_and_what_fewer_draws_save(
    tmp_path, digits, monkeypatch, capsys
):
    monkeypatch.setattr(console, "_TIMED", 0.0)
    monkeypatch.setattr(console, "_LONG", 0.0)
    run = make_run(tmp_path, digits)
    fit(run, digits, 9.0, "best")
    specs = ["clean", "gaussian:0.1"]
    evaluate(run, specs, draws=3, weights=BOTH, batch_size=100)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{run.name}: 8 passes over 540 test images take about \d+ s", line)
    evaluate(run, specs, draws=10, weights=BOTH, batch_size=100)
    (line,) = capsys.readouterr().err.splitlines()  # existing results take no time
    assert "14 passes over 540" in line
    assert line.endswith("with --draws 3, 36 % of that")
    evaluate(run, specs, draws=11, batch_size=100, progress=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "_LONG", 60.0)
    evaluate(run, specs, draws=12, batch_size=100)
    assert capsys.readouterr().err == ""


def test_a_time_estimate_leaves_out_the_first_piece_of_work(monkeypatch):
    clock = iter([100.0, 101.0, 102.0, 103.0])  # the first piece may have taken long
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    announced: list[float] = []
    estimate = console.TimeEstimate(100, announced.append)
    for _ in range(4):
        estimate.advance(1)
    assert announced == [99.0]  # once, for 99 pieces at one per second


def test_class_scores_import_nothing_that_would_count_as_evaluation(tmp_path, digits, monkeypatch):
    few = replace(digits, test=digits.test.take(torch.arange(30)))
    run = make_run(tmp_path, few)
    imported: list[bool] = []
    monkeypatch.delitem(sys.modules, "sklearn.metrics", raising=False)
    monkeypatch.setattr(
        console.TimeEstimate,
        "advance",
        lambda *_: imported.append("sklearn.metrics" in sys.modules),
    )
    evaluate(run, ["clean"], dataset=few)
    assert imported == [False]


def test_missing_weights_raise(tmp_path, digits):
    run = make_run(tmp_path, digits)
    with pytest.raises(ValueError, match="has no best weights"):
        evaluate(run, ["clean"], weights=("best",))


def test_test_images_that_differ_from_those_of_the_run_raise(tmp_path, digits):
    run = make_run(tmp_path, digits)
    run.info["fingerprint"] = "of another folder"
    with pytest.raises(ValueError, match="of another folder"):
        evaluate(run, ["clean"])


def test_invalid_draws_and_devices_raise(tmp_path, digits, monkeypatch):
    run = make_run(tmp_path, digits)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        evaluate(run, ["clean"], draws=0)
    with pytest.raises(ValueError, match="device cuda needs a GPU"):
        evaluate(run, ["clean"], device="cuda")


def test_streamed_files_give_the_same_predictions_as_images_in_memory(tmp_path, monkeypatch):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name, shade in (("dark", 60), ("light", 180)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            image = np.clip(rng.normal(shade, 40, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(image).save(tmp_path / "photos" / name / f"{i}.png")

    class Brightness(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.mean((1, 2, 3))
            return torch.stack([0.5 - mean, mean - 0.5], 1)

    monkeypatch.setattr(RunFolder, "model", lambda self, weights, device: Brightness())
    found = {}
    for storage in ("memory", "stream"):
        settings = Data(data=str(tmp_path / "photos"), workers=0, test_share=0.5, val_share=0.0)
        settings = replace(settings, storage=storage)
        dataset = load_dataset(settings)
        config = Config(data=settings, run=Run(output=str(tmp_path), name=storage))
        run = RunFolder.create(config, {"fingerprint": dataset.fingerprint})
        run.save_weights("last", {"nothing": torch.zeros(1)})
        assert dataset.in_memory == (storage == "memory")
        evaluate(run, ["gaussian:1"], draws=3, batch_size=4)
        found[storage] = predictions(run, "gaussian:1")
    assert np.array_equal(found["memory"].classes, found["stream"].classes)
    assert found["memory"].classes.shape == (3, 10)

    run.save_weights("best", {"nothing": torch.ones(1)})
    opened: list[str] = []
    read = ImageOps.exif_transpose
    monkeypatch.setattr(
        ImageOps, "exif_transpose", lambda i, **o: (opened.append(i.filename), read(i, **o))[1]
    )
    tested = set(dataset.test.files or ())
    specs = ["clean", "gaussian:0.5"]
    kept = evaluate(run, specs, draws=2, weights=BOTH, batch_size=4)
    seen = [file for file in opened if file in tested]
    assert len(seen) == 10  # each file once, for all perturbations and weights
    monkeypatch.setattr(batches, "CACHE_LIMIT", 0)
    again = evaluate(run, specs, draws=2, weights=BOTH, batch_size=4, noise_seed=1)
    seen = [file for file in opened if file in tested]
    assert len(seen) == 10 + 4 * 10  # where memory is too small
    assert [row["value"] for row in kept if row["perturbation"] == "clean"] == [
        row["value"] for row in again if row["perturbation"] == "clean"
    ]


def test_several_runs_are_printed_and_written_as_one_table(tmp_path, digits, capsys):
    paths = [
        make_run(tmp_path / "a", digits, name="good").path,
        make_run(tmp_path / "a", digits, name="[bold]bad", ridge=1e5).path,
    ]
    evaluate_runs(paths, ["clean", NOISE], draws=2, table=tmp_path / "out.md")
    printed = capsys.readouterr().out
    assert "good" in printed
    assert "[bold]bad" in printed
    assert "σ=0.3" in printed
    assert "540 test images" in printed
    assert "evaluation.jsonl" in printed
    written = (tmp_path / "out.md").read_text()
    assert "\\[bold\\]bad" in written
    good = RunFolder.open(paths[0]).evaluation()
    assert f"{100 * good[0]['value']:.1f}" in written


def test_calibration_is_printed_and_written_on_request(tmp_path, digits, capsys):
    run = make_run(tmp_path, digits, name="[bold]one")
    evaluate_runs([run.path], ["clean", NOISE], draws=2, table=tmp_path / "out.md")
    assert "Calibration" not in capsys.readouterr().out + (tmp_path / "out.md").read_text()
    without_calibration(run)
    options: dict[str, Any] = {"draws": 2, "calibration": True}
    evaluate_runs([run.path], ["clean", NOISE], **options, table=tmp_path / "out.md")
    printed = capsys.readouterr().out
    clean, first, second = run.evaluation()[-3:]
    noisy = {name: (first[name] + second[name]) / 2 for name in ("ece", "nll", "brier")}
    lines = [line.split() for line in printed.splitlines() if "[bold]one" in line]
    for condition, expected in (("clean", clean), ("σ=0.3", noisy)):
        numbers = f"{100 * expected['ece']:.1f} {expected['nll']:.3f} {expected['brier']:.3f}"
        assert [condition, "[bold]one", *numbers.split()] in lines
        row = " | ".join([condition, "\\[bold\\]one", *numbers.split()])
        assert f"| {row} |" in (tmp_path / "out.md").read_text()
    assert "Means over noise draws. 540 test images." in " ".join(printed.split())
    evaluate_runs([run.path], ["clean"], **options, table=tmp_path / "out.tex")
    assert "Brier score" in (tmp_path / "out.tex").read_text()
    evaluate_runs([run.path], ["clean"], table=tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as file:
        (line,) = csv.DictReader(file)
    assert [float(line[name]) for name in ("ece", "nll", "brier")] == [
        clean[name] for name in ("ece", "nll", "brier")
    ]


def test_a_run_at_chance_is_named_below_the_table(tmp_path, digits, capsys):
    good = make_run(tmp_path, digits, name="good")
    blind = make_run(tmp_path, digits, name="blind")
    bias = torch.nn.functional.one_hot(digits.test.labels.mode().values, 10).float()
    blind.save_weights("last", {"head.weight": torch.zeros(10, 64), "head.bias": bias})
    evaluate_runs([good.path, blind.path], ["clean", NOISE], draws=2)
    share = torch.bincount(digits.test.labels).max().item() / digits.test.count
    printed = capsys.readouterr().out
    assert f"`blind` is at chance: its {100 * share:.1f} % on clean images" in printed
    assert "`good` is at chance" not in printed


def test_both_weights_of_one_run_are_shown_but_not_ranked(tmp_path, digits, capsys):
    run = make_run(tmp_path, digits, name="mine")
    fit(run, digits, 1e5, "best")
    evaluate_runs([run.path], ["clean", NOISE], draws=2, weights=("last", "best"))
    printed = capsys.readouterr().out
    assert "mine (last epoch)" in printed
    assert "mine (best epoch)" in printed
    assert "At σ" not in printed
    assert "≈" not in printed


def test_runs_with_the_same_name_are_labelled_by_their_folders(tmp_path, digits, capsys):
    paths = [
        make_run(tmp_path / x, digits, name="same", ridge=r).path for x, r in (("a", 1), ("b", 9e4))
    ]
    evaluate_runs(paths, ["clean"], draws=1, table=tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(path) for path in paths]


def test_the_default_suite_is_that_of_the_data(tmp_path, digits, capsys):
    run = make_run(tmp_path, digits)
    evaluate_runs([run.path], None, draws=1)
    specs = [row["perturbation"] for row in run.evaluation()]
    assert specs == ["clean", "gaussian:0.1", "gaussian:0.2", "gaussian:0.3", "gaussian:0.4"]


def test_the_suite_of_corruptions_prints_means_and_resumes(tmp_path, digits, capsys):
    run = make_run(tmp_path, digits)
    evaluate_runs([run.path], suite="c", draws=1, table=tmp_path / "out.csv")
    printed = capsys.readouterr().out
    rows = run.evaluation()
    assert [row["perturbation"] for row in rows] == ["clean", *CORRUPTIONS]
    mean = np.mean([row["value"] for row in rows[1:]])
    assert "corruptions 1–5" in " ".join(printed.split())
    assert f"{100 * mean:.1f}" in printed
    lines = [line.split(",") for line in (tmp_path / "out.csv").read_text().splitlines()[1:]]
    assert [line[2] for line in lines[:3]] == ["clean", "corruptions:1..5", "gaussian_noise:1..5"]
    assert len(lines) == 1 + 1 + 15
    assert float(lines[1][3]) == pytest.approx(mean)
    evaluate_runs([run.path], suite="c", draws=1)
    assert run.evaluation() == rows


def test_corruption_errors_are_relative_to_the_run_of_method_normal(tmp_path, digits, capsys):
    options: dict[str, Any] = {"suite": "c", "draws": 1, "table": tmp_path / "out.csv"}
    normal = make_run(tmp_path, digits, name="plain", method="normal", ridge=1e3)
    other = make_run(tmp_path, digits, name="other", method="both")

    def errors() -> dict[str, str]:
        with open(tmp_path / "out.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["perturbation"] == "fog:1..5"]
        return {row["run"]: row["ce"] for row in rows}

    evaluate_runs([other.path], **options)
    assert errors() == {"other": ""}
    evaluate_runs([normal.path, other.path], **options)
    both = errors()
    assert float(both["plain"]) == 1
    means = [
        np.mean([1 - row["value"] for row in run.evaluation() if row["perturbation"][:3] == "fog"])
        for run in (other, normal)
    ]
    assert float(both["other"]) == pytest.approx(means[0] / means[1])
    evaluate_runs([other.path], baseline=normal.path, **options)  # tests it as well
    assert errors() == {"other": both["other"], "plain": "1.0"}
    evaluate_runs([normal.path, other.path], baseline=other.path, **options)
    assert float(errors()["plain"]) == pytest.approx(means[1] / means[0])
    assert "divided by those of `other`" in " ".join(capsys.readouterr().out.split())


def test_only_the_corruptions_of_a_suite_have_one_draw(tmp_path, digits, capsys, monkeypatch):
    run = make_run(tmp_path, digits)
    names = ["clean", "gaussian:0.1", "fog:1"]
    monkeypatch.setattr(evaluate_module, "perturbations_of", lambda *_: names)

    def draws_of(**options: Any) -> list[int]:
        evaluate_runs([run.path], weights=("last",), **options)
        rows = run.evaluation()
        (run.path / "evaluation.jsonl").unlink()
        return [sum(row["perturbation"] == name for row in rows) for name in names]

    assert draws_of(suite="all") == [1, 10, 1]
    assert draws_of(suite="all", draws=2) == [1, 2, 2]
    assert draws_of(perturb=names) == [1, 10, 10]


def test_suites_are_valid_and_begin_with_clean():
    for data in ("digits", "cifar10", "svhn", "photos/", "mine.npz"):
        parts = {name: suites.suite(name, data, (3, 32, 40)) for name in get_args(SuiteName)}
        assert all(part[0] == "clean" for part in parts.values())
        assert set(parts["all"]) == {text for part in parts.values() for text in part}
        assert len(parts["all"]) == len(set(parts["all"]))
        for text in parts["all"]:
            read(text)
    assert suites.suite("paper", "cifar10")[-2:] == ["gaussian:0.06", "uniform:0.06"]
    assert suites.suite("paper", "photos/") == suites.suite("noise", "photos/")


def test_a_suite_is_combined_with_perturbations(tmp_path, digits, capsys):
    run = make_run(tmp_path, digits)
    evaluate_runs([run.path], ["fog:1"], suite="noise", draws=1)
    names = [row["perturbation"] for row in run.evaluation()]
    assert names == [*suite("digits"), "fog:1"]


def test_an_unknown_table_format_fails_before_anything_is_computed(tmp_path, digits):
    run = make_run(tmp_path, digits)
    with pytest.raises(ValueError, match=r"out\.xls"):
        evaluate_runs([run.path], ["clean"], table=tmp_path / "out.xls")
    assert Linear.images == 0


class FaultyModel(nn.Module):
    """Predicts class 0 for the last images of a large batch, as a faulty kernel did."""

    def __init__(self, inner: nn.Module, left_out: int):
        super().__init__()
        self.inner, self.left_out = inner, left_out

    def forward(self, x: Tensor) -> Tensor:
        logits = 20 * self.inner(x)
        if len(x) > 100 and self.left_out:
            logits[-self.left_out :] = 20 * nn.functional.one_hot(torch.tensor(0), 10).float()
        return logits


@pytest.mark.parametrize(("left_out", "size"), [(12, 540), (300, 540), (12, 200)])
def test_predictions_that_depend_on_the_batch_raise(left_out, size, tmp_path, digits, monkeypatch):
    run = make_run(tmp_path, digits)
    plain = RunFolder.model

    def faulty(count: int):
        return lambda self, *where: FaultyModel(plain(self, *where), count)

    options = {"draws": 1, "device": "cpu", "dataset": digits, "batch_size": size}
    monkeypatch.setattr(RunFolder, "model", faulty(left_out))
    evaluate(run, ["clean"], **options)  # a CPU is not checked
    monkeypatch.setattr(robustness, "_CHECKED_DEVICES", ("cpu",))
    with pytest.raises(RuntimeError, match=f"in a batch of {size} than in one of 64"):
        evaluate(run, [NOISE], **options)
    monkeypatch.setattr(RunFolder, "model", faulty(0))
    rows = evaluate(run, [NOISE, "gaussian:0.1"], **options)
    assert [row["n"] for row in rows] == [540, 540]


def test_each_batch_size_is_checked_once(tmp_path, digits, monkeypatch):
    run = make_run(tmp_path, digits)
    monkeypatch.setattr(robustness, "_CHECKED_DEVICES", ("cpu",))
    options = {"draws": 2, "device": "cpu", "dataset": digits, "batch_size": 250}
    evaluate(run, [NOISE, "gaussian:0.1"], **options)  # batches of 250, 250 and 40
    assert Linear.images == 4 * 540 + 64  # a batch of 40 is smaller than the check


@pytest.mark.parametrize("text", ["downup:9", "occlusion:1x9", "stripes:1x9"])
def test_what_is_larger_than_the_images_is_refused_before_anything_is_tested(
    tmp_path, digits, text
):
    run = make_run(tmp_path, digits)
    with pytest.raises(ValueError, match="an image of 8 x 8"):
        evaluate_runs([run.path], ["clean", text], device="cpu", dataset=digits)
    assert run.evaluation() == []
