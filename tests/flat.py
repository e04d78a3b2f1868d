"""A classifier without batch-norm or convolutions, for tests of training: 1 ms per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from noiseproof.lab.config import Config, Data, Method, Model, Optim, Run, from_dict
from noiseproof.lab.models.backbones import Backbone


class Flat(Backbone):
    """Two linear layers on the pixels of a digit."""

    def __init__(self, channels: int, dropout: float = 0.0):
        super().__init__(24, channels)
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * channels, 32), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(32, 24),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def forward_stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = self.net(x)
        return out, [out]


class Dropped(Flat):
    def __init__(self, channels: int):
        super().__init__(channels, dropout=0.3)


def digits(output: Any, **changes: Any) -> Config:
    """Three epochs of 17 steps on the digits with the flat net, apart from `changes`."""
    base = Config(
        Data(val_share=0.1),
        Model(model="flat", feature_dim=8),
        Method(method="discriminative", margin=2.0),
        Optim(epochs=3, lr=0.05),
        Run(output=str(output), name="one", threads=1, device="cpu"),
    )
    return from_dict(changes, base)


def resumed(config: Config) -> Config:
    """The same config with `resume`."""
    return replace(config, run=replace(config.run, resume=True))
