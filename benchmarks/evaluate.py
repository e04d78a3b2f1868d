"""What it takes to test a trained network: the paper's noise suite, and the curvature estimates.

    python benchmarks/evaluate.py
    python benchmarks/evaluate.py --images 1000 --draws 2 --blocks 1

On a GPU the network is ResNet18 on 10,000 images of 32 x 32, on a CPU a small one on 300 of 8 x 8,
which takes seconds. The estimate that differentiates twice is slow, and gets a tenth of the images.

The network is trained for a few steps on random images. Then `evaluate` itself is timed on the
suite of CIFAR-10 (clean and five levels of Gaussian noise), with the files that it writes but
without loading the images; and the two estimates of the curvature, in float32 and normalised
coordinates, as `analyse` calls them. A time is the median of blocks, each the whole of the work,
after a little of it to warm up; each block has noise of its own, so that nothing is known before.
Memory is the peak of what torch has allocated on the GPU, network and images included.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to be run by its path, too
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
    """Times the evaluation of a run under noise, and the estimates of its curvature."""

    images: int | None = None
    """Test images; 10,000 on a GPU, 300 on a CPU."""
    hessian_images: int | None = None
    """Of these, images for the estimate that differentiates twice; a tenth."""
    draws: int = 10
    """Draws of each noise."""
    probes: int = 20
    """Random directions of the curvature estimates."""
    size: int | None = None
    """Height and width of the images; 32 on a GPU, 8 on a CPU."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    blocks: int = 2
    """Blocks that the median is taken over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    json: Path | None = None
    """File of the results; results/benchmarks/evaluate-DEVICE.json."""


def random_tests(folder: Path, count: int, size: int) -> str:
    """A .npz file of `count` random images to test on, and a tenth as many to train on."""
    made = timing.random_images(folder / "made.npz", count, size, classes=10)
    parts = {"train": "test", "test": "train"}
    with np.load(made) as arrays:
        swapped = {
            f"{part}_{what}": arrays[f"{other}_{what}"]
            for part, other in parts.items()
            for what in ("images", "labels")
        }
    np.savez(folder / "random.npz", **swapped)
    return str(folder / "random.npz")


def measured(
    work: Callable[[int], None], images: int, blocks: int, device: torch.device
) -> dict[str, Any]:
    """Seconds of `work(k)`, k = 1, 2, ..., over so many images, and the peak of memory on a GPU;
    `work(0)` is a little of it."""
    timing.forget()
    work(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for block in range(1, blocks + 1):
        began = time.perf_counter()
        work(block)
        times.append(time.perf_counter() - began)  # its last act reads from the device
    seconds = statistics.median(times)
    found = {
        "images": images,
        "seconds": seconds,
        "seconds_of_blocks": times,
        "seconds_per_1000_images": seconds / images * 1e3,
    }
    if device.type == "cuda":
        found["peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
    return found


def rows(run: RunFolder, a: Arguments, device: torch.device) -> dict[str, dict[str, Any]]:
    """What is timed, by name."""
    dataset = load_dataset(run.config.data)
    subject = Subject(run, dataset, device=device)
    tests, levels = dataset.test.count, suite("cifar10")
    passes = sum(1 if name == "clean" else a.draws for name in levels)
    found: dict[str, dict[str, Any]] = {}
    precisions: set[str] = set()

    def add(name: str, work: Callable[[int], None], images: int, **facts: Any) -> None:
        found[name] = {**measured(work, images, a.blocks, device), **facts}
        print(line(name, found[name]), flush=True)

    def test(seed: int) -> None:
        common: dict[str, Any] = {"device": device.type, "progress": False, "dataset": dataset}
        result = evaluate(run, levels, draws=a.draws if seed else 1, noise_seed=seed, **common)
        if seed and len(result) != passes:
            raise RuntimeError(f"{len(result)} rows were made, expected {passes}")
        precisions.update(row["precision"] for row in result)

    add("evaluate", test, tests, perturbations=levels, draws=a.draws, passes=passes)
    found["evaluate"]["precision"] = ", ".join(precisions)

    def estimate(function: Callable[..., torch.Tensor], model: Any, count: int) -> None:
        pixels = dataset.test.images
        if pixels is None:
            raise RuntimeError("the random images are not in memory")
        x = pixels[:count].to(device).float() / 255
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
    return found


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
        config = timing.settings(
            data, model=model, device=device.type, output=folder, engine="eager", epochs=1
        )
        run = train(config, progress=False)
        print(f"{model}, images of {size} x {size}")
        print(f"{'':<20}{'images':>8}{'seconds':>10}{'s per 1,000':>14}{'peak MB':>10}")
        settings = {"model": model, "size": size, "blocks": a.blocks}
        report = {"settings": settings, "rows": rows(run, a, device)}
        written = timing.write(a.json, "evaluate", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
