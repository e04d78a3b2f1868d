"""Milliseconds per training step of each method, next to a literal step of the same method.

    python benchmarks/train.py                                       # digits on a CPU: a minute
    python benchmarks/train.py --batch 64 512 --engines eager graph  # on a GPU: ResNet18, 32 x 32
    python benchmarks/train.py --augment crop-flip crop-flip+trivial/crop-flip+trivial+hybrid \\
        --methods both --batch 512 --epochs 0                        # the cost of augmentations

Noiseproof's step is timed as `train` runs it (`measure_step` in timing.py). The literal step
computes the same loss as a plain reading of the paper would (literal.py), in the same precision.
What an epoch costs besides its steps is measured in a whole `train`.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from benchmarks.literal import AUGMENTATIONS, literal
from benchmarks.timing import EngineName, benchmark_config, timed
from noiseproof.lab.config import PAPER_METHODS, MethodName
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.device import chosen_device, precision
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training import checkpoint
from noiseproof.lab.training.train import train


@dataclass(frozen=True)
class Arguments:
    """Times the training step of each method, and a literal implementation of it."""

    methods: tuple[MethodName, ...] = PAPER_METHODS
    """Methods to time."""
    engines: tuple[EngineName, ...] = ("auto",)
    """How noiseproof's step is executed; an engine that does not work here is replaced, with a
    note."""
    batch: tuple[int, ...] = (64,)
    """Images per step."""
    augment: tuple[str, ...] = ()
    """Augmentations to time, or CLEAN/NOISY for one of its own for the noisy view; the others are
    compared with the first. By default the recipe's."""
    steps: int | None = None
    """Steps per block; 200 on a GPU, 20 on a CPU."""
    blocks: int = 5
    """Blocks that the median is taken over, after one warm-up block."""
    data: str | None = None
    """A .npz file or a dataset's name; random images on a GPU, the digits on a CPU."""
    size: int | None = None
    """Height and width of random images, 32 on a GPU; on a CPU, replaces the digits by them."""
    images: int | None = None
    """Number of random images; 50,000 on a GPU, 2,000 on a CPU."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    baseline: bool = True
    """Also time the literal step, where the augmentation is that of the paper."""
    workers: int | None = None
    """Processes that transform images for the literal step; up to 8 on a GPU, 0 on a CPU."""
    epochs: int = 3
    """Whole epochs to time, for what they cost besides their steps; 0 skips this."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/train-DEVICE.json by default."""


def epoch_costs(
    data: str, ms: float, engine: EngineName, epochs: int, **changes: Any
) -> dict[str, Any]:
    """Seconds of whole epochs of `train` with validation, compared with their steps at `ms` each.

    An epoch lasts from one row of metrics to the next, with a checkpoint in between; the first,
    which may compile, is excluded. By default a checkpoint is written every five minutes.
    """
    timing.clear_caches()
    ends: list[float] = []
    saves: list[float] = []
    append, save = RunFolder.append_metrics, checkpoint.save

    def appending(run: RunFolder, row: dict[str, Any]) -> None:
        append(run, row)
        ends.append(time.perf_counter())

    def saving(*arguments: Any) -> None:
        began = time.perf_counter()
        save(*arguments)
        saves.append(time.perf_counter() - began)

    short = {"epochs": epochs + 1, "checkpoint_minutes": 0.0, "val_share": 0.1, "engine": engine}
    config = benchmark_config(data, **changes, **short, name=f"epochs-{changes['batch_size']}")
    with (
        patch.object(RunFolder, "append_metrics", appending),
        patch.object(checkpoint, "save", saving),
    ):
        run = train(config, progress=True)
    batch, images = config.optim.batch_size, run.info["samples"]["train"]
    steps = images // min(batch, images)
    inside = statistics.median(row["seconds"] for row in run.metrics()[1:])
    whole = statistics.median(b - a for a, b in itertools.pairwise(ends))
    saved, training = statistics.median(saves), steps * ms / 1e3
    return {
        "method": config.method.method,
        "batch": batch,
        "engine": run.info["engine"],
        "epochs": epochs,
        "steps": steps,
        "epoch_seconds": whole,
        "steps_seconds": training,  # steps x ms
        "training_seconds": inside,  # the same by this training's own clock
        "checkpoint_seconds": saved,
        "other_seconds": whole - training - saved,
        "fixed_share": 1 - training / whole,
        "fixed_share_by_default": 1 - training / (whole - saved) + saved / 300,
    }


