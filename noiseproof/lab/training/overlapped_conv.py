"""Convolutions whose two gradients are computed beside each other on a GPU.

Going backward, a convolution has two jobs that do not depend on each other: the gradient of its
input and that of its weights. With small batches neither fills the GPU, so they run on two streams,
which meet again before anything else happens: to the rest of the program nothing has changed, and a
CUDA graph records the fork and the join.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op(
    "noiseproof::convolution_gradients",
    mutates_args=(),
    tags=(torch.Tag.needs_fixed_stride_order,),
)
def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    """Those of the input and of the weight, from that of the output."""

    def one(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, mask
        )

    if x.device.type == "cuda":
        main, side = torch.cuda.current_stream(x.device), _side(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            of_weight = one([False, True, False])[1]
        of_input = one([True, False, False])[0]
        main.wait_stream(side)
    else:
        of_input, of_weight, _ = one([True, True, False])
    return _like(of_input, x), _like(of_weight, weight)


@gradients.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@cache
def _side(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _like(value: Tensor, model: Tensor) -> Tensor:
    """With the strides that were promised."""
    same = value.stride() == model.stride()
    return value if same else torch.empty_like(model).copy_(value)


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
        return (*gradients(grad, x, weight, list(ctx.stride), list(ctx.padding)), None, None)


class OverlappedConv2d(nn.Conv2d):
    """A Conv2d that computes the gradients of its input and its weight side by side."""

    def forward(self, input: Tensor) -> Tensor:
        if not (input.requires_grad and self.weight.requires_grad):
            return super().forward(input)
        weight, kind = self.weight, input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
        return _Convolution.apply(input, weight, self.stride, self.padding)  # pyright: ignore[reportReturnType]


def overlap(model: nn.Module) -> int:
    """Lets the plain convolutions of `model` work so, without a bias, groups or dilation; returns
    how many there are."""
    found = [
        m
        for m in model.modules()
        if type(m) is nn.Conv2d
        and m.bias is None
        and m.groups == 1
        and m.dilation == (1, 1)
        and m.padding_mode == "zeros"
        and not isinstance(m.padding, str)
    ]
    for m in found:
        m.__class__ = OverlappedConv2d
    return len(found)
