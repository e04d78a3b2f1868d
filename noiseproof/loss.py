"""The discriminative loss: compact classes, far from the decision boundaries, under noise too.

For a batch with classes C_B present, n_c samples of class c, features q and noisy features q̃,
centroids m_c, softmax layer (W, b), radius δ_v and margin δ_d:

    compact = mean_c  (1/n_c) Σ_x  max(0, ‖m_c − q(x)‖ − δ_v)²
    noisy   = mean_c  (1/n_c) Σ_x  max(0, ‖m_c − q̃(x)‖ − δ_v)²
    margin  = mean_c  max_{i ≠ c}  max(0, δ_d − d_ci(m_c)),     d_ci(q) = (z_c − z_i) / ‖W_c − W_i‖
    norm    = mean_c  ‖m_c‖

where mean_c runs over the classes present and i over all classes. Centroids are computed from clean
features only. Which centroid a term uses is the strategy: "partial" (the paper's) takes the
momentum centroid for compact, noisy and norm, and the current one for the margin, whose gradient
momentum would multiply by 1 − γ; "naive" and "momentum" use one of the two in every term.

The hinges of compact and noisy are squared, that of the margin is not. The paper's appendix A.1
argues for this choice: the gradient of a squared hinge fades as the hinge closes, which spares
abnormal samples, while a plain one pushes a centroid with full force until it has its margin.
`compact_hinge` and `margin_hinge` change it, for an ablation.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from noiseproof import centroids as cc
from noiseproof import geometry

__all__ = ["DiscriminativeLoss", "LossTerms"]

Strategy = Literal["partial", "naive", "momentum"]
Hinge = Literal["plain", "squared"]
_NOT_NEGATIVE = ("radius", "margin", "compact_weight", "margin_weight", "norm_weight",
                 "noisy_weight")  # fmt: skip


class LossTerms(NamedTuple):
    """The four terms: scalars, not weighted."""

    compact: Tensor
    margin: Tensor
    norm: Tensor
    noisy: Tensor


class DiscriminativeLoss(nn.Module):
    """A weighted sum of the four terms, to be added to cross-entropy on clean logits.

    >>> criterion = DiscriminativeLoss(num_classes=2, feature_dim=1, margin=2.0, norm_weight=0.0)
    >>> head = nn.Linear(1, 2)
    >>> _ = head.weight.data.copy_(torch.tensor([[1.0], [-1.0]])), head.bias.data.zero_()
    >>> features, labels = torch.tensor([[1.0], [3.0], [-3.0]]), torch.tensor([0, 0, 1])
    >>> terms = criterion.terms(features, labels, head)  # class 0: centroid 2, both samples 1 away
    >>> terms.compact.item(), terms.margin.item()  # ((1 − 0.5)² + 0) / 2; nearest boundary 2 away
    (0.125, 0.0)

    **State.** The buffers `centroids` (C x D) and `seen` (C, positive for classes that have one)
    hold the running centroids. Only `forward` in training mode updates them, except those of
    classes whose features are not finite. In `eval()` every term uses the stored centroids, and
    classes never seen are left out. A training call cannot be recomputed in the backward pass, as
    in `torch.utils.checkpoint`: RuntimeError.

    **Precision** is float32, or float64 if an input is, under autocast too. Pairs of classes whose
    rows of W differ by less than `geometry.PAIR_TOLERANCE` (1e-3) of the larger have no usable
    boundary and are left out of the margin.

    **Gradient accumulation.** The loss is not additive over micro-batches: centroids are means over
    the samples of one call, and each call updates the running centroids. Accumulating K
    micro-batches gives the mean of K small-batch losses, with momentum applied K times; it equals K
    steps with frozen weights, not one step on the joint batch.

    **Distributed training.** If torch.distributed is initialised, class means, counts and the
    number of classes are those of the global batch. Each rank returns its share, scaled so that the
    mean over ranks is the loss of the global batch and gradients averaged by DDP are its gradient.
    All ranks must call the loss together.
    """

    centroids: Tensor
    seen: Tensor

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        *,
        radius: float = 0.5,
        margin: float = 5.0,
        compact_weight: float = 1.0,
        margin_weight: float = 1.0,
        norm_weight: float = 1e-3,
        noisy_weight: float = 1.0,
        momentum: float = 0.9,
        centroids: Strategy = "partial",
        margin_over: Literal["max", "mean"] = "max",
        compact_hinge: Hinge = "squared",
        margin_hinge: Hinge = "plain",
    ):
        """
        Args:
            num_classes: C, the outputs of the head.
            feature_dim: D, the size of the penultimate layer.
            radius: δ_v; features closer than this to their centroid cost nothing.
            margin: δ_d, the distance that a centroid should keep from every decision boundary.
            compact_weight: weight of `compact`, which pulls clean features to their centroid.
            margin_weight: weight of `margin`, which pushes centroids away from the boundaries.
            norm_weight: weight of `norm`, which keeps centroids from growing without limit.
            noisy_weight: weight of `noisy`, which pulls noisy features to the clean centroid.
            momentum: γ in [0, 1], the share of the previous centroid in the running one.
            centroids: which centroids the terms use: "naive" the current ones, "momentum" the
                running ones, "partial" (the paper's) the running ones except in `margin`.
            margin_over: the margin term of a class counts its hardest rival ("max", the paper's) or
                the mean over all rivals ("mean").
            compact_hinge: whether the hinges of `compact` and `noisy` are "squared" (the paper's)
                or "plain".
            margin_hinge: whether the hinge of `margin` is "plain" (the paper's) or "squared".
        """
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        if feature_dim < 1:
            raise ValueError(f"feature_dim must be at least 1, got {feature_dim}")
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must lie in [0, 1], got {momentum}")
        if centroids not in ("partial", "naive", "momentum"):
            raise ValueError(f"centroids must be partial, naive or momentum, got {centroids!r}")
        if margin_over not in ("max", "mean"):
            raise ValueError(f"margin_over must be max or mean, got {margin_over!r}")
        for name, hinge in (("compact_hinge", compact_hinge), ("margin_hinge", margin_hinge)):
            if hinge not in ("plain", "squared"):
                raise ValueError(f"{name} must be plain or squared, got {hinge!r}")
        self.num_classes, self.feature_dim = num_classes, feature_dim
        self.radius, self.margin, self.momentum = radius, margin, momentum
        self.compact_weight, self.margin_weight = compact_weight, margin_weight
        self.norm_weight, self.noisy_weight = norm_weight, noisy_weight
        self.strategy: Strategy = centroids
        self.margin_over = margin_over
        self.compact_hinge: Hinge = compact_hinge
        self.margin_hinge: Hinge = margin_hinge
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                got = getattr(self, name)
                raise ValueError(f"{name} must be a non-negative number, got {got}")
        self.register_buffer("centroids", torch.zeros(num_classes, feature_dim))
        self.register_buffer("seen", torch.zeros(num_classes))

    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        head: nn.Linear,
        noisy_features: Tensor | None = None,
        *,
        return_terms: bool = False,
    ) -> Tensor | tuple[Tensor, LossTerms]:
        """The loss; updates the running centroids in training mode.

        Args:
            features: B x D, clean penultimate features.
            labels: B class indices, int64.
            head: the linear softmax layer, with or without bias.
            noisy_features: B x D, features of the noisy view of the same samples; None leaves the
                term `noisy` at 0.
            return_terms: also return the `LossTerms`.
        """
        terms, slots, running = self._compute(features, labels, head, noisy_features)
        if self.training:
            cc.store(self.centroids, self.seen, slots, running)
        total = self.weighted(terms)
        return (total, terms) if return_terms else total

    def terms(
        self,
        features: Tensor,
        labels: Tensor,
        head: nn.Linear,
        noisy_features: Tensor | None = None,
    ) -> LossTerms:
        """The terms that `forward` adds up, with its arguments; never updates the centroids."""
        return self._compute(features, labels, head, noisy_features)[0]

    def weighted(self, terms: LossTerms) -> Tensor:
        """The weighted sum of the terms."""
        return (
            self.compact_weight * terms.compact
            + self.margin_weight * terms.margin
            + self.norm_weight * terms.norm
            + self.noisy_weight * terms.noisy
        )

    def _compute(
        self, features: Tensor, labels: Tensor, head: nn.Linear, noisy: Tensor | None
    ) -> tuple[LossTerms, cc.Slots, Tensor]:
        """The terms, the slots of the batch, and the centroids to store for them."""
        self._check(features, labels, head, noisy)
        with torch.autocast(features.device.type, enabled=False):
            dtype = geometry.working_dtype(features, head.weight, self.centroids)
            features = features.to(dtype)
            weight, bias = geometry.head_parameters(head, dtype)
            slots = cc.assign(labels, self.num_classes, dtype)
            copy = cc.snapshot if self.training else torch.clone
            previous = cc.rows(copy(self.centroids), slots).to(dtype)
            seen = cc.rows(copy(self.seen), slots) > 0
            if self.training:
                current = cc.class_means(features, slots)
                blended = cc.blend(current, previous, seen, self.momentum)
                centres = current if self.strategy == "naive" else blended
                margin_centres = blended if self.strategy == "momentum" else current
            else:
                centres = margin_centres = previous
                slots = slots._replace(present=slots.present & seen)
            share = slots.present.to(dtype)
            share = share / share.sum().clamp(min=1)  # S; a product with it is mean_c
            views = [features] if noisy is None else [features, noisy.to(dtype)]
            spread = self._spread(torch.stack(views), centres, slots, share).unbind()
            terms = LossTerms(
                compact=spread[0],
                margin=share @ self._violation(margin_centres, slots.classes, weight, bias),
                norm=share @ torch.linalg.vector_norm(centres, dim=1),
                noisy=features.new_zeros(()) if noisy is None else spread[1],
            )
        return terms, slots, centres

    def _spread(self, views: Tensor, centres: Tensor, slots: cc.Slots, share: Tensor) -> Tensor:
        """mean_c (1/n_c) Σ_x max(0, ‖m_c − q(x)‖ − δ_v)² of each view, V x B x D -> V.

        Without the square if `compact_hinge` is "plain". The sum is over this rank's samples, times
        the number of ranks.
        """
        own = cc.of_samples(centres, slots)  # B x D, each sample's centroid
        outside = (torch.linalg.vector_norm(views - own, dim=2) - self.radius).relu()  # V x B
        weight = cc.ranks() * (share / slots.size)[slots.of]  # B
        return _hinge(outside, self.compact_hinge) @ weight

    def _violation(self, points: Tensor, classes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """max (or mean) over i ≠ c of max(0, δ_d − d_ci(m_c)) for each slot: S.

        Squared if `margin_hinge` is "squared".
        """
        if self.margin_over == "mean":
            distance, valid = geometry.row_distances(weight, classes)
            logits = points @ weight.T + bias
            rise = logits - logits.gather(1, classes[:, None])
            hinge = (self.margin + rise / torch.where(valid, distance, 1)).relu()
            hinge = _hinge(hinge, self.margin_hinge)
            return torch.where(valid, hinge, 0).sum(1) / valid.sum(1).clamp(min=1)
        rival, exists = geometry.hardest_rivals(points, classes, weight, bias)
        # One lookup for both rows of each pair: the backward then makes one gradient of W's size.
        both = torch.stack([rival, classes])
        other, own = embedding(both, weight).unbind()
        other_bias, own_bias = embedding(both, bias[:, None])[..., 0].unbind()
        difference = other - own  # W_i − W_c
        length = torch.linalg.vector_norm(difference, dim=1)
        rise = torch.linalg.vecdot(difference, points) + (other_bias - own_bias)
        hinge = (self.margin + rise / torch.where(exists, length, 1)).relu()
        return exists * _hinge(hinge, self.margin_hinge)

    def _check(
        self, features: Tensor, labels: Tensor, head: nn.Linear, noisy: Tensor | None
    ) -> None:
        weight = getattr(head, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ValueError(f"head must be a linear layer, got {type(head).__name__}")
        expected = (self.num_classes, self.feature_dim)
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"the loss has num_classes={expected[0]} and feature_dim={expected[1]}, "
                f"but the head's weight is {weight.shape[0]} x {weight.shape[1]}"
            )
        geometry.check_features(features, labels, self.num_classes, dim=self.feature_dim)
        if noisy is not None and noisy.shape != features.shape:
            raise ValueError(
                f"noisy_features must have the shape of features, {tuple(features.shape)}, "
                f"got {tuple(noisy.shape)}"
            )

    def _apply(self, *args: Any, **options: Any):
        """Casts like nn.Module, but keeps the running centroids in float32 under half precision."""
        super()._apply(*args, **options)
        self._restore_precision()
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._restore_precision()  # assign=True replaces the buffers by those of the file

    def _restore_precision(self) -> None:
        if self.centroids.dtype in (torch.float16, torch.bfloat16):
            self.centroids = self.centroids.float()
        if self.seen.dtype == torch.bool:  # in files of the first edition
            self.seen = self.seen.float()

    def extra_repr(self) -> str:
        numbers = [f"{name}={getattr(self, name)}" for name in (*_NOT_NEGATIVE, "momentum")]
        choices = f"centroids={self.strategy!r}, margin_over={self.margin_over!r}"
        hinges = f"compact_hinge={self.compact_hinge!r}, margin_hinge={self.margin_hinge!r}"
        return f"{self.num_classes}, {self.feature_dim}, {', '.join(numbers)}, {choices}, {hinges}"


def _hinge(distance: Tensor, kind: Hinge) -> Tensor:
    return distance.square() if kind == "squared" else distance
