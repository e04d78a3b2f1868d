"""The states that a model is measured in: evaluation mode; gradients on and full precision; kernels
that give the same result again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

__all__ = ["deterministic", "evaluating", "measuring", "without_tf32"]


@contextmanager
def measuring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, gradients on, full precision; everything as before on the way out.

    Autocast and TF32 are off, since differences of losses and of gradients need the digits.
    """
    precise = without_tf32() if device.type == "cuda" else nullcontext()
    off = torch.autocast(device.type, enabled=False)
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), off, precise:
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; each submodule gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_tf32() -> Iterator[None]:
    """Convolutions and products of matrices in true float32 on CUDA, where TF32 keeps 10 bits."""
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
    """Convolutions by deterministic kernels."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
