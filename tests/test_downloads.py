"""Datasets by name, read from small look-alikes of the files that torchvision downloads."""

from __future__ import annotations

import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import Imagenette

from noiseproof.lab.config import DATASETS, NAMED, Data
from noiseproof.lab.data import downloads
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.data.images import DataError

EUROSAT = ["AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial", "Pasture",
           "PermanentCrop", "Residential", "River", "SeaLake"]  # fmt: skip


def picture(path: Path, colour: int, size: tuple[int, int]) -> None:
    """An image of one colour, which resizing leaves unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 100, 200)).save(path)


def write_cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir()
    for part, count in (("train", 400), ("test", 100)):
        rows = np.random.default_rng(count).integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {"data": rows, "fine_labels": [i % 100 for i in range(count)]}
        (folder / part).write_bytes(pickle.dumps(content))
    names = ["apple", "aquarium_fish", *(f"c{i:02}" for i in range(2, 100))]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))


def write_fashion_mnist(root: Path) -> None:
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 20)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for name, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
            (folder / f"{name}-ubyte").write_bytes(head + array.tobytes())


def write_gtsrb(root: Path) -> None:
    """Two tracks of three frames per class; the colour of an image names its class and track."""
    folder = root / "gtsrb"
    lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for label in range(43):
        for track in range(2):
            for frame in range(3):
                file = f"GTSRB/Training/{label:05}/{track:05}_{frame:05}.ppm"
                picture(folder / file, 5 * label + track, (20 + label, 19 + 2 * frame))
        test = (7 * label) % 43  # the test images are in no order
        picture(folder / f"GTSRB/Final_Test/Images/{label:05}.ppm", 5 * test + 2, (60, 61))
        lines.append(f"{label:05}.ppm;60;61;5;5;54;55;{test}")
    (folder / "GT-final_test.csv").write_text("\n".join(lines) + "\n")


def write_imagenette(root: Path) -> None:
    for label, wnid in enumerate(Imagenette._WNID_TO_CLASS):
        for part, count in (("train", 3), ("val", 2)):
            for i in range(count):
                path = root / "imagenette2-160" / part / wnid / f"{wnid}_{i}.JPEG"
                picture(path, 20 * label, (160, 200))


def write_eurosat(root: Path) -> None:
    for label, name in enumerate(EUROSAT):
        for i in range(1, 11):
            picture(root / "eurosat" / "2750" / name / f"{name}_{i}.jpg", 20 * label + i, (64, 64))


LOOK_ALIKES: dict[str, tuple[Callable[[Path], None], tuple[int, int], list[str]]] = {
    "cifar100": (write_cifar100, (400, 100), ["apple", "aquarium fish"]),
    "fashion_mnist": (write_fashion_mnist, (40, 20), ["T-shirt/top", "Trouser"]),
    "gtsrb": (write_gtsrb, (258, 43), ["speed limit 20 km/h", "speed limit 30 km/h"]),
    "imagenette": (write_imagenette, (30, 20), ["tench", "English springer"]),
    "eurosat": (write_eurosat, (80, 20), ["Annual Crop", "Forest"]),
}
DECODED = ("gtsrb", "imagenette", "eurosat")  # datasets of image files


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Writes a look-alike if it is not there, and loads it."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a, **k: True)

    def load(name: str, **settings: Any) -> Dataset:
        write, (train, test), _ = LOOK_ALIKES[name]
        source = downloads._SOURCES[name]
        if name in DECODED:
            monkeypatch.setitem(downloads._SOURCES, name, source._replace(images=train + test))
        if not any(tmp_path.glob(f"{name}.npz")) and not any(tmp_path.glob(source.files)):
            write(tmp_path)
        settings = {"val_share": 0.0, "data_dir": str(tmp_path), "download": False} | settings
        return load_dataset(Data(name, **settings))

    return load


def colours(images: torch.Tensor) -> list[int]:
    """The colour of each `picture`, whose pixels must be equal."""
    assert (images[:, 0].flatten(1).amax(1) - images[:, 0].flatten(1).amin(1)).max() <= 2
    return images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_dataset_has_its_splits_its_size_and_its_classes_in_words(name: str, load: Any):
    loaded = load(name)
    _, counts, classes = LOOK_ALIKES[name]
    assert (loaded.train.count, loaded.test.count) == counts
    channels, height, width = loaded.size
    assert f"{height} x {width} {'grey' if channels == 1 else 'colour'}" in DATASETS[name]
    assert list(loaded.classes[:2]) == classes
    assert (
        len(loaded.classes)
        == len(loaded.train.labels.unique())
        == int(loaded.test.labels.max()) + 1
    )
    assert not any("_" in name for name in loaded.classes)


def test_every_name_is_known_to_the_reader():
    assert {"digits", *downloads._SOURCES} == set(NAMED)
    assert len(set(downloads._CLASSES["gtsrb"])) == 43


def test_grey_pixels_are_one_channel(load: Any, tmp_path: Path):
    loaded = load("fashion_mnist")
    raw = (tmp_path / "FashionMNIST/raw/t10k-images-idx3-ubyte").read_bytes()
    assert loaded.test.pixels.shape == (20, 1, 28, 28)
    assert loaded.test.pixels.numpy().tobytes() == raw[16:]


def test_signs_have_the_labels_of_the_official_list(load: Any):
    loaded = load("gtsrb")
    assert loaded.test.labels.tolist() == [(7 * i) % 43 for i in range(43)]
    assert colours(loaded.test.pixels) == [5 * ((7 * i) % 43) + 2 for i in range(43)]
    tracks = torch.tensor(colours(loaded.train.pixels)) - 5 * loaded.train.labels
    assert set(tracks.tolist()) == {0, 1}


@pytest.mark.parametrize("stored", [False, True])
def test_no_track_of_a_sign_is_in_training_and_validation(stored: bool, load: Any):
    if stored:
        load("gtsrb")
    loaded = load("gtsrb", val_share=0.1)
    train, held_out = (set(colours(part.pixels)) for part in (loaded.train, loaded.validation))
    assert len(train) == len(held_out) == 43
    assert not train & held_out


def test_a_fifth_of_each_class_of_eurosat_is_for_testing_whatever_the_seed(
    load: Any, tmp_path: Path
):
    first = load("eurosat")
    (tmp_path / "eurosat.npz").unlink()
    second = load("eurosat", split_seed=1, test_share=0.4)
    assert first.test.labels.bincount().tolist() == [2] * 10
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("name", DECODED)
def test_images_are_decoded_once(name: str, load: Any, tmp_path: Path, capsys: Any):
    first = load(name)
    assert f"{name}: decoding" in capsys.readouterr().err
    shutil.rmtree(tmp_path / downloads._SOURCES[name].files)
    second = load(name)
    assert capsys.readouterr().err == ""
    assert (second.fingerprint, second.classes) == (first.fingerprint, first.classes)
    assert torch.equal(second.train.pixels, first.train.pixels)
    assert (second.mean, second.size) == (first.mean, first.size)


def test_a_folder_that_cannot_be_written_is_still_read(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(downloads, "write_atomically", refuse)
    assert load("imagenette").train.count == 30
    assert "imagenette.npz cannot be written (Permission denied)" in capsys.readouterr().err


def test_an_interrupted_download_is_not_trained_on(load: Any, tmp_path: Path):
    write_eurosat(tmp_path)
    (tmp_path / "eurosat/2750/River/River_3.jpg").unlink()
    with pytest.raises(DataError, match=r"eurosat has 99 of 100 images.*delete it"):
        load("eurosat")
    assert not (tmp_path / "eurosat.npz").exists()
    shutil.rmtree(tmp_path / "eurosat/2750/River")
    (tmp_path / "eurosat/2750/River").mkdir()
    with pytest.raises(DataError, match=r"eurosat is incomplete or damaged.*delete eurosat there"):
        load("eurosat")


def test_files_that_are_there_are_not_downloaded(load: Any, capsys: Any, monkeypatch: Any):
    def unreachable(*args: object, **kwargs: object):
        raise AssertionError("a download was tried")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    assert load("cifar100", download=True).train.count == 400
    assert capsys.readouterr().err == ""
