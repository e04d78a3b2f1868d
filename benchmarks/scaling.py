"""What the loss and a training step cost as the problem grows, one thing at a time.

    python benchmarks/scaling.py                          # on a CPU: about a minute
    python benchmarks/scaling.py --sizes 32 64 --classes --features --batches --ranks 1 2 4

The loss is timed forward and backward, beside the softmax layer with cross-entropy. The step is
noiseproof's own, discriminative method, as `train` runs it: order, augmentation, noise, forward,
backward, update and meters, the meters read every 50 steps. Ranks are processes on this CPU, one
thread each, that share the same batch.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to be run by its path, too
from benchmarks.timing import (
    EngineName,
    measured,
    random_images,
    settings,
    timed,
    write,
)
from noiseproof import DiscriminativeLoss
from noiseproof.lab.config import Config
from noiseproof.lab.device import chosen_device


@dataclass(frozen=True)
class Arguments:
    """Times the loss and a training step against classes, batch, features, image size, ranks.

    Each list of values may be empty; a value not varied is the first of its list's defaults.
    """

    classes: tuple[int, ...] = (10, 100, 1000, 10_000)
    """Classes."""
    batches: tuple[int, ...] = (64, 128, 256, 512)
    """Images a step."""
    features: tuple[int, ...] = (128, 64, 256, 512)
    """Sizes of the penultimate layer."""
    sizes: tuple[int, ...] | None = None
    """Heights (and widths) of the images; 32 64 128 on a GPU, 8 16 32 on a CPU."""
    ranks: tuple[int, ...] = (1, 2)
    """Processes that share the batch, on the CPU."""
    step: bool = True
    """Time the training step too, not the loss alone. With the graph engine each value compiles."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    engine: EngineName = "auto"
    """How the step is executed; auto compiles on a GPU, as in a training of usual length."""
    steps: int | None = None
    """Steps a block, of which one warms up; 50 on a GPU, 5 on a CPU."""
    blocks: int = 5
    """Blocks that the median is taken over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    json: Path | None = None
    """File of the results; results/benchmarks/scaling-DEVICE.json."""


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
    """One size of the problem."""

    classes: int
    batch: int
    features: int
    size: int


def settings_at(point: Point, folder: str, **changes: Any) -> Config:
    """The discriminative method on random images of that size."""
    count = max(2 * point.classes, 8 * point.batch)
    path = Path(folder) / f"{point.classes}-{count}-{point.size}.npz"
    if not path.exists():
        random_images(path, count, point.size, point.classes)
    sizes = {"batch_size": point.batch, "feature_dim": point.features}
    return settings(str(path), method="discriminative", **sizes, **changes)


def one_rank(
    rank: int, world: int, port: int, config: Config, point: Point, count: tuple[int, int], out: str
) -> None:
    """The body of one of `world` processes, started as torchrun would."""
    torch.set_num_threads(1)
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({k: str(v) for k, v in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    step = measured(config, *count)  # under Fabric, which joins the ranks; they stay joined
    sizes = point.classes, point.batch // world, point.features
    row = loss_times(*sizes, *count, torch.device("cpu"))
    if rank == 0:
        Path(out).write_text(json.dumps({**row, "step_ms": step["ms"], "engine": step["engine"]}))
    if dist.is_initialized():
        dist.destroy_process_group()


def over_ranks(world: int, config: Config, point: Point, count: tuple[int, int]) -> dict[str, Any]:
    """Times of loss and step where `world` processes share the batch."""
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

    def add(axis: str, point: Point, ranks: int, found: dict[str, Any]) -> None:
        row = {"axis": axis, **point._asdict(), "ranks": ranks, **found}
        rows.append(row)
        value = row[axis]
        print(f"{axis:>8} {value:>6}  loss {row['loss_ms']:9.3f} ms  linear + cross-entropy "
              f"{row['linear_ms']:9.3f} ms" + (f"  step {row['step_ms']:9.3f} ms ({row['engine']})"
              if "step_ms" in row else ""), flush=True)  # fmt: skip
        write(a.json, "scaling", device, report)  # what there is so far

    with tempfile.TemporaryDirectory() as folder:
        for axis, values in axes.items():
            for value in values:
                point = base._replace(**{axis: value})
                found: dict[str, Any] = loss_times(*point[:3], *count, device)
                if a.step:
                    config = settings_at(
                        point, folder, model=model, engine=engine, device=device.type
                    )
                    step = measured(config, *count)
                    found |= {"step_ms": step["ms"], "engine": step["engine"]}
                add(axis, point, 1, found)
        for world in a.ranks:
            point = base._replace(size=8)
            config = settings_at(point, folder, model="small_cnn", device="cpu")
            add("ranks", point, world, over_ranks(world, config, point, count))
    print(f"written to {write(a.json, 'scaling', device, report).name}")


if __name__ == "__main__":
    main()
