"""How long a training takes to start with and without compilation, and when compiling pays off.

    python benchmarks/start.py                          # on a GPU: ResNet18 and MobileNetV2
    python benchmarks/start.py --device cpu --models small_cnn

Every start happens in a new process with empty caches, like the first training on a machine. On a
GPU both variants are captured as a graph; on a CPU the uncompiled variant is an eager step.
Compiling pays off after the number of steps in which shorter steps make up for the longer start;
`auto` compiles from a fixed number of steps on (`lab/training/choose_engine.py`).
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from benchmarks.timing import benchmark_config
from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.device import chosen_device

BLOCKS = 3
SIZES = {"resnet18": 32, "small_cnn": 8}  # height and width of images; _PHOTOGRAPH for other models
_PHOTOGRAPH = 250


@dataclass(frozen=True)
class Arguments:
    """Times the start and the steps of trainings with and without compiled kernels."""

    models: tuple[str, ...] = ("resnet18", "mobilenet_v2")
    """Networks, each with random images of the size that it is designed for."""
    methods: tuple[MethodName, ...] = ("normal", "discriminative")
    """Methods to start."""
    steps: int = 100
    """Steps per block; the median of three blocks is taken, after one warm-up block."""
    images: int = 2_000
    """Number of random images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/start-DEVICE.json by default."""


def worker(pipe: Connection, config: Config, compiled: bool, steps: int) -> None:
    """Starts a training, and sends how long the first step and the following ones took."""
    if not compiled:
        timing.turn_off_compilation()
    began = time.monotonic()
    session = timing.start_session(config)
    fabric, run = session.fabric, timing.step_runner(session)
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


def measure_start(config: Config, compiled: bool, steps: int) -> dict[str, Any]:
    """Times of a start and of the steps after it, in a new process with empty caches."""
    name = f"{config.model.model}, {config.method.method}, {'un' * (not compiled)}compiled"
    return timing.in_new_process(name, worker, config, compiled, steps)


def pays_after(compiled: dict[str, Any], plain: dict[str, Any]) -> float:
    """Steps after which the compiled training has caught up; infinite if it never does.

    >>> pays_after({"start_seconds": 30.0, "ms": 2.0}, {"start_seconds": 10.0, "ms": 3.0})
    20000.0
    """
    longer = compiled["start_seconds"] - plain["start_seconds"]
    shorter = (plain["ms"] - compiled["ms"]) / 1e3
    return max(0.0, longer / shorter) if shorter > 0 else math.inf


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    times = [
        f"{row[k]['start_seconds']:.1f} s, {row[k]['ms']:.2f} ms" for k in ("compiled", "plain")
    ]
    after = f"{row['pays_after']:,.0f} steps" if row["pays_after"] is not None else "never"
    return f"{row['model']:<14}{row['method']:<16}{times[0]:>20}{times[1]:>20}  {after}"


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    report: dict[str, Any] = {"settings": {"steps": a.steps, "images": a.images}, "rows": []}
    print(f"{'model':<14}{'method':<16}{'compiled':>20}{'uncompiled':>20}  pays off after")
    with tempfile.TemporaryDirectory() as folder:
        for model in a.models:
            size = SIZES.get(model, _PHOTOGRAPH)
            data = timing.random_images(Path(folder) / f"{model}.npz", a.images, size, 10)
            for method in a.methods:
                row: dict[str, Any] = {"model": model, "size": size, "method": method}
                for compiled in (False, True):
                    config = benchmark_config(
                        data, model=model, method=method, device=device.type, output=folder,
                        engine=timing.engine_for(device, compiled),
                    )  # fmt: skip
                    row["compiled" if compiled else "plain"] = measure_start(
                        config, compiled, a.steps
                    )
                after = pays_after(row["compiled"], row["plain"])
                row["pays_after"] = after if math.isfinite(after) else None
                report["rows"].append(row)
                print(line(row), flush=True)
                timing.write_results(a.json, "start", device, report)  # the rows so far
    written = timing.write_results(a.json, "start", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
