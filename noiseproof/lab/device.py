"""Where a run is executed: device, precision, processes; and what to record of the machine."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import noiseproof
from noiseproof.lab.config import Config

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = ["chosen_device", "commit", "environment", "make_fabric", "precision", "slow"]

_PRECISION = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "float64": "64-true"}


def chosen_device(name: str) -> torch.device:
    """The device called `name`; auto takes a GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name} needs a GPU, but torch sees none here; use cpu or auto")
    return torch.device(name)


def make_fabric(config: Config) -> Fabric:
    """Lightning's Fabric: device, precision and ranks (those that torchrun has started)."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    # It tells what it does and advises on precision; what matters of that we say ourselves.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # On a CPU without bf16, torch says so with twenty frames of a stack; `slow` says it in a line.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS")
    device = chosen_device(config.run.device).type
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


def environment(device: torch.device | str) -> dict[str, Any]:
    """What a result depends on besides its config: versions, commit, machine."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    return {
        "noiseproof": noiseproof.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if cuda else (_cpu_name() or "cpu"),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with + where it was changed."""
    here = Path(noiseproof.__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = changed = ""
    with contextlib.suppress(OSError):  # no git at all
        head = git("rev-parse", "--short=12", "HEAD")
        changed = "+" if head and git("status", "--porcelain", "--", str(here)) else ""
    return head + changed or os.environ.get("NOISEPROOF_COMMIT")


def _cpu_name() -> str | None:
    """As the system calls it; lscpu knows the names of ARM processors, /proc/cpuinfo does not."""
    with contextlib.suppress(OSError):
        listed = subprocess.run(
            ["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        )
        names = [ln.split(":", 1)[1] for ln in listed.stdout.splitlines() if "Model name:" in ln]
        if names:
            return names[0].strip()
    return platform.processor() or None
