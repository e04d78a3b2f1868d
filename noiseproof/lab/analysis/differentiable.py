"""Replaces activations for which torch has no second derivative by equal functions that have one.

MobileNetV3's squeeze-and-excitation uses hardsigmoid, which torch cannot differentiate twice. It
equals relu6(x + 3) / 6, which torch can.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class Hardsigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


class Hardswish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(x + 3) / 6


_EQUIVALENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Hardsigmoid: Hardsigmoid,
    nn.Hardswish: Hardswish,
}


def twice_differentiable(model: Module) -> Module:
    """The model itself, or a copy with such activations replaced if it has any.

    >>> import torch
    >>> x = torch.linspace(-5, 5, 11)
    >>> pair = nn.Sequential(nn.Hardsigmoid(), nn.Hardswish())
    >>> torch.allclose(pair(x), twice_differentiable(pair)(x))
    True
    """
    if not any(type(module) in _EQUIVALENTS for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in _EQUIVALENTS:
                setattr(module, name, _EQUIVALENTS[type(child)]())
    return model


def lacks_second_derivative(error: Exception) -> bool:
    """Whether torch raised `error` because an operation has no second derivative.

    >>> lacks_second_derivative(RuntimeError("derivative for aten::op is not implemented"))
    True
    """
    text = str(error)
    return "derivative" in text and "not implemented" in text
