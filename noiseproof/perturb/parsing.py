"""Perturbations from text."""

from __future__ import annotations

from collections.abc import Callable

from noiseproof.perturb.base import Chain, Identity, Perturbation
from noiseproof.perturb.masks import Occlusion, Stripes
from noiseproof.perturb.noise import Gaussian, Uniform
from noiseproof.perturb.resample import DownUp
from noiseproof.perturb.text import read

_CLASSES: dict[str, Callable[..., Perturbation]] = {
    "gaussian": Gaussian,
    "uniform": Uniform,
    "occlusion": Occlusion,
    "stripes": Stripes,
    "downup": DownUp,
    "identity": Identity,
}


def parse(text: str) -> Perturbation:
    """The perturbation that a text describes; the inverse of `str`.

    Args:
        text: perturbations joined by +, applied from left to right; see `noiseproof.perturb.text`.

    >>> parse("gaussian:40/255+occlusion:20x70")
    Chain(Gaussian(std=0.1568627450980392), Occlusion(patches=20, size=70))
    >>> print(parse("clean"))
    identity
    """
    members = [_CLASSES[name](*arguments) for name, arguments in read(text)]
    return members[0] if len(members) == 1 else Chain(*members)
