"""The methods by name."""

from noiseproof.objectives.augmix import AugMix
from noiseproof.objectives.base import Objective
from noiseproof.objectives.discriminative import Discriminative
from noiseproof.objectives.plain import Both, Noisy, Normal
from noiseproof.objectives.spheres import Spheres
from noiseproof.objectives.stability import Stability

METHODS: dict[str, type[Objective]] = {
    "normal": Normal,
    "noisy": Noisy,
    "both": Both,
    "stability": Stability,
    "discriminative": Discriminative,
    "spheres": Spheres,
    "augmix": AugMix,
}
