"""What may happen to an image before a classifier sees it.

A perturbation maps a batch of images in [0, 1] to another of the same shape and dtype:

>>> import torch
>>> from noiseproof.perturb import parse
>>> noise = parse("gaussian:40/255+occlusion:20x70")
>>> images = torch.rand(2, 3, 100, 120)
>>> noise(images, torch.Generator().manual_seed(0)).shape
torch.Size([2, 3, 100, 120])

The names below are looked up when they are first used, so that `noiseproof.perturb.text` can
check a text without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noiseproof.perturb.base import Chain, Identity, Perturbation
    from noiseproof.perturb.masks import Occlusion, Stripes
    from noiseproof.perturb.noise import Gaussian, Uniform
    from noiseproof.perturb.parsing import parse
    from noiseproof.perturb.resample import DownUp

__all__ = [  # noqa: RUF022 (grouped by subject)
    # the contract, and how perturbations combine
    "Perturbation",
    "Chain",
    "Identity",
    # noise added to pixels
    "Gaussian",
    "Uniform",
    # black masks
    "Occlusion",
    "Stripes",
    # loss of resolution
    "DownUp",
    # text to perturbation
    "parse",
]

_HOMES = {
    "Perturbation": "base",
    "Chain": "base",
    "Identity": "base",
    "Gaussian": "noise",
    "Uniform": "noise",
    "Occlusion": "masks",
    "Stripes": "masks",
    "DownUp": "resample",
    "parse": "parsing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
