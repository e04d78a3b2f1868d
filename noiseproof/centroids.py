"""Class centroids of a batch: which classes are there, their means, and their running means.

For the classes C_B of a batch, with n_c samples each,

    current   m_c = (1 / n_c) Σ_{x in class c} q(x)                        with gradient
    momentum  m_c = γ · previous + (1 − γ) · current                       previous has no gradient

and the first time a class is seen its momentum centroid is the current one.

Everything has a static shape and reads nothing back from the device: a batch has S = min(B, C)
`slots`, one a class (C ≤ B) or one a sample (C > B, where the first sample of a class holds its
slot), and slots that stand for no class are masked.

Over many ranks the per-class sums and counts are summed over ranks, with gradient, so that every
rank sees the centroids of the global batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Slots", "assign", "blend", "class_means", "held", "of_samples", "snapshot", "store"]

_DENSE_ON_RANKS = 1024  # ranks share a slot a class up to here, and gather their labels beyond


class Slots(NamedTuple):
    """Where the classes of a batch are kept: S slots."""

    classes: Tensor  # S, the class of each slot
    of: Tensor  # B, the slot of each sample
    size: Tensor  # S, samples of the slot over all ranks, in the working dtype; 1 where it has none
    present: Tensor  # S, True for one slot of each class in the (global) batch
    dense: bool  # slot c is class c
    member: Tensor | None  # B x S, 1 where the sample belongs to the slot; None on a CPU


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, whose backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def over_ranks(value: Tensor) -> Tensor:
    """Σ over ranks of `value`, differentiable; the value itself in one process."""
    return _SumOverRanks.apply(value) if ranks() > 1 else value  # pyright: ignore[reportReturnType]


def assign(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Slots:
    """The slots of a batch. On many ranks beyond 1,024 classes, batches must be of equal size."""
    world = ranks()
    everyone = labels  # the labels that slots are made for
    if world > 1 and num_classes > _DENSE_ON_RANKS:
        everyone = labels.new_empty(world * len(labels))
        dist.all_gather_into_tensor(everyone, labels)
    dense = num_classes <= (_DENSE_ON_RANKS if world > 1 else len(labels)) or len(everyone) == 0
    if dense:
        classes, of = torch.arange(num_classes, device=labels.device), labels
        size = over_ranks(_sizes(labels, num_classes, dtype))
    else:  # the first sample of a class holds its slot
        classes, of = everyone, (everyone[:, None] == labels).to(torch.uint8).argmax(dim=0)
        first = (everyone[:, None] == everyone).to(torch.uint8).argmax(dim=0)
        size = _sizes(first, len(everyone), dtype)
    member = None
    if labels.device.type != "cpu":
        member = (of[:, None] == torch.arange(len(classes), device=labels.device)).to(dtype)
    return Slots(classes, of, size.clamp(min=1), size > 0, dense, member)


def _sizes(slot: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """How often each slot occurs. Sums of ones are exact, in whatever order they are made."""
    ones = torch.ones(len(slot), dtype=dtype, device=slot.device)
    return torch.zeros(count, dtype=dtype, device=slot.device).index_add(0, slot, ones)


# Sums into slots, and each sample's slot's value, are the transposes of one another. A CPU adds row
# by row, several times faster than a product with a matrix of 0 and 1; on a GPU the product is fast
# and gives the same bits every time, which adding in parallel would not.


def class_means(features: Tensor, slots: Slots) -> Tensor:
    """The current centroid of each slot, S x D; 0 where no class is present."""
    if slots.member is None:
        empty = features.new_zeros(len(slots.classes), features.shape[1])
        sums = empty.index_add(0, slots.of, features)
    else:
        sums = slots.member.T @ features
    return over_ranks(sums) / slots.size[:, None]


def of_samples(values: Tensor, slots: Slots) -> Tensor:
    """The row of `values`, S x D, that belongs to each sample's slot: B x D."""
    return values.index_select(0, slots.of) if slots.member is None else slots.member @ values


def blend(current: Tensor, previous: Tensor, seen: Tensor, momentum: float) -> Tensor:
    """γ · previous + (1 − γ) · current where the class was seen before, else current."""
    return current.lerp(previous, (momentum * seen.to(current.dtype))[:, None])


def store(centroids: Tensor, seen: Tensor, slots: Slots, values: Tensor) -> None:
    """Writes the centroids of the present classes into the buffers, in place.

    Slots that stand for no class write back what their class has, so that no index is needed.
    """
    with torch.no_grad():
        values = values.to(centroids.dtype)
        if slots.dense:
            centroids.copy_(torch.where(slots.present[:, None], values, centroids))
            seen.logical_or_(slots.present)
        else:
            same = slots.classes[:, None] == slots.classes
            holder = (same & slots.present).to(torch.uint8).argmax(dim=1)
            centroids.index_copy_(0, slots.classes, values[holder])
            seen.index_fill_(0, slots.classes, True)


def held(buffer: Tensor, slots: Slots) -> Tensor:
    """What `buffer`, a row a class, holds for each slot; later updates do not reach it."""
    kept = snapshot(buffer)
    return kept if slots.dense else kept[slots.classes]


@torch.library.custom_op("noiseproof::snapshot", mutates_args=())
def _opaque_snapshot(buffer: Tensor) -> Tensor:
    return buffer.clone()


@_opaque_snapshot.register_fake
def _(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)


def snapshot(buffer: Tensor) -> Tensor:
    """A copy that a later in-place update of `buffer` cannot reach.

    A compiled backward may recompute what it needs from a buffer after the forward has already
    updated it: the loss is then right and its gradient silently wrong. The compiler cannot look
    into a custom operator, so it has to keep this copy.
    """
    return _opaque_snapshot(buffer) if torch.compiler.is_compiling() else buffer.clone()
