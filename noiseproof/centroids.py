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

__all__ = ["Slots", "assign", "blend", "class_means", "snapshot", "store"]

_DENSE_ON_RANKS = 1024  # ranks share a slot a class up to here, and gather their labels beyond


class Slots(NamedTuple):
    """Where the classes of a batch are kept: S slots."""

    classes: Tensor  # S, the class of each slot
    member: Tensor  # S x B, 1 where the sample belongs to the slot, in the working dtype
    size: Tensor  # S, samples of the slot's class, over all ranks
    present: Tensor  # S, True for one slot of each class in the (global) batch
    dense: bool  # slot c is class c


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
        classes = torch.arange(num_classes, device=labels.device)
        member = (classes[:, None] == labels).to(dtype)
        size = over_ranks(member.sum(1))
        return Slots(classes, member, size, size > 0, dense)
    first = (everyone[:, None] == everyone).to(torch.uint8).argmax(dim=1)  # first of the same class
    present = first == torch.arange(len(everyone), device=labels.device)
    same = everyone[:, None] == labels
    size = (everyone[:, None] == everyone).to(dtype).sum(1)
    return Slots(everyone, (same & present[:, None]).to(dtype), size, present, dense)


def class_means(features: Tensor, slots: Slots) -> Tensor:
    """The current centroid of each slot, S x D; 0 where no class is present."""
    sums = over_ranks(slots.member @ features)
    return sums / slots.size.clamp(min=1)[:, None]


def blend(current: Tensor, previous: Tensor, seen: Tensor, momentum: float) -> Tensor:
    """γ · previous + (1 − γ) · current where the class was seen before, else current."""
    return torch.where(seen[:, None], momentum * previous + (1 - momentum) * current, current)


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
