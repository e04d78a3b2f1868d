"""A source that returns given numbers, for tests that need a certain draw."""

from __future__ import annotations

import torch
from torch import Tensor

from noiseproof import draws


class FixedDraws(draws.PerSample):
    """Uniform numbers as given, B x n."""

    def __init__(self, values: Tensor):
        super().__init__(torch.zeros(len(values), dtype=torch.int64))
        self.values = values

    def uniform(self, *shape: int) -> Tensor:
        assert shape == self.values.shape[1:]
        return self.values
