"""What all objectives share: the batch they take, the outcome they return, noise, the ramp."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noiseproof import perturb
from noiseproof.augment import Mixture
from noiseproof.centroids import snapshot
from noiseproof.draws import Source

Views = Literal["paired", "independent"]
BatchNorm = Literal["apart", "together"]


class Batch(NamedTuple):
    """One training batch: images in [0, 1], their labels, and what the noisy view is made from."""

    images: Tensor  # B x C x H x W, the clean view
    labels: Tensor  # B
    second: Tensor | None = None  # the same images, augmented independently
    source: Source = None  # random numbers of the noise; None uses torch's global generator
    mixture: Mixture | None = None  # how both views are mixed; None if they are not

    def unmixed(self, rows: Tensor) -> Tensor:
        """The rows of the samples that are not mixed; ValueError if there are none.

        Args:
            rows: one per sample, such as features or labels.
        """
        if self.mixture is None:
            return rows
        if not len(self.mixture.unmixed):
            raise ValueError(
                f"all {len(rows)} samples of the batch are mixed, but constraints and consistency "
                "need some that are not; mix a smaller fraction"
            )
        return rows.index_select(0, self.mixture.unmixed)


class Outcome(NamedTuple):
    """The result of one step."""

    loss: Tensor  # to minimise
    logits: Tensor  # B x classes, for the training accuracy
    terms: dict[str, Tensor]  # the parts of the loss, detached, for logging


class Objective(nn.Module):
    """What one method minimises: `objective(model, batch)` returns an `Outcome`.

    The class attributes describe the method to a training loop, a progress bar or a scheduler.
    """

    terms: ClassVar[tuple[str, ...]] = ("ce",)  # names in `Outcome.terms`, in order
    ramped: ClassVar[bool] = False  # takes `ramp_steps`
    num_views: ClassVar[int] = 1  # images per sample in the network: the relative cost of a step
    batch_norm: BatchNorm = "together"

    def __init__(
        self,
        noise: perturb.Perturbation | str | None = None,
        *,
        views: Views = "paired",
        smoothing: float = 0.0,
    ):
        """
        Args:
            noise: perturbation of the training images, or its text, such as "gaussian:0.1".
            views: what the noise is added to: "paired" adds it to the clean view itself,
                "independent" to `batch.second`, an independent augmentation of the same images.
            smoothing: label smoothing of the cross-entropy, in [0, 1).
        """
        super().__init__()
        if views not in ("paired", "independent"):
            raise ValueError(f"views must be paired or independent, got {views!r}")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must lie in [0, 1), got {smoothing}")
        self.noise = perturb.parse(noise) if isinstance(noise, str) else noise
        self.views: Views = views
        self.smoothing = smoothing

    @property
    def two_views(self) -> bool:
        """Whether the next step passes a clean and a noisy view through the network."""
        return self.num_views == 2

    @property
    def needs_second(self) -> bool:
        """Whether batches must carry a second, independently augmented view."""
        return self.two_views and self.views == "independent"

    @property
    def passes(self) -> int:
        """Forward passes per step: one per view where batch-norm sees the views separately."""
        return 2 if self.two_views and self.batch_norm == "apart" else 1

    def forward(self, model: Any, batch: Batch) -> Outcome:
        """The loss of one batch.

        Args:
            model: a network with `features(x)`, B x D, and a linear `head` on top of it.
            batch: images, labels and what the noisy view is made from.
        """
        raise NotImplementedError

    def noised(self, batch: Batch) -> Tensor:
        """The noisy view of a batch."""
        images = batch.images
        if self.needs_second:
            if batch.second is None:
                raise ValueError("views are independent, but the batch has no second view")
            images = batch.second
        if self.noise is None:
            raise ValueError(f"{type(self).__name__} needs noise, got None")
        return self.noise(images, batch.source)

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, mixture: Mixture | None = None
    ) -> Tensor:
        """Cross-entropy with this objective's label smoothing, never in half precision.

        Args:
            logits: of one view of the batch, B x classes, or of several, one after the other.
            labels: B.
            mixture: the partners and shares of mixed samples, whose loss is share · CE(own label)
                + (1 − share) · CE(label of the partner); None if nothing is mixed.
        """
        logits = logits.float() if logits.itemsize < 4 else logits
        views = len(logits) // len(labels)
        labels = labels.repeat(views)
        if mixture is None:
            return cross_entropy(logits, labels, label_smoothing=self.smoothing)
        own, other = (
            cross_entropy(logits, y, label_smoothing=self.smoothing, reduction="none")
            for y in (labels, mixture.labels.repeat(views))
        )
        return torch.lerp(other, own, mixture.share.to(own.dtype).repeat(views)).mean()

    def extra_repr(self) -> str:
        return f"noise={str(self.noise)!r}, views={self.views!r}, smoothing={self.smoothing}"


class Constrained(Objective):
    """An objective that constrains the features of the clean and the noisy view."""

    ramped = True
    num_views = 2
    steps: Tensor

    def __init__(
        self,
        noise: perturb.Perturbation | str | None = None,
        *,
        views: Views = "paired",
        smoothing: float = 0.0,
        ramp_steps: int = 0,
        batch_norm: BatchNorm = "apart",
    ):
        """
        Args:
            noise: as for `Objective`.
            views: as for `Objective`.
            smoothing: as for `Objective`.
            ramp_steps: the weight of the constraints rises linearly from 1/n to 1 over the first
                n = `ramp_steps` training steps, counted in the buffer `steps`; 0 starts at full
                weight. A ramp lets training survive higher learning rates, and classes separate
                before their features are constrained.
            batch_norm: "apart", as in the authors' code, passes each view through the network by
                itself, so that batch-norm normalises it with its own statistics; "together" passes
                both as one batch, as `Both` does. At test time there is one set of statistics for
                all images, which "apart" never trains with.
        """
        super().__init__(noise, views=views, smoothing=smoothing)
        if not ramp_steps >= 0:
            raise ValueError(f"ramp_steps must be a non-negative number, got {ramp_steps}")
        if batch_norm not in ("apart", "together"):
            raise ValueError(f"batch_norm must be apart or together, got {batch_norm!r}")
        self.ramp_steps = ramp_steps
        self.batch_norm = batch_norm
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def ramp(self, dtype: torch.dtype) -> Tensor | float:
        """The weight of the constraints at this step; in training mode, counts the step."""
        if self.ramp_steps == 0:
            return 1.0
        steps = self.steps
        if self.training:
            steps = snapshot(steps) + 1
            with torch.no_grad():
                self.steps.copy_(steps)
        return (steps.to(dtype) / self.ramp_steps).clamp(max=1.0)

    def features_of(self, model: Any, *views: Tensor) -> tuple[Tensor, ...]:
        """The features of each view, in one forward pass or one per view, as `batch_norm` says."""
        if self.batch_norm == "together":
            return model.features(torch.cat(views)).chunk(len(views))
        joined = getattr(model, "features_of", None)
        return tuple(model.features(v) for v in views) if joined is None else joined(*views)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, batch_norm={self.batch_norm!r}"
