"""Perturbations of images: noise, occlusion, stripes, loss of resolution, corruptions, cameras.

A perturbation maps a batch of images in [0, 1] to another of the same shape and dtype:

>>> import torch
>>> from noiseproof.perturb import parse
>>> noise = parse("gaussian:40/255+occlusion:20x70")
>>> images = torch.rand(2, 3, 300, 400)
>>> noise(images, torch.Generator().manual_seed(0)).shape
torch.Size([2, 3, 300, 400])

Names are imported on first use, so that `noiseproof.perturb.text` works without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noiseproof.perturb.base import Chain, Identity, Perturbation, RandomApply
    from noiseproof.perturb.corruptions.corruption import Corruption
    from noiseproof.perturb.masks import Occlusion, Stripes
    from noiseproof.perturb.noise import Gaussian, Uniform
    from noiseproof.perturb.own import Own, register
    from noiseproof.perturb.parsing import parse
    from noiseproof.perturb.resample import DownUp
    from noiseproof.perturb.sensor import Exposure, Sensor
    from noiseproof.perturb.text import CORRUPTIONS

__all__ = [  # noqa: RUF022 (grouped by subject)
    # the interface, and how perturbations combine
    "Perturbation",
    "Chain",
    "RandomApply",
    "Identity",
    # noise added to pixels
    "Gaussian",
    "Uniform",
    # black masks
    "Occlusion",
    "Stripes",
    # loss of resolution
    "DownUp",
    # the 15 common corruptions; the texts of all, severities 1 to 5
    "Corruption",
    "CORRUPTIONS",
    # cameras: sensor noise, and more or less light
    "Sensor",
    "Exposure",
    # perturbations of your own
    "Own",
    "register",
    # text to perturbation
    "parse",
]

_MODULES = {
    "base": ("Perturbation", "Chain", "RandomApply", "Identity"),
    "noise": ("Gaussian", "Uniform"),
    "masks": ("Occlusion", "Stripes"),
    "resample": ("DownUp",),
    "corruptions.corruption": ("Corruption",),
    "sensor": ("Sensor", "Exposure"),
    "text": ("CORRUPTIONS",),
    "own": ("Own", "register"),
    "parsing": ("parse",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
