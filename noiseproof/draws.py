"""Counter-based random numbers: each sample has its own, whatever batch it is in.

The numbers of a `torch.Generator` depend on the order of calls, so the noise of an image would
depend on its batch. Here every sample has a 64-bit key instead, and its i-th number is a hash of
(key, i). The noise of an image is then the same in any batch, on any rank, after any restart, and
two methods can be tested under identical noise.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) in wrapping int64 arithmetic,
so it runs on every device and compiles to one kernel.

>>> source = PerSample(keys(7, torch.arange(4)))
>>> alone = PerSample(keys(7, torch.arange(2, 3)))
>>> bool((source.normal(3)[2] == alone.normal(3)[0]).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PerSample", "Source", "fold", "keys", "normal", "poisson", "uniform"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's constants as signed integers
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_TO_UNIT = 2.0**-24
_LARGE = 10.0  # Poisson means from which the expansion is used


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's >> copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def fold(key: Tensor, counter: int | Tensor) -> Tensor:
    """New keys from `key` and `counter`, which broadcast; unrelated for different counters."""
    step = (counter + 1) * _GOLDEN  # tensors wrap around, Python integers do not
    return _mix(key + (step if isinstance(step, Tensor) else _signed(step)))


def _signed(number: int) -> int:
    """The signed 64-bit integer equal to `number` modulo 2⁶⁴."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def keys(seed: int | Tensor, *counters: int | Tensor) -> Tensor:
    """Keys from a seed and any number of counters, which broadcast.

    Args:
        seed: an integer or an int64 tensor.
        counters: integers or int64 tensors, such as an epoch and the indices of samples. Inside
            torch.compile, what changes from call to call must be a tensor.
    """
    device = next((c.device for c in (seed, *counters) if isinstance(c, Tensor)), None)
    key = seed
    if not isinstance(key, Tensor):  # filled on the device: a CUDA graph cannot capture a copy
        key = torch.full((), _signed(key), dtype=torch.int64, device=device)
    for counter in (0, *counters):
        key = fold(key, counter)
    return key


class PerSample:
    """A source of random numbers with one stream per sample."""

    def __init__(self, keys: Tensor):
        """
        Args:
            keys: the key of each sample, an int64 tensor of length B; see `keys`.
        """
        if keys.dtype != torch.int64 or keys.ndim != 1:
            raise ValueError(
                f"keys must be a vector of int64, got {tuple(keys.shape)} of {keys.dtype}"
            )
        self.keys = keys

    def fold(self, counter: int) -> PerSample:
        """Another source for the same samples, with unrelated numbers."""
        return PerSample(fold(self.keys, counter))

    def bits(self, *shape: int) -> Tensor:
        """64 random bits per element, int64, B x `shape`."""
        key = self.keys[:, None]
        counter = torch.arange(1, math.prod(shape) + 1, device=key.device)
        # Two rounds, since consecutive counters differ in few bits; the second also separates
        # samples whose keys are so close that their counters overlap.
        return _mix(_mix(key + counter) ^ key).view(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), float32, B x `shape`."""
        return _shift(self.bits(*shape), 40).float() * _TO_UNIT

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, float32, B x `shape` (the Box–Muller transform of one hash)."""
        bits = self.bits(*shape)
        radius = (_shift(bits, 40).float() + 0.5) * _TO_UNIT  # in (0, 1): the log is finite
        angle = ((bits >> 8) & 0xFFFFFF).float() * (2 * math.pi * _TO_UNIT)
        return torch.sqrt(-2 * torch.log(radius)) * torch.cos(angle)


Source = torch.Generator | PerSample | None


def check_source(source: object, name: str = "source") -> None:
    """Raises ValueError if the argument `name` is no source of random numbers."""
    if not (source is None or isinstance(source, (PerSample, torch.Generator))):
        raise ValueError(
            f"{name} must be None, a torch.Generator or a noiseproof.draws.PerSample, got "
            f"{type(source).__name__}"
        )


def stream(source: Source, i: int) -> Source:
    """The i-th independent stream of `source`.

    A `PerSample` would give the same numbers again, so it is folded; a generator advances.
    """
    return source.fold(i) if isinstance(source, PerSample) else source


def uniform(shape: Sequence[int], like: Tensor, source: Source = None) -> Tensor:
    """Uniform numbers in [0, 1).

    Args:
        shape: of the result; its first axis is the batch.
        like: a tensor whose device is used; float64 gives float64, all others float32.
        source: a `PerSample` of as many samples, a `torch.Generator`, or None for torch's global
            generator.
    """
    return _draw(shape, like, source, "uniform")


def normal(shape: Sequence[int], like: Tensor, source: Source = None) -> Tensor:
    """Standard normal numbers; arguments as for `uniform`."""
    return _draw(shape, like, source, "normal")


def poisson(mean: Tensor, source: Source = None) -> Tensor:
    """Poisson numbers, as floats: the inverse of the cumulative distribution function at Φ(w), for
    a standard normal w.

    Means below 10 add up probabilities, which is exact. For the others it is the expansion in
    1 / √mean of Giles (2016, ACM TOMS 42, algorithm 955), rounded down; the distribution then
    differs from Poisson's by at most 1.4e-4 in total variation.

    Args:
        mean: of each number, at least 0, float32 or float64; its first axis is the batch.
        source: as for `uniform`.
    """
    w = normal(mean.shape, mean, source)
    u, few = torch.special.ndtr(w), mean.clamp(max=_LARGE)
    term = torch.exp(-few)
    below = term.clone()
    count = (u >= below).to(w.dtype)
    for n in range(1, 34):  # a count above that has a probability of 1e-9
        term.mul_(few).mul_(1 / n)
        count.add_(u >= below.add_(term))
    many = mean.clamp(min=_LARGE)
    root, square = many.sqrt(), w * w
    expansion = many + root * w + (2 + square) / 6 - w * (2 + square) / (72 * root)
    expansion = expansion + (-16 + 7 * square + 3 * square * square) / (810 * many)
    return torch.where(mean < _LARGE, count, expansion.floor().clamp(min=0))


def _draw(shape: Sequence[int], like: Tensor, source: Source, kind: str) -> Tensor:
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    if isinstance(source, PerSample):
        if shape[0] != len(source.keys):
            raise ValueError(f"the source has {len(source.keys)} samples, the batch {shape[0]}")
        numbers = source.uniform(*shape[1:]) if kind == "uniform" else source.normal(*shape[1:])
        return numbers.to(device=like.device, dtype=dtype)
    check_source(source)
    device = like.device if source is None else source.device
    draw = torch.rand if kind == "uniform" else torch.randn
    # torch.compile cannot pass generator=None with a batch of variable length.
    options: Any = {} if source is None else {"generator": source}
    return draw(tuple(shape), device=device, dtype=dtype, **options).to(like.device)
