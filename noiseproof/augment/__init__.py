"""Augmentations of training images: whole batches on the device, random numbers per sample.

An image is augmented in the same way in any batch, on any rank and after any restart, except by
`hybrid`, `mixup` and `cutmix`, which combine the images of a batch:

>>> import torch
>>> from noiseproof import augment, draws
>>> images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
>>> source = draws.PerSample(draws.keys(0, torch.arange(8)))
>>> augment.parse("crop-flip+trivial")(images, source).shape
torch.Size([8, 3, 32, 32])

Without a source, torch's global generator is used; a single image needs no batch dimension. So they
are transforms for `torchvision.transforms.Compose` too:

>>> augment.trivial(images[0]).shape
torch.Size([3, 32, 32])
"""

from noiseproof.augment.augmix import augmix
from noiseproof.augment.crop import crop
from noiseproof.augment.erase import cutout, erase
from noiseproof.augment.hybrid import hybrid
from noiseproof.augment.mixing import Mixture, cutmix, mixup
from noiseproof.augment.parsing import (
    AUGMENTATIONS,
    MIXINGS,
    Augmentation,
    Mixing,
    identity,
    parse,
    parse_with_mixing,
)
from noiseproof.augment.road import road
from noiseproof.augment.trivial import trivial

__all__ = [
    "AUGMENTATIONS",
    "MIXINGS",
    "Augmentation",
    "Mixing",
    "Mixture",
    "augmix",
    "crop",
    "cutmix",
    "cutout",
    "erase",
    "hybrid",
    "identity",
    "mixup",
    "parse",
    "parse_with_mixing",
    "road",
    "trivial",
]
