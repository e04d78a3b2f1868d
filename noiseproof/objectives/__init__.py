"""What one training step minimises: one class per method.

`objective(model, batch) -> Outcome(loss, logits, terms)` is all that a training loop knows about a
method; `METHODS` lists them by name. The model needs `features(x)` and `head`; where it has
`features_of(*views)`, that is used for several views at once.
"""

from noiseproof.objectives.augmix import AugMix
from noiseproof.objectives.base import Batch, Objective, Outcome
from noiseproof.objectives.discriminative import Discriminative
from noiseproof.objectives.methods import METHODS
from noiseproof.objectives.plain import Both, Noisy, Normal
from noiseproof.objectives.spheres import Spheres
from noiseproof.objectives.stability import Stability

__all__ = [
    "METHODS",
    "AugMix",
    "Batch",
    "Both",
    "Discriminative",
    "Noisy",
    "Normal",
    "Objective",
    "Outcome",
    "Spheres",
    "Stability",
]
