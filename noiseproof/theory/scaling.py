"""T_ν: scaling features up or down without changing one prediction.

Let q = W⁻q⁻ + b⁻, perhaps with a ReLU after it, be the layer that makes the features. T_ν scales
(W⁻, b⁻, b) by ν > 0 and leaves the head's weight W. Features, centroids, dispersions, margins and
logits are then multiplied by ν: the argmax stays, the probabilities and the curvature do not. So a
margin can be made as large, or a dispersion as small, as one likes with nothing learned; not both,
since T_ν(Θ) − Θ = (ν − 1)u is one line. That is why the loss needs compactness and margin together.

This needs features that scale with that layer. What may follow it is positively homogeneous: ReLU,
pooling, flattening, dropout (idle in eval mode). Batch-norm, tanh, GELU or a skip connection are
not, and are refused.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import check_samples, class_dispersion, class_margin, features_and_head
from noiseproof.modes import measuring

__all__ = ["Scaled", "ScalingReport", "scale_features", "scaling_report"]

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOMOGENEOUS = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.ReLU, nn.LeakyReLU, nn.PReLU),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_CHECKED = 16  # samples on which the scaling is verified


class Scaled(NamedTuple):
    """T_ν of a model: a copy, which layer was multiplied, and by what."""

    model: nn.Module
    layer: str
    nu: float


class ScalingReport(NamedTuple):
    """What T_ν did to a model, measured on data. Ratios are after / before."""

    same_argmax: bool  # for every sample
    logits_ratio: float  # by least squares
    features_ratio: float
    margin_ratio: Tensor  # C; NaN for classes without samples
    dispersion_ratio: Tensor  # C; NaN for classes with fewer than two different samples
    moved: tuple[str, ...]  # the parameters that changed
    step_error: float  # largest |T_ν(Θ) − Θ − (ν − 1)u|, over the largest |(ν − 1)u|


def scale_features(
    model: nn.Module, nu: float, x: Tensor, *, layer: nn.Module | str | None = None
) -> Scaled:
    """A copy of `model` under T_ν, or a `ValueError` that says why the model does not allow it.

    Args:
        nu: ν > 0.
        x: a few inputs. The last layer that runs in `model.features(x)` is taken, and it is checked
            on them, in float64 on the CPU, that the features really scale.
        layer: the layer before the feature space, or its name in the model, if not to be found.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)
    ...     def features(self, x):
    ...         return self.body(x)
    >>> net, x = Net(), torch.randn(5, 3)
    >>> twice = scale_features(net, 2.0, x)
    >>> twice.layer, torch.equal(twice.model.features(x), 2 * net.features(x))
    ('body.0', True)
    """
    if not (nu > 0 and math.isfinite(nu)):
        raise ValueError(f"nu must be a positive number, got {nu}")
    if len(x) == 0:
        raise ValueError("x must hold at least one input, got none")
    features_and_head(model)
    trial = copy.deepcopy(model).to("cpu", torch.float64)
    inputs = x[:_CHECKED].detach().to("cpu", torch.float64)
    name = _last_layer(trial, inputs) if layer is None else _named(model, layer)
    _check_layer(model, name)

    with measuring(trial, inputs.device), torch.no_grad():
        features, _ = features_and_head(trial)
        before = features(inputs)
        size = before.abs().max()
        if not size > 0:
            raise ValueError("every feature of x is 0: nothing can be seen to scale")
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
    """Compare `model` with its T_ν on inputs x and labels y, and the parameters with (ν − 1)u.

    u is (W⁻, b⁻, b) in its places and 0 elsewhere, so `moved` and `step_error` look at every
    parameter of the model.
    """
    head = features_and_head(model)[1]
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for each in (model, scaled.model):
        with measuring(each, head.weight.device), torch.no_grad():
            features, own = features_and_head(each)
            q = features(x)
            check_samples(q, y, own.out_features)
            margin = class_margin(q, y, own)
            seen.append((q, own(q), margin, class_dispersion(q, y, own.out_features)))
    (q, z, margin, spread), (q2, z2, margin2, spread2) = seen

    moved, error, size = [], 0.0, 0.0
    multiplied = _targets(model, scaled.layer)
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


def _last_layer(model: nn.Module, x: Tensor) -> str:
    """The name of the last linear or convolutional layer that `features` runs."""
    order: list[tuple[str, nn.Module]] = []
    head = features_and_head(model)[1]
    hooks = [
        module.register_forward_hook(lambda m, _i, _o, name=name: order.append((name, m)))
        for name, module in model.named_modules()
        if not any(True for _ in module.children()) and module is not head
    ]
    try:
        with measuring(model, x.device), torch.no_grad():
            features_and_head(model)[0](x)
    finally:
        for hook in hooks:
            hook.remove()
    for name, module in reversed(order):
        if isinstance(module, _LINEAR):
            return name
        if not isinstance(module, _HOMOGENEOUS):
            raise ValueError(
                f"features cannot be scaled: {type(module).__name__} ({name}) comes after the last "
                "linear or convolutional layer and does not scale with it"
            )
    raise ValueError("features cannot be scaled: no linear or convolutional layer makes them")


def _named(model: nn.Module, layer: nn.Module | str) -> str:
    for name, module in model.named_modules():
        if module is layer or name == layer:
            return name
    raise ValueError(f"the model has no layer {layer!r}")


def _check_layer(model: nn.Module, name: str) -> None:
    module = model.get_submodule(name)
    if not isinstance(module, _LINEAR):
        raise ValueError(
            f"the layer {name!r} must be linear or convolutional, got {type(module).__name__}"
        )
    if module is features_and_head(model)[1]:
        raise ValueError(f"the layer {name!r} is the head: T_ν scales the layer before it")
    if "weight" not in dict(module.named_parameters(recurse=False)):
        raise ValueError(f"the weight of {name!r} is computed from others, so it cannot be scaled")


def _targets(model: nn.Module, name: str) -> set[str]:
    """The names of W⁻, b⁻ and b, those that exist."""
    head = features_and_head(model)[1]
    before = {id(p) for p in model.get_submodule(name).parameters(recurse=False)}
    chosen = before if head.bias is None else before | {id(head.bias)}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


@torch.no_grad()
def _multiply(model: nn.Module, name: str, factor: float) -> None:
    targets = _targets(model, name)
    for each, p in model.named_parameters():
        if each in targets:
            p.mul_(factor)
