"""How much of a run's accuracy under noise depends on batch-norm's running statistics.

    python -m noiseproof.lab.training.renormalise renormalised.json runs/cifar10-*-s0

A trained network has one mean and one variance per channel for all images. Here they are estimated
again from training batches, and nothing else in the network changes:

- `training`: as the training left them;
- `clean`, `noisy`: from the clean views alone, or from the noisy ones;
- `apart`: from both kinds of batches in turn, as after separate passes;
- `mixed`: from batches that hold both, as `both` trains.

Each version of the network is then evaluated on the first test images.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from noiseproof import accuracy
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.device import chosen_device, environment
from noiseproof.lab.files import write_atomically
from noiseproof.lab.recipes import suite
from noiseproof.lab.runs import RunFolder
from noiseproof.objectives import Both


def renormalised(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of the model whose running statistics are means over those of the image batches."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
            module.train()
    with torch.no_grad():
        for images in batches:
            model(images)
    return model.eval()


def evaluate_statistics(
    file: tyro.conf.Positional[Path],
    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN")]],
    perturb: tuple[str, ...] = (),
    steps: int = 100,
    images: int = 10_000,
    draws: int = 3,
    device: str = "auto",
) -> None:
    """Evaluates runs with each kind of batch-norm statistics; prints and writes accuracies in %.

    Args:
        file: JSON file to write.
        runs: Run folders.
        perturb: Perturbations; by default the test suite of the run's data.
        steps: Training batches that the statistics are estimated from.
        images: Number of test images, the first ones.
        draws: Noise draws per perturbation.
        device: auto, cpu or cuda.
    """
    target = chosen_device(device)
    rows = []
    for run in map(RunFolder.open, runs):
        dataset = load_dataset(run.config.data)
        if not dataset.in_memory or dataset.test.images is None:
            raise ValueError(f"{run.name}: images must be in memory, but they are streamed")
        pixels = dataset.test.images[:images].to(target).float() / 255
        labels = dataset.test.labels[:images].to(target)
        names = perturb or suite(run.config.data.data)
        pairs = _view_pairs(run, dataset, steps, target)
        model = run.model("last", target)
        networks = {
            "training": model,
            "clean": renormalised(model, (clean for clean, _ in pairs)),
            "noisy": renormalised(model, (noisy for _, noisy in pairs)),
            "apart": renormalised(model, itertools.chain.from_iterable(pairs)),
            "mixed": renormalised(model, map(torch.cat, pairs)),
        }
        counts = {"images": len(labels), "batches": len(pairs)}
        for kind, network in networks.items():
            results = accuracy(network, (pixels, labels), names, draws=draws)
            values = {name: round(100 * a.mean, 3) for name, a in results.items()}
            rows.append({"run": run.name, "statistics": kind, **counts, "accuracy": values})
            shown = "  ".join(f"{name} {value:.2f}" for name, value in values.items())
            print(f"{run.name}  {kind:8}  {shown}", flush=True)
    content = {"schema": 1, "draws": draws, "environment": environment(target), "rows": rows}
    write_atomically(file, json.dumps(content, indent=1) + "\n")


def _view_pairs(
    run: RunFolder, dataset: Dataset, steps: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Clean and noisy views of the first `steps` training batches."""
    config = run.config
    noise = Both(config.method.noise, views=config.method.views)
    loader = Loader(
        dataset.train,
        dataset.size,
        batch_size=config.optim.batch_size,
        seed=config.run.seed,
        device=device,
        augment=config.data.augment,
        second=noise.needs_second,
    )
    batches = map(loader.prepare, itertools.islice(loader.tickets(0), steps))
    return [(batch.images, noise.noised(batch)) for batch in batches]


if __name__ == "__main__":
    tyro.cli(evaluate_statistics, args=sys.argv[1:])
