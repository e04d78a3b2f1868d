"""The loss around one input, over a plane: its own gradient against a random direction.

Both axes are Euclidean distances in pixel space: a point (a, b) is the image x + a·g + b·r, where g
is the gradient's direction and r a random one at right angles to it. Images off the grid's centre
are not clamped to [0, 1]: a clamp would fold the plane.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.draws import Source, normal
from noiseproof.modes import measuring

__all__ = ["Surface", "directions", "loss_surface"]


class Surface(NamedTuple):
    """`negative_loss[i, j]` is −l at distance[j] along the gradient and distance[i] across it."""

    distance: Tensor  # P, from −extent to extent; the middle one is 0
    negative_loss: Tensor  # P x P
    margin: Tensor  # P x P, the label's logit less the largest other: positive where it is right
    gradient_norm: float  # ‖∇l‖ at the input, in pixels; 0 where it vanishes to rounding


def directions(gradient: Tensor, source: Source = None) -> tuple[Tensor, Tensor]:
    """Two orthonormal directions of the shape of `gradient`: its own, and a random one across.

    A gradient that is exactly 0 has no direction; a random one takes its place.

    >>> g, r = directions(torch.tensor([3.0, 4.0]))
    >>> g.tolist(), abs(round(float(g @ r), 6))
    ([0.6000000238418579, 0.800000011920929], 0.0)
    """
    if gradient.numel() < 2:
        raise ValueError(f"a plane needs two dimensions, the input has {gradient.numel()}")
    shape = gradient.shape
    first, other = normal((1, 2, gradient.numel()), gradient, source)[0].to(gradient.dtype)
    flat = gradient.flatten()
    flat = torch.where(flat.any(), flat, first)
    along = flat / torch.linalg.vector_norm(flat)
    for _ in range(2):  # twice: the first leaves what rounding left
        other = other - (other @ along) * along
        other = other / torch.linalg.vector_norm(other)
    return along.view(shape), other.view(shape)


def loss_surface(
    model: nn.Module,
    x: Tensor,
    y: int,
    *,
    extent: float,
    points: int = 41,
    source: Source = None,
    chunk: int = 256,
) -> Surface:
    """−l on a grid of `points` x `points` around the image x, C x H x W, with label y.

    `points` is odd, so that the input itself is the middle of the grid. `source` draws the random
    direction: with one seed, all models have the same before it is turned across the gradient.
    """
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points must be odd and at least 3, got {points}")
    if not extent > 0:
        raise ValueError(f"extent must be positive, got {extent}")
    device = next(model.parameters()).device
    label = torch.tensor([y], device=device)
    with measuring(model, device):
        # In float64: a confident model's gradient is 0 in float32, and then has no direction.
        exact = copy.deepcopy(model).double()
        point = x.detach().to(device, torch.float64)[None].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(exact(point), label), point)
        along, across = directions(slope[0], source)
        distance = torch.linspace(-extent, extent, points, dtype=torch.float64, device=device)
        distance[points // 2] = 0
        losses, margins = [], []
        with torch.no_grad():
            b, a = torch.meshgrid(distance, distance, indexing="ij")
            for part in torch.stack([a.flatten(), b.flatten()], 1).split(chunk):
                moved = point[0] + torch.einsum("nk,kchw->nchw", part, torch.stack([along, across]))
                logits = model(moved.to(x.dtype))
                losses.append(F.cross_entropy(logits, label.expand(len(part)), reduction="none"))
                others = logits.index_fill(1, label, -torch.inf).amax(1)
                margins.append(logits[:, y] - others)
    return Surface(
        distance.float().cpu(),
        -torch.cat(losses).view(points, points).cpu(),
        torch.cat(margins).view(points, points).cpu(),
        float(torch.linalg.vector_norm(slope)),
    )
