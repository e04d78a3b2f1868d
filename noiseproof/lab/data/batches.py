"""The one way to pass over a split: batches in order, from memory or from files, on a device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from noiseproof.lab.data.datasets import Split
from noiseproof.lab.data.stream import FileReader, LabelledBatch

__all__ = ["CACHE_LIMIT", "Batches"]

CACHE_LIMIT = 1 << 30  # bytes of pixels that may be cached


class Batches:
    """(uint8 pixels, labels, places) of a split, in order, as often as it is iterated. The place of
    an image is its position in the split.

    Args:
        split: images in memory, or files.
        size: C, H, W of the images; files are resized to it.
        batch_size: images per batch; the last batch may be smaller.
        device: where the batches go.
        index: the places to visit, in this order; by default all.
        rank, world: visit the places that are this rank's share among `world` ranks.
        workers: processes that decode files, at most one per core; 0 decodes in this process. They
            live as long as this object, unless the batches are cached.
        cache: keep the batches of the first complete pass on the device, if they take no more than
            `CACHE_LIMIT` bytes.
        unreadable: called with a message for every file that cannot be read, which is then left
            out; by default such a file raises a DataError.
    """

    def __init__(
        self,
        split: Split,
        size: tuple[int, int, int],
        batch_size: int,
        device: torch.device,
        *,
        index: Tensor | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        cache: bool = False,
        unreadable: Callable[[str], None] | None = None,
    ):
        self.split, self.device = split, device
        self._contiguous = index is None and world == 1
        places = (torch.arange(split.count) if index is None else index)[rank::world]
        self._places = places.split(batch_size) if len(places) else ()
        self._cacheable = cache and len(places) * math.prod(size) <= CACHE_LIMIT
        self._cached: list[LabelledBatch] | None = None
        self._reader: FileReader | None = None
        if split.images is None:
            workers = min(workers, os.cpu_count() or 1)
            self._reader = FileReader(split, size, device, workers, unreadable)

    def __iter__(self) -> Iterator[LabelledBatch]:
        if self._cached is not None:
            yield from self._cached
            return
        batches: list[LabelledBatch] = []
        for batch in self._batches():
            yield batch
            if self._cacheable:
                # Copied on a CPU, where a worker's pixels hold shared memory and a file descriptor.
                copied = self._reader is not None and self.device.type == "cpu"
                batches.append(batch._replace(pixels=batch.pixels.clone()) if copied else batch)
        if self._cacheable:  # only now: a pass may be abandoned half-way
            self._cached, self._reader = batches, None

    def _batches(self) -> Iterator[LabelledBatch]:
        images, labels = self.split.images, self.split.labels
        if self._reader is not None:
            yield from self._reader(self._places)
        elif images is not None:
            for places in self._places:
                # A slice is a view, an index makes a copy.
                run = slice(int(places[0]), int(places[-1]) + 1)
                chosen = run if self._contiguous else places
                yield LabelledBatch(images[chosen], labels[chosen], places).to(self.device)
