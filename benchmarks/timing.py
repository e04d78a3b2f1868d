"""What the benchmarks share: a training step on the clock, random images, files of results."""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from noiseproof.lab.config import Config, from_dict
from noiseproof.lab.device import environment, make_fabric
from noiseproof.lab.recipes import recipe
from noiseproof.lab.training import overlapped_conv  # noqa: F401  (makes its operator known)
from noiseproof.lab.training.session import Session

EngineName = Literal["auto", "eager", "compile", "graph"]
RESULTS = Path(__file__).resolve().parents[1] / "results" / "benchmarks"
STRIDE = 50  # steps between two looks at the meters, as in training


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


def ready(config: Config) -> Session:
    """A session on its device, as `train` makes it."""
    fabric = make_fabric(config)
    fabric.launch()
    return Session(config, fabric)


def stepping(session: Session) -> Callable[[int], None]:
    """A function that trains so many steps further, epoch after epoch, without validation."""

    def run(count: int) -> None:
        while count:
            stop = min(session.step + min(count, STRIDE), session.loader.steps)
            session.engine.run(session.epoch, session.step, stop)
            session.engine.meter.sums.tolist()
            count, session.step = count - (stop - session.step), stop
            if stop == session.loader.steps:
                session.engine.meter.reset()
                session.epoch, session.step = session.epoch + 1, 0

    return run


def measured(
    config: Config,
    steps: int,
    blocks: int,
    also: Callable[[Session], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """Times noiseproof's step under `config`, and counts the arithmetic of its layers; `also` may
    look at the session afterwards and add to what was found."""
    forget()
    session = ready(config)
    fabric = session.fabric
    with session.engine:
        times = timed(stepping(session), steps, blocks, fabric.device)
        more = also(session)
    batch = session.loader.prepare(next(iter(session.loader.tickets(0))))
    with FlopCounterMode(display=False) as counter, fabric.autocast():
        session.objective(session.model, batch).loss.backward()
    ms, images = statistics.median(times), session.loader.batch_size * fabric.world_size
    return {
        "method": config.method.method,
        "batch": images,
        "engine": session.engine.name,
        "note": session.engine_note,
        "start_seconds": session.start_seconds,
        "ms": ms,
        "ms_of_blocks": times,
        "images_per_second": images / ms * 1e3,
        "views_per_second": images * session.objective.num_views / ms * 1e3,
        "gflop": counter.get_total_flops() * fabric.world_size / 1e9,
        **more,
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


def write(path: Path | None, benchmark: str, device: torch.device, report: dict[str, Any]) -> Path:
    """Writes the report, with machine, versions and commit, as JSON."""
    found = environment(device)
    name = found["device"].lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    path = path or RESULTS / f"{benchmark}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": benchmark, "environment": found, **report}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
