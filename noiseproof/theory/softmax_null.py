"""The directions of feature space that softmax cannot see (the paper's section 3.2).

Softmax ignores a constant added to all logits, so features q and q + v give the same probabilities
if Wv is a multiple of the all-ones vector. Those v form the null space of W minus its mean row, of
dimension D − rank with rank <= C − 1: with 10 classes and 128 features, at least 119 directions.
Cross-entropy does not constrain the spread of features along them; the compactness term does. The
share of within-class variance in this space shows what compactness adds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.geometry import check_samples


class SoftmaxNull(NamedTuple):
    """The space {v : Wv ∝ 1}."""

    basis: Tensor  # D x dimension, orthonormal columns
    dimension: int  # D − rank
    rank: int  # of W minus its mean row


class InvisibleVariance(NamedTuple):
    """How much of the within-class variance softmax cannot see."""

    share: float  # in [0, 1]; NaN if there is no variance at all
    per_class: Tensor  # C; NaN for classes without variance
    isotropic: float  # dimension / D: the share if the variance were equal in all directions
    dimension: int


def null_space(head: nn.Linear | Tensor) -> SoftmaxNull:
    """An orthonormal basis of {v : Wv ∝ 1}, in float64.

    Singular values below max(C, D)·eps of the largest count as 0, with eps of W's own dtype.

    Args:
        head: the linear softmax layer, or its weight W, C x D.

    >>> null = null_space(torch.tensor([[1.0, 0.0, 2.0], [-1.0, 0.0, 2.0]]))
    >>> null.dimension, (null.basis[0].abs() < 1e-12).all().item()
    (2, True)
    """
    weight = head.weight if isinstance(head, nn.Linear) else head
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"the weight must be C x D floats, got {tuple(weight.shape)}")
    exact = weight.detach().double()
    _, values, right = torch.linalg.svd(exact - exact.mean(0), full_matrices=True)
    # Relative to W, not to the centred W, which is nothing but rounding if all rows are equal.
    largest = torch.linalg.matrix_norm(exact, 2)
    rank = int((values > max(weight.shape) * torch.finfo(weight.dtype).eps * largest).sum())
    return SoftmaxNull(right[rank:].T.contiguous(), weight.shape[1] - rank, rank)


def invisible_variance(
    features: Tensor, labels: Tensor, head: nn.Linear | Tensor
) -> InvisibleVariance:
    """The share of within-class variance inside the null space, Σ‖P(q − q̄_c)‖² / Σ‖q − q̄_c‖².

    q̄_c is the mean of the given features of class c, P the projection onto {v : Wv ∝ 1}.

    Args:
        features: B x D.
        labels: B class indices, int64.
        head: the linear softmax layer, or its weight W, C x D.

    >>> q = torch.tensor([[1.0, 3.0], [2.0, -3.0], [-1.0, 0.0]])
    >>> w = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> round(invisible_variance(q, torch.tensor([0, 0, 1]), w).share, 4)  # 18 / 18.5
    0.973
    """
    weight = head.weight if isinstance(head, nn.Linear) else head
    null = null_space(weight)
    classes, dim = weight.shape
    check_samples(features, labels, classes)
    if features.shape[1] != dim:
        raise ValueError(f"features must have {dim} columns like W, got {features.shape[1]}")
    q = features.detach().double()
    counts = torch.bincount(labels, minlength=classes).clamp(min=1)
    means = q.new_zeros(classes, dim).index_add(0, labels, q) / counts[:, None]
    deviation = q - means[labels]
    hidden = q.new_zeros(classes).index_add(0, labels, (deviation @ null.basis).square().sum(1))
    total = q.new_zeros(classes).index_add(0, labels, deviation.square().sum(1))
    share = float(hidden.sum() / total.sum())
    return InvisibleVariance(share, hidden / total, null.dimension / dim, null.dimension)
