"""Training batches: which samples form a step, and how their views are made on the device.

Everything random derives from (seed, epoch, sample): the order of an epoch is a permutation seeded
by (seed, epoch); crop, flip and noise of an image come from the image's own key. So there is no
loader state to save, a run resumes in the middle of an epoch, and the images of a global batch look
the same however many ranks share it, whether they come from memory or from files.

A step is described by a `Ticket` of a few static tensors; `prepare` turns it into a `Batch` with
device arithmetic alone, so that an engine can compile or capture it together with the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.augment import parse
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Split
from noiseproof.objectives import Batch

__all__ = ["Loader", "MemoryLoader", "StreamLoader", "Ticket", "global_batch_size"]

_ORDER, _SAMPLES = 1, 2  # streams of the seed
_NOISE, _FIRST, _SECOND = 0, 1, 2  # streams of a sample's key


class Ticket(NamedTuple):
    """The inputs of one step."""

    samples: Tensor  # B, sample numbers in the training split
    key: Tensor  # (), the key of (seed, epoch)
    pixels: Tensor | None = None  # B x C x H x W, uint8: decoded files; None for images in memory
    labels: Tensor | None = None  # B, with the pixels


def global_batch_size(count: int, batch_size: int, world: int) -> int:
    """Images per step over all `world` ranks: `batch_size`, or all `count` images if there are
    fewer; ValueError if ranks cannot have equal shares."""
    together = min(batch_size, count - count % world)
    if together % world or not together:
        raise ValueError(
            f"a batch of {batch_size} cannot be divided evenly among {world} processes"
            f" ({count} training images)"
        )
    return together


class Loader(ABC):
    """Training batches of one rank; an epoch leaves out the last, smaller batch.

    Args:
        count: images in the training split.
        batch_size: images per step over all ranks.
        seed: seed of order, augmentation and noise.
        device: where batches are made.
        augment: the augmentation, by its name in `noiseproof.augment`.
        second: whether batches carry a second view, augmented independently.
        rank, world: which of how many ranks this is.
        dtype: floating-point type of the batches.
    """

    def __init__(
        self,
        count: int,
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
        self.count, self.rank = count, rank
        self.together = global_batch_size(count, batch_size, world)
        self.batch_size = self.together // world  # of this rank
        self.steps = count // self.together  # per epoch
        self.seed, self.device, self.dtype = seed, device, dtype
        self.augment, self.second = parse(augment), second

    def order(self, epoch: int) -> Tensor:
        """The samples of this rank in each step of an epoch, steps x B."""
        generator = torch.Generator().manual_seed(int(draws.keys(self.seed, _ORDER, epoch)))
        order = torch.randperm(self.count, generator=generator)[: self.steps * self.together]
        share = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        return order.view(self.steps, self.together)[:, share].contiguous()

    def key(self, epoch: int) -> Tensor:
        """The key that the samples' random numbers of an epoch derive from."""
        return draws.keys(self.seed, _SAMPLES, epoch).to(self.device)

    @abstractmethod
    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        """The steps of an epoch, from step `start` on."""

    @abstractmethod
    def prepare(self, ticket: Ticket) -> Batch:
        """The batch of a step: augmented views in [0, 1], labels, and the source of the noise."""

    def _views(
        self, ticket: Ticket, images: Tensor, labels: Tensor, index: Tensor | None = None
    ) -> Batch:
        source = draws.PerSample(draws.fold(ticket.key, ticket.samples))
        first = self.augment(images, source.fold(_FIRST), index).to(self.dtype) / 255
        second = None
        if self.second:
            second = self.augment(images, source.fold(_SECOND), index).to(self.dtype) / 255
        return Batch(first, labels, second, source.fold(_NOISE))


class MemoryLoader(Loader):
    """All images on the device as uint8.

    Args:
        split: the training images, in memory.
        options: the arguments of `Loader`.
    """

    def __init__(self, split: Split, **options: Any):
        super().__init__(split.count, **options)
        if split.images is None:
            raise ValueError("a MemoryLoader needs images in memory, got files")
        # Images of one channel can count as contiguous and channels-last at once, and then get the
        # slower kernels on a CPU: this makes the strides unambiguous, without a copy.
        images = split.images.to(self.device).contiguous()
        self.images = images.flatten().view(images.shape)
        self.labels = split.labels.to(self.device)

    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        key, order = self.key(epoch), self.order(epoch)[start:].to(self.device)
        yield from (Ticket(samples, key) for samples in order)

    def prepare(self, ticket: Ticket) -> Batch:
        return self._views(ticket, self.images, self.labels[ticket.samples], ticket.samples)


class StreamLoader(Loader):
    """Files decoded by worker processes; memory holds the batches in flight.

    Args:
        split: the training files.
        size: C, H, W that the images are resized to.
        workers: worker processes, at most one per core, which live as long as the loader.
        options: the arguments of `Loader`.
    """

    def __init__(
        self, split: Split, size: tuple[int, int, int], *, workers: int = 4, **options: Any
    ):
        super().__init__(split.count, **options)
        self.files = Batches(split, size, self.batch_size, self.device, workers=workers)

    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        key = self.key(epoch)
        for pixels, labels, samples in self.files.read(self.order(epoch)[start:]):
            yield Ticket(samples, key, pixels, labels)

    def prepare(self, ticket: Ticket) -> Batch:
        if ticket.pixels is None or ticket.labels is None:
            raise ValueError("a streamed step needs the pixels and labels that workers have read")
        return self._views(ticket, ticket.pixels, ticket.labels)
