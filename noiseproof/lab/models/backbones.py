"""Backbones defined here: normalised images to one pooled vector per image.

`ResNet18` is for 32 x 32 images, `SmallCNN` for 8 x 8 digits; both accept any size and any number
of channels. Backbones of other libraries are in `pretrained`.
"""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn


class Backbone(nn.Module):
    """Maps normalised images to vectors, B x `dim`.

    Args:
        dim: length of the vectors.
        channels: number of input channels.
    """

    def __init__(self, dim: int, channels: int):
        super().__init__()
        self.dim = dim
        self.channels = channels

    def forward_stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output for `x`, and the pooled output of every stage, B x its channels."""
        raise NotImplementedError


def _pooled(x: Tensor) -> Tensor:
    """The mean over pixels. The order of axes here decides the memory layout of the gradient: in
    the other layout, for channels-last activations, the preceding ReLU would be ten times slower
    on a CPU."""
    if x.device.type == "cpu" and x.stride(1) == 1:
        return x.permute(0, 2, 3, 1).mean((1, 2))
    return x.mean((2, 3))


class _SequentialBackbone(Backbone):
    """Stages in sequence, each B x C x H x W, then the mean over pixels.

    Convolutions have torch's default initialisation. Before a batch-norm the scale of their weights
    affects only the effective learning rate, which is small with the paper's 1e-3: larger initial
    weights (He's) change more slowly. See results/cifar10/notes.md.
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

    def forward_stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.stem(x)
        pooled = []
        for stage in self.stages:
            x = stage(x)
            pooled.append(_pooled(x))
        return pooled[-1], pooled


def _conv(inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    """Convolution and batch-norm, whose shift makes a bias of the convolution redundant."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class _BasicBlock(nn.Module):
    """relu(conv(relu(conv(x))) + shortcut(x))."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = _conv(inputs, outputs, stride)
        self.second = _conv(outputs, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, stride, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet18(_SequentialBackbone):
    """The residual network for 32 x 32 images: 3 x 3 stem of stride 1, no max-pool, four stages of
    two blocks, 64-128-256-512 wide; each stage but the first halves the image.

    Args:
        channels: number of input channels.

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


class SmallCNN(_SequentialBackbone):
    """Four 3 x 3 convolutions with batch-norm and ReLU, 16-32-32-32 wide, the second of stride 2.

    For 8 x 8 digits on a CPU: 0.38 million multiply-adds per digit, a quarter of the cost of
    32-32-64-64 with the stride between the pairs.

    Args:
        channels: number of input channels.

    >>> import torch
    >>> SmallCNN(1)(torch.zeros(2, 1, 4, 4)).shape
    torch.Size([2, 32])
    """

    def __init__(self, channels: int):
        plan = [(channels, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1)]
        blocks = [nn.Sequential(_conv(a, b, stride), nn.ReLU()) for a, b, stride in plan]
        super().__init__(32, channels, nn.Identity(), list(blocks))
