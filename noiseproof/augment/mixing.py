"""Mixtures of two samples of a batch: mixup (Zhang et al., 2017) and cutmix (Yun et al., 2019).

An image x with label y becomes a mixture with a partner x', y' of its batch, and its loss

    share · CE(y) + (1 − share) · CE(y').

Terms that assume one class per image, such as constraints on features, belong on the samples that
are not mixed. A batch always has the same number of them, so shapes are static:

>>> from torch.nn.functional import cross_entropy
>>> images, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
>>> mixture = cutmix(images, labels)
>>> logits = torch.zeros(8, 8)  # of a model, for mixture.images
>>> own, other = (cross_entropy(logits, y, reduction="none") for y in (labels, mixture.labels))
>>> loss = (mixture.share * own + (1 - mixture.share) * other).mean()
>>> torch.equal(mixture.images[mixture.unmixed], images[mixture.unmixed])
True

The samples are arranged in a random circle, and the partner is the next one. Positions come from
the samples' own random numbers, so mixtures depend on which samples form the batch, but not on
their order. With the same source, a second view of the samples gets the same partners, shares and
rectangles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from noiseproof.augment.batched import check_images, check_range, uniforms
from noiseproof.augment.erase import rectangle
from noiseproof.draws import Source
from noiseproof.perturb.base import check_range_on_cpu

__all__ = ["Mixture", "cutmix", "mixup", "partners", "unmixed_count"]

_FRACTION = 0.5


class Mixture(NamedTuple):
    """A batch in which some samples are mixed with others."""

    images: Tensor  # B x C x H x W
    labels: Tensor  # B, of the partners
    share: Tensor  # B, of the sample itself, in [0, 1]; 1 if it is not mixed
    unmixed: Tensor  # indices of the samples that are not mixed


def unmixed_count(batch_size: int, fraction: float = _FRACTION) -> int:
    """How many samples of a batch are not mixed.

    Args:
        batch_size: the number of samples.
        fraction: of the batch that is mixed, rounded to whole samples.
    """
    return batch_size - round(fraction * batch_size)


def mixup(
    images: Tensor, labels: Tensor, source: Source = None, *, fraction: float = _FRACTION
) -> Mixture:
    """share · x + (1 − share) · x', with a share uniform in [0, 1).

    Args:
        images: B x C x H x W, uint8, or floating point in [0, 1].
        labels: B.
        source: the random numbers: one stream per sample, a generator, or None for torch's global
            generator.
        fraction: of the batch that is mixed, rounded to whole samples.
    """
    draw, partner, mixed, unmixed = _pairs(images, labels, source, fraction)
    share = torch.where(mixed, draw[:, 2], 1.0)
    weight = share[:, None, None, None]
    blended = weight * images + (1 - weight) * images[partner]
    blended = blended if images.is_floating_point() else blended.round()
    return Mixture(blended.to(images.dtype), labels[partner], share, unmixed)


def cutmix(
    images: Tensor, labels: Tensor, source: Source = None, *, fraction: float = _FRACTION
) -> Mixture:
    """x with a rectangle of x', at the same place.

    The sides of the rectangle are √s times those of the image, with s uniform in [0, 1); its centre
    is any pixel, and it is cut off at the edges. The share is that of the remaining pixels.

    Args:
        images, labels, source, fraction: as for `mixup`.
    """
    draw, partner, mixed, unmixed = _pairs(images, labels, source, fraction)
    height, width = images.shape[2:]
    side = draw[:, 2:3].sqrt() / 2 * mixed[:, None]
    rows, columns = (side * height).floor(), (side * width).floor()  # half of each side
    row, column = (draw[:, 3:4] * height).floor(), (draw[:, 4:] * width).floor()
    cut = rectangle(images, row - rows, column - columns, row + rows, column + columns)
    share = 1 - cut.float().mean((1, 2, 3))
    return Mixture(torch.where(cut, images[partner], images), labels[partner], share, unmixed)


def _pairs(
    images: Tensor, labels: Tensor, source: Source, fraction: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uniform numbers, B x 5, the first two of which are used here; indices of the partners;
    whether a sample is mixed; indices of those that are not."""
    check_range("fraction", fraction)
    check_images(images)
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a torch.Tensor, got {type(labels).__name__}")
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(
            "images must be B x C x H x W and labels B, "
            f"got {tuple(images.shape)} and {tuple(labels.shape)}"
        )
    if images.is_floating_point():
        check_range_on_cpu(images)
    draw = uniforms(images, 5, source)
    partner = partners(draw[:, 0])
    mixed_count = len(images) - unmixed_count(len(images), fraction)
    unmixed = _ascending(draw[:, 1])[mixed_count:]
    mixed = torch.ones_like(partner, dtype=torch.bool).scatter(0, unmixed, False)
    return draw, partner, mixed, unmixed


def partners(position: Tensor) -> Tensor:
    """The index of each sample's partner: the next one, if samples are arranged in a circle.

    Args:
        position: one number per sample, by which they are arranged.

    >>> partners(torch.tensor([0.5, 0.1, 0.9]))  # 1, 0, 2, and back to 1
    tensor([2, 0, 1])
    """
    circle = _ascending(position)
    return torch.zeros_like(circle).scatter(0, circle, circle.roll(-1))


def _ascending(values: Tensor) -> Tensor:
    """`values.argsort(stable=True)` by comparing all pairs: torch 2.11 cannot compile the sort."""
    index = torch.arange(len(values), device=values.device)
    before = (values[None] < values[:, None]) | (
        (values[None] == values[:, None]) & (index[None] < index[:, None])
    )
    return torch.zeros_like(index).scatter(0, before.sum(1), index)
