"""Images decoded from files, for splits that do not fit into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from noiseproof.lab.data.datasets import Split
from noiseproof.lab.data.images import decode

__all__ = ["FileDataset"]


class FileDataset(Dataset[tuple[Tensor, list[int], list[str]]]):
    """The images of a streamed split, by the batch: `dataset[places]` for a list of places. It only
    decodes and resizes, in a DataLoader's worker processes or in threads; what is random happens on
    the device. Nothing is cached.

    An item is (pixels, places, errors): uint8 B x C x H x W, the places of the images that could be
    read, and a message for each of the others. Messages are not raised here, because a worker
    process would pass on a printed traceback.

    Args:
        split: labelled files.
        size: C, H, W to resize the images to; C is 3, or 1 for greyscale.
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
