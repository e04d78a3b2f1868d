"""What the benchmarks share: timed training steps, random images, result files."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from noiseproof.lab.config import Config, from_dict
from noiseproof.lab.device import environment, make_fabric
from noiseproof.lab.recipes import recipe
from noiseproof.lab.training import choose_engine
from noiseproof.lab.training.session import Session

EngineName = Literal["auto", "eager", "compile", "graph"]
RESULTS = Path(__file__).resolve().parents[1] / "results" / "benchmarks"
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
STRIDE = 50  # steps between two reads of the meter, as in training


def timed(run: Callable[[int], None], steps: int, blocks: int, device: torch.device) -> list[float]:
    """Milliseconds per step in each block of `run(steps)`, after a warm-up block."""
    if steps < 1 or blocks < 1:
        raise ValueError(f"steps and blocks must be at least 1, got {steps} and {blocks}")
    times: list[float] = []
    for _ in range(blocks + 1):
        began = time.perf_counter()
        run(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) * 1e3 / steps)
    return times[1:]


def start_session(config: Config) -> Session:
    """A session on its device, as `train` builds it."""
    fabric = make_fabric(config)
    fabric.launch()
    return Session(config, fabric)


def step_runner(session: Session) -> Callable[[int], None]:
    """A function that trains a number of steps, across epochs, without validation."""

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


def measure_step(
    config: Config,
    steps: int,
    blocks: int,
    inspect: Callable[[Session], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """Times noiseproof's training step, and counts the arithmetic of its layers.

    Args:
        config: settings of the training.
        steps: steps per block.
        blocks: blocks that the median is taken over.
        inspect: called with the session afterwards; what it returns is added to the result.
    """
    clear_caches()
    session = start_session(config)
    fabric = session.fabric
    with session.engine:
        times = timed(step_runner(session), steps, blocks, fabric.device)
        extra = inspect(session)
    batch = session.loader.prepare(next(iter(session.loader.tickets(0))))
    with FlopCounterMode(display=False) as counter, fabric.autocast():
        session.objective(session.model, batch).loss.backward()
    ms, images = statistics.median(times), session.loader.batch_size * fabric.world_size
    return {
        "method": config.method.method,
        "augment": "/".join(filter(None, (config.data.augment, config.data.noisy_augment))),
        "batch": images,
        "engine": session.engine.name,
        "note": session.engine_note,
        "start_seconds": session.start_seconds,
        "ms": ms,
        "ms_of_blocks": times,
        "images_per_second": images / ms * 1e3,
        "views_per_second": images * session.objective.num_views / ms * 1e3,
        "gflop": counter.get_total_flops() * fabric.world_size / 1e9,
        **extra,
    }


def clear_caches() -> None:
    """Removes what earlier sessions leave behind: memory, and compiled code, of which torch keeps a
    limited number of versions per function."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def engine_for(device: torch.device, compiled: bool) -> EngineName:
    """The engine of a training with compiled kernels, or without: on a GPU a graph of either, which
    needs `turn_off_compilation` too; on a CPU compiled or eager steps."""
    if device.type == "cuda":
        return "graph"
    return "compile" if compiled else "eager"


def turn_off_compilation() -> None:
    """From now on no training of this process compiles."""
    choose_engine.missing_compiler = lambda _: "compilation is turned off"


def in_new_process(name: str, worker: Callable[..., None], *arguments: Any) -> Any:
    """What `worker(pipe, *arguments)` sends through its pipe, in a new process with empty caches,
    like the first training on a machine.

    Args:
        name: what runs there, for the message that ends this process if that one fails.
        worker: a function that sends one result.
        *arguments: of the worker.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as caches:
        pipe, worker_pipe = context.Pipe()
        process = context.Process(target=worker, args=(worker_pipe, *arguments))
        with patch.dict(os.environ, {cache: f"{caches}/{cache}" for cache in _CACHES}):
            process.start()
        worker_pipe.close()  # so that the pipe closes if the process dies
        try:
            result = pipe.recv()
        except EOFError:
            process.join()  # it prints its own traceback
            ended = f"the process ended with exit code {process.exitcode}, see above"
            raise SystemExit(f"{name}: {ended}") from None
        process.join()
    return result


def random_images(path: Path, count: int, size: int, classes: int, channels: int = 3) -> str:
    """A .npz file with `count` random training images; a tenth as many, at least one per class, for
    testing."""
    generator = np.random.default_rng(0)
    arrays = {}
    for split, number in (("train", count), ("test", max(classes, count // 10))):
        shape = (number, size, size, channels)
        arrays[f"{split}_images"] = generator.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(number) % classes
    np.savez(path, **arrays)
    return str(path)


def benchmark_config(data: str, **changes: Any) -> Config:
    """The paper's recipe for `data`, with changes, and no validation images."""
    return from_dict({"val_share": 0.0, **changes}, recipe("paper", data))


def write_results(
    path: Path | None, benchmark: str, device: torch.device, results: dict[str, Any]
) -> Path:
    """Writes results as JSON, with machine, versions and commit; by default to
    results/benchmarks/BENCHMARK-DEVICE.json."""
    facts = environment(device)
    name = facts["device"].lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    path = path or RESULTS / f"{benchmark}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": benchmark, "environment": facts, **results}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
