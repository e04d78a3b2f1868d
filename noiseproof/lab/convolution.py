"""3 x 3 convolutions of small images as matrix products, for ARM processors.

There torch's own convolution runs its backward pass at a fraction of the speed of a matrix product.
Here an image becomes a row of 9 C numbers for each pixel (its neighbourhood), and forward and
backward are one product each: the same sums in another order. On other processors oneDNN makes code
for the very shape and is faster, so nothing is changed there.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LARGE = 32  # pixels a side above which the neighbourhoods take more memory than they are worth


def _neighbourhoods(x: Tensor, stride: int) -> Tensor:
    """B x H x W x C -> (B H' W') x 9 C: the 3 x 3 pixels around every `stride`-th, 0 outside."""
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    windows = padded.unfold(1, 3, stride).unfold(2, 3, stride)  # B x H' x W' x C x 3 x 3
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[3])


class _Convolution(torch.autograd.Function):
    """Of x, B x C x H x W, with weight O x C x 3 x 3, padding 1; the result is channels-last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        batch, _, height, width = x.shape
        rows = _neighbourhoods(x.permute(0, 2, 3, 1), stride)
        matrix = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)  # O x 9 C
        ctx.save_for_backward(rows, weight)
        ctx.stride, ctx.shape = stride, x.shape
        high, wide = (height - 1) // stride + 1, (width - 1) // stride + 1
        return (rows @ matrix.T).view(batch, high, wide, -1).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        _, channels, height, width = ctx.shape
        grad = grads[0].permute(0, 2, 3, 1).contiguous()  # B x H' x W' x O
        out = grad.shape[3]
        to_weight = to_x = None
        if ctx.needs_input_grad[1]:
            matrix = grad.view(-1, out).T @ rows
            to_weight = matrix.view(out, 3, 3, channels).permute(0, 3, 1, 2).contiguous()
        if ctx.needs_input_grad[0]:
            to_x = _to_input(grad, weight, ctx.stride, height, width).permute(0, 3, 1, 2)
        return to_x, to_weight, None


def _to_input(grad: Tensor, weight: Tensor, stride: int, height: int, width: int) -> Tensor:
    """The gradient of the input, B x H x W x C, from that of the output, B x H' x W' x O."""
    batch, high, wide, out = grad.shape
    if stride == 1:  # a convolution with the kernel turned round
        turned = weight.flip(2, 3).permute(2, 3, 0, 1).reshape(9 * out, -1)
        return (_neighbourhoods(grad, 1) @ turned).view(batch, height, width, -1)
    matrix = weight.permute(0, 2, 3, 1).reshape(out, -1)
    shares = (grad.view(-1, out) @ matrix).view(batch, high, wide, 3, 3, -1)
    padded = grad.new_zeros(batch, height + 2, width + 2, weight.shape[1])
    down, right = stride * (high - 1) + 1, stride * (wide - 1) + 1
    for i in range(3):
        for j in range(3):
            padded[:, i : i + down : stride, j : j + right : stride] += shares[:, :, :, i, j]
    return padded[:, 1:-1, 1:-1]


class ProductConv2d(nn.Conv2d):
    """Conv2d, 3 x 3 with padding 1, computed as above while gradients are wanted."""

    def forward(self, input: Tensor) -> Tensor:
        mixed = torch.is_autocast_enabled("cpu")  # casts inputs, which the products leave alone
        if mixed or not torch.is_grad_enabled() or max(input.shape[2:]) > _LARGE:
            return super().forward(input)
        return _Convolution.apply(input, self.weight, self.stride[0])  # pyright: ignore[reportReturnType]


def use_products(model: nn.Module) -> int:
    """Lets the convolutions of `model` that can be matrix products be so, on ARM; how many were."""
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return 0
    chosen = [m for m in model.modules() if type(m) is nn.Conv2d and _fits(m)]
    for m in chosen:
        m.__class__ = ProductConv2d
    return len(chosen)


def _fits(m: nn.Conv2d) -> bool:
    plain = (m.kernel_size, m.padding, m.dilation, m.groups) == ((3, 3), (1, 1), (1, 1), 1)
    square = m.stride[0] == m.stride[1] and m.padding_mode == "zeros"
    return plain and square and m.bias is None
