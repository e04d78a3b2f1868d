"""T_ν: scaling features up or down without changing any prediction (proposition 5.3).

Let q = W⁻q⁻ + b⁻, perhaps followed by a ReLU, be the layer that computes the features. T_ν scales
(W⁻, b⁻, b) by ν > 0 and leaves the head's weight W. It multiplies features, centroids, dispersions,
margins and logits by ν: the argmax does not change, the probabilities and the curvature do. So a
margin can be made arbitrarily large, or a dispersion arbitrarily small, without learning anything;
but not both, since T_ν(Θ) − Θ = (ν − 1)u is a line (corollary 5.1). That is why the loss needs
compactness and margin together.

This needs features that scale with that layer: what follows it must be positively homogeneous, as
ReLU, pooling, flattening and dropout (idle in eval mode) are. Batch-norm, tanh, GELU and skip
connections are not: `scale_features` notices and raises a ValueError.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import check_samples, class_dispersion, class_margin, features_and_head
from noiseproof.modes import measuring

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CHECKED = 16  # samples on which the scaling is verified


class Scaled(NamedTuple):
    """T_ν of a model: the scaled copy, the name of the scaled layer, and ν."""

    model: nn.Module
    layer: str
    nu: float


class ScalingReport(NamedTuple):
    """The effect of T_ν on a model, measured on data. Ratios are after / before."""

    same_argmax: bool  # for every sample
    logits_ratio: float  # least squares
    features_ratio: float
    margin_ratio: Tensor  # C; NaN for classes without samples
    dispersion_ratio: Tensor  # C; NaN for classes with fewer than two different samples
    moved: tuple[str, ...]  # names of the parameters that changed
    step_error: float  # largest |T_ν(Θ) − Θ − (ν − 1)u|, over the largest |(ν − 1)u|


def scale_features(
    model: nn.Module, nu: float, x: Tensor, *, layer: nn.Module | str | None = None
) -> Scaled:
    """A copy of `model` under T_ν; ValueError if the model does not allow it.

    Args:
        model: a network with `features(x)` and a linear `head`; it is not changed.
        nu: ν > 0.
        x: a few inputs, on which it is verified, in float64 on the CPU, that the features scale.
        layer: the linear or convolutional layer that computes the features, or its name in the
            model; `model.neck` if not given.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)
    ...     def features(self, x):
    ...         return self.body(x)
    >>> net, x = Net(), torch.randn(5, 3)
    >>> twice = scale_features(net, 2.0, x, layer="body.0")
    >>> torch.equal(twice.model.features(x), 2 * net.features(x))
    True
    """
    if not (nu > 0 and math.isfinite(nu)):
        raise ValueError(f"nu must be a positive number, got {nu}")
    if len(x) == 0:
        raise ValueError("x must hold at least one input, got none")
    name = _layer_name(model, "neck" if layer is None else layer)
    trial = copy.deepcopy(model).to("cpu", torch.float64)
    inputs = x[:_CHECKED].detach().to("cpu", torch.float64)
    with measuring(trial, inputs.device), torch.no_grad():
        features, _ = features_and_head(trial)
        before = features(inputs)
        size = before.abs().max()
        if not size > 0:
            raise ValueError("every feature of x is 0: no scaling can be seen")
        done = 1.0
        for factor in (2.0, nu):  # 2 as well, because a ν near 1 would pass with any layer
            _multiply(trial, name, factor / done)
            done = factor
            error = float((features(inputs) - factor * before).abs().max() / (factor * size))
            if not error < 1e-9:
                raise ValueError(
                    f"the features do not scale with the layer {name!r} (relative error "
                    f"{error:.1e}): something between it and the features is not homogeneous, such "
                    "as a skip connection, a normalisation, tanh or GELU"
                )
    scaled = copy.deepcopy(model)
    _multiply(scaled, name, nu)
    return Scaled(scaled, name, nu)


@torch.no_grad()
def scaling_report(model: nn.Module, scaled: Scaled, x: Tensor, y: Tensor) -> ScalingReport:
    """Compares a model with its T_ν on data, and the step of its parameters with (ν − 1)u.

    u is (W⁻, b⁻, b) for these parameters and 0 for all others, so `moved` and `step_error` cover
    every parameter of the model.

    Args:
        model: the original.
        scaled: the result of `scale_features`.
        x: inputs.
        y: their class indices, int64.
    """
    head = features_and_head(model)[1]
    measured: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for net in (model, scaled.model):
        with measuring(net, head.weight.device), torch.no_grad():
            features, own = features_and_head(net)
            q = features(x)
            check_samples(q, y, own.out_features)
            margin = class_margin(q, y, own)
            measured.append((q, own(q), margin, class_dispersion(q, y, own.out_features)))
    (q, z, margin, spread), (q2, z2, margin2, spread2) = measured

    moved, error, size = [], 0.0, 0.0
    multiplied = _scaled_parameters(model, scaled.layer)
    after = dict(scaled.model.named_parameters())
    for name, p in model.named_parameters():
        expected = (scaled.nu - 1) * p if name in multiplied else torch.zeros_like(p)
        step = after[name] - p
        if bool(step.any()):
            moved.append(name)
        error = max(error, float((step - expected).abs().max()))
        size = max(size, float(expected.abs().max()))
    return ScalingReport(
        same_argmax=bool((z.argmax(1) == z2.argmax(1)).all()),
        logits_ratio=float((z * z2).sum() / z.square().sum()),
        features_ratio=float((q * q2).sum() / q.square().sum()),
        margin_ratio=margin2 / margin,
        dispersion_ratio=spread2 / spread,
        moved=tuple(moved),
        step_error=error / size if size else error,
    )


def _layer_name(model: nn.Module, layer: nn.Module | str) -> str:
    """The name of the layer to scale; ValueError if there is no such layer or it cannot be."""
    head = features_and_head(model)[1]
    matches = [(name, m) for name, m in model.named_modules() if layer in (name, m)]
    if not matches:
        linear = [n for n, m in model.named_modules() if isinstance(m, _LINEAR) and m is not head]
        raise ValueError(
            f"the model has no layer {layer!r}; name the one that computes the features, such as "
            f"layer={' or '.join(map(repr, reversed(linear[-3:])))}"
        )
    name, module = matches[0]
    if not isinstance(module, _LINEAR):
        raise ValueError(
            f"the layer {name!r} must be linear or convolutional, got {type(module).__name__}"
        )
    if module is head:
        raise ValueError(f"the layer {name!r} is the head: T_ν scales the layer before it")
    if "weight" not in dict(module.named_parameters(recurse=False)):
        raise ValueError(f"the weight of {name!r} is computed from others, so it cannot be scaled")
    return name


def _scaled_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Those of W⁻, b⁻ and b that exist, by their names in the model."""
    layer, head = model.get_submodule(name), features_and_head(model)[1]
    scaled = [*layer.parameters(recurse=False), head.bias]
    return {n: p for n, p in model.named_parameters() if any(p is s for s in scaled)}


@torch.no_grad()
def _multiply(model: nn.Module, name: str, factor: float) -> None:
    for p in _scaled_parameters(model, name).values():
        p.mul_(factor)
