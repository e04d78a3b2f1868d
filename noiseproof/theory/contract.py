"""What the theory asks of its arguments, checked once and in one place.

A model has `features(x) -> B x D` and `head`, an `nn.Linear` on top of it; its logits are
`head(features(x))`. Features, labels and centroids are B x D, B and C x D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from noiseproof.modes import measuring

__all__ = ["measuring", "parts", "per_class_max"]


def parts(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
    """The feature map and the linear head of `model`, or a `ValueError` that says what is missing.

    >>> parts(nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: the model needs a method features(x) and an nn.Linear head; Linear has no features
    """
    wanted = "the model needs a method features(x) and an nn.Linear head"
    features: Any = getattr(model, "features", None)
    head: Any = getattr(model, "head", None)
    if features is None:
        raise ValueError(f"{wanted}; {type(model).__name__} has no features")
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{wanted}; the head of {type(model).__name__} is {type(head).__name__}")
    return features, head


def per_class_max(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The largest of the non-negative `values` in each class; 0 for a class without samples.

    >>> import torch
    >>> per_class_max(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 2]), 3)
    tensor([3., 0., 2.])
    """
    return values.new_zeros(num_classes).scatter_reduce(0, labels, values, "amax")
