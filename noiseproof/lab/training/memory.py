"""How much memory a training needs, estimated before it starts: a training that does not fit fails
with a message instead of being killed.

Counted is what a step keeps: images, activations for the backward pass, parameters with gradients
and optimiser state. Measured with 16 images of 224 x 224 on a CPU, activations took 2 to 14 % more
than estimated (ResNet-50, ConvNeXt, MobileNetV3), or 18 % less (ViT, whose attention is counted in
its plain form).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noiseproof.lab.config import Config
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import precision
from noiseproof.lab.models.classifier import classifier_for
from noiseproof.lab.training.interrupt import uninterrupted
from noiseproof.objectives import METHODS

_CERTAIN = 0.8  # a training is refused if this share of the estimate is not free
_PREFETCHED = 2  # batches per worker process that reads files
_COPIES = {"sgd": 3, "adam": 4, "adamw": 4}  # of the parameters: gradients and optimiser state too


class MemoryEstimate(NamedTuple):
    """Bytes that a training needs: on its device, and on the host if that is not the device."""

    device: int
    host: int


def saved_for_backward(model: nn.Module, size: tuple[int, ...]) -> int:
    """Bytes that a forward pass in float32 keeps for the backward pass, per image. They are counted
    on torch's meta device, which takes no memory.

    Args:
        model: the network.
        size: C, H, W of the images.
    """
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    state = {name: tensor.to("meta") for name, tensor in tensors}
    storages = {v.untyped_storage()._cdata: v.untyped_storage() for v in state.values()}
    parameters = set(storages)

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # kept, or its address could be used again
        return tensor

    images = torch.zeros(2, *size, device="meta")
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with uninterrupted(), hooks:  # the meta device imports triton
        functional_call(model, state, (images,))
    return sum(s.nbytes() for address, s in storages.items() if address not in parameters) // 2


def estimate(
    config: Config, data: Dataset, model: nn.Module, *, device: str, ranks: int = 1
) -> MemoryEstimate:
    """The memory that one process of a training needs.

    Args:
        config: settings of the run.
        data: its images.
        model: its network, not yet trained.
        device: "cpu" or "cuda".
        ranks: processes that share a batch.
    """
    pixels = math.prod(data.size)
    batch = math.ceil(min(config.optim.batch_size, data.train.count) / ranks)
    views = METHODS[config.method.method].num_views
    scale = {"bf16": 0.5, "fp16": 0.5, "float64": 2.0}.get(precision(config, device), 1.0)
    activations = int(scale * batch * views * saved_for_backward(model, data.size))
    copies = _COPIES[config.optim.opt] + (config.optim.ema_decay > 0)
    parameters = 4 * copies * sum(p.numel() for p in model.parameters())
    batches = batch * pixels * (1 + 4 * views)
    queued = 0 if data.in_memory else config.data.workers * _PREFETCHED * batch * pixels
    stored = data.train.count * pixels if data.in_memory else 0
    needed = activations + parameters + batches
    if device == "cpu":
        return MemoryEstimate(needed + queued, 0)  # images in memory are there already
    return MemoryEstimate(needed + stored, queued)


def require_memory(
    config: Config,
    data: Dataset,
    model: nn.Module,
    *,
    device: str,
    ranks: int = 1,
    jobs: int = 1,
) -> MemoryEstimate | None:
    """The estimate for one process, or None for a network that cannot be estimated. Raises
    ValueError if that is more than what is free. Arguments as for `estimate`.

    Args:
        jobs: trainings at a time on this machine.
    """
    try:
        needed = estimate(config, data, model, device=device, ranks=ranks)
    except Exception:  # a network of the user's own may need real numbers, and raise anything
        return None
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else free_memory()
    on_host = free_memory() if device == "cuda" else None
    where = "GPU memory" if device == "cuda" else "memory"
    for bytes_, available, name in ((needed.device, free, where), (needed.host, on_host, "memory")):
        if available is not None and _CERTAIN * jobs * bytes_ > available:
            raise ValueError(_message(config, data, bytes_, available, name, jobs))
    return needed


def _message(
    config: Config, data: Dataset, bytes_: int, available: int, where: str, jobs: int
) -> str:
    _, height, width = data.size
    many = f"{jobs} trainings at a time need" if jobs > 1 else "the training needs"
    changes = [f"--batch-size (now {config.optim.batch_size})"]
    if data.resized:
        changes.append(f"--img-size (now {height} {width}; auto is the default)")
    fewer = " or fewer --jobs" if jobs > 1 else ""
    return (
        f"{many} about {in_gigabytes(jobs * bytes_)} of {where}, and {in_gigabytes(available)} "
        f"are free: use a smaller {' or '.join(changes)}{fewer}"
    )


def in_gigabytes(bytes_: int) -> str:
    """An amount of memory in words.

    >>> in_gigabytes(24_300_000_000), in_gigabytes(210_000_000)
    ('24 GB', '0.2 GB')
    """
    return f"{bytes_ / 1e9:.0f} GB" if bytes_ >= 9.5e9 else f"{bytes_ / 1e9:.1f} GB"


def free_memory() -> int | None:
    """Bytes that processes on this machine, or in this container, can still get; None if the system
    does not say."""
    free = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = [int(line.split()[1]) for line in lines if line.startswith("inactive_file ")]
        used = int((group / "memory.current").read_text())
        free.append(limit - used + sum(cached))
    return min(free, default=None)


def memory_note(needed: MemoryEstimate | None) -> str:
    """How much memory a training needs on its device, for the end of a line; nothing if it is
    little or unknown.

    >>> memory_note(MemoryEstimate(1_100_000_000, 0)), memory_note(None)
    (', about 1.1 GB of memory', '')
    """
    if needed is None or needed.device < 10**8:
        return ""
    return f", about {in_gigabytes(needed.device)} of memory"


def check_start(config: Config, data: Dataset, *, device: str, jobs: int) -> MemoryEstimate | None:
    """The memory that one such training needs, if it can be estimated. Raises ValueError if it
    could not start: pretrained weights are not available, or there is too little memory. For a
    comparison, so that the error appears once.

    Args:
        config: settings of the most expensive training.
        data: its images.
        device: "cpu" or "cuda".
        jobs: trainings at a time.
    """
    model = classifier_for(config.model, data)
    return require_memory(config, data, model, device=device, jobs=jobs)
