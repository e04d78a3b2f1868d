"""How much of an analysis is worth waiting for at the end of a comparison.

Curvature takes a hundred passes through the network for each image, and some parts tens of
thousands whatever the number of images: seconds for the digits, and for photographs on a laptop
longer than their training. How much is taken follows from the arithmetic of one pass and from the
kind of device, not from a clock, so that all methods are measured on the same images everywhere.
`noiseproof analyse` takes what it is asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from noiseproof.lab.analyse import ALL
from noiseproof.lab.runs import RunFolder

__all__ = ["Share", "affordable", "arithmetic", "share"]

FIXED = ("steps", "surface", "theory")  # parts whose cost hardly depends on the number of images
# Operations a run, meant to last a minute or two; and the passes forward that an image and the
# fixed parts are worth, estimated from the time that they took with a ResNet18 on a CPU. (All of it
# with 2,000 images took 82 to 181 s on an H200 that two trainings shared.)
_BUDGET = {"cpu": 2e12, "cuda": 5e14}
_EACH, _FIXED = 110, 56_000
_LEAST, _MOST = 30, 2000  # images


class Share(NamedTuple):
    """What is taken of an analysis."""

    samples: int
    parts: tuple[str, ...]

    def told(self, count: int) -> str | None:
        """A line about what is left out of so many test images; None where that is nothing."""
        missing = [part for part in ALL if part not in self.parts]
        if not missing and self.samples >= min(count, _MOST):
            return None
        left = f", without {', '.join(missing)}" if missing else ""
        return (
            f"Analysis: on {min(self.samples, count):,} of {count:,} test images{left}; more takes "
            "long here. `noiseproof analyse` measures all."
        )


def affordable(run: RunFolder, device: torch.device) -> Share:
    """What a comparison takes of the analysis of a run."""
    return share(arithmetic(run.model("last"), run.info["size"]), device.type)


def share(operations: float, device: str) -> Share:
    """What is taken where a pass of one image forward is so many operations.

    >>> share(1.1e9, "cpu").samples, share(1.1e9, "cuda").samples  # ResNet18
    (30, 2000)
    """
    budget = _BUDGET["cuda" if device == "cuda" else "cpu"]
    samples = int(budget / (_EACH * max(operations, 1.0)))
    whole = _FIXED * operations <= budget
    parts = ALL if whole else tuple(part for part in ALL if part not in FIXED)
    return Share(min(_MOST, max(_LEAST, samples)), parts)


@torch.no_grad()
def arithmetic(model: nn.Module, size: tuple[int, int, int] | list[int]) -> float:
    """Operations of one image's pass forward, counted."""
    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *size, device=device))
    return float(counter.get_total_flops())
