"""Packing traffic signs and Imagenette: files, classes, tracks and sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from noiseproof.lab.config import Data
from noiseproof.lab.data.datasets import load_dataset
from tools import pack


def grey(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (60, 50), (level, level, level)).save(path)


def test_traffic_signs_have_their_tracks_and_the_classes_of_the_list(tmp_path: Path):
    training, test = tmp_path / "GTSRB/Final_Training/Images", tmp_path / "GTSRB/Final_Test/Images"
    for label, track in ((0, 0), (0, 1), (2, 0)):
        for frame in (0, 1):
            grey(training / f"{label:05d}/{track:05d}_{frame:05d}.ppm", 100 + label)
    grey(test / "00000.ppm", 102)
    grey(test / "00001.ppm", 100)
    (tmp_path / "GT-final_test.csv").write_text(
        "Filename;Width;ClassId\n00000.ppm;60;2\n00001.ppm;60;0\n"
    )
    assert pack.main(["signs", str(tmp_path), str(tmp_path / "a.npz")]) == 0
    arrays = np.load(tmp_path / "a.npz")
    assert arrays["train_labels"].tolist() == [0, 0, 0, 0, 2, 2]
    assert arrays["train_groups"].tolist() == [0, 0, 43, 43, 2, 2]
    for split in ("train", "test"):
        pixels, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        assert pixels.shape == (len(labels), 3, 48, 48)
        assert (pixels == 100 + labels[:, None, None, None]).all()


def test_imagenette_is_tested_on_its_validation_images(tmp_path: Path):
    for label, name in enumerate(("n01", "n02")):
        for split, count in (("train", 3), ("val", 2)):
            for i in range(count):
                grey(tmp_path / split / name / f"{i}.png", 100 * label + count)
    assert pack.main(["imagenette", str(tmp_path), str(tmp_path / "a.npz")]) == 0
    dataset = load_dataset(Data(str(tmp_path / "a.npz"), val_share=0))
    for split, count in ((dataset.train, 3), (dataset.test, 2)):
        assert split.labels.tolist() == [0] * count + [1] * count
        assert (split.pixels == 100 * split.labels[:, None, None, None] + count).all()
        assert split.pixels.shape[1:] == (3, 128, 128)


def test_anything_else_is_a_mistake_in_the_command(capsys: pytest.CaptureFixture[str]):
    assert pack.main(["cifar10", "a", "b.npz"]) == 2
    assert "signs|imagenette" in capsys.readouterr().err
