"""Noise added to pixels: x' = clamp(x + n, 0, 1).

Noise is drawn and added in float32 (float64 for float64 images); the sum is rounded to the dtype of
the images once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source, stream
from noiseproof.perturb import values
from noiseproof.perturb.base import Perturbation


@dataclass(frozen=True)
class Gaussian(Perturbation):
    """x' = clamp(x + σ ε, 0, 1) with ε ~ N(0, 1) for every pixel and channel.

    Args:
        std: σ in pixel units, 0 to 1, or a pair (low, high) between which σ is drawn uniformly per
            sample. A level within 1e-12 of k/255 is taken as k/255.

    >>> print(Gaussian(40 / 255), Gaussian((0, 0.1)))
    gaussian:40/255 gaussian:0..0.1
    """

    std: float | tuple[float, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", values.level_or_range("std", self.std))

    @property
    def deterministic(self) -> bool:
        return self.std == 0

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        if self.std == 0:
            return x
        std = self.std
        if isinstance(std, tuple):
            low, high = std
            # A separate stream: from the same one, the level would repeat the first pixel's number.
            std = low + (high - low) * draws.uniform((len(x), 1, 1, 1), x, stream(source, 0))
        return _add(x, draws.normal(x.shape, x, source).mul_(std))

    def __str__(self) -> str:
        if isinstance(self.std, tuple):
            return f"gaussian:{values.show(self.std[0])}..{values.show(self.std[1])}"
        return f"gaussian:{values.show(self.std)}"


@dataclass(frozen=True)
class Uniform(Perturbation):
    """x' = clamp(x + u, 0, 1) with u ~ U[−a, a] for every pixel and channel.

    Args:
        amplitude: a in pixel units, 0 to 1. A level within 1e-12 of k/255 is taken as k/255.

    >>> print(Uniform(0.06))
    uniform:0.06
    """

    amplitude: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "amplitude", values.level("amplitude", self.amplitude))

    @property
    def deterministic(self) -> bool:
        return self.amplitude == 0

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        if self.amplitude == 0:
            return x
        noise = draws.uniform(x.shape, x, source).mul_(2 * self.amplitude).sub_(self.amplitude)
        return _add(x, noise)

    def __str__(self) -> str:
        return f"uniform:{values.show(self.amplitude)}"


def _add(x: Tensor, noise: Tensor) -> Tensor:
    # The sum promotes half precision; the clamp is in place on the sum, not on x.
    return (x + noise).clamp_(0, 1).to(x.dtype)
