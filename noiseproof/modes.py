"""Context managers for measuring a model: eval mode, full precision, deterministic kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

__all__ = ["deterministic", "evaluating", "measuring", "without_tf32"]


@contextmanager
def measuring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, gradients on, autocast and TF32 off; restores everything on exit.

    Differences of losses and of gradients need full precision.

    Args:
        model: the model to measure.
        device: where it runs.
    """
    precise = without_tf32() if device.type == "cuda" else nullcontext()
    off = torch.autocast(device.type, enabled=False)
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), off, precise:
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; restores the mode of each submodule on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_tf32() -> Iterator[None]:
    """True float32 convolutions and matrix products on CUDA; TF32 keeps 10 bits of the mantissa."""
    conv = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    matmul = torch.backends.cuda.matmul
    before = conv.fp32_precision, matmul.fp32_precision
    try:
        conv.fp32_precision = matmul.fp32_precision = "ieee"
        yield
    finally:
        conv.fp32_precision, matmul.fp32_precision = before


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic cuDNN convolutions."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
