"""Linear layers whose forward product takes W turned over, for ARM processors.

For x Wᵀ with W as it lies in memory torch calls another library there, which takes several times as
long for small matrices and starts threads of its own, however many torch was given. A copy of a few
thousand weights costs less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, of x: B x D, W: C x D and b: C."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.T.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            grad @ weight if to_x else None,
            grad.T @ x if to_weight else None,
            grad.sum(0) if to_bias else None,
        )


class ProductLinear(nn.Linear):
    """Linear, computed as above while gradients are wanted."""

    def forward(self, input: Tensor) -> Tensor:
        mixed = torch.is_autocast_enabled("cpu")  # casts inputs, which the products leave alone
        if mixed or not torch.is_grad_enabled() or input.ndim != 2:
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]
