"""Training batches: which samples make a step, and how their views are made on the device.

Everything random derives from (seed, epoch, sample): the order of an epoch is a permutation seeded
by (seed, epoch), crop, flip and noise of an image come from the image's own key. So there is no
loader state to save, a run resumes in the middle of an epoch, and the images of a global batch look
the same however many ranks share it.

A step is described by a `Ticket` of a few static tensors; `prepare` turns it into a `Batch` with
device arithmetic alone, so that an engine can compile or capture it together with the step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.augment import parse
from noiseproof.lab.data.datasets import Dataset, Split
from noiseproof.objectives import Batch

_ORDER, _SAMPLES = 1, 2  # streams of the seed
_NOISE, _FIRST, _SECOND = 0, 1, 2  # streams of a sample's key


class Ticket(NamedTuple):
    """What a step starts from."""

    samples: Tensor  # B, sample numbers in the training split
    key: Tensor  # (), the key of (seed, epoch)
    pixels: Tensor | None = None  # B x V x C x H x W, uint8: views that workers have made
    labels: Tensor | None = None  # B, with pixels


class Loader(Protocol):
    """Batches of one rank. `steps` an epoch; the last, smaller batch is left out."""

    steps: int
    batch_size: int

    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        """The steps of an epoch from `start` on; closing it ends what works for it."""
        ...

    def prepare(self, ticket: Ticket) -> Batch: ...


def global_batch_size(count: int, batch_size: int, world: int) -> int:
    """Images per step over all `world` ranks: `batch_size`, or all `count` images if there are
    fewer; ValueError if ranks cannot have equal shares."""
    together = min(batch_size, count - count % world)
    if together % world or not together:
        raise ValueError(
            f"a batch of {batch_size} cannot be shared evenly by {world} processes"
            f" (of {count} training images)"
        )
    return together


class _Order:
    """The samples of each step of each epoch, for one rank of several."""

    def __init__(self, count: int, batch_size: int, seed: int, rank: int, world: int):
        together = global_batch_size(count, batch_size, world)
        self.count, self.seed, self.rank, self.world = count, seed, rank, world
        self.together, self.each = together, together // world
        self.steps = count // together

    def __call__(self, epoch: int) -> Tensor:
        """steps x B sample numbers."""
        generator = torch.Generator().manual_seed(int(draws.keys(self.seed, _ORDER, epoch)))
        order = torch.randperm(self.count, generator=generator)[: self.steps * self.together]
        mine = slice(self.rank * self.each, (self.rank + 1) * self.each)
        return order.view(self.steps, self.together)[:, mine].contiguous()


def _batch(pixels: Tensor, second: Tensor | None, labels: Tensor, source: draws.PerSample,
           dtype: torch.dtype) -> Batch:  # fmt: skip
    other = None if second is None else second.to(dtype) / 255
    return Batch(pixels.to(dtype) / 255, labels, other, source.fold(_NOISE))


class MemoryLoader:
    """All images on the device as uint8; a crop with its flip is one gather."""

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        augment: str = "none",
        second: bool = False,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype = torch.float32,
    ):
        if split.images is None:
            raise ValueError("a MemoryLoader needs images in memory, got files")
        # Images of one channel can pass for contiguous and channels-last at once, and then choose
        # the slower kernels on a CPU: strides are made plain, without a copy.
        images = split.images.to(device).contiguous()
        self.images, self.labels = images.flatten().view(images.shape), split.labels.to(device)
        self.order = _Order(split.count, batch_size, seed, rank, world)
        self.steps, self.batch_size = self.order.steps, self.order.each
        self.seed, self.device, self.dtype = seed, device, dtype
        self.augment, self.second = parse(augment), second

    def key(self, epoch: int) -> Tensor:
        return draws.keys(self.seed, _SAMPLES, epoch).to(self.device)

    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        key, order = self.key(epoch), self.order(epoch)[start:].to(self.device)
        yield from (Ticket(index, key) for index in order)

    def prepare(self, ticket: Ticket) -> Batch:
        source = draws.PerSample(draws.fold(ticket.key, ticket.samples))
        index, second = ticket.samples, None
        first = self.augment(self.images, source.fold(_FIRST), index)
        if self.second:
            second = self.augment(self.images, source.fold(_SECOND), index)
        return _batch(first, second, self.labels[index], source, self.dtype)


class StreamLoader:
    """Images read and augmented by DataLoader workers; memory holds the batches in flight."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        augment: str = "none",
        second: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 4,
        dtype: torch.dtype = torch.float32,
    ):
        from noiseproof.lab.data.augmented_stream import AugmentedFileDataset

        self.files = AugmentedFileDataset(
            dataset.train, dataset.size, augment=augment, seed=seed, views=2 if second else 1
        )
        self.order = _Order(dataset.train.count, batch_size, seed, rank, world)
        self.steps, self.batch_size = self.order.steps, self.order.each
        self.seed, self.device, self.dtype = seed, device, dtype
        self.second = second
        self.batches: list[list[int]] = []
        # Workers outlive an epoch; what they make of an image follows the shared epoch number.
        self.reader = torch.utils.data.DataLoader(
            self.files,
            batch_sampler=_Now(self),
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )

    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        self.files.set_epoch(epoch)
        self.batches = self.order(epoch)[start:].tolist()
        key = draws.keys(self.seed, _SAMPLES, epoch).to(self.device)
        for pixels, labels, index in self.reader:
            yield Ticket(
                index.to(self.device, non_blocking=True),
                key,
                pixels.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
            )

    def prepare(self, ticket: Ticket) -> Batch:
        if ticket.pixels is None or ticket.labels is None:
            raise ValueError("a streamed step needs the pixels and labels that workers have read")
        source = draws.PerSample(draws.fold(ticket.key, ticket.samples))
        views = ticket.pixels.unbind(1) if self.second else (ticket.pixels, None)
        return _batch(views[0], views[1], ticket.labels, source, self.dtype)


class _Now:
    """The batches that a StreamLoader's reader is to read now, as the sampler it was made with."""

    def __init__(self, loader: StreamLoader):
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.loader.batches)

    def __len__(self) -> int:
        return len(self.loader.batches)
