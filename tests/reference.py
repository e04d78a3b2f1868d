"""The paper's sums as slow, literal loops over classes and samples, independent of the package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PAIR_TOLERANCE = 1e-3


class ReferenceLoss:
    """Compactness, margin, norm and noisy alignment, one class and one sample at a time."""

    def __init__(self, num_classes, *, radius=0.5, margin=5.0, momentum=0.9, centroids="partial",
                 margin_over="max", compact_hinge="squared", margin_hinge="plain"):  # fmt: skip
        self.num_classes = num_classes
        self.radius, self.margin, self.momentum = radius, margin, momentum
        self.strategy, self.margin_over = centroids, margin_over
        self.compact_hinge, self.margin_hinge = compact_hinge, margin_hinge
        self.previous: dict[int, Tensor] = {}

    def step(self, features: Tensor, labels: Tensor, head: nn.Linear, noisy: Tensor | None = None):
        """The four terms on one batch in training; remembers the centroids for the next."""
        current, blended = {}, {}
        for c in sorted({int(y) for y in labels}):
            members = [features[i] for i in range(len(labels)) if int(labels[i]) == c]
            mean = members[0]
            for member in members[1:]:
                mean = mean + member
            current[c] = mean / len(members)
            blended[c] = current[c]
            if c in self.previous:
                old = self.momentum * self.previous[c]
                blended[c] = old + (1 - self.momentum) * current[c]
        centres = current if self.strategy == "naive" else blended
        margin_centres = blended if self.strategy == "momentum" else current
        terms = self.terms(features, labels, head, noisy, centres, margin_centres)
        self.previous |= {c: m.detach().clone() for c, m in centres.items()}
        return terms

    def frozen(self, features, labels, head, noisy=None):
        """The four terms in eval mode: stored centroids, classes never seen left out."""
        return self.terms(features, labels, head, noisy, self.previous, self.previous)

    def terms(self, features, labels, head, noisy, centres, margin_centres):
        classes = [c for c in sorted({int(y) for y in labels}) if c in centres]
        zero = features.new_zeros(())
        compact, margin, norm, aligned = zero, zero, zero, zero
        for c in classes:
            compact = compact + self.spread(features, labels, c, centres[c]) / len(classes)
            margin = margin + self.violation(margin_centres[c], c, head) / len(classes)
            norm = norm + length(centres[c]) / len(classes)
            if noisy is not None:
                aligned = aligned + self.spread(noisy, labels, c, centres[c]) / len(classes)
        return compact, margin, norm, aligned

    def spread(self, features, labels, c, centroid):
        members = [i for i in range(len(labels)) if int(labels[i]) == c]
        total = features.new_zeros(())
        for i in members:
            excess = length(centroid - features[i]) - self.radius
            if excess > 0:
                total = total + (excess**2 if self.compact_hinge == "squared" else excess)
        return total / len(members)

    def violation(self, centroid, c, head):
        hinges = []
        for i in range(self.num_classes):
            if i == c or not has_boundary(head.weight[c], head.weight[i]):
                continue
            value = self.margin - signed_distance(centroid, c, i, head)
            value = value if value > 0 else value * 0
            hinges.append(value * value if self.margin_hinge == "squared" else value)
        if not hinges:
            return centroid.new_zeros(())
        if self.margin_over == "mean":
            return torch.stack(hinges).mean()
        return max(hinges, key=lambda hinge: hinge.item())


def length(v: Tensor) -> Tensor:
    """‖v‖ with gradient 0 at 0."""
    square = (v * v).sum()
    return square.sqrt() if square.item() > 0 else square


def has_boundary(a: Tensor, b: Tensor) -> bool:
    return length(a - b).item() > PAIR_TOLERANCE * max(length(a).item(), length(b).item())


def signed_distance(q: Tensor, c: int, i: int, head: nn.Linear) -> Tensor:
    """d_ci(q): positive where class c beats class i."""
    bias = 0.0 if head.bias is None else head.bias[c] - head.bias[i]
    difference = head.weight[c] - head.weight[i]
    return ((difference * q).sum() + bias) / length(difference)
