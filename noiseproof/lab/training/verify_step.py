"""Whether a fast training step does what a plain one does.

Compilers and tuned kernels are fast, and now and then wrong: a step that was right on a whole GPU
gave NaN on half of its multiprocessors, where kernels left images out. So the first step is
taken in both ways, and these must agree in the loss, in the gradient of every weight and in every
buffer; a loss alone can hide wrong gradients. In half precision gradients differ by rounding alone:
by a quarter in the first layers of a network with batch-norm. How much, is measured: a third step,
plain like the first, has its images in other places, and a fourth is taken in full precision. A
fast step is right where it is as near to the plain one as that is to itself in another order, or as
near to full precision as that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Taken", "disagreement", "taken"]

# Allowed besides twice the rounding, as a share of each tensor. A gradient that is lost differs by
# 1, one with the wrong sign by 2.
_EXACT, _ROUNDED = 1e-5, 0.1
_NEARLY = 1.25  # as near to full precision
_NOISE, _MOST = 0.5, 10.0  # what changes by half when images change places is noise; it may grow so
_TINY = 1e-4  # of the mean size of all: below this a tensor is noise, too


class Taken(NamedTuple):
    """What a step came to."""

    loss: float
    tensors: dict[str, Tensor]  # gradients and, after the step, buffers, by name
    finite: bool  # these, and all weights afterwards


def taken(loss: Tensor, step: nn.Module) -> Taken:
    """The step that was just taken; gradients that are not there count as zero."""
    weights = {n: p for n, p in step.named_parameters() if p.requires_grad}
    tensors = {
        f"the gradient of {n}": torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for n, p in weights.items()
    }
    tensors |= {n: b.detach().clone() for n, b in step.named_buffers() if b.is_floating_point()}
    finite = torch.stack([t.isfinite().all() for t in (*tensors.values(), *step.parameters())])
    return Taken(float(loss), tensors, bool(finite.all()))


def disagreement(fast: Taken, plain: Taken, again: Taken, full: Taken) -> str | None:
    """What is wrong with `fast`, or None.

    `again` is the plain step with its images in another order, `full` the one in full precision;
    both have another seed, so that dropout counts as rounding does. A shift in front of a
    convolution and a batch-norm has no gradient but rounding, and says nothing. Where a plain step
    itself is not finite, nothing can be said at all.
    """
    if not all(s.finite and math.isfinite(s.loss) for s in (plain, again, full)):
        return None
    if not (fast.finite and math.isfinite(fast.loss)):
        return "it gives values that are not finite where a plain step does not"
    exact = all(t.dtype == torch.float64 for t in plain.tensors.values())
    base = _EXACT if exact else _ROUNDED
    spread = max(abs(other.loss - plain.loss) for other in (again, full))
    if not abs(fast.loss - plain.loss) <= base * max(abs(plain.loss), 1e-3) + 2 * spread:
        return f"its loss is {fast.loss:.4g}, a plain step's {plain.loss:.4g}"
    for name, size in _sizes(plain.tensors).items():
        f, p, a, x = (step.tensors[name].double() for step in (fast, plain, again, full))
        pairs = ((f, p), (a, p), (f, x), (p, x))
        apart, luck, error, usual = (float((one - two).norm()) / size for one, two in pairs)
        near = apart <= (base + 2 * luck if luck < _NOISE else _MOST)
        if not (near or error <= base + _NEARLY * usual):
            return (
                f"{name} differs by {apart:.0%} from a plain step's, "
                f"which changes by {luck:.0%} with the order of the images"
            )
    return None


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The size of each tensor, or what is tiny beside the others."""
    sizes = {name: float(t.double().norm()) for name, t in tensors.items()}
    least = max(_TINY * sum(sizes.values()) / max(1, len(sizes)), 1e-30)
    return {name: max(size, least) for name, size in sizes.items()}
