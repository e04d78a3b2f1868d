"""Cameras: the noise of an image sensor, and more or less light.

A sensor counts electrons, so both act on linear light. Pixels are decoded by the transfer function
of sRGB (IEC 61966-2-1) and encoded again at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source, stream
from noiseproof.perturb import values
from noiseproof.perturb.base import Perturbation

# The phone sensor Sony IMX686, as calibrated by Feng et al. (2022), "Learnability Enhancement for
# Low-Light Raw Denoising: Where Paired Real Data Meets Noise Modeling", in their published code
# (github.com/megvii-research/PMN, data_process/process.py). DN are steps of the 10-bit converter.
_GAIN = 0.1366021 / 100  # DN per electron, for each unit of ISO
_READ_NOISE = {100: 0.6926457, 6400: 14.30362}  # DN, by ISO
_STEPS = 1023 - 64  # DN from black to white


def phone(iso: int) -> tuple[float, float]:
    """Electrons of a white pixel and read noise in electrons of the phone sensor at this ISO.

    Read noise arises before the amplifier (a electrons) and after it (b DN): in DN its variance is
    (gain a)² + b². The two measured values determine a and b.

    >>> [tuple(round(x, 2) for x in phone(iso)) for iso in (100, 1600, 6400)]
    [(7020.39, 5.07), (438.77, 1.66), (109.69, 1.64)]
    """
    (low, low_noise), (high, high_noise) = _READ_NOISE.items()
    before = (high_noise**2 - low_noise**2) / ((_GAIN * high) ** 2 - (_GAIN * low) ** 2)
    after = low_noise**2 - (_GAIN * low) ** 2 * before
    gain = _GAIN * iso
    return _STEPS / gain, math.sqrt(before + after / gain**2)


@dataclass(frozen=True)
class Sensor(Perturbation):
    """Noise of an image sensor: photons, read noise, and the steps of the converter.

    With light u in [0, 1], N electrons at white, read noise σ and n steps,

        u' = round(n (Poisson(N u) + σ ε) / N) / n,   ε ~ N(0, 1), clamped to [0, 1],

    for every pixel and channel. But for what is clamped, the mean of u' is u, and its variance is
    u / N + (σ / N)² + 1 / (12 n²).

    Args:
        iso: setting of a phone camera, from 100 to 6400, which gives N, σ and n (10 bits).
        electrons: N, instead of `iso`.
        read_noise: σ in electrons, with `electrons`.
        bits: of the converter, with `electrons`: n is 2^bits − 1.

    >>> print(Sensor(1600), Sensor(electrons=400, read_noise=2.5))
    sensor:iso1600 sensor:400x2.5
    """

    iso: int | None = None
    electrons: float | None = None
    read_noise: float | None = None
    bits: int = 12

    def __post_init__(self) -> None:
        if (self.iso is None) == (self.electrons is None):
            raise ValueError(f"expected iso or electrons, got {self.iso!r} and {self.electrons!r}")
        if self.iso is not None:
            if self.read_noise is not None or self.bits != 12:
                raise ValueError("iso determines read_noise and bits; give electrons instead")
            object.__setattr__(self, "iso", values.iso("iso", self.iso))
            return
        object.__setattr__(self, "electrons", values.electrons("electrons", self.electrons))
        object.__setattr__(self, "read_noise", values.read_noise("read_noise", self.read_noise))
        object.__setattr__(self, "bits", values.bits("bits", self.bits))

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        if self.iso is not None:
            white, noise, steps = *phone(self.iso), _STEPS
        else:
            white, noise, steps = self.electrons or 0.0, self.read_noise or 0.0, 2**self.bits - 1
        light = _light(x)
        electrons = draws.poisson(light * white, stream(source, 0))
        electrons = electrons + draws.normal(x.shape, light, stream(source, 1)) * noise
        return _pixels((electrons * (steps / white)).round() / steps, x.dtype)

    def __str__(self) -> str:
        if self.iso is not None:
            return f"sensor:iso{self.iso}"
        numbers = [values.decimal(x or 0.0) for x in (self.electrons, self.read_noise)]
        return "sensor:" + "x".join(numbers + [str(self.bits)] * (self.bits != 12))


@dataclass(frozen=True)
class Exposure(Perturbation):
    """More or less light: u' = min(1, 2^stops u), where u is the light of a pixel.

    Args:
        stops: from −10 to 10; −1 halves the light.

    >>> print(Exposure(-2), Exposure(0.5))
    exposure:-2 exposure:0.5
    """

    stops: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", values.stops("stops", self.stops))

    @property
    def deterministic(self) -> bool:
        return True

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        return x if self.stops == 0 else _pixels(_light(x) * 2**self.stops, x.dtype)

    def __str__(self) -> str:
        return f"exposure:{values.decimal(self.stops)}"


def _light(x: Tensor) -> Tensor:
    """The linear light of pixels, in [0, 1], float32 or float64."""
    x = (x if x.dtype == torch.float64 else x.float()).clamp(0, 1)
    return torch.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def _pixels(light: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_light`, of light that may be outside [0, 1]."""
    u = light.clamp(0, 1)
    curve = 1 + 1.055 * (u.clamp(min=0.0031308) ** (1 / 2.4) - 1)  # white is exactly 1
    return torch.where(u <= 0.0031308, 12.92 * u, curve).to(dtype)
