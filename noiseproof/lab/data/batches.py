"""The one way to pass over a split: batches in order, from memory or from files, on a device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from noiseproof.lab.data.images import STRETCHED, DataError, Reading, decode, shortened
from noiseproof.lab.data.splits import Split

CACHE_LIMIT = 1 << 30  # bytes of pixels that may be cached


class LabelledBatch(NamedTuple):
    """Some images of a split."""

    pixels: Tensor  # uint8, B x C x H x W
    labels: Tensor  # int64, B
    positions: Tensor  # int64, B: positions in the split

    def to(self, device: torch.device) -> LabelledBatch:
        return LabelledBatch(*(part.to(device, non_blocking=True) for part in self))


class FileDataset(Dataset[tuple[Tensor, list[int], list[str]]]):
    """The images of a streamed split, by the batch: `dataset[positions]`. It only decodes and
    resizes, in a DataLoader's worker processes or in threads; what is random happens on the device.
    Nothing is cached.

    An item is (pixels, positions, errors): uint8 B x C x H x W, the positions of the images that
    could be read, and a message for each of the others. Messages are not raised here, because a
    worker process would pass on a printed traceback.

    Args:
        files: the files of the split.
        size: C, H, W to resize the images to; C is 3, or 1 for greyscale.
        reading: how they are resized.
    """

    def __init__(
        self, files: Sequence[str], size: tuple[int, int, int], reading: Reading = STRETCHED
    ):
        # One flat array: with a tuple of strings, reference counting would make forked workers
        # copy page after page.
        self.files = np.array([os.fsencode(name) for name in files], dtype=np.bytes_)
        self.size, self.reading = size, reading

    def __getitem__(self, positions: Sequence[int]) -> tuple[Tensor, list[int], list[str]]:
        paths = [os.fsdecode(self.files[position]) for position in positions]
        threads = 1 if get_worker_info() else None
        pixels, errors = decode(paths, self.size, self.reading, threads)
        if errors:
            read = [i for i in range(len(paths)) if i not in errors]
            pixels, positions = pixels[read], [positions[i] for i in read]
        return pixels, list(positions), list(errors.values())


class Batches:
    """The images of a split in order, as often as it is iterated.

    Args:
        split: images in memory, or files.
        size: C, H, W of the images; files are resized to it.
        batch_size: images per batch; the last batch may be smaller.
        device: where the batches go.
        index: the positions to visit, in this order; by default all.
        rank: of this process; it visits every `world`-th position.
        world: number of ranks that share the positions.
        workers: processes that decode files, at most one per core; 0 decodes in this process. They
            live as long as this object, since starting them can take longer than a pass, unless the
            batches are cached.
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
        self.split, self.device, self.unreadable = split, device, unreadable
        positions = (torch.arange(split.count) if index is None else index)[rank::world]
        self._parts = positions.split(batch_size) if len(positions) else ()
        self._cacheable = cache and len(positions) * math.prod(size) <= CACHE_LIMIT
        self._cached: list[LabelledBatch] | None = None
        self._next: list[list[int]] = []  # the batches of positions that the loader reads next
        self._loader: DataLoader[tuple[Tensor, list[int], list[str]]] | None = None
        if split.images is None and split.files is not None:
            workers = min(workers, os.cpu_count() or 1)
            self._loader = DataLoader(
                FileDataset(split.files, size, split.reading),
                batch_size=None,  # the sampler gives whole batches
                sampler=self._next,
                num_workers=workers,
                pin_memory=device.type == "cuda",
                persistent_workers=workers > 0,
                generator=torch.Generator(),  # not the global one for the workers' seeds
            )

    def __iter__(self) -> Iterator[LabelledBatch]:
        if self._cached is not None:
            yield from self._cached
            return
        batches: list[LabelledBatch] = []
        for batch in self.read(self._parts):
            yield batch
            if self._cacheable:
                # Copied on a CPU, where a worker's pixels hold shared memory and a file descriptor.
                copied = self._loader is not None and self.device.type == "cpu"
                batches.append(batch._replace(pixels=batch.pixels.clone()) if copied else batch)
        if self._cacheable:  # only now: a pass may be abandoned half-way
            self._cached, self._loader = batches, None

    def read(self, parts: Iterable[Tensor]) -> Iterator[LabelledBatch]:
        """Other batches of the same split, not cached.

        Args:
            parts: the positions that form each batch.
        """
        images, labels = self.split.images, self.split.labels
        if images is not None:
            for positions in parts:
                yield LabelledBatch(images[positions], labels[positions], positions).to(self.device)
        elif self._loader is not None:
            self._next[:] = [positions.tolist() for positions in parts]
            for pixels, read, errors in self._loader:
                if errors:
                    if self.unreadable is None:
                        raise DataError(shortened(errors, "; "))
                    for message in errors:
                        self.unreadable(message)
                if read:
                    positions = torch.tensor(read)
                    yield LabelledBatch(pixels, labels[positions], positions).to(self.device)
