"""Names to augmentations."""

from __future__ import annotations

from noiseproof.augment.base import Augmentation, identity
from noiseproof.augment.crop import crop, crop_flip
from noiseproof.augment.road import road

__all__ = ["AUGMENTATIONS", "parse"]

AUGMENTATIONS: dict[str, Augmentation] = {
    "none": identity,
    "crop": crop,
    "crop-flip": crop_flip,
    "road": road,
}


def parse(name: str) -> Augmentation:
    """The augmentation called `name`, as in `--augment`: none, crop, crop-flip or road.

    >>> parse("crop-flip").__name__
    'crop_flip'
    """
    if name not in AUGMENTATIONS:
        *names, last = AUGMENTATIONS
        raise ValueError(f"augment must be {', '.join(names)} or {last}, got {name!r}")
    return AUGMENTATIONS[name]
