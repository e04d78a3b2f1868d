"""Streamed images are those in memory, whatever the workers, and errors name the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.augment import AUGMENTATIONS
from noiseproof.lab.config import Data
from noiseproof.lab.data.batches import Batches, FileDataset
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.data.splits import Split
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits

CPU = torch.device("cpu")
SIZE = (16, 24)


def write_photos(root: Path, size: tuple[int, int], count: int = 6) -> str:
    rng = np.random.default_rng(0)
    for name in ("ant", "bee ü"):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(1, 256, (*size, 3), dtype=np.uint8)  # never black
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return str(root)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_photos(tmp_path_factory.mktemp("photos"), SIZE)


@pytest.fixture(scope="module")
def streamed(photos: str) -> Dataset:
    return load_dataset(Data(photos, storage="stream", val_share=0.0))


@pytest.fixture(scope="module")
def in_memory(photos: str) -> Split:
    return load_dataset(Data(photos, storage="memory", val_share=0.0)).train


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_what_memory_holds_whatever_the_workers_and_the_order(
    streamed: Dataset, in_memory: Split, workers: int
):
    assert in_memory.images is not None
    files = Batches(streamed.train, streamed.size, 3, CPU, workers=workers)
    for seed in range(2):
        order = torch.randperm(streamed.train.count, generator=torch.Generator().manual_seed(seed))
        batches = list(files.read(order.split(3)))
        pixels, labels, places = (torch.cat(part) for part in zip(*batches, strict=True))
        assert pixels.dtype == torch.uint8
        assert torch.equal(places, order)
        assert torch.equal(pixels, in_memory.images[order])
        assert torch.equal(labels, in_memory.labels[order])


@pytest.mark.parametrize("augment", [*AUGMENTATIONS, "crop-flip+trivial+erase+cutmix", "mixup"])
def test_streamed_training_batches_are_those_from_memory(
    streamed: Dataset, in_memory: Split, augment: str
):
    options: dict[str, Any] = dict(batch_size=4, seed=7, device=CPU, augment=augment, second=True)
    memory = Loader(in_memory, streamed.size, **options)
    stream = Loader(streamed.train, streamed.size, workers=0, **options)
    assert stream.steps == memory.steps == 2
    for epoch, start in ((0, 0), (1, 0), (3, 1)):
        pairs = list(zip(memory.tickets(epoch, start), stream.tickets(epoch, start), strict=True))
        for one, other in pairs:
            expected, found = memory.prepare(one), stream.prepare(other)
            assert torch.equal(found.images, expected.images)
            assert torch.equal(found.labels, expected.labels)
            assert found.second is not None
            assert expected.second is not None
            assert torch.equal(found.second, expected.second)
            for a, b in zip(found.mixture or (), expected.mixture or (), strict=True):
                assert torch.equal(a, b)
            assert isinstance(found.source, type(expected.source))
            assert torch.equal(found.source.keys, expected.source.keys)  # pyright: ignore


def test_a_streamed_training_gives_the_weights_of_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    photos = write_photos(tmp_path / "photos", (8, 8), count=12)
    config = digits(tmp_path, epochs=2, batch_size=4, device="cpu", views="independent")
    weights = []
    for storage in ("memory", "stream"):
        data = Data(photos, augment="crop-flip", val_share=0.2, storage=storage, workers=1)
        run = replace(config.run, name=storage)
        weights.append(train(replace(config, data=data, run=run), progress=False).model())
    one, other = (model.state_dict() for model in weights)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_goes_bad_is_named_from_a_worker_too(tmp_path: Path, workers: int):
    noise = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    path = tmp_path / "cut.jpg"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-60])
    split = Split(None, (str(path),), torch.tensor([0]))
    files = Batches(split, (3, *SIZE), 1, CPU, workers=workers)
    with pytest.raises(ValueError, match=rf"^{path} cannot be read: .*truncated.*\Z"):  # one line
        next(files.read([torch.tensor([0])]))


def test_memory_does_not_grow_with_what_was_read(streamed: Dataset):
    assert streamed.train.files is not None
    dataset = FileDataset(streamed.train.files, streamed.size)

    def held() -> dict[str, int]:
        return {name: getattr(part, "nbytes", 0) for name, part in vars(dataset).items()}

    before = held()
    for place in range(streamed.train.count):
        dataset[[place]]
    assert held() == before
