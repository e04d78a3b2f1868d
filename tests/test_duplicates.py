"""Near-duplicates and groups do not cross the splits of a folder unnoticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from benchmarks.duplicates import all_pairs
from noiseproof.lab.comparison import jobs
from noiseproof.lab.comparison.compare import compare
from noiseproof.lab.config import Comparison, Data
from noiseproof.lab.data import datasets, duplicates, images
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.folder import read_images
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import Split
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits


def photograph(seed: int) -> Image.Image:
    """A random scene: smooth, with a few edges."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    return coarse.resize((96, 72), Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def changed(image: Image.Image) -> list[Image.Image]:
    w, h = image.size
    return [
        image.resize((w // 2, h // 2)),
        ImageEnhance.Brightness(image).enhance(1.2),
        image.crop((1, 1, w - 1, h - 1)),
        image.convert("L"),
    ]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 scenes per class in train/ and 10 in test/; a/00 and b/00 are in both, b/01 as a/01."""
    root = tmp_path / "photos"
    for label, name in enumerate("ab"):
        for i in range(30):
            part = "train" if i < 20 else "test"
            save(photograph(1000 * label + i), root / part / name / f"{i:02}.png")
        save(changed(photograph(1000 * label))[1], root / "test" / name / "copy.png")
    save(changed(photograph(1))[0], root / "test" / "b" / "other.png")
    return root


def test_changed_copies_are_found_and_other_images_are_not(tmp_path):
    files = []
    for seed in range(60):
        versions = [photograph(seed), *(changed(photograph(seed)) if seed < 5 else ())]
        for k, image in enumerate(versions):
            files.append(tmp_path / f"{seed:02}-{k}.jpg")
            image.save(files[-1], quality=60)
    split = Split(None, tuple(map(str, files)), torch.zeros(len(files), dtype=torch.int64))
    pairs = duplicates.near_duplicates(split)
    found = {tuple(files[i].name[:2] for i in pair) for pair in pairs.T}
    assert found == {(f"{seed:02}", f"{seed:02}") for seed in range(5)}
    assert pairs.shape[1] == 5 * 10  # all pairs of five versions
    pixels = read_images([str(file) for file in files], (64, 64))
    halves = [split._replace(images=part, files=None) for part in pixels.split(40)]
    assert np.array_equal(duplicates.near_duplicates(halves[0], None, *halves[1:]), pairs)


def test_large_photographs_are_not_decoded_in_full(tmp_path, monkeypatch):
    sizes, to_rgb = [], images.rgb
    monkeypatch.setattr(
        images, "rgb", lambda image, *rest: sizes.append(image.size) or to_rgb(image, *rest)
    )
    files = [tmp_path / "large.jpg", tmp_path / "small.jpg"]
    photograph(1).resize((4000, 3000)).save(files[0])
    photograph(1).save(files[1])
    split = Split(None, tuple(map(str, files)), torch.zeros(2, dtype=torch.int64))
    assert duplicates.near_duplicates(split).T.tolist() == [[0, 1]]
    assert sorted(sizes) == [(96, 72), (500, 375)]


def test_files_are_compared_under_a_progress_bar(tmp_path, monkeypatch):
    shown, usual = [], images.file_progress
    monkeypatch.setattr(images, "file_progress", lambda *a: shown.append(a[0]) or usual(*a))
    photograph(1).save(tmp_path / "a.png")
    duplicates.described(Split(None, (str(tmp_path / "a.png"),), torch.zeros(1)))
    assert shown == ["looking for near-duplicates in 1 files"]


def test_pairs_are_those_of_an_exhaustive_comparison():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(300, 180)).astype(np.float32)
    vectors[200:] = vectors[:100] + 0.4 * rng.normal(size=(100, 180))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = np.argwhere(np.triu(vectors @ vectors.T, 1) >= 0.87)
    assert len(expected) > 50
    found = duplicates.similar_pairs(vectors).T
    assert {*map(tuple, found)} == {*map(tuple, expected)} == all_pairs(vectors)
    assert duplicates.similar_pairs(vectors[:1]).shape == (2, 0)
    assert duplicates.similar_pairs(np.zeros((9, 180), np.float32)).shape == (2, 0)  # no contrast


def test_a_training_reports_and_records_near_duplicates(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    data = Data(data=str(photos), img_size=(8, 8), val_share=0, group=r"(.)\.")
    config = digits(tmp_path, epochs=1, batch_size=4, device="cpu")
    run = train(replace(config, data=data))
    near, groups = RunFolder.open(run.path).info["leaks"]
    assert (
        near.items() >= {"kind": "near-duplicates", "split": "test", "images": 3, "of": 23}.items()
    )
    assert ["test/b/other.png", "train/a/01.png"] in near["examples"]
    assert (groups["kind"], groups["images"]) == ("groups", 20)
    text = capsys.readouterr().err
    assert "3 of 23 test images have near-duplicates in training or validation, which" in text
    assert "test/a/copy.png and train/a/00.png; " in text
    assert "20 of 23 test images have images of the same group in training or validation" in text
    assert "23 for testing (test/), in 12 groups; images 8 x 8" in text
    assert "--dedupe keeps near-duplicates and images of a group in one split" in text


def test_a_comparison_reports_near_duplicates_before_it_trains(
    photos, tmp_path, monkeypatch, capsys
):
    def diverge(config, leaks):
        raise Diverged("the loss is nan")

    monkeypatch.setattr(jobs, "train", diverge)
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    data = Data(data=str(photos), img_size=(8, 8), val_share=0)
    config = replace(digits(tmp_path, epochs=1, batch_size=4, device="cpu"), data=data)
    assert compare(config, Comparison(("both",), 1, 1, draws=1, report=False)) == 3
    before, _, _ = capsys.readouterr().out.partition("1 runs in ")
    assert "warning: 3 of 23 test images have near-duplicates in training" in before
    assert "--dedupe keeps near-duplicates in one split" in before


def test_a_comparison_looks_for_near_duplicates_once(photos, tmp_path, monkeypatch, capsys):
    find, calls = datasets.find_leaks, []
    monkeypatch.setattr(datasets, "find_leaks", lambda *parts: calls.append(1) or find(*parts))
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    data = Data(data=str(photos), img_size=(8, 8), val_share=0)
    config = replace(digits(tmp_path, epochs=1, batch_size=4, device="cpu"), data=data)
    assert compare(config, Comparison(("normal", "both"), 1, 1, draws=1, report=False)) == 0
    assert len(calls) == 1
    out, err = capsys.readouterr()
    assert out.count("test images have near-duplicates") == 1
    assert "near-duplicates" not in err
    for path in tmp_path.glob("*/*/config.json"):
        (leak,) = RunFolder.open(path.parent).info["leaks"]
        assert (leak["kind"], leak["images"]) == ("near-duplicates", 3)


def test_dedupe_moves_near_duplicates_to_training(photos):
    before, after = (
        load_dataset(Data(data=str(photos), img_size=(8, 8), val_share=0.2, dedupe=dedupe))
        for dedupe in (False, True)
    )
    names = {Path(file).name for file in before.test.files or ()}
    assert names - {Path(file).name for file in after.test.files or ()} == {"copy.png", "other.png"}
    assert before.test.count - after.test.count == 3
    assert after.notes == (
        "6 near-duplicates, those of each cluster in one split; 3 held-out images moved for that",
    )
    parts = (after.train, after.validation, after.test)
    assert duplicates.find_leaks(parts, str(photos)) == []


def test_dedupe_refuses_to_empty_a_class(tmp_path):
    for name in "ab":
        for i in range(6):
            save(photograph(ord(name) + 100 * i), tmp_path / "train" / name / f"{i}.png")
        save(photograph(ord(name)), tmp_path / "test" / name / "0.png")
    with pytest.raises(DataError, match="--dedupe leaves no test images of class 'a'"):
        load_dataset(Data(data=str(tmp_path), dedupe=True))


def test_a_class_of_near_duplicates_alone_names_dedupe(tmp_path):
    for i in range(6):
        save(photograph(i), tmp_path / "a" / f"{i}.png")
        save(photograph(100), tmp_path / "b" / f"{i}.png")
    message = r"class 'b' has one group of images or near-duplicates \(--dedupe\) left, too few"
    with pytest.raises(DataError, match=message):
        load_dataset(Data(data=str(tmp_path), dedupe=True))


def test_clusters_stay_together_where_a_test_split_is_split_off(tmp_path):
    for label, name in enumerate("ab"):
        for i in range(20):
            scene = photograph(1000 * label + i)
            for k, image in enumerate([scene, *changed(scene)]):
                save(image, tmp_path / name / f"{i:02}-{k}.png")
    options = {"data": str(tmp_path), "img_size": (8, 8), "val_share": 0.2}
    plain, deduped = (load_dataset(Data(**options, dedupe=dedupe)) for dedupe in (False, True))
    assert duplicates.find_leaks((plain.train, plain.validation, plain.test), str(tmp_path))
    for part in (deduped.validation, deduped.test):
        assert part is not None
        scenes = [Path(f).parent.name + Path(f).name[:2] for f in part.files or ()]
        assert all(scenes.count(scene) == 5 for scene in scenes)
    assert deduped.test.count == plain.test.count == 40
