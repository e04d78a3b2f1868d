"""Loss of resolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from noiseproof.draws import Source
from noiseproof.perturb import values
from noiseproof.perturb.base import Perturbation


@dataclass(frozen=True)
class DownUp(Perturbation):
    """Bilinear downsampling followed by bilinear upsampling to the original size; deterministic.

    Neither antialiased nor with aligned corners. The small image has floor(H / factor) by
    floor(W / factor) pixels, at least one each way.

    Args:
        factor: by which height and width are divided, at least 1.

    >>> print(DownUp(3))
    downup:3
    >>> ramp = torch.tensor([[[[0.0, 0.2, 0.4, 0.6]]]])
    >>> DownUp(2)(ramp)  # the small image is [0.1, 0.5]
    tensor([[[[0.1000, 0.2000, 0.4000, 0.5000]]]])
    """

    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", values.factor("factor", self.factor))

    @property
    def deterministic(self) -> bool:
        return True

    def _apply(self, x: Tensor, source: Source) -> Tensor:
        height, width = x.shape[-2:]
        if self.factor > max(height, width, 1):
            raise ValueError(
                f"the factor of {self} is larger than an image of {height} x {width}; expected at "
                f"most {max(height, width)}"
            )
        # 1e-9 corrects quotients such as 33 / 1.1 that fall just short of an integer.
        size = [max(1, int(side / self.factor + 1e-9)) for side in (height, width)]
        small = _resize(x if x.dtype == torch.float64 else x.float(), size)
        return _resize(small, [height, width]).clamp(0, 1).to(x.dtype)

    def __str__(self) -> str:
        return f"downup:{values.show(self.factor)}"


def _resize(x: Tensor, size: list[int]) -> Tensor:
    return interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=False)
