"""Batch-norm over parts of a batch: the result of separate passes at the cost of one.

The method sends the clean and the noisy batch through the network separately, so that batch-norm
sees each alone. One batch of twice the size is faster, but batch-norm would mix the two. Here each
part of the batch is normalised by its own mean and variance, and the running statistics are updated
part after part, in order, as separate passes would.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class _Normalise(torch.autograd.Function):
    """y = (x − mean) · scale · weight + bias for each part, where scale = 1 / √(variance + ε).

    The gradients are written out, including the dependence of mean and scale on x: two sums over
    each part suffice, which a compiler computes in one pass over the data. Autograd's own formulas
    took two. First derivatives only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        parts = _split(x, len(mean))
        y = (parts - mean) * (scale * _per_channel(weight)) + _per_channel(bias)
        # Not `view`: the result of such a function could then not be changed in place, which many
        # networks do with the activation that follows.
        return torch.ops.aten._unsafe_view(y.to(x.dtype), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, scale = ctx.saved_tensors
        g, parts = _split(grad, len(mean)), _split(x, len(mean))
        normalised = (parts - mean) * scale
        bias_grad = g.sum((1, 3, 4), keepdim=True)
        weight_grad = (g * normalised).sum((1, 3, 4), keepdim=True)
        count = parts[0].numel() // parts.shape[2]
        x_grad = g - (bias_grad + normalised * weight_grad) / count
        x_grad = x_grad * (scale * _per_channel(weight))
        sums = (t.sum(0).flatten().to(weight.dtype) for t in (weight_grad, bias_grad))
        return x_grad.to(x.dtype).view(x.shape), *sums, None, None


@torch.no_grad()
def moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each part and channel, parts x 1 x C x 1 x 1, in one pass over the data.

    `x` is B x C x H x W, and `parts` divides B. Squares are taken about the first value of each
    channel: about zero, digits would cancel where the mean is far from it.
    """
    split = _split(x, parts)
    reference = split[:, :1, :, :1, :1]
    first = (split - reference).mean((1, 3, 4), keepdim=True)
    second = (split - reference).square().mean((1, 3, 4), keepdim=True)
    return reference + first, (second - first.square()).clamp(min=0)


def _split(x: Tensor, parts: int) -> Tensor:
    """parts x B/parts x C x H x W, at least in float32. The cast comes first: a compiler that has
    to view a tensor of its own writes it with channels first, which slows down every reader."""
    x = x.float() if x.itemsize < 4 else x
    return x.view(parts, x.shape[0] // parts, *x.shape[1:])


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, 1, -1, 1, 1)


class SplitBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over `parts` equal slices of the batch in training; as usual in evaluation."""

    parts = 1
    chunked_devices = ("cpu",)  # where torch's own kernel, applied part by part, is faster

    def forward(self, input: Tensor) -> Tensor:
        if self.parts == 1 or not self.training:
            return super().forward(input)
        batch, _, height, width = input.shape
        if batch % self.parts:
            raise ValueError(f"a batch of {batch} cannot be split into {self.parts} equal parts")
        if input.device.type in self.chunked_devices:
            batch_norm = super().forward
            return torch.cat([batch_norm(part) for part in input.chunk(self.parts)])
        mean, variance = moments(input, self.parts)
        count = batch // self.parts * height * width
        self._update_running_statistics(mean.flatten(1), variance.flatten(1), count)
        scale = torch.rsqrt(variance + self.eps)
        return _Normalise.apply(input, self.weight, self.bias, mean, scale)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def _update_running_statistics(self, means: Tensor, variances: Tensor, count: int) -> None:
        """One part after another; the running variance is the unbiased one."""
        unbiased = variances * (count / max(1, count - 1))
        running_mean, running_var = self.running_mean, self.running_var
        if running_mean is None or running_var is None or self.num_batches_tracked is None:
            return
        momentum: Any = self.momentum
        for part in range(self.parts):
            running_mean.lerp_(means[part].to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased[part].to(running_var.dtype), momentum)
        self.num_batches_tracked.add_(self.parts)


def join_passes(model: Any, views: int) -> bool:
    """Makes `model.features_of` send `views` views through the network in one pass, in place;
    returns False, and changes nothing, if the model does not allow it.

    It does if it has `features_of`, and every batch-norm is a plain BatchNorm2d with affine weights
    and a fixed momentum.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    replaceable = all(
        type(m) in (nn.BatchNorm2d, SplitBatchNorm2d) and m.affine and m.momentum is not None
        for m in norms
        if not isinstance(m, nn.modules.instancenorm._InstanceNorm)
    )
    if not replaceable or not hasattr(model, "features_of"):
        return False
    for m in norms:
        if isinstance(m, nn.BatchNorm2d):
            m.__class__ = SplitBatchNorm2d
            cast(SplitBatchNorm2d, m).parts = views
    model.joint_views = views
    return True
