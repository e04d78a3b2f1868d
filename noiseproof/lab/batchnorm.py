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


class PartedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over `parts` equal slices of the batch, in training; in eval nothing differs."""

    parts = 1
    piecewise = ("cpu",)  # devices where torch's own kernel, part by part, is faster than this one

    def forward(self, input: Tensor) -> Tensor:
        if self.parts == 1 or not self.training:
            return super().forward(input)
        batch, channels, height, width = input.shape
        if batch % self.parts:
            raise ValueError(f"a batch of {batch} has no {self.parts} equal parts")
        if input.device.type in self.piecewise:
            normal = super().forward
            return torch.cat([normal(part) for part in input.chunk(self.parts)])
        x = input.view(self.parts, batch // self.parts, channels, height, width)
        wide = x.float() if x.itemsize < 4 else x
        variance, mean = torch.var_mean(wide, dim=(1, 3, 4), correction=0, keepdim=True)
        self._track(mean.detach().flatten(1), variance.detach().flatten(1), wide[0].numel())
        gain = torch.rsqrt(variance + self.eps) * self.weight.view(1, 1, -1, 1, 1)
        # A shift for each part: its gradient is then summed as the others are, in the same kernel.
        shift = self.bias.view(1, 1, -1, 1, 1).expand(self.parts, 1, -1, 1, 1)
        y = (wide - mean) * gain + shift
        return y.to(input.dtype).view(input.shape)

    @torch.no_grad()
    def _track(self, means: Tensor, variances: Tensor, numbers: int) -> None:
        """Running statistics, one part after another; the variance is the unbiased one."""
        count = numbers // means.shape[1]
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
