"""What every objective shares: the batch it takes, the outcome it gives, its noise."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noiseproof import perturb
from noiseproof.centroids import snapshot
from noiseproof.draws import Source

Views = Literal["paired", "independent"]
BatchNorm = Literal["apart", "together"]


class Batch(NamedTuple):
    """Images in [0, 1], their labels, and where they are wanted another view and a noise source."""

    images: Tensor  # B x C x H x W, the clean view
    labels: Tensor  # B
    second: Tensor | None = None  # the same images, augmented independently
    source: Source = None  # randomness of the noise; None draws from torch's own


class Outcome(NamedTuple):
    """Of one step: what to minimise, the logits to count hits on, and the parts of the loss."""

    loss: Tensor
    logits: Tensor
    terms: dict[str, Tensor]  # detached


class Objective(nn.Module):
    """A method. `views` says what the noise is added to: the clean view itself ("paired"), or a
    view of the same images augmented independently ("independent"), which `batch.second` holds."""

    sees_both = False  # whether a step looks at clean and noisy images together
    batch_norm: BatchNorm = "together"  # whether batch-norm sees the two mixed, or each alone

    def __init__(
        self,
        noise: perturb.Perturbation | str | None = None,
        *,
        views: Views = "paired",
        smoothing: float = 0.0,
    ):
        super().__init__()
        if views not in ("paired", "independent"):
            raise ValueError(f"views must be paired or independent, got {views!r}")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must lie in [0, 1), got {smoothing}")
        self.noise = perturb.parse(noise) if isinstance(noise, str) else noise
        self.views: Views = views
        self.smoothing = smoothing

    @property
    def needs_second(self) -> bool:
        """Whether batches must carry a second, independently augmented view."""
        return self.sees_both and self.views == "independent"

    @property
    def passes(self) -> int:
        """How many passes a step makes through the network, of a view each."""
        return 2 if self.sees_both and self.batch_norm == "apart" else 1

    def forward(self, model: Any, batch: Batch) -> Outcome:
        raise NotImplementedError

    def noised(self, batch: Batch) -> Tensor:
        """The noisy view of a batch."""
        images = batch.images
        if self.needs_second:
            if batch.second is None:
                raise ValueError("views are independent, but the batch has no second view")
            images = batch.second
        if self.noise is None:
            raise ValueError(f"{type(self).__name__} needs a noise, got None")
        return self.noise(images, batch.source)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.float() if logits.itemsize < 4 else logits, labels,
                             label_smoothing=self.smoothing)  # fmt: skip

    def extra_repr(self) -> str:
        return f"noise={str(self.noise)!r}, views={self.views!r}, smoothing={self.smoothing}"


class Constrained(Objective):
    """An objective that constrains the features of the clean and the noisy view.

    **Ramp.** With `ramp_steps` = n the constraints' weight rises linearly from 1/n to 1 over the
    first n training steps; the buffer `steps` counts them. It lets higher learning rates survive
    the start, and networks learn something before it is constrained.

    **Batch-norm.** "apart", as in the authors' code, sends each view through the network by itself,
    so that batch-norm sees it alone; "together" sends both as one batch, as `Both` does. At test
    time there is one set of statistics for all images: "apart" trains with others.
    """

    steps: Tensor

    def __init__(
        self,
        *arguments: Any,
        ramp_steps: int = 0,
        batch_norm: BatchNorm = "apart",
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        if ramp_steps < 0:
            raise ValueError(f"ramp_steps must not be negative, got {ramp_steps}")
        if batch_norm not in ("apart", "together"):
            raise ValueError(f"batch_norm must be apart or together, got {batch_norm!r}")
        self.ramp_steps = ramp_steps
        self.batch_norm = batch_norm
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_pre_hook(_past)

    def ramp(self, dtype: torch.dtype) -> Tensor | float:
        """The constraints' weight at this step, which it counts."""
        if self.ramp_steps == 0:
            return 1.0
        steps = snapshot(self.steps)
        if self.training:
            steps = steps + 1
            with torch.no_grad():
                self.steps.copy_(steps)
        return (steps.to(dtype) / self.ramp_steps).clamp(max=1.0)

    def features_of(self, model: Any, *views: Tensor) -> tuple[Tensor, ...]:
        """The features of each view, from as many passes as `batch_norm` asks for."""
        if self.batch_norm == "together":
            return model.features(torch.cat(views)).chunk(len(views))
        joined = getattr(model, "features_of", None)
        return tuple(model.features(v) for v in views) if joined is None else joined(*views)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, batch_norm={self.batch_norm!r}"


def _past(objective: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A state from before `steps` was counted is one in which the ramp is over."""
    state.setdefault(f"{prefix}steps", torch.tensor(objective.ramp_steps))
