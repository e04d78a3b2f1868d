"""Whether a fast training step computes what a plain one does.

Compilers and tuned kernels are fast, and occasionally wrong: a step that was right on a whole GPU
gave NaN on half of its multiprocessors, where kernels skipped images. So the first step is executed
both ways, and the two must agree in the loss, in the gradient of every weight and in every buffer;
the loss alone can hide wrong gradients. In half precision, gradients differ by rounding alone: by
25 % in the first layers of a network with batch-norm. How much rounding matters is measured with
two more plain steps, one with the batch permuted and one in full precision. Each gives a criterion,
and a tensor has to pass one of them:

- the fast step is as close to the plain one as the permuted step is;
- the fast step is as close to full precision as the plain one is.

Both are needed. Full precision alone rejected correct steps on an H200 (the gradient of a shift
that batch-norm removes is nothing but rounding), and the permuted step alone rejects compiled
code that rounds less often than the plain step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Tolerances relative to the norm of each tensor, in float64 and in lower precision, on top of the
# measured rounding. A lost gradient differs by 1, one with the wrong sign by 2.
_EXACT, _ROUNDED = 1e-5, 0.1
_PERMUTED_FACTOR, _PRECISE_FACTOR = 2.0, 1.25  # allowed multiples of the measured rounding
_NOISE, _NOISE_LIMIT = 0.5, 10.0  # what permuting changes by half is noise, up to 10 norms off
_TINY = 1e-4  # times the mean norm of all tensors: smaller tensors are noise too


class StepMismatch(RuntimeError):
    """A captured step does not compute what a plain one does."""


class StepResult(NamedTuple):
    """What a training step computed."""

    loss: float
    tensors: dict[str, Tensor]  # gradients and, after the step, buffers, by name
    finite: bool  # whether these, and all weights after the step, are finite


def step_result(loss: Tensor, step: nn.Module) -> StepResult:
    """The result of the step that was just executed, with its loss and the gradients, buffers and
    weights of `step`; missing gradients count as zero."""
    weights = {n: p for n, p in step.named_parameters() if p.requires_grad}
    tensors = {
        f"the gradient of {n}": torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for n, p in weights.items()
    }
    tensors |= {n: b.detach().clone() for n, b in step.named_buffers() if b.is_floating_point()}
    finite = torch.stack([t.isfinite().all() for t in (*tensors.values(), *step.parameters())])
    return StepResult(float(loss), tensors, bool(finite.all()))


def find_mismatch(
    fast: StepResult, plain: StepResult, permuted: StepResult, precise: StepResult
) -> str | None:
    """What is wrong with `fast`, or None. If a plain step is not finite, nothing is concluded.

    Args:
        fast: the step to verify.
        plain: the same step, executed plainly.
        permuted: the plain step with the batch permuted and another random seed, so that dropout
            counts as rounding.
        precise: the plain step in full precision, with that seed too.
    """
    if not all(s.finite and math.isfinite(s.loss) for s in (plain, permuted, precise)):
        return None
    if not (fast.finite and math.isfinite(fast.loss)):
        return "it gives values that are not finite where a plain step does not"
    exact = all(t.dtype == torch.float64 for t in plain.tensors.values())
    tolerance = _EXACT if exact else _ROUNDED
    spread = max(abs(other.loss - plain.loss) for other in (permuted, precise))
    if not abs(fast.loss - plain.loss) <= tolerance * max(abs(plain.loss), 1e-3) + 2 * spread:
        return f"its loss is {fast.loss:.4g}, that of a plain step {plain.loss:.4g}"
    for name, size in _sizes(plain.tensors).items():

        def distance(a: StepResult, b: StepResult, name: str = name, size: float = size) -> float:
            return float((a.tensors[name].double() - b.tensors[name].double()).norm()) / size

        apart, order = distance(fast, plain), distance(permuted, plain)
        allowed = tolerance + _PERMUTED_FACTOR * order if order < _NOISE else _NOISE_LIMIT
        error, usual_error = distance(fast, precise), distance(plain, precise)
        if not (apart <= allowed or error <= tolerance + _PRECISE_FACTOR * usual_error):
            return (
                f"{name} differs by {apart:.0%} from that of a plain step, "
                f"which changes by {order:.0%} when the batch is permuted"
            )
    return None


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each tensor, or a floor relative to the others."""
    sizes = {name: float(t.double().norm()) for name, t in tensors.items()}
    floor = max(_TINY * sum(sizes.values()) / max(1, len(sizes)), 1e-30)
    return {name: max(size, floor) for name, size in sizes.items()}
