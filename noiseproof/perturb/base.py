"""The interface of perturbations, the identity, chains, and perturbations of some images only."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import Source, check_source, stream
from noiseproof.perturb import values

_TOLERANCE = 0.25  # bicubic upsampling overshoots by up to 0.2; normalised images go further


class Perturbation(ABC):
    """Maps images in [0, 1] to images in [0, 1].

    `p(x, generator)` keeps shape, dtype and device, never writes to `x`, and draws independently
    for every sample of the batch. Perturbations are immutable, compare by value, and `str(p)` is a
    text that `noiseproof.perturb.parse` turns back into an equal perturbation.

    A subclass is a frozen dataclass that defines `_apply` and `__str__`.
    """

    def __call__(self, x: Tensor, generator: Source = None) -> Tensor:
        """Perturb a batch, or a single image, as in `torchvision.transforms.Compose`.

        Args:
            x: images in [0, 1], B x C x H x W or C x H x W, of any floating dtype, not normalised.
                Values far outside raise a ValueError on a CPU; on other devices the range is not
                checked, since that would make a GPU wait.
            generator: source of the random numbers. None is torch's global generator; a
                `noiseproof.draws.PerSample` gives an image the same noise in any batch.
        """
        if isinstance(x, Tensor) and x.ndim == 3:
            return self(x[None], generator)[0]
        check_images(x)
        check_range_on_cpu(x)
        check_source(generator, "generator")
        return self._apply(x, generator)

    @property
    def deterministic(self) -> bool:
        """Whether two calls give the same result, so that one draw is enough in an evaluation."""
        return False

    @abstractmethod
    def _apply(self, x: Tensor, source: Source) -> Tensor:
        """The perturbed batch; `x` is known to be B x C x H x W and floating point."""

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Identity(Perturbation):
    """No perturbation: returns the batch itself, without a copy.

    >>> print(Identity())
    identity
    """

    @property
    def deterministic(self) -> bool:
        return True

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        return x

    def __str__(self) -> str:
        return "identity"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Chain(Perturbation):
    """Several perturbations, applied from left to right.

    Put noise before masks, so that masks stay black. Nested chains are flattened and identities
    dropped, so that equal chains act equally: `Chain()` equals `Identity()`, and `Chain(p)` equals
    `p`, including the random numbers.

    >>> Chain(Identity(), Chain()) == Identity()
    True
    """

    members: tuple[Perturbation, ...]

    def __init__(self, *members: Perturbation):
        flat: list[Perturbation] = []
        for member in members:
            if not isinstance(member, Perturbation):
                raise ValueError(
                    f"members of a chain must be perturbations, got {member!r}; "
                    "noiseproof.perturb.parse makes one from text"
                )
            if isinstance(member, Chain):
                flat.extend(member.members)
            elif not isinstance(member, Identity):
                flat.append(member)
        object.__setattr__(self, "members", tuple(flat))

    @property
    def deterministic(self) -> bool:
        return all(member.deterministic for member in self.members)

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        if len(self.members) == 1:  # equal to the member alone, so it must draw the same numbers
            return self.members[0]._apply(x, source)
        for i, member in enumerate(self.members):
            x = member._apply(x, stream(source, i))
        return x

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Perturbation):
            return NotImplemented
        return self.members == Chain(other).members

    def __hash__(self) -> int:
        # An equal Identity hashes as (), an equal single member as itself.
        return hash(self.members[0]) if len(self.members) == 1 else hash(self.members)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.members))})"

    def __str__(self) -> str:
        return "+".join(map(str, self.members)) or "identity"


@dataclass(frozen=True)
class RandomApply(Perturbation):
    """Perturbs each image with some probability, and otherwise leaves it as it is.

    Args:
        perturbation: a single one, no chain; the members of a chain can have shares of their own.
        share: the probability that an image is perturbed, above 0 and below 1.

    >>> from noiseproof.perturb import Gaussian
    >>> print(RandomApply(Gaussian((0, 0.1)), 0.8))
    gaussian:0..0.1@0.8
    """

    perturbation: Perturbation
    share: float

    def __post_init__(self) -> None:
        p = self.perturbation
        if not isinstance(p, Perturbation) or isinstance(p, (Chain, Identity, RandomApply)):
            raise ValueError(f"perturbation must be one such as Gaussian(0.1), got {p!r}")
        object.__setattr__(self, "share", values.share("share", self.share))

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        # The perturbation and the choice of images have separate streams.
        perturbed = self.perturbation._apply(x, stream(source, 0))
        chosen = draws.uniform((len(x), 1, 1, 1), x, stream(source, 1)) < self.share
        return torch.where(chosen, perturbed, x)

    def __str__(self) -> str:
        return f"{self.perturbation}@{values.show(self.share)}"


def check_images(x: Tensor) -> None:
    """Raises ValueError unless `x` is a batch of floating-point images; reads no values."""
    if not isinstance(x, Tensor):
        raise ValueError(f"images must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(
            f"images must be floating point in [0, 1], got {x.dtype}; "
            "convert bytes with x.float() / 255"
        )
    if x.ndim != 4:
        raise ValueError(f"images must be B x C x H x W, got shape {tuple(x.shape)}")


def check_range(x: Tensor, tolerance: float = 1e-3) -> None:
    """Raises ValueError if a value of `x` is more than `tolerance`, by default that of rounding,
    outside [0, 1]."""
    if x.numel() == 0:
        return
    low, high = (value.item() for value in torch.aminmax(x.detach()))
    if low >= -tolerance and high <= 1 + tolerance:
        return
    if math.isnan(low) or math.isnan(high):
        raise ValueError("images must lie in [0, 1], got NaN")
    hint = (
        "perturb or augment images before they are normalised, or let the model normalise them "
        "itself"
    )
    if low >= 0 and high > 8:
        hint = "divide them by 255"
    raise ValueError(f"images must lie in [0, 1], got values from {low:.3g} to {high:.3g}; {hint}")


def check_range_on_cpu(x: Tensor) -> None:
    """`check_range` where it costs microseconds: on a CPU, outside of tracing and compiling."""
    tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]
    if x.device.type != "cpu" or torch.compiler.is_compiling() or tracing():
        return
    try:
        check_range(x, _TOLERANCE)
    except RuntimeError:  # vmap, make_fx and fake tensors have no values
        return
