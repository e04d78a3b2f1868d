"""From a config to the parts of a run: objective, optimiser, loader, device and precision."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noiseproof import DiscriminativeLoss, perturb
from noiseproof.lab.config import Config
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.loader import Loader, MemoryLoader, StreamLoader
from noiseproof.lab.training.descent import PlainSGD
from noiseproof.objectives import Both, Discriminative, Noisy, Normal, Objective, Stability

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_PRECISION = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "float64": "64-true"}


def fabric(config: Config) -> Fabric:
    """Lightning's Fabric: device, precision and ranks (those that torchrun has started)."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    # It tells what it does and advises on precision; what matters of that we say ourselves.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # On a CPU without bf16, torch says so with twenty frames of a stack; `slow` says it in a line.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS")
    device = config.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here")
    several = _under_torchrun()
    return Fabric(
        accelerator=device,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]) if several else 1,
        num_nodes=_nodes() if several else 1,
        strategy="ddp" if several else "auto",
        # One process is one process, also where a cluster's queue has set variables for many.
        plugins=None if several else LightningEnvironment(),
        precision=_PRECISION[precision(config, device)],  # pyright: ignore[reportArgumentType]
    )


def precision(config: Config, device: str) -> str:
    """The arithmetic that `auto` stands for: bf16 on a GPU that has it, float32 elsewhere. On a CPU
    Lightning takes bf16 for fp16, without a word."""
    if config.run.amp == "fp16" and device == "cpu":
        raise ValueError("--amp fp16 needs a GPU, and this runs on the CPU; expected no or bf16")
    if config.run.amp != "auto":
        return config.run.amp
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "no"


def slow(config: Config, device: str) -> str | None:
    """A line where the arithmetic asked for is one that this CPU does not have."""
    if device != "cpu" or precision(config, device) != "bf16":
        return None
    with contextlib.suppress(AttributeError, RuntimeError):  # not every torch can tell
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no bf16: --amp no is several times as fast here"
    return None


def _under_torchrun() -> bool:
    variables = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(v in os.environ for v in variables)


def _nodes() -> int:
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def objective(config: Config, num_classes: int, steps_per_epoch: int) -> Objective:
    """The method's objective."""
    m = config.method
    noise, ramp_steps = perturb.parse(m.noise), round(m.ramp_epochs * steps_per_epoch)
    if m.method == "normal":
        return Normal(noise, views=m.views, smoothing=m.smoothing)
    if m.method == "noisy":
        return Noisy(noise, views=m.views, smoothing=m.smoothing)
    if m.method == "both":
        return Both(noise, views=m.views, smoothing=m.smoothing)
    if m.method == "stability":
        return Stability(
            noise,
            weight=m.stability_weight,
            ramp_steps=ramp_steps,
            views=m.views,
            batch_norm=m.batch_norm,
            smoothing=m.smoothing,
        )
    criterion = DiscriminativeLoss(
        num_classes,
        config.model.feature_dim,
        radius=m.radius,
        margin=m.margin,
        compact_weight=m.compact_weight,
        margin_weight=m.margin_weight,
        norm_weight=m.norm_weight,
        noisy_weight=m.noisy_weight,
        momentum=m.centroid_momentum,
        centroids=m.centroids,
        margin_over=m.margin_over,
    )
    return Discriminative(
        criterion,
        noise,
        noisy_ce_weight=m.noisy_ce_weight,
        ramp_steps=ramp_steps,
        views=m.views,
        batch_norm=m.batch_norm,
        smoothing=m.smoothing,
    )


def optimizer(
    config: Config, model: nn.Module, device: torch.device, captured: bool = False
) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, Adam or AdamW, fused where the device has that."""
    o = config.optim
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = device.type in ("cuda", "cpu")
    if o.opt == "sgd":
        # With fp16 a loss scale decides about every step, which goes through Fabric then
        lean = device.type == "cpu" and config.run.amp != "fp16"
        return (PlainSGD if lean else torch.optim.SGD)(
            parameters,
            lr=o.lr,
            momentum=o.momentum,
            nesterov=o.momentum > 0,
            weight_decay=o.weight_decay,
            fused=fused,
        )
    kind = torch.optim.Adam if o.opt == "adam" else torch.optim.AdamW
    return kind(parameters, lr=o.lr, weight_decay=o.weight_decay, fused=fused, capturable=captured)


def loader(config: Config, dataset: Dataset, second: bool, fab: Fabric) -> Loader:
    """Batches of this rank, from memory or from files."""
    options: dict[str, Any] = dict(
        batch_size=config.optim.batch_size,
        seed=config.run.seed,
        device=fab.device,
        augment=config.data.augment,
        second=second,
        rank=fab.global_rank,
        world=fab.world_size,
        dtype=torch.float64 if config.run.amp == "float64" else torch.float32,
    )
    if dataset.in_memory:
        return MemoryLoader(dataset.train, **options)
    return StreamLoader(dataset, workers=config.data.workers, **options)
