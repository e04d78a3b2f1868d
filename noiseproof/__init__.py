"""Train image classifiers that stay accurate on noisy inputs, test them, and analyse why.

In your own training loop:  wrap, DiscriminativeLoss, perturb, augment, objectives
To use a trained model:     load (needs the extra `lab`)
To test a model:            accuracy, smoothing, adversarial
To analyse a model:         geometry, curvature, theory

Names are imported on first use, so `import noiseproof` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Accuracy",
    "DiscriminativeLoss",
    "LossTerms",
    "accuracy",
    "adversarial",
    "augment",
    "curvature",
    "draws",
    "geometry",
    "load",
    "objectives",
    "perturb",
    "smoothing",
    "theory",
    "wrap",
]

_MODULES = {
    "Accuracy": "robustness",
    "DiscriminativeLoss": "loss",
    "LossTerms": "loss",
    "accuracy": "robustness",
    "load": "lab.deploy.load",
    "wrap": "wrapped",
}  # of the names that are not modules

if TYPE_CHECKING:
    from noiseproof import (
        adversarial,
        augment,
        curvature,
        draws,
        geometry,
        objectives,
        perturb,
        smoothing,
        theory,
    )
    from noiseproof.lab.deploy.load import load
    from noiseproof.loss import DiscriminativeLoss, LossTerms
    from noiseproof.robustness import Accuracy, accuracy
    from noiseproof.wrapped import wrap


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'noiseproof' has no attribute {name!r}")
    try:
        module = import_module(f"noiseproof.{_MODULES.get(name, name)}")
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if name != "load" or library == "noiseproof":
            raise
        message = f"noiseproof.load needs {library}: pip install 'noiseproof[lab]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return getattr(module, name) if name in _MODULES else module


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
