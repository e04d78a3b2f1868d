"""Distances of features to the decision boundaries of a softmax layer, and within their classes.

For logits z = Wq + b the boundary between classes c and i is the hyperplane
P_ci = {q : ⟨W_c − W_i, q⟩ + b_c − b_i = 0}. The signed distance of q to it, seen from class c, is

    d_ci(q) = (z_c − z_i) / ‖W_c − W_i‖,        positive where class c wins against class i.

Two classes whose rows of W are (nearly) equal have no such hyperplane: pairs with
‖W_c − W_i‖ ≤ PAIR_TOLERANCE · max(‖W_c‖, ‖W_i‖) are left out everywhere.

>>> head = torch.nn.Linear(2, 2, bias=False)
>>> head.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
>>> boundary_distances(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), head).tolist()
[[inf, 3.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import (  # pyright: ignore[reportMissingModuleSource]
    get_unwrapped,
    is_batchedtensor,
    is_gradtrackingtensor,
)

__all__ = [
    "PAIR_TOLERANCE",
    "Rivals",
    "boundary_distances",
    "class_dispersion",
    "class_margin",
    "hardest_rivals",
]

PAIR_TOLERANCE = 1e-3
"""Relative distance of two rows of W below which the two classes have no boundary."""

_EXACT = "donot_use_mm_for_euclid_dist"
_EXACT_LIMIT = 1 << 21  # multiplications for an exact table of distances; larger ones are searched
_CHUNK = 1 << 20  # entries of the search table in memory at a time: 4 MB in float32
_CANDIDATES = 8  # pairs per point and group that are compared exactly after the search
_DOUBTFUL = 16  # times the squared tolerance; the search rounds by about 2 with 2,048 features


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, else float32: nothing is computed in half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def row_distances(weight: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """‖W_c − W_i‖ for each c in `classes` and every i, and which pairs have a boundary: S x C."""
    rows = weight[classes]
    distance = torch.cdist(rows, weight, compute_mode=_EXACT)  # S x C
    norms = torch.linalg.vector_norm(weight, dim=1)
    largest = torch.maximum(norms[classes][:, None], norms)
    return distance, distance > PAIR_TOLERANCE * largest  # a class and itself are exactly 0 apart


def boundary_distances(features: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    """Signed distance of each feature to each boundary of its class: B x C.

    Positive on the right side; +inf for its own class and for pairs without a boundary.

    Args:
        features: B x D.
        labels: B class indices, int64.
        head: the linear softmax layer, D -> C.
    """
    weight, bias = head_parameters(head, working_dtype(features, head.weight))
    check_features(features, labels, len(weight), dim=weight.shape[1])
    logits = features.to(weight.dtype) @ weight.T + bias
    distance, valid = row_distances(weight, labels)
    gap = logits.gather(1, labels[:, None]) - logits
    return torch.where(valid, gap / torch.where(valid, distance, 1.0), torch.inf)


def class_margin(features: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    """Smallest signed distance of a class's features to the class's boundaries: C.

    Negative if a feature is misclassified; +inf for a class without features. Arguments as for
    `boundary_distances`.
    """
    nearest = boundary_distances(features, labels, head).amin(dim=1)  # B
    margins = nearest.new_full((head.out_features,), torch.inf)
    return margins.scatter_reduce(0, labels, nearest, "amin")


def class_dispersion(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Largest distance between two features of a class: C; 0 for a class without two features.

    Args:
        features: B x D.
        labels: B class indices, int64.
        num_classes: C.

    >>> class_dispersion(torch.tensor([[0.0], [3.0], [7.0]]), torch.tensor([0, 0, 1]), 3).tolist()
    [3.0, 0.0, 0.0]
    """
    check_features(features, labels, num_classes)
    features = features.to(working_dtype(features))
    return torch.stack([_diameter(features[labels == c]) for c in range(num_classes)])


