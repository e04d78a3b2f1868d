"""Batch-norm statistics estimated again, on noisy training images or on new ones.

A trained network has one mean and one variance per channel for all images. They come from the
batches of its training, and under other conditions (noise, another camera) they can be wrong.
Estimating them again needs no labels and no training, and changes nothing else in the network.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from noiseproof.lab.console import print_status
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.folder import image_files
from noiseproof.lab.data.images import Reading
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.data.splits import Split
from noiseproof.lab.device import chosen_device
from noiseproof.lab.runs import RunFolder
from noiseproof.perturb import Perturbation, parse


def renormalised(
    model: nn.Module, batches: Iterable[Tensor], momentum: float | None = None
) -> nn.Module:
    """A copy of the model whose running statistics are means over those of the batches.

    Args:
        model: a network with batch-norm; ValueError if it has none.
        batches: images in [0, 1], B x C x H x W.
        momentum: weight of each batch in an exponential mean, as in training; by default all
            batches have the same weight.
    """
    model = copy.deepcopy(model).eval()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        raise ValueError("the model has no batch-norm statistics, so there are none to estimate")
    for module in norms:
        module.reset_running_stats()
        module.momentum = momentum
        module.train()
    with torch.no_grad():
        for images in batches:
            model(images)
    return model.eval()


def renormalise(
    run: RunFolder,
    *,
    noise: Sequence[str] = (),
    images: str | Path | None = None,
    batches: int = 100,
    output: str | Path | None = None,
    name: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    dataset: Dataset | None = None,
) -> RunFolder:
    """Writes a new run folder: the same model with batch-norm statistics estimated again.

    The images are training images, augmented as in the training and then perturbed, or the images
    of a folder as they are. `renormalised` in the info of the new run records what was done. The
    original run stays as it is.

    Args:
        run: a trained run, whose model has batch-norm.
        noise: perturbations of the training images; with several, every batch has a view of its
            images under each, which "clean" can be. By default the run's training noise.
        images: a folder of images to use instead; labels are not needed.
        batches: how many batches to use at most, each with as many images as in the training.
        output: folder of the new run folder; by default that of the run.
        name: name of the new run folder; by default the run's with -renormalised.
        device: "auto", "cpu" or "cuda".
        overwrite: replace a run folder of that name instead of raising a ValueError.
        dataset: the run's data, if the caller has loaded it already.
    """
    if noise and images is not None:
        raise ValueError("noise is for training images, and images replace them; expected only one")
    if batches < 1:
        raise ValueError(f"batches must be at least 1, got {batches}")
    new = run.derive("renormalised", output=output, name=name, overwrite=overwrite)
    target, facts = chosen_device(device), new.info["renormalised"]
    if images is None:
        perturbations = [parse(text) for text in noise or [run.config.method.noise]]
        facts["noise"] = list(map(str, perturbations))
        views = partial(_training_views, run, run.dataset(dataset), perturbations, batches, target)
    else:
        facts["images"] = str(Path(images).absolute())
        files = image_files([str(images)], partial(print_status, run.name))
        if not files:
            raise ValueError(f"there are no images in {images}")
        views = partial(_folder_views, run, files, batches, target)
    facts["weights"] = {}

    for weights in run.available_weights:
        sizes: list[int] = []
        model = renormalised(run.model(weights, target), _measured(views(), sizes))
        new.save_weights(weights, model.state_dict())
        facts["weights"][weights] = run.weights_hash(weights)  # those of the original
        facts.update(batches=len(sizes), views=sum(sizes))
    new.save_config()  # last: a folder that has it is complete
    return new


def renormalise_path(path: str | Path, **options: Any) -> None:
    """Renormalises the run at `path` and prints where the new one is.

    Args:
        path: the run folder.
        **options: as for `renormalise`.
    """
    run = RunFolder.open(path)
    new = renormalise(run, **options)
    facts, paths = new.info["renormalised"], shlex.join([str(run.path), str(new.path)])
    count = facts["views"] // (len(facts.get("noise", ())) or 1)  # one view of an image per noise
    print(
        f"The run is in {shlex.quote(str(new.path))}, with batch-norm statistics of {count:,} "
        f"images. To test both:\n  noiseproof evaluate {paths}"
    )


def _measured(batches: Iterable[Tensor], sizes: list[int]) -> Iterator[Tensor]:
    """The batches, whose sizes are added to `sizes`."""
    for batch in batches:
        sizes.append(len(batch))
        yield batch


def _training_views(
    run: RunFolder,
    dataset: Dataset,
    perturbations: Sequence[Perturbation],
    batches: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Training batches of the first epoch, each under all perturbations."""
    loader = Loader(
        dataset.train,
        dataset.size,
        batch_size=run.config.optim.batch_size,
        seed=run.config.run.seed,
        device=device,
        augment=run.config.data.augment,
        workers=run.config.data.workers,
    )
    with contextlib.closing(loader.tickets(0)) as tickets:
        for ticket in itertools.islice(tickets, batches):
            batch = loader.prepare(ticket)
            yield torch.cat([p(batch.images, batch.source) for p in perturbations])


def _folder_views(
    run: RunFolder, files: Sequence[str], batches: int, device: torch.device
) -> Iterator[Tensor]:
    """The images in random order: those of one class may be next to each other in the folder."""
    count = max(1, len(files) // run.config.optim.batch_size)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
    parts = order.tensor_split(count)[:batches]
    size = tuple(run.info["size"])
    images, workers = Split.unlabelled(files, Reading.of(run.config.data)), run.config.data.workers
    reader = Batches(images, size, 1, device, workers=workers)
    for batch in reader.read(parts):
        yield batch.pixels.float() / 255
