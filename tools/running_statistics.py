"""How far a run's accuracy depends on which batches its batch-norm statistics saw last.

    python -m tools.running_statistics RUN statistics.json

Batch-norm's running statistics are an exponential average with momentum 0.1, so they come from the
last few dozen batches. Here the weights of a run stay as they are, and the statistics are collected
again from the last batches of different epochs, in three ways:

- `full`: batches of the training's size only, as ours leaves them;
- `small`: the same, and then one batch of the images that remain (16 of 50,000 on CIFAR-10), as the
  authors' loader, which does not drop it, leaves them;
- `mean`: the plain mean over the same full batches.

The spread over epochs is what chance in the statistics alone contributes to a measured accuracy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

import tyro

from noiseproof import accuracy
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.device import chosen_device, environment
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.renormalise import renormalised


def measure(
    run: tyro.conf.Positional[Path],
    file: tyro.conf.Positional[Path],
    perturb: tuple[str, ...] = ("clean", "gaussian:16/255", "gaussian:20/255"),
    repeats: int = 20,
    batches: int = 100,
    images: int = 10_000,
    device: str = "auto",
) -> None:
    """Tests a run with statistics of different epochs; prints and writes accuracies in %.

    Args:
        run: the run folder; its training images must fit into memory.
        file: JSON file to write.
        perturb: perturbations, each with one draw, the same for all statistics.
        repeats: number of epochs whose last batches are used, at least 2.
        batches: batches per epoch; with momentum 0.1 and 100 of them, none of the start is left.
        images: test images, the first ones.
        device: auto, cpu or cuda.
    """
    target, folder = chosen_device(device), RunFolder.open(run)
    config, dataset = folder.config, folder.dataset()
    size = config.optim.batch_size
    left = dataset.train.count % size or size
    loader = Loader(
        dataset.train,
        dataset.size,
        batch_size=size,
        seed=config.run.seed,
        device=target,
        augment=config.data.augment,
    )
    pixels = dataset.test.pixels[:images].to(target).float() / 255
    labels = dataset.test.labels[:images].to(target)
    model = folder.model("last", target)
    values: dict[str, dict[str, list[float]]] = {}  # by kind of statistics and perturbation
    for epoch in range(repeats):
        start = max(0, loader.steps - batches - 1)
        views = [loader.prepare(t).images for t in loader.tickets(epoch, start)]
        small = views.pop(0)[:left]
        networks = {
            "full": renormalised(model, views, 0.1),
            "small": renormalised(model, [*views, small], 0.1),
            "mean": renormalised(model, views),
        }
        for kind, network in networks.items():
            for name, result in accuracy(network, (pixels, labels), perturb, draws=1).items():
                accuracies = values.setdefault(kind, {}).setdefault(name, [])
                accuracies.append(round(100 * result.mean, 4))
        content = {
            "schema": 1, "run": folder.name, "batches": len(views), "images": len(labels),
            "small": left, "environment": environment(target), "accuracy": values,
        }  # fmt: skip
        write_atomically(file, json.dumps(content, indent=1) + "\n")
    for kind, row in values.items():
        shown = [f"{n} {fmean(v):.2f} ± {stdev(v):.2f}" for n, v in row.items()]
        print(f"{kind:6}", "  ".join(shown), flush=True)


if __name__ == "__main__":
    tyro.cli(measure, args=sys.argv[1:])
