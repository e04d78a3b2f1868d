"""Streamed images: the same pixels whatever the workers, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from noiseproof.lab.config import Data
from noiseproof.lab.data.augmented_stream import AugmentedFileDataset as FileDataset
from noiseproof.lab.data.augmented_stream import augmentation
from noiseproof.lab.data.datasets import Dataset, Split, load_dataset

SIZE = (16, 24)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in ("ant", "bee ü"):
        (root / name).mkdir()
        for i in range(6):
            pixels = rng.integers(1, 256, (*SIZE, 3), dtype=np.uint8)  # never black
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return str(root)


@pytest.fixture(scope="module")
def streamed(photos: str) -> Dataset:
    return load_dataset(Data(photos, storage="stream", val_share=0.0))


def collected(dataset: FileDataset, workers: int) -> tuple[Tensor, ...]:
    """Everything, in the order of the samples, though read in another."""
    order = torch.randperm(len(dataset)).tolist()
    loader = DataLoader(dataset, batch_size=3, sampler=order, num_workers=workers)
    pixels, labels, index = (torch.cat(part) for part in zip(*loader, strict=True))
    return pixels[index.argsort()], labels[index.argsort()], index.sort().values


def test_without_augmentation_a_stream_is_what_memory_holds(photos: str, streamed: Dataset):
    kept = load_dataset(Data(photos, storage="memory", val_share=0.0)).train
    assert kept.images is not None
    pixels, labels, index = collected(FileDataset(streamed.train, streamed.size), 0)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, kept.images)
    assert torch.equal(labels, kept.labels)
    assert index.tolist() == list(range(kept.count))


@pytest.mark.parametrize("augment", ["crop", "crop-flip", "road"])
def test_workers_and_order_change_nothing(streamed: Dataset, augment: str):
    def made() -> FileDataset:
        return FileDataset(streamed.train, streamed.size, augment=augment, seed=4, epoch=2, views=2)

    alone, shared = collected(made(), 0), collected(made(), 2)
    assert alone[0].shape == (streamed.train.count, 2, 3, *SIZE)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_seed_epoch_and_view_each_give_another_augmentation(streamed: Dataset):
    def first(seed: int, epoch: int) -> Tensor:
        dataset = FileDataset(
            streamed.train, streamed.size, augment="road", seed=seed, epoch=epoch, views=2
        )
        return dataset[0][0]

    views = [*first(0, 0), *first(1, 0), *first(0, 1)]
    assert len({view.numpy().tobytes() for view in views}) == 6
    single = FileDataset(streamed.train, streamed.size, augment="road")
    assert torch.equal(single[0][0], views[0])  # a view does not depend on how many there are


def test_reading_leaves_the_global_generator_alone(streamed: Dataset):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    FileDataset(streamed.train, streamed.size, augment="road")[1]
    assert torch.equal(torch.rand(4), expected)


def test_lasting_workers_see_the_next_epoch(streamed: Dataset):
    dataset = FileDataset(streamed.train, streamed.size, augment="crop", seed=1)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        seen.append(torch.cat([pixels for pixels, _, _ in loader]))
        fresh = FileDataset(streamed.train, streamed.size, augment="crop", seed=1, epoch=epoch)
        assert torch.equal(seen[-1], collected(fresh, 0)[0])
    assert not torch.equal(*seen)


def test_a_crop_is_a_window_of_the_padded_image(streamed: Dataset):
    plain = FileDataset(streamed.train, streamed.size)[0][0]
    padded = torch.nn.functional.pad(plain, (2, 2, 2, 2))  # an eighth of 16
    windows = {
        padded[:, y : y + SIZE[0], x : x + SIZE[1]].numpy().tobytes()
        for y in range(5)
        for x in range(5)
    }
    mirrored = {
        torch.frombuffer(bytearray(w), dtype=torch.uint8).view(3, *SIZE).flip(2).numpy().tobytes()
        for w in windows
    }
    crops = FileDataset(streamed.train, streamed.size, augment="crop", views=40)[0][0]
    found = {crop.numpy().tobytes() for crop in crops}
    assert found <= windows
    assert len(found) > 10
    flips = FileDataset(streamed.train, streamed.size, augment="crop-flip", views=40)[0][0]
    found = [crop.numpy().tobytes() in windows for crop in flips]
    assert all(f or c.numpy().tobytes() in mirrored for f, c in zip(found, flips, strict=True))
    assert 8 < sum(found) < 32


def test_the_road_recipe_jitters_turns_warps_and_flips():
    recipe = augmentation("road", SIZE)
    assert isinstance(recipe, v2.Compose)
    names = [type(step).__name__ for step in recipe.transforms]
    steps = ["ColorJitter", "RandomRotation", "RandomPerspective", "RandomHorizontalFlip"]
    assert names == steps


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_goes_bad_is_named_from_a_worker_too(tmp_path: Path, workers: int):
    noise = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    path = tmp_path / "cut.jpg"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-60])
    dataset = FileDataset(Split(None, (str(path),), torch.tensor([0])), (3, *SIZE))
    batches = iter(DataLoader(dataset, num_workers=workers))
    with pytest.raises(ValueError) as caught:
        next(batches)
    # Left to the garbage collector, a failed loader waits five seconds for its worker.
    getattr(batches, "_shutdown_workers", bool)()
    assert str(caught.value).startswith(f"{path} cannot be read: ")
    assert "truncated" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_does_not_grow_with_what_was_read(streamed: Dataset):
    dataset = FileDataset(streamed.train, streamed.size, augment="crop")

    def held() -> int:
        parts = vars(dataset).values()
        return sum(part.nbytes for part in parts if isinstance(part, (np.ndarray, Tensor)))

    before, names = held(), set(vars(dataset))
    for i in range(len(dataset)):
        dataset[i]
    assert held() == before
    assert set(vars(dataset)) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": "blur"}, "augment must be none, crop, crop-flip or road, got 'blur'"),
        ({"views": 0}, "views must be at least 1, got 0"),
        ({"size": (1, 16, 24)}, r"3 x H x W, got size \(1, 16, 24\)"),
        ({"split": Split(torch.zeros(1), None, torch.zeros(1))}, "got one kept in memory"),
        ({"split": Split(None, ("a.png",), torch.arange(2))}, "1 files, but 2 labels"),
    ],
)
def test_wrong_arguments_are_told(streamed: Dataset, changes: dict, message: str):
    arguments = {"split": streamed.train, "size": streamed.size} | changes
    with pytest.raises(ValueError, match=message):
        FileDataset(**arguments)
