"""Train image classifiers that stay accurate when the input is noisy, and see why.

In your own loop:  DiscriminativeLoss, perturb, augment, objectives
To test a model:   accuracy
To look inside:    geometry, curvature, theory
Names are resolved on first use, so that `import noiseproof` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = ("augment", "curvature", "draws", "geometry", "objectives", "perturb", "theory")
_NAMES = {
    "Accuracy": "robustness",
    "DiscriminativeLoss": "loss",
    "LossTerms": "loss",
    "accuracy": "robustness",
}

__all__ = [
    "Accuracy",
    "DiscriminativeLoss",
    "LossTerms",
    "accuracy",
    "augment",
    "curvature",
    "draws",
    "geometry",
    "objectives",
    "perturb",
    "theory",
]

if TYPE_CHECKING:
    from noiseproof import augment, curvature, draws, geometry, objectives, perturb, theory
    from noiseproof.loss import DiscriminativeLoss, LossTerms
    from noiseproof.robustness import Accuracy, accuracy


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"noiseproof.{name}")
    if name in _NAMES:
        return getattr(import_module(f"noiseproof.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'noiseproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
