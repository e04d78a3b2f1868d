"""Perturbations from text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from noiseproof.perturb.base import Chain, Identity, Perturbation, RandomApply
from noiseproof.perturb.corruptions.corruption import Corruption
from noiseproof.perturb.masks import Occlusion, Stripes
from noiseproof.perturb.noise import Gaussian, Uniform
from noiseproof.perturb.own import Own
from noiseproof.perturb.resample import DownUp
from noiseproof.perturb.sensor import Exposure, Sensor
from noiseproof.perturb.text import CORRUPTIONS, REGISTERED, read, shares, steps

_CLASSES: dict[str, Callable[..., Perturbation]] = {
    "gaussian": Gaussian,
    "uniform": Uniform,
    "occlusion": Occlusion,
    "stripes": Stripes,
    "downup": DownUp,
    "sensor": Sensor,
    "exposure": Exposure,
    "identity": Identity,
    **{step.name: partial(Corruption, step.name) for text in CORRUPTIONS for step in steps(text)},
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
    members = [_member(name, arguments) for name, arguments in read(text)]
    members = [
        member if share is None else RandomApply(member, share)
        for member, share in zip(members, shares(text), strict=True)
    ]
    return members[0] if len(members) == 1 else Chain(*members)


def _member(name: str, arguments: tuple[Any, ...]) -> Perturbation:
    own = REGISTERED.get(name)
    if own is None:
        return _CLASSES[name](*arguments)
    return Own(name, own.function, *arguments, fixed=own.deterministic)
