"""How much of a run's accuracy under noise hangs on batch-norm's running statistics.

    python -m noiseproof.lab.training.renormalise renormalised.json runs/cifar10-*-s0

A trained network has one mean and one variance a channel for all images that it will meet. Here
they are taken anew, from batches of the training, and nothing else of the network is changed:

- `training`: as the training left them;
- `clean`, `noisy`: from the clean views alone, or from the noisy ones;
- `apart`: the mean of both kinds of batches, as after separate passes;
- `mixed`: from batches that hold both, as `both` trains.

Then the run is tested on the first of its test images.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from noiseproof import accuracy
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.loader import MemoryLoader
from noiseproof.lab.device import chosen_device, environment
from noiseproof.lab.recipes import suite
from noiseproof.lab.runs import RunFolder
from noiseproof.objectives import Both

__all__ = ["KINDS", "measure", "renormalised"]

KINDS = ("training", "clean", "noisy", "apart", "mixed")


def renormalised(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of the model whose running statistics are the means over those of the batches."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the plain mean over all batches
            module.train()
    with torch.no_grad():
        for images in batches:
            model(images)
    return model.eval()


def measure(
    run: RunFolder,
    perturbations: Sequence[str],
    *,
    steps: int,
    images: int,
    draws: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """A row for each kind of statistics, with accuracies in % under the perturbations, or under the
    suite of the run's data where none are given."""
    config = run.config
    dataset = load_dataset(config.data)
    if not dataset.in_memory or dataset.test.images is None:
        raise ValueError(f"{run.name}: images that are streamed are not supported here")
    noise = Both(config.method.noise, views=config.method.views)
    batches = MemoryLoader(
        dataset.train,
        batch_size=config.optim.batch_size,
        seed=config.run.seed,
        device=device,
        augment=config.data.augment,
        second=noise.needs_second,
    )
    tickets = itertools.islice(batches.tickets(0), steps)
    pairs = [(b.images, noise.noised(b)) for b in map(batches.prepare, tickets)]
    views: dict[str, Iterable[Tensor]] = {
        "clean": (clean for clean, _ in pairs),
        "noisy": (noisy for _, noisy in pairs),
        "apart": itertools.chain.from_iterable(pairs),
        "mixed": (torch.cat(pair) for pair in pairs),
    }
    model = run.model("last", device)
    pixels = dataset.test.images[:images].to(device).float() / 255
    labels = dataset.test.labels[:images].to(device)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        network = model if kind == "training" else renormalised(model, views[kind])
        asked = perturbations or suite(config.data.data)
        found = accuracy(network, (pixels, labels), asked, draws=draws)
        row = {"run": run.name, "statistics": kind, "images": len(labels), "batches": len(pairs)}
        rows.append(row | {"accuracy": {spec: round(100 * a.mean, 3) for spec, a in found.items()}})
        shown = "  ".join(f"{spec} {100 * a.mean:.2f}" for spec, a in found.items())
        print(f"{run.name}  {kind:8}  {shown}", flush=True)
    return rows


@dataclass(frozen=True)
class Arguments:
    """Tests runs with batch-norm statistics taken anew."""

    file: tyro.conf.Positional[Path]
    """Where the rows are written, as JSON."""
    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN")]]
    """Run folders."""
    steps: int = 100
    """Batches of the training that statistics are taken from."""
    images: int = 10_000
    """Test images, the first ones."""
    perturb: tuple[str, ...] = ()
    """Perturbations; those of the data's suite."""
    draws: int = 3
    """Draws of each noise."""
    device: str = "auto"
    """Device; auto takes a GPU when there is one."""


def main(argv: Sequence[str]) -> int:
    arguments = tyro.cli(Arguments, args=list(argv))
    device = chosen_device(arguments.device)
    rows = [
        row
        for path in arguments.runs
        for row in measure(
            RunFolder.open(path),
            arguments.perturb,
            steps=arguments.steps,
            images=arguments.images,
            draws=arguments.draws,
            device=device,
        )
    ]
    content = {"schema": 1, "draws": arguments.draws, "environment": environment(device)}
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
