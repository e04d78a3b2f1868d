"""Images decoded from files in worker processes, for splits that do not fit into memory.

Nothing is cached: memory holds the paths, the labels and the batches in flight. The workers decode
and resize, and nothing else; what is random happens on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from noiseproof.lab.data.datasets import Split
from noiseproof.lab.data.images import DataError, decode, shortened

__all__ = ["FileDataset", "FileReader", "LabelledBatch"]


class LabelledBatch(NamedTuple):
    """Some images of a split."""

    pixels: Tensor  # uint8, B x C x H x W
    labels: Tensor  # int64, B
    places: Tensor  # int64, B: positions in the split

    def to(self, device: torch.device) -> LabelledBatch:
        return LabelledBatch(*(part.to(device, non_blocking=True) for part in self))


class FileDataset(torch.utils.data.Dataset[tuple[Tensor, list[int], list[str]]]):
    """The images of a streamed split, by the batch: `dataset[places]` for a list of places.

    An item is (pixels, places, errors): uint8 B x C x H x W, the places of the images that could be
    read, and a message for each of the others. Messages are not raised here, because a worker
    process would hand over a printed traceback.

    Args:
        split: a split with files.
        size: C, H, W of the images; C is 3, or 1 for greyscale.
    """

    def __init__(self, split: Split, size: tuple[int, int, int]):
        if split.files is None:
            raise ValueError(
                "a FileDataset needs a split with files, got one with images in memory"
            )
        if len(split.files) != len(split.labels):
            raise ValueError(f"{len(split.files)} files, but {len(split.labels)} labels")
        if size[0] not in (1, 3):
            raise ValueError(f"files are read as 1 or 3 channels, got size {size}")
        # One flat array: of a tuple of strings, forked workers would copy page after page as they
        # count references.
        self.files = np.array([os.fsencode(name) for name in split.files], dtype=np.bytes_)
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, places: Sequence[int]) -> tuple[Tensor, list[int], list[str]]:
        paths = [os.fsdecode(self.files[place]) for place in places]
        pixels, errors = decode(paths, self.size, threads=1 if get_worker_info() else None)
        if errors:
            read = [position for position in range(len(paths)) if position not in errors]
            pixels, places = pixels[read], [places[position] for position in read]
        return pixels, list(places), list(errors.values())


class FileReader:
    """Reads batches of a streamed split, by worker processes that live as long as this object:
    starting them for every pass can take longer than the pass.

    Args:
        split: a split with files.
        size: C, H, W that the images are resized to.
        device: where the batches go.
        workers: worker processes; 0 decodes in this process, in threads.
        unreadable: called with a message for every file that cannot be read, which is then left
            out; by default such a file raises a DataError.
    """

    def __init__(
        self,
        split: Split,
        size: tuple[int, int, int],
        device: torch.device,
        workers: int,
        unreadable: Callable[[str], None] | None = None,
    ):
        self.labels, self.device, self.unreadable = split.labels, device, unreadable
        self._batches: list[list[int]] = []  # what the loader reads next
        self._loader = DataLoader(
            FileDataset(split, size),
            batch_size=None,  # the sampler gives whole batches
            sampler=self._batches,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # workers' seeds must not come from the global generator
        )

    def __call__(self, batches: Iterable[Tensor]) -> Iterator[LabelledBatch]:
        """The batches, on the device.

        Args:
            batches: the places in the split that form each batch.
        """
        self._batches[:] = [places.tolist() for places in batches]
        for pixels, read, errors in self._loader:
            if errors:
                self._report(errors)
            if read:
                places = torch.tensor(read)
                yield LabelledBatch(pixels, self.labels[places], places).to(self.device)

    def _report(self, errors: list[str]) -> None:
        if self.unreadable is None:
            raise DataError(shortened(errors, "; "))
        for message in errors:
            self.unreadable(message)
