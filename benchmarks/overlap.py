"""What it gains to compute the two gradients of a convolution concurrently (overlapped_conv.py).

    python benchmarks/overlap.py                  # on a GPU: ResNet18, 32 x 32, batches 64 and 128
    python benchmarks/overlap.py --device cpu     # only executes the code: a CPU overlaps nothing

For each method and batch size, the training step is captured twice, with overlapped convolutions
and with torch's own, and both are replayed in turn, block after block. The speed-up is the time
without over the time with, as the median over blocks, with the smallest and the largest.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.device import chosen_device
from noiseproof.lab.training import cuda_graph
from noiseproof.lab.training.overlapped_conv import overlap_gradients
from noiseproof.lab.training.session import Session


@dataclass(frozen=True)
class Arguments:
    """Times a captured training step with and without overlapped convolution gradients."""

    methods: tuple[MethodName, ...] = ("normal", "discriminative")
    """Methods to time."""
    batch: tuple[int, ...] = (64, 128)
    """Images per step."""
    steps: int | None = None
    """Steps per block; 200 on a GPU, 1 on a CPU."""
    blocks: int = 10
    """Blocks of each variant, in turn, after one warm-up block."""
    size: int = 32
    """Height and width of the random images."""
    images: int = 10_000
    """Number of random images."""
    model: str = "resnet18"
    """Network."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/overlap-DEVICE.json by default."""


def start_session(config: Config, overlapped: bool) -> tuple[Session, int]:
    """A session with or without overlapped convolutions, and how many of them it has."""
    counts = []

    def overlap(model: Any) -> int:
        counts.append(overlap_gradients(model) if overlapped else 0)
        return counts[-1]

    timing.clear_caches()
    with patch.object(cuda_graph, "overlap_gradients", overlap):
        session = timing.start_session(config)
    if session.engine.name != "graph":  # which alone overlaps gradients
        overlap(session.model)
    return session, max(counts)


def measure(config: Config, steps: int, blocks: int) -> dict[str, Any]:
    """Milliseconds per step with and without overlapped gradients, and the speed-up."""
    with contextlib.ExitStack() as stack:
        runs, row = {}, {"method": config.method.method, "batch": config.optim.batch_size}
        for name, overlapped in (("with", True), ("without", False)):
            session, convolutions = start_session(config, overlapped)
            stack.enter_context(session.engine)
            runs[name] = timing.step_runner(session)
            row[name] = {
                "engine": session.engine.name,
                "note": session.engine_note,
                "overlapped_convolutions": convolutions,
            }
            device = session.fabric.device
        times = timing.alternating(runs, steps, blocks, device)
    for name, values in times.items():
        row[name] |= {"ms": statistics.median(values), "ms_of_blocks": values}
    ratios = [b / a for a, b in zip(times["with"], times["without"], strict=True)]
    return row | {"speedup": statistics.median(ratios), "speedup_of_blocks": ratios}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    ratios = row["speedup_of_blocks"]
    note = row["with"]["note"] or row["without"]["note"]
    return (
        f"{row['method']:<15}{row['batch']:>6}{row['with']['ms']:>10.3f}"
        f"{row['without']['ms']:>10.3f}{row['speedup'] - 1:>+10.1%}"
        f"  ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})" + (f"  {note}" if note else "")
    )


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    cuda = device.type == "cuda"
    steps = a.steps or (200 if cuda else 1)
    settings = {"model": a.model, "size": a.size, "steps": steps, "blocks": a.blocks}
    results: dict[str, Any] = {"settings": settings, "rows": []}
    print(f"{'method':<15}{'batch':>6}{'with ms':>10}{'without':>10}{'gain':>10}")
    with tempfile.TemporaryDirectory() as folder:
        data = timing.random_images(Path(folder) / "random.npz", a.images, a.size, 10)
        for method in a.methods:
            for batch in a.batch:
                config = timing.benchmark_config(
                    data,
                    model=a.model,
                    method=method,
                    batch_size=batch,
                    amp="bf16" if cuda else "no",
                    device=device.type,
                    engine="graph" if cuda else "eager",
                    output=folder,
                )
                row = measure(config, steps, a.blocks)
                results["rows"].append(row)
                print(line(row), flush=True)
                timing.write_results(a.json, "overlap", device, results)  # the rows so far
    print(f"written to {timing.write_results(a.json, 'overlap', device, results).name}")


if __name__ == "__main__":
    main()
