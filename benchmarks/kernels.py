"""Where a training step's time on a GPU goes, kernel by kernel.

    python benchmarks/kernels.py --methods normal discriminative

The captured step of `train` is replayed under torch's profiler. Kernels are sorted into kinds by
their names: convolutions and other matrix products, reductions (batch-norm statistics and their
gradients, the loss), elementwise work (normalisation, ReLU, casts, noise), the optimiser, the rest.
`busy` is the sum of the kernels' own times. The time of the arithmetic alone is at the rate that a
large matrix product reaches in the same run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from benchmarks.train import matrix_rate
from noiseproof.lab.config import MethodName
from noiseproof.lab.device import chosen_device
from noiseproof.lab.training.session import Session

# A kernel has the first kind, in this order, that has one of these in the kernel's name.
KINDS = {
    "optimiser": ("multi_tensor", "sgd", "adam"),
    "reductions": ("triton_red", "triton_per", "reduce_kernel", "collect_statistics"),
    "elementwise": ("triton_poi", "elementwise"),
    "products": ("xmma", "cutlass", "cudnn", "conv", "gemm", "gemv"),
}


@dataclass(frozen=True)
class Arguments:
    """Shows which kernels a training step consists of, and what they cost."""

    methods: tuple[MethodName, ...] = ("normal", "discriminative")
    """Methods to profile."""
    batch: int = 64
    """Images per step."""
    size: int = 32
    """Height and width of the random images."""
    model: str = "resnet18"
    """Network."""
    steps: int = 20
    """Steps to profile."""
    top: int = 12
    """Number of kernels to list."""
    json: Path | None = None
    """Result file; results/benchmarks/kernels-DEVICE.json by default."""


def kind(name: str) -> str:
    """The kind of a kernel, from its name.

    >>> kind("sm90_xmma_wgrad_implicit_gemm_bf16"), kind("triton_red_fused_var_mean_7")
    ('products', 'reductions')
    >>> kind("Memset (Device)")
    'other'
    """
    low = name.lower()
    return next((k for k, words in KINDS.items() if any(w in low for w in words)), "other")


def summed(kernels: Iterable[tuple[str, float]], steps: int) -> dict[str, Any]:
    """Microseconds and launches per step, by kind and by kernel, the most expensive first."""
    kinds: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for name, us in kernels:
        for table, key in ((kinds, kind(name)), (names, name)):
            row = table.setdefault(key, [0.0, 0.0])
            row[0] += us / steps
            row[1] += 1 / steps
    order = {k: sorted(t.items(), key=lambda item: -item[1][0])
             for k, t in (("kinds", kinds), ("kernels", names))}  # fmt: skip
    return {
        "busy_us": sum(us for us, _ in kinds.values()),
        "launches": sum(count for _, count in kinds.values()),
        **{
            table: [{"name": name, "us": us, "launches": n} for name, (us, n) in rows]
            for table, rows in order.items()
        },
    }


def profiled(session: Session, steps: int) -> dict[str, Any]:
    """The kernels of a number of steps."""
    steps = min(steps, session.loader.steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        session.engine.run(0, 0, steps)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    return summed([(e.name, e.device_time) for e in events], steps)


def show(row: dict[str, Any], tflops: float, top: int) -> None:
    floor = row["gflop"] / tflops
    print(f"\n{row['method']}, batch {row['batch']}, {row['engine']}: {row['ms']:.3f} ms per step; "
          f"arithmetic alone {floor:.3f} ms; kernels busy {row['busy_us'] / 1e3:.3f} ms, "
          f"{row['launches']:.0f} launches")  # fmt: skip
    for part in row["kinds"]:
        share = part["us"] / row["busy_us"]
        print(f"  {part['name']:<12}{part['us']:>9.1f} us{part['launches']:>7.0f} x{share:>7.0%}")
    for part in row["kernels"][:top]:
        print(f"    {part['us']:>8.1f} us{part['launches']:>6.0f} x  {part['name'][:90]}")


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device("cuda")
    rate = matrix_rate(device, torch.bfloat16)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = timing.random_images(Path(folder) / "random.npz", 50_000, a.size, 10)
        for method in a.methods:
            changes = {"method": method, "model": a.model, "batch_size": a.batch}
            config = timing.benchmark_config(data, **changes, output=folder)
            row = timing.measure_step(
                config, 10 * a.steps, 3, lambda session: profiled(session, a.steps)
            )
            show(row, rate["tflops"], a.top)
            rows.append(row | {"kernels": row["kernels"][:40]})
    written = timing.write_results(a.json, "kernels", device, {"matrix": rate, "rows": rows})
    print(f"\nwritten to {written.name}")


if __name__ == "__main__":
    main()