def matrix_rate(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The rate of a product of two large square matrices here, in TFLOP per second."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    ms = statistics.median(timed(run, 20 if device.type == "cuda" else 2, 5, device))
    return {"size": n, "dtype": str(dtype).removeprefix("torch."), "tflops": 2 * n**3 / ms / 1e9}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    text = (
        f"{row['method']:<15}{row['batch']:>6} {row['engine']:<8}{row['ms']:>9.3f}"
        f"{row['images_per_second']:>10,.0f}{row['views_per_second']:>10,.0f}"
        f"{row['matrix_share']:>9.1%}"
    )
    if "literal" in row:
        baseline = row["literal"]
        text += f"{baseline['ms']:>9.2f}{baseline['ms_without_data']:>9.2f}{row['ratio']:>8.1f}"
    if "augment_ratio" in row:
        text += f"  {row['augment']}: {row['augment_ratio']:.3f} times the first"
    return text + (f"  {row['note']}" if row["note"] else "")


def epoch_line(e: dict[str, Any]) -> str:
    """The result of `epoch_costs` as a sentence."""
    return (
        f"one epoch of {e['method']}, batch {e['batch']}: {e['epoch_seconds']:.3f} s; "
        f"steps x ms {e['steps_seconds']:.3f} s, by its own clock {e['training_seconds']:.3f} s, "
        f"checkpoint {e['checkpoint_seconds']:.3f} s; overhead beyond steps x ms: "
        f"{e['fixed_share_by_default']:.1%}, with a checkpoint every epoch {e['fixed_share']:.1%}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    cuda = device.type == "cuda"
    steps = a.steps or (200 if cuda else 20)
    workers = a.workers if a.workers is not None else (min(8, os.cpu_count() or 1) if cuda else 0)
    with tempfile.TemporaryDirectory() as folder:
        data = a.data or "digits"
        if a.data is None and (cuda or a.size):
            count = a.images or (50_000 if cuda else 2_000)
            data = timing.random_images(Path(folder) / "random.npz", count, a.size or 32, 10)
        model = a.model or ("resnet18" if cuda else "small_cnn")
        common = {"model": model, "device": device.type, "output": folder}
        amp = precision(benchmark_config(data, **common), device.type)
        rate = matrix_rate(device, torch.bfloat16 if amp == "bf16" else torch.float32)
        report: dict[str, Any] = {
            "settings": {
                "data": Path(data).stem,
                "size": list(load_dataset(benchmark_config(data).data).size),
                "model": model,
                "precision": amp,
                "steps": steps,
                "blocks": a.blocks,
                "literal_workers": workers,
            },
            "matrix": rate,
            "rows": [],
            "epochs": [],
        }
        first_ms: dict[tuple[int, str, str], float] = {}
        print(f"product of two {rate['size']} x {rate['size']} matrices in {rate['dtype']}: "
              f"{rate['tflops']:.3g} TFLOP/s\n"
              f"{'method':<15}{'batch':>6} {'engine':<8}{'ms/step':>9}{'images/s':>10}"
              f"{'views/s':>10}{'of gemm':>9}{'literal':>9}{'no data':>9}{'ratio':>8}")  # fmt: skip
        augments = a.augment or (benchmark_config(data).data.augment,)
        for batch in a.batch:
            best: dict[str, tuple[float, EngineName]] = {}  # with the first augmentation
            for method, augment in itertools.product(a.methods, augments):
                clean, _, noisy = augment.partition("/")
                changes = {**common, "method": method, "batch_size": batch, "augment": clean}
                changes |= {"noisy_augment": noisy or None}
                count, baseline = (max(1, steps // 10), a.blocks), None
                if a.baseline and augment in AUGMENTATIONS:
                    baseline = literal(benchmark_config(data, **changes), device, workers, *count)
                for engine in a.engines:
                    config = benchmark_config(data, **changes, engine=engine)
                    row = timing.measure_step(config, steps, a.blocks)
                    row["matrix_share"] = row["gflop"] / row["ms"] / rate["tflops"]
                    if baseline:
                        row |= {"literal": baseline, "ratio": baseline["ms"] / row["ms"]}
                    if augment == augments[0]:
                        fastest = best.get(method, (math.inf, engine))
                        best[method] = min(fastest, (row["ms"], row["engine"]))
                        first_ms[batch, method, engine] = row["ms"]
                    else:
                        row["augment_ratio"] = row["ms"] / first_ms[batch, method, engine]
                    report["rows"].append(row)
                    print(line(row), flush=True)
                    timing.write_results(a.json, "train", device, report)  # the rows so far
            if a.epochs and best:
                method = "discriminative" if "discriminative" in best else a.methods[-1]
                changes = {**common, "method": method, "batch_size": batch, "augment": augments[0]}
                costs = epoch_costs(data, *best[method], a.epochs, **changes)
                report["epochs"].append(costs)
                print(epoch_line(costs), flush=True)
        written = timing.write_results(a.json, "train", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
