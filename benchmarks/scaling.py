"""What the loss and a training step cost as the problem grows, one thing at a time.

    python benchmarks/scaling.py                          # on a CPU: about a minute
    python benchmarks/scaling.py --sizes 32 64 --classes --features --batches --ranks 1 2 4

The loss is timed forward and backward, beside the softmax layer with cross-entropy. The step is
noiseproof's own, discriminative method, as `train` runs it: order, augmentation, noise, forward,
backward, update and meters, the meters read every 50 steps. Ranks are processes on this CPU, one
thread each, that share the same batch. `train.py` times its steps with `measured` from here.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from noiseproof import DiscriminativeLoss
from noiseproof.lab import (
    build,
    overlap,  # noqa: F401  (makes its operator known)
)
from noiseproof.lab.config import Config, from_dict
from noiseproof.lab.runs import environment
from noiseproof.lab.session import Session
from noiseproof.recipes import recipe

EngineName = Literal["auto", "eager", "compile", "graph"]
RESULTS = Path(__file__).resolve().parents[1] / "results" / "benchmarks"
_STRIDE = 50  # steps between two looks at the meters, as in training


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
    """How the step is executed."""
    steps: int | None = None
    """Steps a block, of which one warms up; 50 on a GPU, 5 on a CPU."""
    blocks: int = 5
    """Blocks that the median is taken over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    json: Path | None = None
    """File of the results; results/benchmarks/scaling-DEVICE.json."""


# Timing


def timed(run: Callable[[int], None], steps: int, blocks: int, device: torch.device) -> list[float]:
    """Milliseconds a step in each block of `run(steps)`, after one block that warms up."""
    if steps < 1 or blocks < 1:
        raise ValueError(f"steps and blocks must be at least 1, got {steps} and {blocks}")
    found = []
    for _ in range(blocks + 1):
        began = time.perf_counter()
        run(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - began) * 1e3 / steps)
    return found[1:]


def stepping(session: Session) -> Callable[[int], None]:
    """A function that trains so many steps further, epoch after epoch, without validation."""

    def run(count: int) -> None:
        while count:
            stop = min(session.step + min(count, _STRIDE), session.loader.steps)
            session.engine.run(session.epoch, session.step, stop)
            session.engine.meter.sums.tolist()
            count, session.step = count - (stop - session.step), stop
            if stop == session.loader.steps:
                session.engine.meter.reset()
                session.epoch, session.step = session.epoch + 1, 0

    return run


def measured(config: Config, steps: int, blocks: int) -> dict[str, Any]:
    """Times noiseproof's step under `config`, and counts the arithmetic of its layers."""
    forget()
    fabric = build.fabric(config)
    fabric.launch()
    session = Session(config, fabric)
    with session.engine:
        times = timed(stepping(session), steps, blocks, fabric.device)
    batch = session.loader.prepare(next(iter(session.loader.tickets(0))))
    with FlopCounterMode(display=False) as counter, fabric.autocast():
        session.objective(session.model, batch).loss.backward()
    ms, images = statistics.median(times), session.loader.batch_size * fabric.world_size
    return {
        "method": config.method.method,
        "batch": images,
        "engine": session.engine.name,
        "note": session.why,
        "ms": ms,
        "ms_of_blocks": times,
        "images_per_second": images / ms * 1e3,
        "views_per_second": images * (2 if session.objective.sees_both else 1) / ms * 1e3,
        "gflop": counter.get_total_flops() * fabric.world_size / 1e9,
    }


@register_flop_formula(torch.ops.noiseproof.convolution_gradients)
def _gradient_flops(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any
) -> int:
    """Two products of the size of the forward one: 2 x outputs x weights of one output channel."""
    return 2 * 2 * math.prod(grad) * math.prod(weight[1:])


def forget() -> None:
    """Undoes what earlier sessions leave behind: memory, the choice of kernels, and compiled code,
    of which there may be only so many versions of one function."""
    torch.compiler.reset()
    torch.backends.cudnn.benchmark = False
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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


# What is timed


class Point(NamedTuple):
    """One size of the problem."""

    classes: int
    batch: int
    features: int
    size: int


def random_images(path: Path, count: int, size: int, classes: int, channels: int = 3) -> str:
    """A .npz file of random images to train on; a tenth as many, at least one a class, to test."""
    generator = np.random.default_rng(0)
    arrays = {}
    for part, number in (("train", count), ("test", max(classes, count // 10))):
        shape = (number, size, size, channels)
        arrays[f"{part}_images"] = generator.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(number) % classes
    np.savez(path, **arrays)
    return str(path)


def settings(data: str, **changes: Any) -> Config:
    """The paper's recipe for `data`, with changes, and all training images to train on."""
    return from_dict({"val_share": 0.0, **changes}, recipe("paper", data))


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


def device_of(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` stands for."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def write(path: Path | None, benchmark: str, device: torch.device, report: dict[str, Any]) -> Path:
    """Writes the report, with machine, versions and commit, as JSON."""
    found = environment(device)
    name = found["device"].lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    path = path or RESULTS / f"{benchmark}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": benchmark, "environment": found, **report}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = device_of(a.device)
    cuda = device.type == "cuda"
    sizes = a.sizes if a.sizes is not None else ((32, 64, 128) if cuda else (8, 16, 32))
    count = (a.steps or (50 if cuda else 5)), a.blocks
    model = a.model or ("resnet18" if cuda else "small_cnn")
    base = Point(10, 64, 128, 32 if cuda else 8)
    axes = {"classes": a.classes, "batch": a.batches, "features": a.features, "size": sizes}
    rows: list[dict[str, Any]] = []

    def add(axis: str, point: Point, ranks: int, found: dict[str, Any]) -> None:
        row = {"axis": axis, **point._asdict(), "ranks": ranks, **found}
        rows.append(row)
        value = row[axis]
        print(f"{axis:>8} {value:>6}  loss {row['loss_ms']:9.3f} ms  linear + cross-entropy "
              f"{row['linear_ms']:9.3f} ms" + (f"  step {row['step_ms']:9.3f} ms ({row['engine']})"
              if "step_ms" in row else ""), flush=True)  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        for axis, values in axes.items():
            for value in values:
                point = base._replace(**{axis: value})
                found: dict[str, Any] = loss_times(*point[:3], *count, device)
                if a.step:
                    config = settings_at(
                        point, folder, model=model, engine=a.engine, device=device.type
                    )
                    step = measured(config, *count)
                    found |= {"step_ms": step["ms"], "engine": step["engine"]}
                add(axis, point, 1, found)
        for world in a.ranks:
            point = base._replace(size=8)
            config = settings_at(point, folder, model="small_cnn", device="cpu")
            add("ranks", point, world, over_ranks(world, config, point, count))
    report = {"model": model, "steps": count[0], "blocks": a.blocks, "rows": rows}
    print(f"written to {write(a.json, 'scaling', device, report).name}")


if __name__ == "__main__":
    main()
