"""Training batches: which samples form a step, and how their views are made on the device.

Everything random derives from (seed, epoch, sample): the order of an epoch is a permutation seeded
by (seed, epoch); crop, flip and noise of an image come from the image's own key. So there is no
loader state to save, a run resumes in the middle of an epoch, and the images of a global batch look
the same however many ranks share it, whether they come from memory or from files, except that
`hybrid`, `mixup` and `cutmix` combine images of one rank.

A step is described by a `Ticket` of a few static tensors; `prepare` turns it into a `Batch` with
device arithmetic alone, so that an engine can compile or capture it together with the step.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.augment import Mixing, parse, parse_with_mixing
from noiseproof.augment.mixing import unmixed_count
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.splits import Split
from noiseproof.objectives import Batch

_ORDER, _SAMPLES = 1, 2  # streams of the seed
_NOISE, _FIRST, _SECOND, _MIXING = 0, 1, 2, 3  # streams of a sample's key


class Ticket(NamedTuple):
    """The inputs of one step."""

    samples: Tensor  # B, sample numbers: positions in the training split + N for each repetition
    key: Tensor  # (), the key of (seed, epoch)
    pixels: Tensor | None = None  # B x C x H x W, uint8: decoded files; None for images in memory
    labels: Tensor | None = None  # B, with the pixels


def global_batch_size(count: int, batch_size: int, world: int) -> int:
    """Images per step over all `world` ranks: `batch_size`, or all `count` images if there are
    fewer; ValueError if ranks cannot have equal shares."""
    size = min(batch_size, count - count % world)
    if size % world or not size:
        raise ValueError(
            f"a batch of {batch_size} cannot be divided evenly among {world} processes"
            f" ({count} training images)"
        )
    return size


class Loader:
    """Training batches of one rank; an epoch leaves out the last, smaller batch.

    Images in memory are moved to the device, as uint8. Files are decoded by worker processes, which
    live as long as the loader; memory holds the batches in flight.

    Args:
        split: the training images, in memory or as files.
        size: C, H, W of the images; files are resized to it.
        batch_size: images per step over all ranks.
        balance: draw equally many images of each class. An epoch is as long as without, but repeats
            images of rare classes, augmented anew, and leaves out others of frequent ones.
        seed: seed of order, augmentation and noise.
        device: where batches are prepared.
        augment: the augmentations, as `noiseproof.augment.parse_with_mixing` reads them.
        second: whether batches have a second view, augmented independently.
        augment_second: augmentation of the second view, without mixing; by default `augment`. Both
            views are mixed in the same way.
        rank: of this process.
        world: number of ranks.
        workers: worker processes, at most one per core.
        dtype: floating-point type of the batches.
    """

    def __init__(
        self,
        split: Split,
        size: tuple[int, int, int],
        *,
        batch_size: int,
        balance: bool = False,
        seed: int,
        device: torch.device,
        augment: str = "none",
        second: bool = False,
        augment_second: str | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 4,
        dtype: torch.dtype = torch.float32,
    ):
        self.count, self.rank = split.count, rank
        self.global_size = global_batch_size(self.count, batch_size, world)
        self.batch_size = self.global_size // world  # of this rank
        self.steps = self.count // self.global_size  # per epoch
        self.seed, self.device, self.dtype = seed, device, dtype
        (self.augment, self.mixing), self.second = parse_with_mixing(augment), second
        self.augment_second = self.augment if augment_second is None else parse(augment_second)
        self.unmixed_size = (
            self.batch_size if self.mixing is None else unmixed_count(self.batch_size)
        )
        self.members: list[Tensor] | None = None  # positions of each class, if it is balanced
        if balance:
            self.members = [(split.labels == k).nonzero()[:, 0] for k in split.labels.unique()]
        self.in_memory = split.images is not None
        if split.images is not None:
            # Images of one channel can count as contiguous and channels-last at once, and then get
            # the slower kernels on a CPU: this makes the strides unambiguous, without a copy.
            images = split.images.to(device).contiguous()
            self.images, self.labels = images.flatten().view(images.shape), split.labels.to(device)
        else:
            self.files = Batches(split, size, self.batch_size, device, workers=workers)

    def order(self, epoch: int) -> Tensor:
        """The samples of this rank in each step of an epoch, steps x B."""
        generator = torch.Generator().manual_seed(int(draws.keys(self.seed, _ORDER, epoch)))
        samples = self._balanced(self.members, generator) if self.members else None
        count = self.count if samples is None else len(samples)
        order = torch.randperm(count, generator=generator)[: self.steps * self.global_size]
        order = order if samples is None else samples[order]
        share = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        return order.view(self.steps, self.global_size)[:, share].contiguous()

    def _balanced(self, members: list[Tensor], generator: torch.Generator) -> Tensor:
        """Equally many samples of every class, at least enough for an epoch."""
        size = math.ceil(self.steps * self.global_size / len(members))
        samples = []
        for positions in members:
            passes = [
                positions[torch.randperm(len(positions), generator=generator)] + self.count * k
                for k in range(math.ceil(size / len(positions)))
            ]
            samples.append(torch.cat(passes)[:size])
        return torch.cat(samples)

    def key(self, epoch: int) -> Tensor:
        """The key that the samples' random numbers of an epoch derive from."""
        return draws.keys(self.seed, _SAMPLES, epoch).to(self.device)

    def tickets(self, epoch: int, start: int = 0) -> Generator[Ticket]:
        """The steps of an epoch, from step `start` on."""
        key, order = self.key(epoch), self.order(epoch)[start:]
        if self.in_memory:
            yield from (Ticket(samples, key) for samples in order.to(self.device))
        else:
            read = self.files.read(order % self.count)
            for samples, (pixels, labels, _) in zip(order.to(self.device), read, strict=True):
                yield Ticket(samples, key, pixels, labels)

    def prepare(self, ticket: Ticket) -> Batch:
        """The batch of a step: augmented views in [0, 1], labels, and the source of the noise."""
        images, labels, index = ticket.pixels, ticket.labels, None
        if images is None or labels is None:
            index = ticket.samples if self.members is None else ticket.samples % self.count
            images, labels = self.images, self.labels[index]
        source = draws.PerSample(draws.fold(ticket.key, ticket.samples))
        first = self.augment(images, source.fold(_FIRST), index).to(self.dtype) / 255
        second = None
        if self.second:
            second = self.augment_second(images, source.fold(_SECOND), index).to(self.dtype) / 255
        batch = Batch(first, labels, second, source.fold(_NOISE))
        return batch if self.mixing is None else _mixed(batch, self.mixing, source.fold(_MIXING))


def _mixed(batch: Batch, mixing: Mixing, source: draws.Source) -> Batch:
    """Both views with the same partners, shares and rectangles."""
    mixture, second = mixing(batch.images, batch.labels, source), batch.second
    if second is not None:
        second = mixing(second, batch.labels, source).images
    return Batch(mixture.images, batch.labels, second, batch.source, mixture)
