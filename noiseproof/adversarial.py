"""Adversarial perturbations by projected gradient descent (Madry et al., ICLR 2018).

Noise is random; an attacker looks for the worst image within a distance ε. An attack that fails
proves nothing, so accuracy under attack is an upper limit on the accuracy in the worst case.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from noiseproof.draws import PerSample, keys
from noiseproof.geometry import check_labels
from noiseproof.modes import measuring
from noiseproof.perturb.base import check_images, check_range

__all__ = ["Norm", "pgd"]

Norm = Literal["l2", "linf"]


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    norm: Norm,
    epsilon: float,
    *,
    steps: int = 20,
    seed: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Images in [0, 1] within the distance `epsilon` of `images` that the model classifies worst.

    Each step increases the margin max_c≠y z_c − z_y of the logits z, whose gradient, unlike that of
    the cross-entropy, does not vanish where the model is confident. The first starts at a random
    point at distance ε / 10, since the gradient may vanish at the image itself; a step has length
    2.5 ε / `steps`. Of all points and the image itself, the one with the largest margin is
    returned. The model runs in eval mode and in full precision.

    Args:
        model: maps pixels to logits, B x classes; normalisation is part of it.
        images: in [0, 1], B x C x H x W, on the device of the model.
        labels: true classes.
        norm: "l2" for the Euclidean distance over all pixels and channels, "linf" for the largest
            change of a pixel.
        epsilon: largest distance, in pixel units.
        steps: number of gradients.
        seed: of the starting points, which are keyed by image: batches make no difference.
        index: of each image in its dataset, int64; by default 0, 1, …

    >>> class Bright(nn.Module):
    ...     def forward(self, x):
    ...         return torch.cat([0.5 - x, x - 0.5], 1).flatten(1)
    >>> worst = pgd(Bright(), torch.full((1, 1, 1, 1), 0.7), torch.tensor([1]), "l2", 0.25)
    >>> round(worst.item(), 4)
    0.45
    """
    check_images(images)
    check_range(images)
    if norm not in ("l2", "linf"):
        raise ValueError(f"norm must be l2 or linf, got {norm!r}")
    if not (math.isfinite(epsilon) and epsilon > 0) or steps < 1:
        raise ValueError(f"epsilon must be above 0 and steps at least 1, got {epsilon}, {steps}")
    index = torch.arange(len(images)) if index is None else index
    noise = PerSample(keys(seed, index.to(images.device))).normal(*images.shape[1:])
    start = _ascent(noise.to(images.dtype), norm) * (0.1 * epsilon)
    change = torch.zeros_like(images)
    worst, largest = images.clone(), torch.full_like(images[:, 0, 0, 0], -math.inf)
    with measuring(model, images.device):
        for step in range(steps + 2):  # the image itself, the start, and the end of each step
            x = (images + change).clamp(0, 1).requires_grad_()
            logits = model(x)
            if step == 0:
                check_labels(labels, logits.shape[1])
            margin = _margin(logits, labels)
            better = margin.detach() > largest
            largest = torch.where(better, margin.detach(), largest)
            worst = torch.where(better[:, None, None, None], x.detach(), worst)
            if step == 0:
                change = start
            elif step <= steps:
                (gradient,) = torch.autograd.grad(margin.sum(), x)
                change = x.detach() - images + _ascent(gradient, norm) * (2.5 * epsilon / steps)
                change = _projected(change, norm, epsilon)
    return worst


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest other logit minus that of the true class: positive if the answer is wrong."""
    true = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], True)
    return logits.masked_fill(true, -math.inf).amax(1) - logits[true]


def _ascent(gradient: Tensor, norm: Norm) -> Tensor:
    """The direction of unit length in `norm` in which the gradient rises fastest."""
    return gradient.sign() if norm == "linf" else gradient / _length(gradient)


def _projected(change: Tensor, norm: Norm, epsilon: float) -> Tensor:
    """The nearest change of length at most `epsilon`; clamping pixels then only shortens it."""
    if norm == "linf":
        return change.clamp(-epsilon, epsilon)
    return change * (epsilon / _length(change)).clamp(max=1)


def _length(x: Tensor) -> Tensor:
    """The Euclidean length of each sample, B x 1 x 1 x 1, not 0."""
    return x.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None, None]
