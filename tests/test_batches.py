"""One pass over a split, from memory or from files, gives the same batches in the same order."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from noiseproof.lab.data import batches as module
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import Split

CPU = torch.device("cpu")
COUNT, SIZE = 11, (3, 6, 5)


@pytest.fixture
def files(tmp_path: Path) -> Split:
    rng = np.random.default_rng(0)
    paths = []
    for i in range(COUNT):
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(rng.integers(0, 256, (*SIZE[1:], 3), dtype=np.uint8)).save(paths[-1])
    return Split(None, tuple(paths), torch.arange(COUNT) % 3)


@pytest.fixture
def memory(files: Split) -> Split:
    assert files.files is not None
    pixels = [torch.from_numpy(np.array(Image.open(path))) for path in files.files]
    return Split(torch.stack(pixels).permute(0, 3, 1, 2).contiguous(), None, files.labels)


@pytest.fixture(params=["memory", "files"])
def split(request: pytest.FixtureRequest) -> Split:
    return request.getfixturevalue(request.param)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are decoded, in this process."""
    seen: list[str] = []
    read = ImageOps.exif_transpose
    monkeypatch.setattr(
        ImageOps, "exif_transpose", lambda i, **o: (seen.append(i.filename), read(i, **o))[1]
    )
    return seen


def joined(batches: Batches) -> tuple[Tensor, Tensor, Tensor]:
    pixels, labels, places = (torch.cat(part) for part in zip(*batches, strict=True))
    return pixels, labels, places


def check(batches: Batches, memory: Split, expected: list[int]) -> None:
    pixels, labels, places = joined(batches)
    assert memory.images is not None
    assert pixels.dtype == torch.uint8
    assert places.tolist() == expected
    assert torch.equal(pixels, memory.images[expected])
    assert torch.equal(labels, memory.labels[expected])


@pytest.mark.parametrize("workers", [0, 2])
def test_all_images_come_in_order_pass_after_pass(split: Split, memory: Split, workers: int):
    batches = Batches(split, SIZE, 4, CPU, workers=workers)
    for _ in range(2):
        check(batches, memory, list(range(COUNT)))
    assert [len(labels) for _, labels, _ in batches] == [4, 4, 3]


def test_chosen_places_come_in_the_order_given(split: Split, memory: Split):
    chosen = [7, 2, 2, 10, 0]
    check(Batches(split, SIZE, 2, CPU, index=torch.tensor(chosen)), memory, chosen)
    assert list(Batches(split, SIZE, 2, CPU, index=torch.arange(0))) == []


@pytest.mark.parametrize("world", [2, 3, 20])
def test_the_shares_of_all_ranks_are_the_split(split: Split, memory: Split, world: int):
    shares = [Batches(split, SIZE, 4, CPU, rank=rank, world=world) for rank in range(world)]
    places = [place for share in shares for _, _, part in share for place in part.tolist()]
    assert sorted(places) == list(range(COUNT))
    check(shares[1], memory, list(range(1, COUNT, world)))


def test_workers_live_as_long_as_the_batches(files: Split):
    batches = Batches(files, SIZE, 4, CPU, workers=1)
    workers = []
    for _ in range(2):
        list(batches)
        workers.append([process.pid for process in multiprocessing.active_children()])
    assert workers[0] == workers[1] != []


def test_a_pass_that_was_abandoned_leaves_the_next_one_whole(files: Split, memory: Split):
    for workers in (0, 1):
        for cache in (False, True):
            batches = Batches(files, SIZE, 2, CPU, workers=workers, cache=cache)
            next(iter(batches))
            for _ in range(2):
                check(batches, memory, list(range(COUNT)))


def test_cached_files_are_decoded_once_and_others_every_time(
    files: Split, memory: Split, opened: list[str], monkeypatch: pytest.MonkeyPatch
):
    for limit, cache, times in ((1 << 30, True, 1), (1 << 30, False, 3), (989, True, 3)):
        monkeypatch.setattr(module, "CACHE_LIMIT", limit)  # 990 bytes are needed
        opened.clear()
        batches = Batches(files, SIZE, 4, CPU, cache=cache)
        for _ in range(3):
            check(batches, memory, list(range(COUNT)))
        assert len(opened) == times * COUNT


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_files_are_raised_together_or_reported_and_left_out(
    files: Split, memory: Split, workers: int
):
    assert files.files is not None
    for place in (2, 3, 9):
        Path(files.files[place]).write_bytes(b"nothing")
    bad = [re.escape(f"{files.files[place]} cannot be read: not an image") for place in (2, 3)]
    # No `as`: caught by it, a failed reader would wait for the garbage collector and its workers.
    with pytest.raises(DataError, match=rf"^{'; '.join(bad)}\Z"):
        list(Batches(files, SIZE, 4, CPU, workers=workers))
    reports: list[str] = []
    batches = Batches(files, SIZE, 4, CPU, workers=workers, unreadable=reports.append)
    check(batches, memory, [0, 1, 4, 5, 6, 7, 8, 10])
    assert [report.split()[0] for report in reports] == [files.files[i] for i in (2, 3, 9)]
    Path(files.files[8]).write_bytes(b"")
    Path(files.files[10]).unlink()
    check(Batches(files, SIZE, 4, CPU, unreadable=reports.append), memory, [0, 1, 4, 5, 6, 7])


def test_one_channel_is_the_brightness_of_a_file(files: Split):
    assert files.files is not None
    pixels, _, _ = joined(Batches(files, (1, *SIZE[1:]), 4, CPU))
    for found, path in zip(pixels, files.files, strict=True):
        assert np.array_equal(found[0].numpy(), np.asarray(Image.open(path).convert("L")))


def test_reading_leaves_the_global_generator_alone(files: Split):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    list(Batches(files, SIZE, 4, CPU))
    assert torch.equal(torch.rand(4), expected)
