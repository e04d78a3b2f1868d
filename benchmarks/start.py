"""How long a training takes to start, with compiled kernels and without, and when compiling pays.

    python benchmarks/start.py                          # on a GPU: ResNet18 and MobileNetV2
    python benchmarks/start.py --device cpu --models small_cnn

Every start is made in a process of its own with empty caches, as the first training on a machine
is. On a GPU both are captured as a graph; on a CPU an eager step stands for uncompiled kernels.
Compiling pays after as many steps as it takes to get back, in shorter steps, what the start took
longer; `auto` compiles from a fixed number of steps on (`lab/training/choose_engine.py`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to be run by its path, too
from benchmarks import timing
from benchmarks.timing import EngineName, settings
from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.device import chosen_device
from noiseproof.lab.training import choose_engine

BLOCKS = 3
SIZES = {"resnet18": 32, "small_cnn": 8}  # height and width of images; of others, see _PHOTOGRAPH
_PHOTOGRAPH = 250
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Arguments:
    """Times the start of trainings with and without compiled kernels, and their steps."""

    models: tuple[str, ...] = ("resnet18", "mobilenet_v2")
    """Networks, each with random images of the size that it is meant for."""
    methods: tuple[MethodName, ...] = ("normal", "discriminative")
    """Methods to start."""
    steps: int = 100
    """Steps a block; the median of three is taken, after one that warms up."""
    images: int = 2_000
    """How many random images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    json: Path | None = None
    """File of the results; results/benchmarks/start-DEVICE.json."""


def worker(pipe: Connection, config: Config, compiled: bool, steps: int) -> None:
    """Starts a training, and sends when the first step was taken and how long the others take."""
    if not compiled:
        choose_engine.missing_compiler = lambda _: "compiling was not asked for"
    began = time.monotonic()
    session = timing.ready(config)
    fabric, run = session.fabric, timing.stepping(session)
    with session.engine:
        run(1)
        if fabric.device.type == "cuda":
            torch.cuda.synchronize(fabric.device)
        seconds = time.monotonic() - began
        blocks = timing.timed(run, steps, BLOCKS, fabric.device)
    pipe.send({
        "engine": session.engine.name, "note": session.engine_note, "start_seconds": seconds,
        "ms": statistics.median(blocks), "ms_of_blocks": blocks,
    })  # fmt: skip


def started(config: Config, compiled: bool, steps: int) -> dict[str, Any]:
    """What a start takes, and a step after it, in a new process with empty caches."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as caches:
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, config, compiled, steps))
        with patch.dict(os.environ, {name: f"{caches}/{name}" for name in _CACHES}):
            process.start()
        theirs.close()  # so that the end of the process ends the pipe
        found = mine.recv()
        process.join()
    return found


def pays_after(compiled: dict[str, Any], plain: dict[str, Any]) -> float:
    """Steps after which the compiled training has caught up; infinite where it never does.

    >>> pays_after({"start_seconds": 30.0, "ms": 2.0}, {"start_seconds": 10.0, "ms": 3.0})
    20000.0
    """
    longer = compiled["start_seconds"] - plain["start_seconds"]
    shorter = (plain["ms"] - compiled["ms"]) / 1e3
    return max(0.0, longer / shorter) if shorter > 0 else math.inf


def line(row: dict[str, Any]) -> str:
    """A row of the table that is printed."""
    told = [
        f"{row[k]['start_seconds']:.1f} s, {row[k]['ms']:.2f} ms" for k in ("compiled", "plain")
    ]
    after = f"{row['pays_after']:,.0f} steps" if row["pays_after"] is not None else "never"
    return f"{row['model']:<14}{row['method']:<16}{told[0]:>20}{told[1]:>20}  {after}"


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    engines: dict[bool, EngineName] = {True: "graph", False: "graph"}
    if device.type == "cpu":
        engines = {True: "compile", False: "eager"}
    report: dict[str, Any] = {"settings": {"steps": a.steps, "images": a.images}, "rows": []}
    print(f"{'model':<14}{'method':<16}{'compiled':>20}{'not':>20}  pays after")
    with tempfile.TemporaryDirectory() as folder:
        for model in a.models:
            size = SIZES.get(model, _PHOTOGRAPH)
            data = timing.random_images(Path(folder) / f"{model}.npz", a.images, size, 10)
            for method in a.methods:
                row: dict[str, Any] = {"model": model, "size": size, "method": method}
                for compiled in (False, True):
                    config = settings(
                        data, model=model, method=method, device=device.type, output=folder,
                        engine=engines[compiled],
                    )  # fmt: skip
                    row["compiled" if compiled else "plain"] = started(config, compiled, a.steps)
                after = pays_after(row["compiled"], row["plain"])
                row["pays_after"] = after if math.isfinite(after) else None
                report["rows"].append(row)
                print(line(row), flush=True)
                timing.write(a.json, "start", device, report)  # what there is so far
    written = timing.write(a.json, "start", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
