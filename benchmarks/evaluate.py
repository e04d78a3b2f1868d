"""Time to evaluate a trained network under the paper's noise suite, and to estimate its curvature.

    python benchmarks/evaluate.py
    python benchmarks/evaluate.py --images 1000 --draws 2 --blocks 1

On a GPU the network is ResNet18 on 10,000 images of 32 x 32, on a CPU a small one on 300 of 8 x 8,
which takes seconds. The estimator that differentiates twice is slow and gets a tenth of the images.

The network is trained for a few steps on random images. Then `evaluate` itself is timed on the
suite of CIFAR-10 (clean and five levels of Gaussian noise), including the files that it writes but
not the loading of images; and the two curvature estimators, in float32 and normalised coordinates,
as `analyse` calls them. A time is the median over blocks, each of which does all the work, after a
short warm-up; each block has its own noise, so that nothing is cached. Memory is the peak that
torch has allocated on the GPU, including network and images.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from noiseproof import curvature, draws
from noiseproof.lab.analysis.subject import Subject
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.recipes import suite
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train


@dataclass(frozen=True)
class Arguments:
    """Times the evaluation of a run under noise, and the estimators of its curvature."""

    images: int | None = None
    """Number of test images; 10,000 on a GPU, 300 on a CPU."""
    hessian_images: int | None = None
    """How many of them the estimator that differentiates twice gets; a tenth by default."""
    draws: int = 10
    """Draws per noise level."""
    probes: int = 20
    """Random directions of the curvature estimators."""
    size: int | None = None
    """Height and width of the images; 32 on a GPU, 8 on a CPU."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    blocks: int = 2
    """Blocks that the median is taken over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/evaluate-DEVICE.json by default."""


def random_tests(folder: Path, count: int, size: int) -> str:
    """A .npz file with `count` random test images, and a tenth as many for training."""
    path = timing.random_images(folder / "swapped.npz", count, size, classes=10)
    with np.load(path) as arrays:
        swapped = {
            f"{split}_{kind}": arrays[f"{other}_{kind}"]
            for split, other in (("train", "test"), ("test", "train"))
            for kind in ("images", "labels")
        }
    np.savez(folder / "random.npz", **swapped)
    return str(folder / "random.npz")


def measure(
    work: Callable[[int], None], images: int, blocks: int, device: torch.device
) -> dict[str, Any]:
    """Seconds of `work(k)`, k = 1 to `blocks`, and the peak memory on a GPU; `work(0)` is the
    warm-up. `images` is what one call processes."""
    timing.clear_caches()
    work(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for block in range(1, blocks + 1):
        began = time.perf_counter()
        work(block)
        times.append(time.perf_counter() - began)  # it ends by reading from the device
    seconds = statistics.median(times)
    row = {
        "images": images,
        "seconds": seconds,
        "seconds_of_blocks": times,
        "seconds_per_1000_images": seconds / images * 1e3,
    }
    if device.type == "cuda":
        row["peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
    return row


def rows(run: RunFolder, a: Arguments, device: torch.device) -> dict[str, dict[str, Any]]:
    """One row per measurement, by name."""
    dataset = load_dataset(run.config.data)
    subject = Subject(run, dataset, device=device)
    tests, levels = dataset.test.count, suite("cifar10")
    passes = sum(1 if name == "clean" else a.draws for name in levels)
    table: dict[str, dict[str, Any]] = {}
    precisions: set[str] = set()

    def add(name: str, work: Callable[[int], None], images: int, **facts: Any) -> None:
        table[name] = {**measure(work, images, a.blocks, device), **facts}
        print(line(name, table[name]), flush=True)

    def test(seed: int) -> None:
        common: dict[str, Any] = {"device": device.type, "progress": False, "dataset": dataset}
        result = evaluate(run, levels, draws=a.draws if seed else 1, noise_seed=seed, **common)
        if seed and len(result) != passes:
            raise RuntimeError(f"expected {passes} rows, got {len(result)}")
        precisions.update(row["precision"] for row in result)

    add("evaluate", test, tests, perturbations=levels, draws=a.draws, passes=passes)
    table["evaluate"]["precision"] = ", ".join(precisions)

    def estimate(function: Callable[..., torch.Tensor], model: Any, count: int) -> None:
        x = dataset.test.pixels[:count].to(device).float() / 255
        y = dataset.test.labels[:count].to(device)

        def work(seed: int) -> None:
            n = count if seed else min(count, 256)
            source = draws.PerSample(draws.keys(seed, torch.arange(n, device=device)))
            common: dict[str, Any] = {"scale": subject.scale, "generator": source}
            if not function(model, x[:n], y[:n], probes=a.probes, **common).isfinite().all():
                raise RuntimeError(f"{function.__name__} gave values that are not finite")

        add(function.__name__, work, count, probes=a.probes, precision="float32")

    few = min(tests, a.hessian_images or max(1, tests // 10))
    estimate(curvature.finite_difference, subject.model, tests)
    estimate(curvature.hessian_probe, subject.smooth_model, few)
    return table


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    memory = f"{row['peak_memory_mb']:>10,.0f}" if "peak_memory_mb" in row else f"{'–':>10}"
    return (
        f"{name:<20}{row['images']:>8,}{row['seconds']:>10.3f}"
        f"{row['seconds_per_1000_images']:>14.3f}{memory}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    cuda = device.type == "cuda"
    model, size = a.model or ("resnet18" if cuda else "small_cnn"), a.size or (32 if cuda else 8)
    with tempfile.TemporaryDirectory() as folder:
        data = random_tests(Path(folder), a.images or (10_000 if cuda else 300), size)
        config = timing.benchmark_config(
            data, model=model, device=device.type, output=folder, engine="eager", epochs=1
        )
        run = train(config, progress=False)
        print(f"{model}, images of {size} x {size}")
        print(f"{'':<20}{'images':>8}{'seconds':>10}{'s per 1,000':>14}{'peak MB':>10}")
        settings = {"model": model, "size": size, "blocks": a.blocks}
        report = {"settings": settings, "rows": rows(run, a, device)}
        written = timing.write_results(a.json, "evaluate", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
