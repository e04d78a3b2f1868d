"""The interfaces of augmentations and of mixing, and both by name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Protocol

from torch import Tensor

from noiseproof.augment.augmix import augmix
from noiseproof.augment.batched import batched
from noiseproof.augment.crop import crop
from noiseproof.augment.erase import cutout, erase
from noiseproof.augment.hybrid import hybrid
from noiseproof.augment.mixing import Mixture, cutmix, mixup
from noiseproof.augment.road import road
from noiseproof.augment.trivial import trivial
from noiseproof.draws import Source, stream

__all__ = [
    "AUGMENTATIONS",
    "MIXINGS",
    "Augmentation",
    "Mixing",
    "identity",
    "parse",
    "parse_with_mixing",
]


class Augmentation(Protocol):
    """A random change to images, drawn per sample and computed on the device.

    Args:
        images: N x C x H x W, uint8, or floating point in [0, 1]; or one image, C x H x W. Values
            far outside raise a ValueError on a CPU; on other devices the range is not checked.
        source: the random numbers: a `noiseproof.draws.PerSample` with one stream per sample of
            the batch, a `torch.Generator`, or None for torch's global generator.
        index: which of the images form the batch, B; by default all of them.

    Returns:
        The augmented batch, B x C x H x W, in the dtype of `images`; or one image.
    """

    def __call__(
        self, images: Tensor, source: Source = None, index: Tensor | None = None
    ) -> Tensor: ...


class Mixing(Protocol):
    """A mixture of samples of a batch, of images and labels alike.

    Args:
        images: B x C x H x W, uint8, or floating point in [0, 1]; checked as by an `Augmentation`.
        labels: B.
        source: the random numbers, as for every `Augmentation`. With the same ones, another view
            of the samples is mixed in the same way.
    """

    def __call__(self, images: Tensor, labels: Tensor, source: Source = None) -> Mixture: ...


@batched
def identity(images: Tensor, source: Source = None, index: Tensor | None = None) -> Tensor:
    """The batch, unchanged."""
    return images if index is None else images[index]


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": identity,
    "crop": crop,
    "crop-flip": partial(crop, flip=True),
    "road": road,
    "trivial": trivial,
    "erase": erase,
    "cutout": cutout,
    "augmix": augmix,
    "hybrid": hybrid,
}


MIXINGS: dict[str, Mixing] = {"mixup": mixup, "cutmix": cutmix}


def parse(text: str) -> Augmentation:
    """The augmentation that a text describes.

    Args:
        text: a name in `AUGMENTATIONS`, or several joined by +, applied from left to right. Each
            of several has its own random numbers.

    >>> import torch
    >>> parse("crop-flip+trivial+erase")(torch.rand(3, 32, 32)).shape
    torch.Size([3, 32, 32])
    """
    augment, mixing = parse_with_mixing(text)
    if mixing is not None:
        raise ValueError(
            f"{text!r} mixes labels too, so it is no augmentation of images alone; "
            "use parse_with_mixing, or augment.mixup and augment.cutmix"
        )
    return augment


def parse_with_mixing(text: str) -> tuple[Augmentation, Mixing | None]:
    """The augmentation that a text describes, as in `--augment`, and how its results are mixed.

    Args:
        text: as for `parse`; its last name may be one of `MIXINGS`.

    >>> augment, mixing = parse_with_mixing("crop-flip+cutmix")
    >>> mixing is cutmix, parse_with_mixing("crop-flip")[1]
    (True, None)
    """
    if not isinstance(text, str):
        raise ValueError(f"augment must be text such as 'crop-flip+trivial', got {text!r}")
    *names, last = text.split("+")
    mixing = MIXINGS.get(last)
    names = names if mixing else [*names, last]
    for name in names:
        if name in MIXINGS:
            raise ValueError(f"only one of mixup and cutmix can be used, at the end, got {text!r}")
        if name not in AUGMENTATIONS:
            *known, final = (*AUGMENTATIONS, *MIXINGS)
            closest = get_close_matches(name, [*known, final], 1)
            raise ValueError(
                f"augment must be {', '.join(known)} or {final}, or several joined by +, "
                f"got {name!r}"
                + (f" in {text!r}" if name != text else "")
                + (f" (did you mean {closest[0]!r}?)" if closest else "")
            )
    members = [AUGMENTATIONS[name] for name in names] or [identity]
    return members[0] if len(members) == 1 else partial(_chained, members), mixing


def _chained(
    members: Sequence[Augmentation],
    images: Tensor,
    source: Source = None,
    index: Tensor | None = None,
) -> Tensor:
    for i, augment in enumerate(members):
        images = augment(images, stream(source, i), index)
        index = None  # the first has selected the batch
    return images
