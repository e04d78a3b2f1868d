"""A model that can be differentiated twice: the same function, in operations that torch can follow.

Torch has no second derivative of hardsigmoid, which MobileNetV3 squeezes its channels with. It is
relu6(x + 3) / 6, and of that there is one.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["lacks_second_derivative", "twice_differentiable"]

Module = TypeVar("Module", bound=nn.Module)


class Hardsigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


class Hardswish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(x + 3) / 6


_SAME: dict[type[nn.Module], type[nn.Module]] = {
    nn.Hardsigmoid: Hardsigmoid,
    nn.Hardswish: Hardswish,
}


def twice_differentiable(model: Module) -> Module:
    """The model itself, or, where it has such activations, a copy with them replaced.

    >>> import torch
    >>> x = torch.linspace(-5, 5, 11)
    >>> pair = nn.Sequential(nn.Hardsigmoid(), nn.Hardswish())
    >>> torch.allclose(pair(x), twice_differentiable(pair)(x))
    True
    """
    if not any(type(module) in _SAME for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in _SAME:
                setattr(module, name, _SAME[type(child)]())
    return model


def lacks_second_derivative(error: Exception) -> bool:
    """Whether torch gave up for want of a second derivative of some operation.

    >>> lacks_second_derivative(RuntimeError("derivative for aten::op is not implemented"))
    True
    """
    text = str(error)
    return "derivative" in text and "not implemented" in text
