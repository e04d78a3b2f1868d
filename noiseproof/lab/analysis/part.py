"""What a part of an analysis gets and returns: settings, arrays and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from noiseproof.perturb.text import noise_levels

Arrays = dict[str, NDArray[Any]]
Row = dict[str, Any]
Inputs = Mapping[str, Arrays]  # the arrays of the parts that a part needs, by the part's name
Progress = Callable[[float], None]  # called with the share that is done, from 0 to 1


@dataclass(frozen=True)
class Settings:
    """The settings of an analysis. A part is measured again only if one that it depends on changes.

    probes: random directions per curvature estimate.
    step: of the finite differences, in normalised coordinates.
    draws: noisy copies of each sample.
    noise: perturbations; the first is used wherever one is enough.
    seed: of the sample, the noise, the probes and t-SNE.
    samples: at most this many test samples; None for all.
    stages: embed the features of all stages, not only the penultimate ones.
    """

    probes: int = 20
    step: float = 1e-2
    draws: int = 10
    noise: tuple[str, ...] = ("gaussian:0.1",)
    seed: int = 0
    samples: int | None = None
    stages: bool = False

    @property
    def level(self) -> float:
        """The (largest) level of the first noise, in pixels; 0.1 if it has none."""
        return max(noise_levels(self.noise[0]), default=0.1) or 0.1


class Measured(NamedTuple):
    """The result of a part: arrays, and rows of one number each."""

    arrays: Arrays
    rows: list[Row]


def row(metric: str, value: float | int | bool | None, **facts: Any) -> Row:
    """One number: its name, its value, and the facts that distinguish it from similar ones."""
    return {"metric": metric, "value": value, **facts}
