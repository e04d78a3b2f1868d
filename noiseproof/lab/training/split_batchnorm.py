"""Batch-norm that takes its statistics part by part: two passes' meaning at one pass's cost.

The method sends the clean and the noisy batch through the network apart, so that batch-norm sees
each alone. Joined into one batch of twice the size, the network runs faster, but batch-norm would
mix them. Here each part of the batch is normalised by its own mean and variance, and the running
statistics are updated part after part, in order, as separate passes would.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class _Parted(torch.autograd.Function):
    """y = (x − mean) · scale · weight + bias by parts, scale being 1 / √(variance + ε).

    The gradients are written out, with all that x changes through mean and scale: two sums over
    each part are enough, which a compiler makes in one pass over the data. From autograd's own
    formulas it made two. First derivatives only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        y = (_wide(x, len(mean)) - mean) * (scale * _spread(weight)) + _spread(bias)
        # Not `view`: what a function of this kind returns may then not be changed in place, as many
        # networks do with the activation that follows.
        return torch.ops.aten._unsafe_view(y.to(x.dtype), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, scale = ctx.saved_tensors
        g, wide = _wide(grad, len(mean)), _wide(x, len(mean))
        normal = (wide - mean) * scale
        of_bias = g.sum((1, 3, 4), keepdim=True)
        of_weight = (g * normal).sum((1, 3, 4), keepdim=True)
        count = wide[0].numel() // wide.shape[2]
        of_x = (g - (of_bias + normal * of_weight) / count) * (scale * _spread(weight))
        small = (t.sum(0).flatten().to(weight.dtype) for t in (of_weight, of_bias))
        return of_x.to(x.dtype).view(x.shape), *small, None, None


@torch.no_grad()
def moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each part and channel, parts x 1 x C x 1 x 1, in one pass over the data.

    The squares are taken about some value of each channel: about zero, digits would be lost where
    the mean is far from it.
    """
    wide = _wide(x, parts)
    about = wide[:, :1, :, :1, :1]
    first = (wide - about).mean((1, 3, 4), keepdim=True)
    second = (wide - about).square().mean((1, 3, 4), keepdim=True)
    return about + first, (second - first.square()).clamp(min=0)


def _wide(x: Tensor, parts: int) -> Tensor:
    """The parts, in at least float32. In this order: a compiler that is to view what it has stored
    itself stores it with channels first, and all that follow read it in the wrong order."""
    x = x.float() if x.itemsize < 4 else x
    return x.view(parts, x.shape[0] // parts, *x.shape[1:])


def _spread(values: Tensor) -> Tensor:
    return values.view(1, 1, -1, 1, 1)


class PartedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over `parts` equal slices of the batch, in training; in eval nothing differs."""

    parts = 1
    piecewise = ("cpu",)  # devices where torch's own kernel, part by part, is faster than this one

    def forward(self, input: Tensor) -> Tensor:
        if self.parts == 1 or not self.training:
            return super().forward(input)
        batch, _, height, width = input.shape
        if batch % self.parts:
            raise ValueError(f"a batch of {batch} has no {self.parts} equal parts")
        if input.device.type in self.piecewise:
            normal = super().forward
            return torch.cat([normal(part) for part in input.chunk(self.parts)])
        mean, variance = moments(input, self.parts)
        count = batch // self.parts * height * width
        self._track(mean.flatten(1), variance.flatten(1), count)
        scale = torch.rsqrt(variance + self.eps)
        return _Parted.apply(input, self.weight, self.bias, mean, scale)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def _track(self, means: Tensor, variances: Tensor, count: int) -> None:
        """Running statistics, one part after another; the variance is the unbiased one."""
        unbiased = variances * (count / max(1, count - 1))
        running_mean, running_var = self.running_mean, self.running_var
        if running_mean is None or running_var is None or self.num_batches_tracked is None:
            return
        momentum: Any = self.momentum
        for part in range(self.parts):
            running_mean.lerp_(means[part].to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased[part].to(running_var.dtype), momentum)
        self.num_batches_tracked.add_(self.parts)


def join_views(model: Any, views: int) -> bool:
    """Lets `model.features_of` take `views` views in one pass; False where it cannot.

    It can where every batch-norm is a plain BatchNorm2d with affine weights and a fixed momentum.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    plain = all(
        type(m) in (nn.BatchNorm2d, PartedBatchNorm2d) and m.affine and m.momentum is not None
        for m in norms
        if not isinstance(m, nn.modules.instancenorm._InstanceNorm)
    )
    if not plain:
        return False
    for m in norms:
        if isinstance(m, nn.BatchNorm2d):
            m.__class__ = PartedBatchNorm2d
            cast(PartedBatchNorm2d, m).parts = views
    model.joint_views = views
    return True
