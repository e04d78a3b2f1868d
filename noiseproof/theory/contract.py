"""What the theory asks of its arguments, checked once and in one place.

A model has `features(x) -> B x D` and `head`, an `nn.Linear` on top of it; its logits are
`head(features(x))`. Features, labels and centroids are B x D, B and C x D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from noiseproof.modes import measuring

__all__ = ["check_features", "measuring", "parts", "per_class_max"]


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


def check_features(
    features: Tensor, labels: Tensor, num_classes: int, centroids: Tensor | None = None
) -> None:
    """Raise a `ValueError` unless the shapes fit together and every label is a class."""
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(
            f"features must be B x D floats, got {tuple(features.shape)} of {features.dtype}"
        )
    if labels.shape != features.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"labels must be {len(features)} integers, got {tuple(labels.shape)} of {labels.dtype}"
        )
    if len(labels) == 0:
        raise ValueError("there must be at least one sample, got none")
    bad = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"labels must lie in [0, {num_classes}), got {int(labels[index])} at index {index}"
        )
    if centroids is not None and centroids.shape != (num_classes, features.shape[1]):
        raise ValueError(
            f"centroids must be {num_classes} x {features.shape[1]}, got {tuple(centroids.shape)}"
        )


def per_class_max(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The largest of the non-negative `values` in each class; 0 for a class without samples.

    >>> import torch
    >>> per_class_max(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 2]), 3)
    tensor([3., 0., 2.])
    """
    return values.new_zeros(num_classes).scatter_reduce(0, labels, values, "amax")
