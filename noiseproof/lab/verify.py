"""Whether a fast training step does what a plain one does.

Compilers and tuned kernels are fast, and now and then wrong: a step that was right on a whole GPU
gave NaN on half of its multiprocessors. So the first step is taken in both ways, and these must
agree in loss and gradients; a loss alone can hide wrong gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["TOLERANCE", "Taken", "disagreement", "taken"]

# How far apart two right steps may be, as a share of the gradient: rounding, and that a compiler
# keeps more digits between operations. A wrong term or a missing layer changes more than this.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 0.05, torch.bfloat16: 0.3, torch.float16: 0.3}


class Taken(NamedTuple):
    """What a step came to."""

    loss: float
    gradients: list[Tensor]
    finite: bool  # all weights and buffers afterwards


def taken(loss: Tensor, step: nn.Module, weights: Iterable[nn.Parameter]) -> Taken:
    """The step that was just taken; gradients that are not there count as zero."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
    floats = [t for t in (*step.parameters(), *step.buffers()) if t.is_floating_point()]
    finite = torch.stack([t.isfinite().all() for t in floats]).all()
    return Taken(float(loss), gradients, bool(finite))


def disagreement(fast: Taken, plain: Taken, another: Taken, precision: torch.dtype) -> str | None:
    """What is wrong with `fast`, or None.

    `another` is the plain step with another seed, which shows how much dropout and the like may
    change. Where the plain step itself is not finite, nothing can be said.
    """
    if not (plain.finite and math.isfinite(plain.loss)):
        return None
    if not (fast.finite and math.isfinite(fast.loss)):
        return "it gives values that are not finite where a plain step does not"
    limit = TOLERANCE[precision]
    scale = _norm(plain.gradients)
    share, luck = (_norm(s.gradients, plain.gradients) / (scale or 1.0) for s in (fast, another))
    if not share <= limit + 3 * luck:
        return f"its gradients differ by {share:.0%} from a plain step's"
    size = max(abs(plain.loss), 1e-3)
    apart, luck = (abs(s.loss - plain.loss) / size for s in (fast, another))
    if not apart <= limit + 3 * luck:
        return f"its loss is {fast.loss:.4g}, a plain step's {plain.loss:.4g}"
    return None


def _norm(a: Sequence[Tensor], b: Sequence[Tensor] | None = None) -> float:
    """The norm of all of `a`, or of what it is away from `b`."""
    parts = a if b is None else [x.double() - y.double() for x, y in zip(a, b, strict=True)]
    return float(torch.stack([x.double().square().sum() for x in parts]).sum().sqrt())
