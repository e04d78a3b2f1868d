"""The loss on a plane through an input, spanned by its gradient and a random direction.

Both axes are Euclidean distances in pixel space: the point (a, b) is the image x + a·g + b·r, where
g is the direction of the gradient and r a random one orthogonal to it. The images are not clamped
to [0, 1], which would fold the plane.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.draws import Source, normal
from noiseproof.lab.analysis.subject import Measured, Progress, Subject, row
from noiseproof.modes import measuring

IMAGES = 3  # the same for every run, so that their surfaces can be shown side by side
EXTENT = 8.0  # of the plane, in standard deviations of the noise
POINTS = 41  # per axis; odd, so that the image itself is the middle of the grid
CHUNK = 256  # images per forward pass
_SURFACE = 23  # purpose of random numbers


def measure_surface(subject: Subject, progress: Progress) -> Measured:
    """The surface of the loss around a few test images."""
    index, extent = subject.test_sample(IMAGES), EXTENT * subject.settings.level
    surfaces: list[Surface] = []
    images, labels, rows = [], [], []
    for x, y, positions in subject.batches(subject.dataset.test, index):
        for i in range(len(y)):
            source = subject.source(_SURFACE, positions[i : i + 1])
            surface = loss_surface(subject.model, x[i], int(y[i]), extent=extent, source=source)
            surfaces.append(surface)
            images.append(x[i].cpu().numpy())
            labels.append(int(y[i]))
            facts = {"space": "pixels", "index": int(positions[i]), "extent": extent}
            correct = float((surface.margin > 0).double().mean())
            middle = float(surface.negative_loss[POINTS // 2, POINTS // 2])
            rows += [
                row("negative loss at the input", middle, **facts),
                row("lowest negative loss", float(surface.negative_loss.min()), **facts),
                row("gradient norm", surface.gradient_norm, **facts),
                row("share of the plane classified rightly", correct, **facts),
            ]
            progress(len(surfaces) / len(index))
    arrays = {
        "distance": surfaces[0].distance.numpy(),
        "negative_loss": np.stack([surface.negative_loss.numpy() for surface in surfaces]),
        "margin": np.stack([surface.margin.numpy() for surface in surfaces]),
        "image": np.stack(images),
        "index": index.numpy(),
        "label": np.array(labels),
    }
    return Measured(arrays, rows)


class Surface(NamedTuple):
    """`negative_loss[i, j]` is −l at distance[j] along the gradient and distance[i] across it."""

    distance: Tensor  # P, from −extent to extent; the middle one is 0
    negative_loss: Tensor  # P x P
    margin: Tensor  # P x P, the label's logit minus the largest other: positive if correct
    gradient_norm: float  # ‖∇l‖ at the input, in pixels; 0 if it vanishes to rounding


def directions(gradient: Tensor, source: Source = None) -> tuple[Tensor, Tensor]:
    """Two orthonormal directions in the shape of `gradient`: its own and a random one.

    A gradient of exactly 0 is replaced by a random direction.

    Args:
        gradient: of the loss with respect to the input.
        source: of the random numbers.

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
    for _ in range(2):  # the second pass removes the rounding error of the first
        other = other - (other @ along) * along
        other = other / torch.linalg.vector_norm(other)
    return along.view(shape), other.view(shape)


def loss_surface(
    model: nn.Module, x: Tensor, y: int, *, extent: float, source: Source = None
) -> Surface:
    """−l on a grid of `POINTS` x `POINTS` around an image.

    Args:
        model: maps images to logits.
        x: the image, C x H x W.
        y: its label.
        extent: distance from the image to the edge of the grid, in pixel space.
        source: of the random direction; the same source gives all models the same one, before it
            is made orthogonal to the gradient.
    """
    device = next(model.parameters()).device
    label = torch.tensor([y], device=device)
    with measuring(model, device):
        # In float64: the gradient of a confident model is 0 in float32, so it has no direction.
        exact = copy.deepcopy(model).double()
        point = x.detach().to(device, torch.float64)[None].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(exact(point), label), point)
        along, across = directions(slope[0], source)
        distance = torch.linspace(-extent, extent, POINTS, dtype=torch.float64, device=device)
        distance[POINTS // 2] = 0
        losses, margins = [], []
        with torch.no_grad():
            b, a = torch.meshgrid(distance, distance, indexing="ij")
            for part in torch.stack([a.flatten(), b.flatten()], 1).split(CHUNK):
                moved = point[0] + torch.einsum("nk,kchw->nchw", part, torch.stack([along, across]))
                logits = model(moved.to(x.dtype))
                losses.append(F.cross_entropy(logits, label.expand(len(part)), reduction="none"))
                others = logits.index_fill(1, label, -torch.inf).amax(1)
                margins.append(logits[:, y] - others)
    return Surface(
        distance.float().cpu(),
        -torch.cat(losses).view(POINTS, POINTS).cpu(),
        torch.cat(margins).view(POINTS, POINTS).cpu(),
        float(torch.linalg.vector_norm(slope)),
    )
