"""Where a run is executed: device, precision, processes; and what is recorded about the machine."""

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

_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_PRECISION = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "float64": "64-true"}


def chosen_device(name: str) -> torch.device:
    """The device called `name`; "auto" means a GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name} needs a GPU, but torch sees none here; use cpu or auto")
    return torch.device(name)


def make_fabric(config: Config) -> Fabric:
    """Lightning's Fabric for the configured device and precision, over the processes that torchrun
    has started or for this process alone."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    # Lightning logs what it does and gives advice on precision; we print what matters ourselves.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # On a CPU without bf16, torch warns with twenty stack frames; `slow_precision` needs one line.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS")
    device = chosen_device(config.run.device).type
    distributed = all(v in os.environ for v in _TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1
    local = int(os.environ["LOCAL_WORLD_SIZE"]) if distributed else 1
    return Fabric(
        accelerator=device,
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local if distributed else 1,
        strategy="ddp" if distributed else "auto",
        # One process stays one process even if a cluster's queue has set variables for many.
        plugins=None if distributed else LightningEnvironment(),
        precision=_PRECISION[precision(config, device)],  # pyright: ignore[reportArgumentType]
    )


def precision(config: Config, device: str) -> str:
    """The precision on `device` ("cpu" or "cuda"): the configured one, where "auto" means bf16 on a
    GPU that supports it and float32 elsewhere. fp16 is refused on a CPU, where Lightning would
    silently use bf16."""
    if config.run.amp == "fp16" and device == "cpu":
        raise ValueError("--amp fp16 needs a GPU, and this runs on the CPU; expected no or bf16")
    if config.run.amp != "auto":
        return config.run.amp
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "no"


def slow_precision(config: Config, device: str) -> str | None:
    """A warning if `device` is a CPU that does not support the configured precision."""
    if device != "cpu" or precision(config, device) != "bf16":
        return None
    with contextlib.suppress(AttributeError, RuntimeError):  # not every torch has this query
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU does not support bf16: --amp no is several times faster here"
    return None


def environment(device: torch.device | str) -> dict[str, Any]:
    """What a result from `device` depends on besides its config: versions, commit, machine."""
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
    """The commit of the checkout that this package runs from, with a + if files were changed; or
    the environment variable NOISEPROOF_COMMIT; or None."""
    here = Path(noiseproof.__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else ""

    head = changed = ""
    with contextlib.suppress(OSError):  # git is not installed
        head = git("rev-parse", "--short=12", "HEAD")
        changed = "+" if head and git("status", "--porcelain", "--", str(here)) else ""
    return head + changed or os.environ.get("NOISEPROOF_COMMIT")


def _cpu_name() -> str | None:
    """The processor's name; lscpu knows those of ARM processors, /proc/cpuinfo does not."""
    with contextlib.suppress(OSError):
        lscpu = subprocess.run(
            ["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        )
        names = [ln.split(":", 1)[1] for ln in lscpu.stdout.splitlines() if "Model name:" in ln]
        if names:
            return names[0].strip()
    return platform.processor() or None
