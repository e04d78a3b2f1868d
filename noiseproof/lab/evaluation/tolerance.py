"""Noise tolerance: the strongest noise under which a model keeps its answer for an image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from noiseproof import draws

STEPS = 100  # levels are multiples of 1 / STEPS, up to 1
DRAWS, KEPT = 10, 9


@torch.no_grad()
def noise_tolerance(model: Callable[[Tensor], Tensor], images: Tensor, seed: int = 0) -> Tensor:
    """For each image the highest σ of Gaussian noise, in steps of 0.01, at which the model keeps
    its answer for the image without noise in at least 9 of 10 draws: B values from 0 to 1.

    It is found by bisection, in seven rounds of ten draws: at this level the answer is kept, at the
    next one it is lost. No higher level keeps it, unless a lost answer comes back under stronger
    noise. All images and levels get the same ten draws, multiplied by σ, so that this is rare, and
    so that the result for an image does not depend on the others.

    Args:
        model: maps pixels in [0, 1], B x C x H x W, to logits; in eval mode.
        images: B x C x H x W, in [0, 1].
        seed: of the noise.
    """
    size, count = images.shape[1:], len(images)
    keys = draws.keys(seed, torch.arange(DRAWS, device=images.device))
    noise = draws.normal((DRAWS, *size), images.new_empty(DRAWS, *size), draws.PerSample(keys))
    answers = model(images).argmax(1)
    low = torch.zeros(count, dtype=torch.long, device=images.device)  # the answer is kept
    high = torch.full_like(low, STEPS + 1)  # it is lost, or not tested
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        level = (middle / STEPS).view(-1, 1, 1, 1, 1)
        noisy = (images[:, None] + level * noise).clamp(0, 1).flatten(0, 1)
        same = model(noisy).argmax(1).view(count, DRAWS) == answers[:, None]
        kept = same.sum(1) >= KEPT
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return low / STEPS


def tolerance_text(tolerance: float) -> str:
    """
    >>> tolerance_text(0.23), tolerance_text(0.0), tolerance_text(1.0)
    ('up to σ=0.23', 'below σ=0.01', 'σ=1 or more')
    """
    if tolerance >= 1:
        return "σ=1 or more"
    return f"up to σ={tolerance:.2f}" if tolerance > 0 else f"below σ={1 / STEPS:g}"
