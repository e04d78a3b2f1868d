"""How much of a run's accuracy under noise depends on batch-norm's running statistics.

    python -m noiseproof.lab.training.renormalise renormalised.json runs/cifar10-*-s0

A trained network has one mean and one variance per channel for all images. Here they are estimated
again from training batches, and nothing else of the network changes:

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
from collections.abc import Iterable, Sequence
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

__all__ = ["STATISTICS", "evaluate_statistics", "renormalised"]

STATISTICS = ("training", "clean", "noisy", "apart", "mixed")


def renormalised(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of the model whose running statistics are means over those of the batches.

    Args:
        model: a network with batch-norm.
        batches: images, B x C x H x W.
    """
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
    run: RunFolder,
    perturbations: Sequence[str] = (),
    *,
    steps: int = 100,
    images: int = 10_000,
    draws: int = 3,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Accuracies in % with each kind of `STATISTICS`, one row per kind.

    Args:
        run: a finished run with images in memory.
        perturbations: what to evaluate under; by default the test suite of the run's data.
        steps: training batches that the statistics are estimated from.
        images: test images, the first ones.
        draws: noise draws per perturbation.
        device: "auto", "cpu" or "cuda".
    """
    config, target = run.config, chosen_device(device)
    dataset = load_dataset(config.data)
    if not dataset.in_memory or dataset.test.images is None:
        raise ValueError(
            f"{run.name}: streamed images are not supported; expected images in memory"
        )
    noise = Both(config.method.noise, views=config.method.views)
    loader = MemoryLoader(
        dataset.train,
        batch_size=config.optim.batch_size,
        seed=config.run.seed,
        device=target,
        augment=config.data.augment,
        second=noise.needs_second,
    )
    batches = map(loader.prepare, itertools.islice(loader.tickets(0), steps))
    pairs = [(batch.images, noise.noised(batch)) for batch in batches]
    views: dict[str, Iterable[Tensor]] = {
        "clean": (clean for clean, _ in pairs),
        "noisy": (noisy for _, noisy in pairs),
        "apart": itertools.chain.from_iterable(pairs),
        "mixed": (torch.cat(pair) for pair in pairs),
    }
    model = run.model("last", target)
    test_images = dataset.test.images[:images].to(target).float() / 255
    test_labels = dataset.test.labels[:images].to(target)
    names = perturbations or suite(config.data.data)
    rows = []
    for kind in STATISTICS:
        network = model if kind == "training" else renormalised(model, views[kind])
        results = accuracy(network, (test_images, test_labels), names, draws=draws)
        rows.append(
            {
                "run": run.name,
                "statistics": kind,
                "images": len(test_labels),
                "batches": len(pairs),
                "accuracy": {name: round(100 * a.mean, 3) for name, a in results.items()},
            }
        )
    return rows


def main(
    file: tyro.conf.Positional[Path],
    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN")]],
    perturb: tuple[str, ...] = (),
    steps: int = 100,
    images: int = 10_000,
    draws: int = 3,
    device: str = "auto",
) -> None:
    """Evaluates runs with batch-norm statistics that are estimated again.

    Args:
        file: JSON file to write.
        runs: Run folders.
        perturb: Perturbations; by default the test suite of the run's data.
        steps: Training batches that the statistics are estimated from.
        images: Number of test images, the first ones.
        draws: Noise draws per perturbation.
        device: auto, cpu or cuda.
    """
    rows = []
    for path in runs:
        results = evaluate_statistics(
            RunFolder.open(path), perturb, steps=steps, images=images, draws=draws, device=device
        )
        for row in results:
            accuracies = "  ".join(f"{name} {a:.2f}" for name, a in row["accuracy"].items())
            print(f"{row['run']}  {row['statistics']:8}  {accuracies}", flush=True)
        rows += results
    content = {"schema": 1, "draws": draws, "environment": environment(chosen_device(device))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main, args=sys.argv[1:])
