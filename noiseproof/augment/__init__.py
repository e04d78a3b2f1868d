"""Augmentations of training images: whole batches on the device, random numbers per sample.

An image is augmented in the same way in any batch, on any rank and after any restart:

>>> import torch
>>> from noiseproof import augment, draws
>>> images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
>>> source = draws.PerSample(draws.keys(0, torch.arange(8)))
>>> augment.parse("crop-flip")(images, source).shape
torch.Size([8, 3, 32, 32])
"""

from noiseproof.augment.crop import crop
from noiseproof.augment.parsing import AUGMENTATIONS, Augmentation, identity, parse
from noiseproof.augment.road import road

__all__ = ["AUGMENTATIONS", "Augmentation", "crop", "identity", "parse", "road"]
