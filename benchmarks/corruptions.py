"""Time to make the images of the 15 corruptions at 5 severities, and to evaluate a network on them.

    python benchmarks/corruptions.py
    python benchmarks/corruptions.py --images 1000 --size 224

On a GPU there are 10,000 images of 32 x 32 and the network is ResNet18; on a CPU 100 images of
32 x 32 and a small network. The images are random bytes: no corruption's time depends on them.

First each corruption is timed alone: its five severities on all images, in the batches of an
evaluation, already on the device. Then `evaluate` itself is timed on clean images and all 75 cells
with one draw each, including the making of the images and the files that it writes, but not the
loading of images. A time is the median over blocks, after a warm-up.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from benchmarks.evaluate import line, measure, random_tests
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.perturb import CORRUPTIONS, parse
from noiseproof.perturb.text import CORRUPTION_FAMILIES
from noiseproof.robustness import batch_size_for, perturb_samples


@dataclass(frozen=True)
class Arguments:
    """Times the making of the 75 corruption cells and an evaluation on them."""

    images: int | None = None
    """Number of test images; 10,000 on a GPU, 100 on a CPU."""
    size: int = 32
    """Height and width of the images."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    blocks: int = 2
    """Blocks that the median is taken over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/corruptions-DEVICE.json by default."""


def rows(run: RunFolder, a: Arguments, device: torch.device) -> dict[str, dict[str, Any]]:
    """One row for each corruption, for all of them, and for the evaluation."""
    dataset = load_dataset(run.config.data)
    x = dataset.test.pixels.to(device).float() / 255
    index = torch.arange(len(x), device=device)
    size = batch_size_for(x.shape[1:], device)
    table: dict[str, dict[str, Any]] = {}
    for name in CORRUPTION_FAMILIES:
        five = [parse(text) for text in CORRUPTIONS if text.startswith(f"{name}:")]

        def make(seed: int, five: Any = five) -> None:
            out = x
            for p in five:
                for start in range(0, len(x), size):
                    part = slice(start, start + size)
                    out = perturb_samples(x[part], index[part], p, 0, seed)
            out[0, 0, 0, 0].item()  # waits for the device

        table[name] = measure(make, 5 * len(x), a.blocks, device)
        print(line(name, table[name]), flush=True)
    seconds, views = (sum(row[key] for row in table.values()) for key in ("seconds", "images"))
    table["all 15"] = {
        "images": views,
        "seconds": seconds,
        "seconds_per_1000_images": seconds / views * 1e3,
    }
    print(line("all 15", table["all 15"]), flush=True)

    def test(seed: int) -> None:
        texts = ["clean", *(CORRUPTIONS if seed else CORRUPTIONS[::5])]
        common: dict[str, Any] = {"device": device.type, "progress": False, "dataset": dataset}
        result = evaluate(run, texts, draws=1, noise_seed=seed, **common)
        if len(result) != len(texts):
            raise RuntimeError(f"expected {len(texts)} rows, got {len(result)}")

    table["evaluate"] = measure(test, 76 * len(x), a.blocks, device)
    print(line("evaluate", table["evaluate"]), flush=True)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    cuda = device.type == "cuda"
    model = a.model or ("resnet18" if cuda else "small_cnn")
    with tempfile.TemporaryDirectory() as folder:
        data = random_tests(Path(folder), a.images or (10_000 if cuda else 100), a.size)
        config = timing.benchmark_config(
            data, model=model, device=device.type, output=folder, engine="eager", epochs=1
        )
        run = train(config, progress=False)
        print(f"{model}, images of {a.size} x {a.size}")
        print(f"{'':<20}{'views':>8}{'seconds':>10}{'s per 1,000':>14}{'peak MB':>10}")
        settings = {"model": model, "size": a.size, "blocks": a.blocks}
        report = {"settings": settings, "rows": rows(run, a, device)}
        written = timing.write_results(a.json, "corruptions", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
