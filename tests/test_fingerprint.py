"""Test images are known by their contents: a run refuses others, and older runs still open."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from noiseproof.lab.config import Config, Data
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.evaluation.evaluate import evaluate, evaluate_runs
from noiseproof.lab.evaluation.predictions import Predictor
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.page import report
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "flat", Flat)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Trains on two classes of bitmaps, whose sizes in bytes do not depend on their pixels."""
    rng = np.random.default_rng(0)
    for name, shade in (("dark", 60), ("light", 190)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            pixels = rng.normal(shade, 20, (8, 8, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.bmp")
    base = digits(tmp_path, epochs=1, batch_size=4, device="cpu")
    return replace(base, data=Data(str(tmp_path / "photos"), val_share=0.2, workers=0))


def a_test_file(config: Config) -> Path:
    files = load_dataset(replace(config.data, storage="stream")).test.files
    assert files
    return Path(files[0])


def change_a_pixel(path: Path) -> None:
    size = path.stat().st_size
    with Image.open(path) as image:
        red, green, blue = np.asarray(image)[3, 4].tolist()
        image.putpixel((4, 3), (red, green, blue ^ 1))
        image.save(path)
    assert path.stat().st_size == size


def older(dataset: Dataset, root: str) -> str:
    """The fingerprint as it was once recorded: of labels, names and sizes."""
    digest = hashlib.sha256(dataset.test.labels.numpy().astype("<i8").tobytes())
    for path in dataset.test.files or ():
        digest.update(f"{os.path.relpath(path, root)}\0{os.path.getsize(path)}\n".encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_a_run_notices_one_changed_pixel_in_a_file_of_the_same_size(config: Config, storage):
    config = replace(config, data=replace(config.data, storage=storage))
    run = train(config, progress=False)
    path = a_test_file(config)
    before = path.read_bytes()
    change_a_pixel(path)
    for use in (run.dataset, lambda: evaluate(run, ["clean"], device="cpu")):
        with pytest.raises(ValueError, match="kept their names and sizes, but not their contents"):
            use()
    path.write_bytes(before)
    assert run.dataset().fingerprint == run.info["fingerprint"]
    path.write_bytes(before + b"more")
    with pytest.raises(ValueError, match="images were added, removed, renamed or changed in"):
        run.dataset()


def test_a_changed_pixel_of_an_array_is_noticed(tmp_path: Path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 8, 8), dtype=np.uint8), np.arange(12) % 2
    marks = []
    for _ in range(2):
        np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels,
                 test_images=images[:4], test_labels=labels[:4])  # fmt: skip
        marks.append(load_dataset(Data(str(tmp_path / "a.npz"))).fingerprint)
        images[2, 3, 4] ^= 1
    assert marks[0] != marks[1]


def test_an_older_run_is_checked_by_the_names_and_sizes_that_it_recorded(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    run = train(config, progress=False)
    streamed = load_dataset(replace(config.data, storage="stream"))
    run.info["fingerprint"] = older(streamed, config.data.data)
    run.save_config()
    old = RunFolder.open(run.path)
    old.dataset()
    evaluate(old, ["clean"], device="cpu", progress=False)
    assert {row["fingerprint"] for row in old.evaluation()} == {old.info["fingerprint"]}
    monkeypatch.setattr(Predictor, "predict", lambda *_: pytest.fail("computed again"))
    evaluate(old, ["clean"], device="cpu", progress=False)
    a_test_file(config).write_bytes(a_test_file(config).read_bytes() + b"more")
    with pytest.raises(ValueError, match="images were added, removed, renamed or changed in"):
        old.dataset()


@pytest.mark.usefixtures("undrawn")
def test_older_and_newer_runs_on_the_same_images_are_compared(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = [
        train(replace(config, run=replace(config.run, name=name, seed=seed)), progress=False)
        for seed, name in enumerate(("old", "new", "other"))
    ]
    streamed = load_dataset(replace(config.data, storage="stream"))
    runs[0].info["fingerprint"] = older(streamed, config.data.data)
    runs[2].info["fingerprint"] = f"{older(streamed, config.data.data)}-{'0' * 16}"
    for run in runs:
        run.save_config()
    evaluate_runs([run.path for run in runs[:2]], ["clean"], device="cpu")
    assert capsys.readouterr().out.count(" run    clean ") == 1  # one table
    page = report(runs[:2], tmp_path / "page")
    assert "cannot be shown" not in page.read_text(encoding="utf-8")  # the gallery
    with pytest.raises(ValueError, match="must share their test images"):
        report(runs, tmp_path / "page")
