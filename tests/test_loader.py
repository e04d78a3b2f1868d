"""Which samples make a step, and what their views look like."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof import draws
from noiseproof.augment import MIXINGS, road
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.data.splits import Split

CPU = torch.device("cpu")


def split(count=23, size=(3, 16, 16)) -> Any:
    images = torch.randint(1, 256, (count, *size), dtype=torch.uint8)
    return Split(images, None, torch.arange(count) % 5)


def memory(data, **options) -> Any:
    size = tuple(data.images.shape[1:])
    return Loader(data, size, **({"batch_size": 8, "seed": 3, "device": CPU} | options))


def samples(loader, epoch, start=0):
    return [ticket.samples.tolist() for ticket in loader.tickets(epoch, start)]


def test_an_epoch_visits_samples_once_in_an_order_of_its_own():
    loader = memory(split())
    assert loader.steps == 2  # the last 7 are left out
    visited = [[i for step in samples(loader, e) for i in step] for e in range(4)]
    assert all(len(set(order)) == 16 for order in visited)
    assert len({tuple(order) for order in visited}) == 4
    assert samples(memory(split()), 2) == samples(loader, 2)
    assert samples(memory(split(), seed=4), 2) != samples(loader, 2)


def test_an_epoch_can_be_entered_in_the_middle():
    loader = memory(split(50), augment="crop-flip", second=True)
    assert samples(loader, 1, start=4) == samples(loader, 1)[4:]
    for whole, entered in zip(list(loader.tickets(1))[4:], loader.tickets(1, start=4), strict=True):
        one, other = loader.prepare(whole), loader.prepare(entered)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.second, other.second)
        assert torch.equal(one.source.normal(3, 4), other.source.normal(3, 4))


def test_balanced_classes_get_equal_shares_of_an_epoch_and_repeats_differ():
    data = split(40)._replace(labels=torch.tensor([0] * 30 + [1] * 8 + [2] * 2))
    loader = memory(data, batch_size=12, augment="crop-flip", balance=True)
    assert loader.steps == 3  # as without balance
    tickets = list(loader.tickets(0))
    labels = torch.cat([loader.prepare(ticket).labels for ticket in tickets])
    assert labels.bincount().tolist() == [12, 12, 12]
    numbers = torch.cat([ticket.samples for ticket in tickets])
    assert torch.equal(data.labels[numbers % 40], labels)
    assert len(numbers.unique()) == 36
    assert set((numbers % 40)[labels == 1].tolist()) == set(range(30, 38))
    views = torch.cat([loader.prepare(ticket).images for ticket in tickets])
    assert len(views[numbers % 40 == 39].unique(dim=0)) > 2  # of six
    seen = {i for e in range(30) for step in samples(loader, e) for i in step}
    assert set(range(30)) < seen  # over several epochs, all images of a frequent class
    assert samples(loader, 1, start=1) == samples(loader, 1)[1:] != samples(loader, 2)[1:]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_every_batch_and_see_the_same_views_of_it(world):
    data = split(40)
    options = {"augment": "crop-flip", "second": True}
    whole = memory(data, **options)
    ranks = [memory(data, rank=r, world=world, **options) for r in range(world)]
    for ticket, *parts in zip(whole.tickets(1), *(r.tickets(1) for r in ranks), strict=True):
        batch = whole.prepare(ticket)
        shares = [rank.prepare(part) for rank, part in zip(ranks, parts, strict=True)]
        assert torch.equal(torch.cat([s.images for s in shares]), batch.images)
        assert torch.equal(torch.cat([s.labels for s in shares]), batch.labels)
        assert torch.equal(torch.cat([s.second for s in shares]), batch.second)
        keys = [s.source.keys for s in shares]
        assert torch.equal(torch.cat(keys), batch.source.keys)


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="a batch of 8 cannot be divided evenly among 3 processes"):
        memory(split(), world=3)


def test_a_batch_larger_than_the_data_is_all_of_it():
    loader = memory(split(23), batch_size=64)
    assert (loader.steps, loader.batch_size) == (1, 23)


@pytest.mark.parametrize("augment", ["crop", "crop-flip"])
def test_a_view_is_a_crop_of_the_padded_and_perhaps_flipped_image(augment):
    """Each view must be one of the 5 x 5 crops of its own image, and all crops must come up."""
    data = split(400)
    loader = memory(data, batch_size=400, augment=augment)
    (ticket,) = loader.tickets(0)
    views = (loader.prepare(ticket).images * 255).round().to(torch.uint8)
    found = []
    for view, index in zip(views, ticket.samples.tolist(), strict=True):
        padded = torch.nn.functional.pad(data.images[index], (2, 2, 2, 2))
        matches = [
            (down, right, flipped)
            for flipped in ((False, True) if augment == "crop-flip" else (False,))
            for down in range(5)
            for right in range(5)
            if torch.equal(
                view,
                (padded.flip(2) if flipped else padded)[:, down : down + 16, right : right + 16],
            )
        ]
        assert len(matches) == 1
        found += matches
    assert len({match[:2] for match in found}) == 25
    flips = sum(match[2] for match in found) / 400
    assert 0.4 < flips < 0.6 if augment == "crop-flip" else flips == 0


def test_a_sample_looks_the_same_in_any_batch_and_different_in_another_epoch():
    data = split(40)
    small, large = (memory(data, batch_size=b, augment="crop") for b in (4, 40))
    (ticket,) = large.tickets(5)
    looks = dict(zip(ticket.samples.tolist(), large.prepare(ticket).images, strict=True))
    for ticket in small.tickets(5):
        for index, image in zip(ticket.samples.tolist(), small.prepare(ticket).images, strict=True):
            assert torch.equal(image, looks[index])
    (ticket,) = large.tickets(6)
    other = dict(zip(ticket.samples.tolist(), large.prepare(ticket).images, strict=True))
    assert sum(torch.equal(other[i], looks[i]) for i in looks) < 10


def test_two_views_of_an_image_are_cropped_apart_and_noise_has_a_stream_of_its_own():
    loader = memory(split(400), batch_size=400, augment="crop", second=True)
    (ticket,) = loader.tickets(0)
    batch = loader.prepare(ticket)
    same = (batch.images == batch.second).flatten(1).all(1).float().mean()
    assert same < 0.1  # one in 25
    keys = batch.source.keys
    assert not torch.equal(keys, draws.fold(ticket.key, ticket.samples))
    assert len(set(keys.tolist())) == 400


def test_the_noisy_view_can_have_an_augmentation_of_its_own():
    options = {"augment": "crop-flip+cutmix", "augment_second": "none", "second": True}
    loader = memory(split(32), batch_size=32, **options)
    ticket = next(loader.tickets(0))
    batch = loader.prepare(ticket)
    unmixed = batch.mixture.unmixed
    plain = loader.images[ticket.samples][unmixed] / 255
    assert torch.equal(batch.second[unmixed], plain)
    assert not torch.equal(batch.images[unmixed], plain)


def test_pixels_are_in_the_unit_interval_in_the_asked_dtype():
    data = split()
    loader = memory(data, dtype=torch.float64)
    ticket = next(loader.tickets(0))
    images = loader.prepare(ticket).images
    assert images.dtype == torch.float64
    assert torch.equal(images, data.images[ticket.samples].double() / 255)


@pytest.fixture
def files(tmp_path) -> Split:
    paths = []
    for i in range(10):
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)).save(paths[-1])
    return Split(None, tuple(paths), torch.arange(10) % 2)


def stream(files: Split, **options) -> Any:
    return Loader(files, (3, 8, 8), **({"batch_size": 4, "seed": 1, "device": CPU} | options))


def test_balanced_batches_are_streamed_like_those_in_memory(files):
    files = files._replace(labels=torch.tensor([0] * 8 + [1] * 2))
    pixels = torch.stack([torch.full((3, 8, 8), 20 * i, dtype=torch.uint8) for i in range(10)])
    options = {"batch_size": 4, "seed": 1, "augment": "crop", "balance": True}
    in_memory = memory(files._replace(images=pixels), **options)
    streamed = stream(files, workers=0, **options)
    pairs = zip(in_memory.tickets(0), streamed.tickets(0), strict=True)
    for one, other in pairs:
        one, other = in_memory.prepare(one), streamed.prepare(other)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_are_those_of_the_order_epoch_after_epoch(files, workers):
    loader = stream(files, augment="crop", second=True, workers=workers)
    plain = stream(files, workers=0)
    for epoch, start in ((0, 0), (1, 1), (2, 0)):
        expected = loader.order(epoch)[start:].tolist()
        tickets = list(loader.tickets(epoch, start))
        assert [t.samples.tolist() for t in tickets] == expected
        for ticket, bare in zip(tickets, plain.tickets(epoch, start), strict=True):
            batch = loader.prepare(ticket)
            assert batch.labels.tolist() == (ticket.samples % 2).tolist()
            assert batch.second is not None
            assert batch.images.shape == batch.second.shape == (4, 3, 8, 8)
            values = plain.prepare(bare).images[:, 0, 0, 0] * 255
            assert torch.allclose(values, 20.0 * bare.samples)


def test_road_views_are_those_of_the_augmentation_by_each_samples_own_draws():
    data = split(30)
    loader = memory(data, batch_size=30, augment="road", second=True)
    (ticket,) = loader.tickets(2)
    batch = loader.prepare(ticket)
    assert data.images is not None
    assert batch.second is not None
    source = draws.PerSample(draws.fold(ticket.key, ticket.samples))
    for stream, seen in ((1, batch.images), (2, batch.second)):
        wanted = road(data.images[ticket.samples], source.fold(stream))
        assert torch.equal(seen, wanted.float() / 255)
    assert not torch.equal(batch.images, batch.second)
    with pytest.raises(ValueError, match="or several joined by \\+, got 'blur'"):
        memory(data, augment="blur")


@pytest.mark.parametrize("name", MIXINGS)
def test_both_views_are_mixed_alike_after_their_augmentation(name):
    data = split(30)
    options = {"batch_size": 15, "second": True, "dtype": torch.float64}
    plain, loader = (memory(data, augment=f"crop{mix}", **options) for mix in ("", f"+{name}"))
    ticket = next(loader.tickets(2))
    before, batch = plain.prepare(ticket), loader.prepare(ticket)
    mixture = batch.mixture
    source = draws.PerSample(draws.fold(ticket.key, ticket.samples)).fold(3)
    for view, found in ((before.images, batch.images), (before.second, batch.second)):
        expected = MIXINGS[name](view, before.labels, source)
        assert torch.equal(found, expected.images)
        assert found.dtype == torch.float64
        assert all(torch.equal(a, b) for a, b in zip(expected[1:], mixture[1:], strict=True))
    assert torch.equal(batch.labels, before.labels)
    assert torch.equal(batch.source.keys, before.source.keys)
    assert torch.equal(batch.unmixed(batch.images), before.images[mixture.unmixed])
    assert len(mixture.unmixed) == loader.unmixed_size == 7
    assert plain.unmixed_size == 15
    assert torch.equal(before.unmixed(before.labels), before.labels)


def test_a_file_that_a_worker_cannot_read_is_named_at_once(files):
    assert files.files is not None
    Path(files.files[7]).write_bytes(b"nothing")
    tickets = stream(files, batch_size=1, workers=1).tickets(0)
    with pytest.raises(DataError, match=r"7\.png cannot be read: not an image\Z"):
        for _ in tickets:
            pass
    assert list(tickets) == []  # the generator is over


def test_closing_an_epoch_early_leaves_the_next_one_whole(files):
    loader = stream(files, batch_size=2, workers=1)
    tickets = loader.tickets(0)
    next(tickets)
    tickets.close()
    assert samples(loader, 1) == loader.order(1).tolist()


def test_no_more_workers_are_started_than_there_are_cores(files, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    before = set(multiprocessing.active_children())
    loader = stream(files, workers=4)
    list(loader.tickets(0))
    assert len(set(multiprocessing.active_children()) - before) == 1
