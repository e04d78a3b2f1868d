"""Corruptions as perturbations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor

from noiseproof.draws import Source
from noiseproof.perturb import values
from noiseproof.perturb.base import Perturbation
from noiseproof.perturb.corruptions.blur import defocus, glass, motion, zoom
from noiseproof.perturb.corruptions.constants import constants
from noiseproof.perturb.corruptions.digital import brightness, contrast, elastic, pixelate
from noiseproof.perturb.corruptions.frost import frost
from noiseproof.perturb.corruptions.jpeg import jpeg
from noiseproof.perturb.corruptions.noise import gaussian_noise, impulse, shot
from noiseproof.perturb.corruptions.pixels import to_bytes, truncated
from noiseproof.perturb.corruptions.weather import fog, snow

__all__ = ["Corruption"]

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        gaussian_noise, shot, impulse, defocus, glass, motion, zoom, snow, frost, fog, brightness,
        contrast, elastic, pixelate, jpeg,
    )
}  # fmt: skip
_DETERMINISTIC = {"defocus", "zoom", "brightness", "contrast", "pixelate", "jpeg"}


@dataclass(frozen=True)
class Corruption(Perturbation):
    """One of the 15 common corruptions of CIFAR-10-C and ImageNet-C (Hendrycks and Dietterich,
    2019), with the constants of the original and the same distribution.

    As in the original, images have 256 levels: the input is rounded to the nearest of them, the
    result down. Images whose shorter side is at most 64 pixels take the constants of CIFAR-10-C,
    larger ones those of ImageNet-C, with lengths multiplied by side / 224.

    Args:
        name: gaussian_noise, shot, impulse, defocus, glass, motion, zoom, snow, frost, fog,
            brightness, contrast, elastic, pixelate or jpeg.
        severity: 1 to 5.

    >>> print(Corruption("fog", 3))
    fog:3
    >>> import torch
    >>> ramp = torch.tensor([[[[0, 64, 128, 192]]]]) / 255
    >>> (Corruption("contrast", 2)(ramp) * 255).int().tolist()  # half the distance from 96
    [[[[48, 80, 112, 144]]]]
    """

    name: str
    severity: int

    def __post_init__(self) -> None:
        if self.name not in _FUNCTIONS:
            near = get_close_matches(str(self.name), _FUNCTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"name must be one of {', '.join(_FUNCTIONS)}, got {self.name!r}{hint}"
            )
        object.__setattr__(self, "severity", values.severity("severity", self.severity))

    @property
    def deterministic(self) -> bool:
        return self.name in _DETERMINISTIC

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        if x.numel() == 0:
            return x
        amounts = constants(self.name, self.severity, min(x.shape[-2:]))
        corrupted = _FUNCTIONS[self.name](to_bytes(x), source, *amounts)
        return (truncated(corrupted) / 255).to(x.dtype)

    def __str__(self) -> str:
        return f"{self.name}:{self.severity}"
