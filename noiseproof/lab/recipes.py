"""Ready settings: functions from a dataset's name to a config, and the perturbations to test with.

A recipe gives the defaults of `noiseproof train --recipe NAME`; a YAML file and flags go over it.
Nothing here needs torch.

>>> recipe("paper", "cifar10").method.noise
'gaussian:0.06'
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from noiseproof.lab.config import Config
from noiseproof.lab.recipe_modern import modern
from noiseproof.lab.recipe_paper import paper
from noiseproof.lab.recipe_suites import suite

__all__ = ["DEFAULT", "RECIPES", "recipe", "recipe_help", "suite"]

RECIPES: dict[str, Callable[[str], Config]] = {
    "paper": paper,
    "modern": modern,
}
DEFAULT = "paper"


def recipe(name: str, data: str) -> Config:
    """The config that recipe `name` gives for `data`: a dataset's name, a folder or a .npz file.

    >>> recipe("papr", "digits")
    Traceback (most recent call last):
        ...
    ValueError: no recipe is called 'papr'; expected paper or modern (did you mean 'paper'?)
    """
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no recipe is called {name!r}; expected {' or '.join(RECIPES)}{hint}")
    return RECIPES[name](data)


def recipe_help() -> dict[str, str]:
    """Name -> the first line of the recipe's docstring."""
    docs = {name: (make.__doc__ or "").strip() for name, make in RECIPES.items()}
    return {name: text.partition("\n")[0].rstrip(".") for name, text in docs.items()}
