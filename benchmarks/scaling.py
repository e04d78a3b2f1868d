"""How the cost of the loss and of a training step grows with the problem, one axis at a time.

    python benchmarks/scaling.py                          # on a CPU: about a minute
    python benchmarks/scaling.py --sizes 32 64 --classes --features --batches --ranks 1 2 4

The loss is timed forward and backward, next to the softmax layer with cross-entropy. The step is
that of the discriminative method as `train` runs it: order, augmentation, noise, forward, backward,
update and meter, the meter read every 50 steps. Ranks are processes on this CPU, one thread each,
that share the same batch.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks.timing import (
    EngineName,
    benchmark_config,
    measure_step,
    random_images,
    timed,
    write_results,
)
from noiseproof import DiscriminativeLoss
from noiseproof.lab.config import Config
from noiseproof.lab.device import chosen_device


@dataclass(frozen=True)
class Arguments:
    """Times loss and training step for several classes, batches, features, image sizes, ranks.

    Each list of values may be empty; an axis that is not varied has the first of its defaults.
    """

    classes: tuple[int, ...] = (10, 100, 1000, 10_000)
    """Numbers of classes."""
    batches: tuple[int, ...] = (64, 128, 256, 512)
    """Images per step."""
    features: tuple[int, ...] = (128, 64, 256, 512)
    """Sizes of the penultimate layer."""
    sizes: tuple[int, ...] | None = None
    """Heights and widths of the images; 32 64 128 on a GPU, 8 16 32 on a CPU."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of processes that share the batch, on the CPU."""
    step: bool = True
    """Time the training step as well as the loss. The graph engine compiles for each value."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    engine: EngineName = "auto"
    """How the step is executed; auto compiles on a GPU, as a long training does."""
    steps: int | None = None
    """Steps per block; 50 on a GPU, 5 on a CPU."""
    blocks: int = 5
    """Blocks that the median is taken over, after one warm-up block."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/scaling-DEVICE.json by default."""


def loss_times(
    classes: int, batch: int, features: int, steps: int, blocks: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds of the loss, forward and backward, and of linear + cross-entropy."""
    generator = torch.Generator().manual_seed(0)
    clean, noisy = (
        torch.randn(batch, features, generator=generator).to(device).requires_grad_()
        for _ in range(2)
    )
    labels = torch.randint(classes, (batch,), generator=generator).to(device)
    head = nn.Linear(features, classes).to(device)
    criterion = DiscriminativeLoss(classes, features).to(device)

    def repeat(value: Callable[[], Tensor], inputs: Sequence[Tensor]) -> float:
        def run(count: int) -> None:
            for _ in range(count):
                torch.autograd.grad(value(), [*inputs, *head.parameters()])

        return statistics.median(timed(run, steps, blocks, device))

    return {
        "loss_ms": repeat(lambda: criterion(clean, labels, head, noisy), [clean, noisy]),
        "linear_ms": repeat(lambda: F.cross_entropy(head(clean), labels), [clean]),
    }


class Point(NamedTuple):
    """One problem size."""

    classes: int
    batch: int
    features: int
    size: int


def config_at(point: Point, folder: str, **changes: Any) -> Config:
    """The discriminative method on random images of one problem size."""
    count = max(2 * point.classes, 8 * point.batch)
    path = Path(folder) / f"{point.classes}-{count}-{point.size}.npz"
    if not path.exists():
        random_images(path, count, point.size, point.classes)
    sizes = {"batch_size": point.batch, "feature_dim": point.features}
    return benchmark_config(str(path), method="discriminative", **sizes, **changes)


def one_rank(
    rank: int, world: int, port: int, config: Config, point: Point, count: tuple[int, int], out: str
) -> None:
    """The body of one of `world` processes, started as torchrun would."""
    torch.set_num_threads(1)
    if world > 1:
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({k: str(v) for k, v in values.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    step = measure_step(config, *count)  # Fabric starts the process group, which stays up
    sizes = point.classes, point.batch // world, point.features
    row = loss_times(*sizes, *count, torch.device("cpu"))
    if rank == 0:
        Path(out).write_text(json.dumps({**row, "step_ms": step["ms"], "engine": step["engine"]}))
    if dist.is_initialized():
        dist.destroy_process_group()


def over_ranks(world: int, config: Config, point: Point, count: tuple[int, int]) -> dict[str, Any]:
    """Times of loss and step when `world` processes share the batch."""
    with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
        s.bind(("127.0.0.1", 0))
        port, out = s.getsockname()[1], Path(folder) / "row.json"
        s.close()
        spawn(one_rank, (world, port, config, point, count, str(out)), world)
        return json.loads(out.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    cuda = device.type == "cuda"
    sizes = a.sizes if a.sizes is not None else ((32, 64, 128) if cuda else (8, 16, 32))
    count = (a.steps or (50 if cuda else 5)), a.blocks
    model = a.model or ("resnet18" if cuda else "small_cnn")
    engine: EngineName = "graph" if cuda and a.engine == "auto" else a.engine
    base = Point(10, 64, 128, 32 if cuda else 8)
    axes = {"classes": a.classes, "batch": a.batches, "features": a.features, "size": sizes}
    rows: list[dict[str, Any]] = []
    report = {"model": model, "steps": count[0], "blocks": a.blocks, "rows": rows}

    def add(axis: str, point: Point, ranks: int, times: dict[str, Any]) -> None:
        row = {"axis": axis, **point._asdict(), "ranks": ranks, **times}
        rows.append(row)
        value = row[axis]
        print(f"{axis:>8} {value:>6}  loss {row['loss_ms']:9.3f} ms  linear + cross-entropy "
              f"{row['linear_ms']:9.3f} ms" + (f"  step {row['step_ms']:9.3f} ms ({row['engine']})"
              if "step_ms" in row else ""), flush=True)  # fmt: skip
        write_results(a.json, "scaling", device, report)  # the rows so far

    with tempfile.TemporaryDirectory() as folder:
        for axis, values in axes.items():
            for value in values:
                point = base._replace(**{axis: value})
                times: dict[str, Any] = loss_times(*point[:3], *count, device)
                if a.step:
                    config = config_at(
                        point, folder, model=model, engine=engine, device=device.type
                    )
                    step = measure_step(config, *count)
                    times |= {"step_ms": step["ms"], "engine": step["engine"]}
                add(axis, point, 1, times)
        for world in a.ranks:
            point = base._replace(size=8)
            config = config_at(point, folder, model="small_cnn", device="cpu")
            add("ranks", point, world, over_ranks(world, config, point, count))
    print(f"written to {write_results(a.json, 'scaling', device, report).name}")


if __name__ == "__main__":
    main()
