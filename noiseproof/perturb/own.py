"""Perturbations of the user's own: any function of images, with a name for texts.

>>> def shade(image, level):  # one image, C x H x W
...     return image * (1 - level)
>>> shaded = Own("shade", shade, 0.5)
>>> print(shaded, shaded(torch.ones(1, 1, 1, 2)))
shade:0.5 tensor([[[[0.5000, 0.5000]]]])

`register("shade", shade, levels=(0, 1))` makes `parse("shade:0.5")` and all commands know it.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noiseproof.draws import PerSample, Source
from noiseproof.perturb import values
from noiseproof.perturb.base import Perturbation
from noiseproof.perturb.text import BUILT_IN, REGISTERED, Registration

__all__ = ["Own", "register"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Own(Perturbation):
    """A function as a perturbation. Its result is clamped to [0, 1].

    Args:
        name: what texts call it.
        function: as for `register`.
        level: the second argument of the function, if it has levels.
        fixed: the function draws no random numbers.
    """

    name: str
    function: Callable[..., Any]
    level: float | None = None
    fixed: bool = False

    @property
    def deterministic(self) -> bool:
        return self.fixed

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        level = () if self.level is None else (self.level,)
        images = x.clone()  # the function may work in place
        if _takes_source(self.function):
            result = self.function(images, *level, source=source)
        else:
            results = []
            with _restored(source, x.device):
                for i, image in enumerate(images):
                    _seed(source, i, x.device)
                    results.append(self.function(image, *level))
                    self._check(results[-1], image)
            result = torch.stack(results) if results else x
        self._check(result, x)
        return result.clamp(0, 1).to(x.dtype)

    def _check(self, result: object, x: Tensor) -> None:
        if not isinstance(result, Tensor):
            got = type(result).__name__
        elif result.shape != x.shape:
            got = tuple(result.shape)
        elif not result.is_floating_point():
            got = result.dtype
        elif x.ndim == 4 and _has_nan(result):
            got = "NaN"
        else:
            return
        raise ValueError(
            f"the perturbation {self} must return a tensor of floats in [0, 1], of the shape of "
            f"its images, {tuple(x.shape)}, got {got}"
        )

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{values.decimal(self.level)}"


def register(
    name: str,
    function: Callable[..., Any],
    *,
    levels: tuple[float, float] | None = None,
    deterministic: bool = False,
    help: str = "",
) -> None:
    """Gives a function a name, so that texts such as "rain:0.3" or "rain:0.3+jpeg:2" describe it.

    Registering a name again replaces the function; the names of this package cannot be replaced. In
    commands, `--plugin FILE.py` names the file that calls this.

    Args:
        name: lower-case letters, digits and underscores.
        function: maps an image, a C x H x W tensor in [0, 1], to one of the same shape. It is
            called for each image, with the random numbers of torch, numpy.random and random seeded
            for that image; torchvision's transforms are such functions. One with a parameter
            `source` gets whole batches instead, B x C x H x W, and draws with `noiseproof.draws`
            from that source: faster, and still independent for each image. With `levels`, the
            second argument is the level.
        levels: the lowest and the highest level. By default it has none: the text is the name.
        deterministic: it draws no random numbers, so that one draw is enough in an evaluation.
        help: a line for `noiseproof list perturbations`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a name must be of the form {_NAME.pattern}, got {name!r}")
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is a perturbation of noiseproof; choose another name")
    if not callable(function):
        raise ValueError(f"function must be callable, got {function!r}")
    if levels is not None:
        if not isinstance(levels, (tuple, list)) or len(levels) != 2:
            raise ValueError(f"levels must be the lowest and the highest, got {levels!r}")
        low, high = (values.number("levels", level) for level in levels)
        if low > high:
            raise ValueError(f"levels must be the lowest and the highest, got {low} > {high}")
        levels = (low, high)
    _check_parameters(name, function, levels is not None)
    first_line = (inspect.getdoc(function) or "").partition("\n")[0]
    text = help or first_line or "registered perturbation"
    REGISTERED[name] = Registration(function, levels, deterministic, text.rstrip("."))


def _check_parameters(name: str, function: Callable[..., Any], has_level: bool) -> None:
    """ValueError unless the function can be called as `Own` calls it."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function
        return
    positional = ("image", "level") if has_level else ("image",)
    try:
        signature.bind(*positional, **({"source": None} if _takes_source(function) else {}))
    except TypeError:
        expected = "an image and a level" if has_level else "one image, or levels must be given"
        raise ValueError(
            f"the function of {name!r} must take {expected}, got {signature}"
        ) from None


def _has_nan(x: Tensor) -> bool:
    """Whether there is a NaN; False where looking would make a GPU wait or break a graph."""
    looks = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return looks and bool(x.isnan().any())


def _takes_source(function: Callable[..., Any]) -> bool:
    try:
        return "source" in inspect.signature(function).parameters
    except ValueError:  # a built-in function
        return False


@contextmanager
def _restored(source: Source, device: torch.device) -> Iterator[None]:
    """Restores the global generators of torch, Python and numpy afterwards; without a source they
    continue."""
    if source is None:
        yield
        return
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)


def _seed(source: Source, position: int, device: torch.device) -> None:
    """Seeds these generators for one image of a batch; not without a source."""
    if source is None:
        return
    if isinstance(source, PerSample):
        seed = int(source.keys[position])
    else:
        seed = int(torch.randint(2**62, (), generator=source, device=source.device))
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
