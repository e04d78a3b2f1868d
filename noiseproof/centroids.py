"""Class centroids of a batch: which classes are present, their means, and their running means.

For the classes C_B of a batch, with n_c samples each,

    current   m_c = (1 / n_c) Σ_{x in class c} q(x)                        with gradient
    momentum  m_c = γ · previous + (1 − γ) · current                       previous has no gradient

and the first time a class is seen its momentum centroid is the current one.

All shapes are static and nothing synchronises with the device: a batch has S = min(B, C) slots, one
per class (C ≤ B) or one per sample (C > B, where the first sample of a class holds its slot), and
unused slots are masked.

In distributed training, per-class sums and counts are summed over ranks, with gradient, so that
every rank uses the centroids of the global batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Slots", "assign", "blend", "class_means", "of_samples", "rows", "snapshot", "store"]

_DENSE_ON_RANKS = 1024  # on several ranks, a slot per class up to here; beyond, labels are gathered


class Slots(NamedTuple):
    """The S slots that hold the classes of a batch."""

    classes: Tensor  # S, the class of each slot
    of: Tensor  # B, the slot of each sample
    size: Tensor  # S, samples in the slot over all ranks, as floats; 1 for an empty slot
    present: Tensor  # S, True for one slot per class of the (global) batch
    dense: bool  # whether slot c is class c
    member: Tensor | None  # B x S, 1 where the sample belongs to the slot; None on a CPU


def ranks() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; the backward pass sums the gradients of all ranks."""

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
    """Σ over ranks of `value`, differentiable; `value` itself in a single process."""
    return _SumOverRanks.apply(value) if ranks() > 1 else value  # pyright: ignore[reportReturnType]


def assign(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Slots:
    """The slots of a batch.

    Args:
        labels: B class indices; above 1,024 classes, B must be the same on every rank.
        num_classes: C.
        dtype: of `Slots.size`.
    """
    world = ranks()
    all_labels = labels  # those of all ranks, once they are gathered
    if world > 1 and num_classes > _DENSE_ON_RANKS:
        all_labels = labels.new_empty(world * len(labels))
        dist.all_gather_into_tensor(all_labels, labels)
    dense = num_classes <= (_DENSE_ON_RANKS if world > 1 else len(labels)) or len(all_labels) == 0
    if dense:
        classes, of = torch.arange(num_classes, device=labels.device), labels
        size = over_ranks(_sizes(labels, num_classes, dtype))
    else:  # the first sample of a class holds its slot
        classes, of = all_labels, (all_labels[:, None] == labels).to(torch.uint8).argmax(dim=0)
        first = (all_labels[:, None] == all_labels).to(torch.uint8).argmax(dim=0)
        size = _sizes(first, len(all_labels), dtype)
    member = None
    if labels.device.type != "cpu":
        member = of[:, None] == torch.arange(len(classes), device=labels.device)
        member = member.to(torch.float64 if labels.is_cuda else dtype)
    return Slots(classes, of, size.clamp(min=1), size > 0, dense, member)


def _sizes(slot: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """How often each slot occurs; sums of ones are exact in any order."""
    ones = torch.ones(len(slot), dtype=dtype, device=slot.device)
    return torch.zeros(count, dtype=dtype, device=slot.device).index_add(0, slot, ones)


# `class_means` and `of_samples` are transposes of each other. Adding row by row is several times
# faster on a CPU than a product with a 0/1 matrix; on a GPU the product is fast and, unlike
# parallel additions, deterministic. On CUDA it is in float64, because torch may be set to round the
# factors of a float32 product to TF32's 11 bits.


def class_means(features: Tensor, slots: Slots) -> Tensor:
    """The current centroid of each slot, S x D; 0 for unused slots."""
    if slots.member is None:
        empty = features.new_zeros(len(slots.classes), features.shape[1])
        sums = empty.index_add(0, slots.of, features)
    else:
        sums = (slots.member.T @ features.to(slots.member.dtype)).to(features.dtype)
    return over_ranks(sums) / slots.size[:, None]


def of_samples(values: Tensor, slots: Slots) -> Tensor:
    """The row of `values` (S x D) of each sample's slot: B x D."""
    if slots.member is None:
        return values.index_select(0, slots.of)
    return (slots.member @ values.to(slots.member.dtype)).to(values.dtype)


def blend(current: Tensor, previous: Tensor, seen: Tensor, momentum: float) -> Tensor:
    """γ · previous + (1 − γ) · current where the class was seen before, else current."""
    return current.lerp(previous, (momentum * seen.to(current.dtype))[:, None])


def store(centroids: Tensor, seen: Tensor, slots: Slots, values: Tensor) -> None:
    """Writes the centroids of the present classes into the buffers, in place; marks them in `seen`.

    A class whose new centroid is not finite keeps the old one: gradient scaling skips such a step,
    but does not restore buffers. Unused slots write back what is stored for their class, which
    avoids dynamic shapes.
    """
    with torch.no_grad():
        values = values.to(centroids.dtype)
        usable = slots.present & values.isfinite().all(dim=1)
        if slots.dense:
            centroids.copy_(torch.where(usable[:, None], values, centroids))
            seen.copy_(torch.where(usable, 1.0, seen))
        else:
            same = slots.classes[:, None] == slots.classes
            holder = (same & slots.present).to(torch.uint8).argmax(dim=1)
            old, usable = centroids[slots.classes], usable[holder]
            new = torch.where(usable[:, None], values[holder], old)
            centroids.index_copy_(0, slots.classes, new)
            seen.index_copy_(0, slots.classes, torch.where(usable, 1.0, seen[slots.classes]))


def rows(buffer: Tensor, slots: Slots) -> Tensor:
    """The row of `buffer`, which has one per class, for each slot."""
    return buffer if slots.dense else buffer[slots.classes]


_RECOMPUTED = (
    "the running centroids or the ramp of a loss were updated in the forward pass, and the backward"
    " pass now computes the loss again from the new values, so its gradient would be wrong."
    " Keep the loss outside of torch.utils.checkpoint (checkpoint the network alone);"
    " under torch.compile, leave torch._functorch.config.activation_memory_budget at 1"
)


def _copy(buffer: Tensor) -> Tensor:
    if torch._C._current_graph_task_id() != -1:  # this runs inside a backward pass
        raise RuntimeError(_RECOMPUTED)
    return buffer.clone()


_opaque_copy = torch.library.custom_op("noiseproof::snapshot", _copy, mutates_args=())
_opaque_copy.register_fake(torch.empty_like)


def snapshot(buffer: Tensor) -> Tensor:
    """A copy of `buffer` that survives an in-place update in the same forward pass.

    A compiled backward pass may recompute values from a buffer that the forward pass has updated in
    the meantime: the loss is then right and its gradient silently wrong. A custom operator is
    opaque to the compiler, which therefore keeps this copy. Where it is recomputed all the same
    (activation checkpointing, a memory budget of the compiler), RuntimeError is raised.
    """
    return _opaque_copy(buffer) if torch.compiler.is_compiling() else _copy(buffer)
