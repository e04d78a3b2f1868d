"""What a result depends on besides its config: versions, commit, machine."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import noiseproof

__all__ = ["chosen_device", "commit", "environment"]


def chosen_device(name: str) -> torch.device:
    """The device called `name`; auto takes a GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no CUDA device; expected cpu or auto")
    return torch.device(name)


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
