"""The contract of a perturbation, the one that does nothing, and chains of several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from noiseproof.draws import PerSample, Source

__all__ = ["Chain", "Identity", "Perturbation", "check_images", "check_range", "stream"]

_SLACK = 0.25  # bicubic enlargement overshoots by up to 0.2; normalised images go further


class Perturbation(ABC):
    """A value that maps images in [0, 1] to images in [0, 1].

    `p(x, generator)` keeps shape, dtype and device, never writes to `x`, and draws independently
    for every sample of the batch. Perturbations are immutable, compare by value, and `str(p)` is
    the text that `noiseproof.perturb.parse` turns back into an equal one.

    A subclass is a frozen dataclass that defines `_apply` and `__str__`.
    """

    def __call__(self, x: Tensor, generator: Source = None) -> Tensor:
        """Perturb a batch.

        Args:
            x: images in [0, 1], B x C x H x W, of any floating dtype, not normalised. On a CPU,
                values far outside are refused; elsewhere the range is not looked at, since that
                would stop a GPU until the answer is known.
            generator: where random numbers come from. None is torch's global generator; a
                `PerSample` gives an image the same noise in whatever batch it stands.
        """
        check_images(x)
        _check_range_on_cpu(x)
        if not (generator is None or isinstance(generator, (PerSample, torch.Generator))):
            raise ValueError(
                "generator must be None, a torch.Generator or a noiseproof.draws.PerSample, "
                f"got {type(generator).__name__}"
            )
        return self._apply(x, generator)

    @property
    def deterministic(self) -> bool:
        """Whether two calls give the same result, so that one draw is enough to evaluate it."""
        return False

    @abstractmethod
    def _apply(self, x: Tensor, source: Source) -> Tensor:
        """The perturbed batch; `x` has been checked to be B x C x H x W and floating."""

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

    Put noise before masks, so that masks stay black. Chains inside a chain are flattened and
    identities left out, so that equal chains act equally: `Chain()` equals `Identity()`, and
    `Chain(p)` equals `p`, down to the numbers drawn.

    >>> Chain(Identity(), Chain()) == Identity()
    True
    """

    members: tuple[Perturbation, ...]

    def __init__(self, *members: Perturbation):
        flat: list[Perturbation] = []
        for member in members:
            if not isinstance(member, Perturbation):
                raise ValueError(
                    f"a chain is made of perturbations, got {member!r}; "
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
        if len(self.members) == 1:  # as the member alone would act, since the two are equal
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


def stream(source: Source, i: int) -> Source:
    """The i-th stream of `source`.

    A `PerSample` would hand out the same numbers twice, so it is folded; a generator moves on by
    itself.
    """
    return source.fold(i) if isinstance(source, PerSample) else source


def check_images(x: Tensor) -> None:
    """Raises ValueError where `x` is not a batch of floating-point images; looks at no value."""
    if not isinstance(x, Tensor):
        raise ValueError(f"images must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(
            f"images must be floating point in [0, 1], got {x.dtype}; "
            "bytes become so by x.float() / 255"
        )
    if x.ndim != 4:
        raise ValueError(f"images must be B x C x H x W, got shape {tuple(x.shape)}")


def check_range(x: Tensor, slack: float) -> None:
    """Raises ValueError where a value of `x` lies more than `slack` outside [0, 1]."""
    if x.numel() == 0:
        return
    low, high = (value.item() for value in torch.aminmax(x.detach()))
    if low >= -slack and high <= 1 + slack:
        return
    if math.isnan(low) or math.isnan(high):
        raise ValueError("images must lie in [0, 1], got NaN")
    raise ValueError(
        f"images must lie in [0, 1], got values from {low:.3g} to {high:.3g}; "
        + (
            "divide them by 255"
            if low >= 0 and high > 8
            else "perturb images before they are normalised, or let the model normalise them itself"
        )
    )


def _check_range_on_cpu(x: Tensor) -> None:
    """Where values can be had for microseconds: on a CPU, and not while a program is traced."""
    tracing = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]
    if x.device.type != "cpu" or torch.compiler.is_compiling() or tracing():
        return
    try:
        check_range(x, _SLACK)
    except RuntimeError:  # vmap, make_fx and fake tensors have no values to look at
        return
