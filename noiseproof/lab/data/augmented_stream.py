"""Images read and augmented file by file in a DataLoader's workers, where memory is too small.

Nothing is cached: memory holds the paths and labels, and the batches in flight. What a view looks
like depends on (seed, epoch, index, view) alone, so the number of workers, the order and a restart
change nothing. The transforms are torchvision's v2 on Pillow images, which at 400 x 500 rotates and
warps several times faster than on tensors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from noiseproof import draws
from noiseproof.lab.data.images import open_image

if TYPE_CHECKING:
    from noiseproof.lab.data.datasets import Split

__all__ = ["AugmentedFileDataset", "augmentation"]


def augmentation(name: str, size: tuple[int, int]) -> v2.Transform | None:
    """The random transform called `name` for images of (height, width) `size`.

    crop: padded with black by an eighth of the smaller side, then cropped to `size` (4 pixels at
    32 x 32); crop-flip: with a horizontal flip half of the time; road: the paper's recipe for road
    images, jitter of colours by 0.3, rotation up to 10 degrees, perspective, flip.
    """
    crop = v2.RandomCrop(size, padding=min(size) // 8)
    if name == "none":
        return None
    if name == "crop":
        return crop
    if name == "crop-flip":
        return v2.Compose([crop, v2.RandomHorizontalFlip()])
    if name == "road":
        return v2.Compose(
            [
                v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
                v2.RandomRotation([-10, 10]),
                v2.RandomPerspective(),
                v2.RandomHorizontalFlip(),
            ]
        )
    raise ValueError(f"augment must be none, crop, crop-flip or road, got {name!r}")


class AugmentedFileDataset(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Items (pixels, label, index) of a streamed split.

    Pixels are uint8: C x H x W for one view, V x C x H x W for V > 1 independently augmented views
    of the same image. A file that cannot be decoded raises a ValueError that names it, also out of
    a worker process.

    size: C x H x W of the dataset, C = 3.
    augment: none (for evaluation), crop, crop-flip or road.
    """

    def __init__(
        self,
        split: Split,
        size: tuple[int, int, int],
        *,
        augment: str = "none",
        seed: int = 0,
        epoch: int = 0,
        views: int = 1,
    ):
        if split.files is None:
            raise ValueError("files are needed, got one kept in memory")
        if len(split.files) != len(split.labels):
            raise ValueError(f"{len(split.files)} files, but {len(split.labels)} labels")
        if size[0] != 3:
            raise ValueError(f"files are read as 3 x H x W, got size {size}")
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}")
        # Two flat arrays: forked workers would copy, page by page, a tuple of strings they count
        # references in.
        self.files = np.array([os.fsencode(name) for name in split.files], dtype=np.bytes_)
        self.labels = split.labels.numpy()
        self.size = (size[1], size[2])
        self.augment = augmentation(augment, self.size)
        self.seed = seed
        self.views = views
        self._epoch = torch.tensor(epoch).share_memory_()  # seen by workers that outlive an epoch

    def set_epoch(self, epoch: int) -> None:
        """Moves on to another epoch's augmentation; call it before iterating the loader anew."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        image = open_image(os.fsdecode(self.files[index]), self.size)
        views = [self._view(image, index, view) for view in range(self.views)]
        pixels = views[0] if self.views == 1 else torch.stack(views)
        return pixels, int(self.labels[index]), index

    def _view(self, image: Image.Image, index: int, view: int) -> Tensor:
        if self.augment is not None:
            key = int(draws.keys(self.seed, self._epoch, index, view))
            with torch.random.fork_rng(devices=[]):
                # Not torch.manual_seed, which would also reseed the GPU's generators.
                torch.default_generator.manual_seed(key)
                image = self.augment(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