def _diameter(points: Tensor, rows: int = 1024) -> Tensor:
    """The largest distance: the farthest pair is found block by block, then measured exactly."""
    largest = points.new_zeros(())
    if len(points) < 2:
        return largest
    points = points - points.mean(0)  # cdist expands the square, which is accurate near 0 only
    for block in points.split(rows):
        index = torch.cdist(block, points).argmax()
        difference = block[index // len(points)] - points[index % len(points)]
        largest = torch.maximum(largest, torch.linalg.vector_norm(difference))
    return largest


class Rivals(NamedTuple):
    """For each point, the other class whose boundary it is closest to, or farthest behind."""

    rival: Tensor  # S, the rival class
    exists: Tensor  # S, False if no class has a boundary with the point's own


@torch.no_grad()
def hardest_rivals(points: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Rivals:
    """The i ≠ c with the smallest signed distance d_ci(point), for each of S points.

    Memory is S · C, never C · C · D. A small table of distances is exact. A large one is searched
    block by block with ‖W_c − W_i‖² = ‖W_c‖² + ‖W_i‖² − 2⟨W_c, W_i⟩, which is inaccurate for nearly
    equal rows; so the best few candidates of each point are then compared exactly.

    Args:
        points: S x D, such as centroids.
        classes: S, the class c of each point.
        weight: W of the softmax layer, C x D.
        bias: b of the softmax layer, C.
    """
    if len(classes) * weight.numel() <= _EXACT_LIMIT:
        # Contiguous: some CPU libraries are 10 times slower for a small transposed matrix.
        logits = torch.addmm(bias, points, weight.T.contiguous())
        distance, valid = row_distances(weight, classes)
        violation = (logits - logits.gather(1, classes[:, None])) / distance
        worst = torch.where(valid, violation, -torch.inf).max(dim=1)
        return Rivals(worst.indices, valid.any(dim=1))
    rows = max(1, _CHUNK // len(weight))
    blocks = zip(points.split(rows), classes.split(rows), strict=True)
    parts = [_search(p, c, weight, bias) for p, c in blocks]
    return Rivals(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _search(points: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Rivals:
    own = weight[classes]
    squares = torch.linalg.vecdot(weight, weight)
    table = torch.addmm(squares, own, weight.T, alpha=-2).add_(squares[classes][:, None])
    floor = PAIR_TOLERANCE**2 * torch.maximum(squares[classes][:, None], squares)
    doubtful = table < _DOUBTFUL * floor  # rounding may hide that the rows are equal
    scale = torch.maximum(table, floor, out=table).rsqrt_()
    del floor
    logits = torch.addmm(bias, points, weight.T)
    violation = logits.sub_(logits.gather(1, classes[:, None])).mul_(scale)
    violation.scatter_(1, classes[:, None], -torch.inf)
    count = min(_CANDIDATES, len(weight))
    # Apart, so that many equal rows, which have no boundary, cannot crowd out those that have one.
    groups = [violation.masked_fill(excluded, -torch.inf) for excluded in (doubtful, ~doubtful)]
    near = torch.cat([group.topk(count, dim=1).indices for group in groups], dim=1)  # S x K
    difference = weight[near] - own[:, None]  # S x K x D
    length = torch.linalg.vector_norm(difference, dim=2)
    norms = squares.sqrt()
    valid = length > PAIR_TOLERANCE * torch.maximum(norms[classes][:, None], norms[near])
    rise = (difference @ points[:, :, None])[:, :, 0] + bias[near] - bias[classes][:, None]
    exact = torch.where(valid, rise / torch.where(valid, length, 1), -torch.inf)
    return Rivals(near.gather(1, exact.argmax(dim=1)[:, None])[:, 0], valid.any(dim=1))


def head_parameters(head: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W and b in `dtype`; a head without bias has b = 0."""
    weight = head.weight.to(dtype)
    bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias.to(dtype)
    return weight, bias


def features_and_head(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
    """`model.features` and `model.head`, whose logits are head(features(x)); else ValueError.

    >>> features_and_head(nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: the model needs a method features(x) and an nn.Linear head; Linear has no features
    """
    required = "the model needs a method features(x) and an nn.Linear head"
    features: Any = getattr(model, "features", None)
    head: Any = getattr(model, "head", None)
    if features is None:
        raise ValueError(f"{required}; {type(model).__name__} has no features")
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{required}; the head of {type(model).__name__} is {type(head).__name__}")
    return features, head


def check_features(
    features: Tensor, labels: Tensor, num_classes: int, *, dim: int | None = None
) -> None:
    """Raises ValueError unless features are B x D floats and labels B classes, as int64.

    The range of labels is checked on a CPU alone: reading them would make a GPU wait.

    Args:
        features: B x D.
        labels: B.
        num_classes: C; labels lie in [0, C).
        dim: D that is expected; None accepts any.
    """
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(
            f"features must be B x D of a float type, got {tuple(features.shape)} {features.dtype}"
        )
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be {len(features)} values of int64, one per feature, "
            f"got {tuple(labels.shape)} of {labels.dtype}"
        )
    if dim is not None and features.shape[1] != dim:
        raise ValueError(f"features have {features.shape[1]} values each, but the head takes {dim}")
    check_labels(labels, num_classes)


def check_samples(
    features: Tensor, labels: Tensor, num_classes: int, centroids: Tensor | None = None
) -> None:
    """`check_features` for use outside a training step: labels are read on any device.

    Also requires at least one sample and, if centroids are given, that they are C x D.
    """
    check_features(features, labels.cpu(), num_classes)
    if len(labels) == 0:
        raise ValueError("there must be at least one sample, got none")
    if centroids is not None and centroids.shape != (num_classes, features.shape[1]):
        raise ValueError(
            f"centroids must be {num_classes} x {features.shape[1]}, got {tuple(centroids.shape)}"
        )


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raises ValueError for labels outside [0, num_classes), if they are on a CPU."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    while is_gradtrackingtensor(labels):  # of torch.func.grad
        labels = get_unwrapped(labels)
    if is_batchedtensor(labels):  # under vmap values cannot be read
        return
    low, high = torch.aminmax(labels)
    if int(low) < 0 or int(high) >= num_classes:
        index = int(((labels < 0) | (labels >= num_classes)).nonzero()[0])
        raise ValueError(
            f"labels must lie in [0, {num_classes}), got {int(labels[index])} at index {index}"
        )
