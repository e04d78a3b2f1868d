"""3 x 3 convolutions of small images as matrix products, for ARM processors.

There torch's own convolution runs its backward pass at a fraction of the speed of a matrix product.
Here an image becomes a row of 9 C numbers for each pixel (its neighbourhood), and forward and
backward are one product each: the same sums in another order. Where the stride is 1 and channels
are many, torch's forward kernel is the faster one, and the gradient of the input is a forward
convolution too. On other processors oneDNN makes code for the very shape and is faster, so nothing
is changed there.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.lab.training.linear import ProductLinear

_LARGE = 32  # pixels a side above which the neighbourhoods take more memory than they are worth
_MANY = 16  # channels from which torch's forward kernel pays


def _neighbourhoods(x: Tensor, stride: int) -> Tensor:
    """B x C x H x W -> (B H' W') x 9 C: the 3 x 3 pixels around every `stride`-th, 0 outside."""
    channels = x.shape[1]
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    windows = padded.unfold(1, 3, stride).unfold(2, 3, stride)  # B x H' x W' x C x 3 x 3
    if channels == 1:  # column by column memory is copied in longer runs
        return windows.permute(4, 5, 3, 0, 1, 2).reshape(9, -1).T
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * channels)


class _Convolution(torch.autograd.Function):
    """Of x, B x C x H x W, with weight O x C x 3 x 3, padding 1; the result is channels-last, or
    as x is where torch's kernel makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        batch, channels, height, width = x.shape
        ctx.stride, ctx.shape = stride, x.shape
        if stride == 1 and channels >= _MANY:
            ctx.save_for_backward(x, weight)
            return F.conv2d(x, weight, padding=1)
        rows = _neighbourhoods(x, stride)
        ctx.save_for_backward(rows, weight)
        matrix = weight.permute(2, 3, 1, 0).reshape(9 * channels, -1)  # 9 C x O
        high, wide = (height - 1) // stride + 1, (width - 1) // stride + 1
        return (rows @ matrix).view(batch, high, wide, -1).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        kept, weight = ctx.saved_tensors  # the input itself, or its neighbourhoods
        out, channels = weight.shape[:2]
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        to_weight = to_x = None
        if ctx.needs_input_grad[1]:
            rows = kept if kept.ndim == 2 else _neighbourhoods(kept, 1)
            matrix = rows.T @ grad.permute(0, 2, 3, 1).reshape(-1, out)  # 9 C x O
            to_weight = matrix.view(3, 3, channels, out).permute(3, 2, 0, 1).contiguous()
        if ctx.needs_input_grad[0]:
            if ctx.stride == 1:  # a convolution with the kernel turned round
                to_x = F.conv2d(grad, weight.flip(2, 3).transpose(0, 1), padding=1)
            else:
                to_x = _to_input(grad, weight, ctx.stride, ctx.shape)
        return to_x, to_weight, None


def _to_input(grad: Tensor, weight: Tensor, stride: int, shape: torch.Size) -> Tensor:
    """The gradient of the input, of `shape`: the sum of what it gave to each neighbourhood."""
    batch, out, high, wide = grad.shape
    _, channels, height, width = shape
    matrix = weight.permute(0, 2, 3, 1).reshape(out, -1)  # O x 9 C
    shares = (grad.permute(0, 2, 3, 1).reshape(-1, out) @ matrix).view(batch, high, wide, 3, 3, -1)
    if stride == 2 and (height, width) == (2 * high, 2 * wide):
        whole = grad.new_empty(batch, high, 2, wide, 2, channels)
        whole.copy_(shares[:, :, :, 1:, 1:].transpose(2, 3))  # these meet every pixel once
        whole[:, :-1, 1] += shares[:, 1:, :, 0, 1:]
        whole[:, :, :, :-1, 1] += shares[:, :, 1:, 1:, 0].transpose(2, 3)
        whole[:, :-1, 1, :-1, 1] += shares[:, 1:, 1:, 0, 0]
        return whole.view(batch, height, width, channels).permute(0, 3, 1, 2)
    padded = grad.new_zeros(batch, height + 2, width + 2, channels)
    down, right = stride * (high - 1) + 1, stride * (wide - 1) + 1
    for i in range(3):
        for j in range(3):
            padded[:, i : i + down : stride, j : j + right : stride] += shares[:, :, :, i, j]
    return padded[:, 1:-1, 1:-1].permute(0, 3, 1, 2)


class ProductConv2d(nn.Conv2d):
    """Conv2d, 3 x 3 with padding 1, computed as above while gradients are wanted."""

    def forward(self, input: Tensor) -> Tensor:
        mixed = torch.is_autocast_enabled("cpu")  # casts inputs, which the products leave alone
        if mixed or not torch.is_grad_enabled() or max(input.shape[2:]) > _LARGE:
            return super().forward(input)
        return _Convolution.apply(input, self.weight, self.stride[0])  # pyright: ignore[reportReturnType]


def use_products(model: nn.Module) -> int:
    """Lets the convolutions and linear layers of `model` that can be plain matrix products be so,
    on ARM; how many were."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return 0
    convolutions = [m for m in model.modules() if type(m) is nn.Conv2d and _fits(m)]
    linear = [m for m in model.modules() if type(m) is nn.Linear and m.bias is not None]
    for m in convolutions:
        m.__class__ = ProductConv2d
    for m in linear:
        m.__class__ = ProductLinear
    return len(convolutions) + len(linear)


def _fits(m: nn.Conv2d) -> bool:
    plain = (m.kernel_size, m.padding, m.dilation, m.groups) == ((3, 3), (1, 1), (1, 1), 1)
    square = m.stride[0] == m.stride[1] and m.padding_mode == "zeros"
    return plain and square and m.bias is None
