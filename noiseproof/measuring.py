"""The state that a model is measured in: evaluation mode, gradients on, full precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

__all__ = ["measuring", "without_tf32"]


@contextmanager
def measuring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode, gradients on, full precision; everything as before on the way out.

    Each submodule gets its own mode back. Autocast and TF32 are off, since differences of losses
    and of gradients need the digits.
    """
    modes = [(module, module.training) for module in model.modules()]
    precise = without_tf32() if device.type == "cuda" else nullcontext()
    off = torch.autocast(device.type, enabled=False)
    try:
        model.eval()
        with torch.inference_mode(False), torch.enable_grad(), off, precise:
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
