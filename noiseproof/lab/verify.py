"""Whether a fast training step does what a plain one does.

Compilers and tuned kernels are fast, and now and then wrong: a step that was right on a whole GPU
gave NaN on half of its multiprocessors, where kernels left images out. So the first step is
taken in both ways, and these must agree in the loss, in the gradient of every weight and in every
buffer; a loss alone can hide wrong gradients. In half precision gradients differ by rounding alone:
by a quarter in the first layers of a network with batch-norm. How much, shows a third step, plain
like the first, whose images have changed places; what is allowed follows it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Taken", "deterministic", "disagreement", "taken"]

# Allowed besides twice the rounding, as a share of each tensor. A gradient that is lost differs by
# 1, one with the wrong sign by 2.
_EXACT, _ROUNDED = 1e-5, 0.1
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


def disagreement(fast: Taken, plain: Taken, again: Taken) -> str | None:
    """What is wrong with `fast`, or None.

    `again` is the plain step with its images in another order and with another seed: it shows how
    much rounding, dropout and the like may change. A shift in front of a convolution and a
    batch-norm has no gradient but rounding, and says nothing. Where the plain step itself is not
    finite, nothing can be said at all.
    """
    if not (plain.finite and math.isfinite(plain.loss) and again.finite):
        return None
    if not (fast.finite and math.isfinite(fast.loss)):
        return "it gives values that are not finite where a plain step does not"
    exact = all(t.dtype == torch.float64 for t in plain.tensors.values())
    base = _EXACT if exact else _ROUNDED
    size = max(abs(plain.loss), 1e-3)
    apart, luck = abs(fast.loss - plain.loss) / size, abs(again.loss - plain.loss) / size
    if not apart <= base + 2 * luck:
        return f"its loss is {fast.loss:.4g}, a plain step's {plain.loss:.4g}"
    shares, lucks = _shares(fast.tensors, plain.tensors), _shares(again.tensors, plain.tensors)
    allowed = {n: base + 2 * luck if luck < _NOISE else _MOST for n, luck in lucks.items()}
    worst = max(shares, key=lambda n: shares[n] / allowed[n], default="")
    if worst and not shares[worst] <= allowed[worst]:
        return (
            f"{worst} differs by {shares[worst]:.0%} from a plain step's, "
            f"which changes by {lucks[worst]:.0%} with the order of the images"
        )
    return None


def _shares(some: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor is from the plain one, as a share of its size."""
    names = list(plain)
    if not names:
        return {}
    apart = torch.stack([(some[n].double() - plain[n].double()).norm() for n in names])
    sizes = torch.stack([plain[n].double().norm() for n in names])
    shares = apart / sizes.clamp(min=max(_TINY * float(sizes.mean()), 1e-30))
    return dict(zip(names, shares.tolist(), strict=True))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Convolutions by deterministic kernels."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
