"""Convolutions that compute their two gradients concurrently on a GPU.

In the backward pass, the gradient of a convolution's input and that of its weights do not depend on
each other. With small batches neither fills the GPU, so they run on two streams, which join before
anything else happens: to the rest of the program nothing has changed, and a CUDA graph records the
fork and the join. `benchmarks/overlap.py` measures what that gains.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["OverlappedConv2d", "overlap_gradients"]


@torch.library.custom_op(
    "noiseproof::convolution_gradients",
    mutates_args=(),
    tags=(torch.Tag.needs_fixed_stride_order,),
)
def convolution_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight, from that of the output."""

    def gradients(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, mask
        )

    if x.device.type == "cuda":
        main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            weight_grad = gradients([False, True, False])[1]
        input_grad = gradients([True, False, False])[0]
        main.wait_stream(side)
    else:
        input_grad, weight_grad, _ = gradients([True, True, False])
    return _with_strides_of(x, input_grad), _with_strides_of(weight, weight_grad)


@convolution_gradients.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _with_strides_of(like: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides that the fake operator promises to the compiler."""
    same = value.stride() == like.stride()
    return value if same else torch.empty_like(like).copy_(value)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        sizes = list(ctx.stride), list(ctx.padding)
        return (*convolution_gradients(grad, x, weight, *sizes), None, None)


class OverlappedConv2d(nn.Conv2d):
    """A Conv2d that computes the gradients of its input and its weight concurrently."""

    def forward(self, input: Tensor) -> Tensor:
        if not (input.requires_grad and self.weight.requires_grad):
            return super().forward(input)
        weight, device = self.weight, input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
        return _Convolution.apply(input, weight, self.stride, self.padding)  # pyright: ignore[reportReturnType]


def overlap_gradients(model: nn.Module) -> int:
    """Makes the plain convolutions of `model` (no bias, groups or dilation) overlap their
    gradients, in place; returns how many there are."""
    plain = [
        m
        for m in model.modules()
        if type(m) is nn.Conv2d
        and m.bias is None
        and m.groups == 1
        and m.dilation == (1, 1)
        and m.padding_mode == "zeros"
        and not isinstance(m.padding, str)
    ]
    for m in plain:
        m.__class__ = OverlappedConv2d
    return len(plain)
