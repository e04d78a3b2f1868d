"""Backbones written here: normalised images in, one pooled vector an image out.

`ResNet18` is for 32 x 32 images, `SmallCNN` for 8 x 8 digits; both take any size and any number of
channels. Those of other libraries are in `adapters`.
"""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Backbone", "ResNet18", "SmallCNN"]


class Backbone(nn.Module):
    """`forward(x)` is B x `dim`; `staged(x)` gives it with the pooled output of every stage."""

    def __init__(self, dim: int, channels: int):
        super().__init__()
        self.dim = dim
        self.channels = channels  # how many the first layer takes

    def staged(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        raise NotImplementedError


def _pooled(x: Tensor) -> Tensor:
    """The mean over pixels. Its gradient lies in memory as the mean is written: where it met
    activations with channels last, a CPU would take ten times as long for the ReLU before it."""
    if x.device.type == "cpu" and x.stride(1) == 1:
        return x.permute(0, 2, 3, 1).mean((1, 2))
    return x.mean((2, 3))


class _Plain(Backbone):
    """Stages one after the other, each B x C x H x W, then the mean over pixels.

    Convolutions start as torch starts them. Before a batch-norm the scale of their weights changes
    nothing but the effective learning rate, which the paper's 1e-3 leaves little of: larger initial
    weights (He's) are slower to move. docs/results.md has a training with them.
    """

    def __init__(self, dim: int, channels: int, stem: nn.Module, blocks: list[nn.Module]):
        super().__init__(dim, channels)
        self.stem = stem
        self.stages = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return _pooled(x)

    def staged(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.stem(x)
        pooled = []
        for stage in self.stages:
            x = stage(x)
            pooled.append(_pooled(x))
        return pooled[-1], pooled


def _conv(inside: int, out: int, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    """Convolution and batch-norm; the norm's shift makes a bias of the convolution idle."""
    return nn.Sequential(
        nn.Conv2d(inside, out, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(out),
    )


class _BasicBlock(nn.Module):
    """relu(conv(relu(conv(x))) + shortcut(x))."""

    def __init__(self, inside: int, out: int, stride: int):
        super().__init__()
        self.first = _conv(inside, out, stride)
        self.second = _conv(out, out)
        same = stride == 1 and inside == out
        self.shortcut = nn.Identity() if same else _conv(inside, out, stride, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet18(_Plain):
    """The residual network for 32 x 32 images: 3 x 3 stem of stride 1, no max-pool, four stages of
    two blocks, 64-128-256-512 wide, each after the first halving the image.

    >>> import torch
    >>> ResNet18(3)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 512])
    """

    def __init__(self, channels: int):
        widths = (64, 64, 128, 256, 512)
        blocks = [
            nn.Sequential(_BasicBlock(a, b, 1 if a == b else 2), _BasicBlock(b, b, 1))
            for a, b in itertools.pairwise(widths)
        ]
        super().__init__(512, channels, nn.Sequential(_conv(channels, 64), nn.ReLU()), list(blocks))


class SmallCNN(_Plain):
    """Four 3 x 3 convolutions with batch-norm and ReLU, 16-32-32-32 wide, the second of stride 2.

    Made for 8 x 8 digits on a CPU: 0.38 million multiply-adds a digit, a quarter of what
    32-32-64-64 with the stride between the pairs costs.

    >>> import torch
    >>> SmallCNN(1)(torch.zeros(2, 1, 4, 4)).shape
    torch.Size([2, 32])
    """

    def __init__(self, channels: int):
        plan = [(channels, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1)]
        blocks = [nn.Sequential(_conv(a, b, stride), nn.ReLU()) for a, b, stride in plan]
        super().__init__(32, channels, nn.Identity(), list(blocks))
