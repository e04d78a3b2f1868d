"""Throughput of several trainings that share one GPU, compared with running them in sequence.

    python benchmarks/sharing.py
    python benchmarks/sharing.py --methods normal noisy both --kernels tuned

Every training is a process, as in `compare --jobs N`, and they share the GPU through MPS. When all
are compiled, each runs a number of steps alone while the others wait; then all run as many at once.
`time` is the time of all at once, until the last has ended, over the sum of the times alone.
`shares` considers the interval in which all of them ran: the sum over trainings of speed over speed
alone, which is the gain in throughput as long as there is always another training to start.

This is done twice, since the fastest kernels alone need not be the best when a GPU is shared: with
convolutions tuned by each process, and with cuDNN's own choice. The time alone is the shorter of
the two. On a CPU the trainings share its cores, and there is nothing to choose.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from benchmarks.timing import STRIDE, benchmark_config
from noiseproof.lab.comparison.gpu_sharing import shared_gpu
from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.device import chosen_device
from noiseproof.lab.training import cuda_graph

Kernels = Literal["tuned", "given"]


@dataclass(frozen=True)
class Arguments:
    """Times several trainings at once on one GPU, and each of them alone."""

    methods: tuple[MethodName, ...] = ("normal", "both", "discriminative")
    """One training per method."""
    kernels: tuple[Kernels, ...] = ("tuned", "given")
    """How convolution kernels are chosen: tuned by each process, or given by cuDNN."""
    steps: int | None = None
    """Steps that each runs alone and with the others; 1,500 on a GPU, 20 on a CPU."""
    batch: int = 64
    """Images per step."""
    size: int | None = None
    """Height and width of the random images; 32 on a GPU, 8 on a CPU."""
    images: int | None = None
    """Number of random images; 20,000 on a GPU, 1,000 on a CPU."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/sharing-DEVICE.json by default."""


def worker(pipe: Connection, config: Config, kernels: Kernels) -> None:
    """Starts a training, sends how long that took, and then runs as many steps as it receives; for
    each request it sends the clock's times at the start and after every stride."""
    began = time.monotonic()
    cuda_graph.TUNE_KERNELS = kernels == "tuned"
    if config.run.device == "cpu":
        torch.set_num_threads(1)
    session = timing.start_session(config)
    fabric, run = session.fabric, timing.step_runner(session)

    def steps(count: int) -> float:
        run(count)
        if fabric.device.type == "cuda":
            torch.cuda.synchronize(fabric.device)
        return time.monotonic()

    with session.engine:
        ready = steps(STRIDE) - began
        facts = {"seconds": ready, "engine": session.engine.name, "note": session.engine_note}
        pipe.send(facts | {"views": session.objective.num_views})
        while count := pipe.recv():
            marks = [time.monotonic()]
            while count:
                some = min(count, STRIDE)
                marks.append(steps(some))
                count -= some
            pipe.send(marks)


def run_trainings(configs: Sequence[Config], kernels: Kernels, steps: int) -> list[dict[str, Any]]:
    """Each training's start, its milliseconds per step alone, and its clock with the others."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for config in configs:
        pipe, worker_pipe = context.Pipe()
        process = context.Process(target=worker, args=(worker_pipe, config, kernels), daemon=True)
        process.start()
        worker_pipe.close()  # so that the pipe closes if the process dies
        pipes.append(pipe)
        processes.append(process)
    starts = [pipe.recv() for pipe in pipes]
    alone = []
    for pipe in pipes:
        pipe.send(steps)
        marks = pipe.recv()
        alone.append((marks[-1] - marks[0]) * 1e3 / steps)
    for pipe in pipes:
        pipe.send(steps)
    together = [pipe.recv() for pipe in pipes]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(0)
        process.join()
    return [
        {"method": c.method.method, "start": start, "alone_ms": ms, "marks": marks}
        for c, start, ms, marks in zip(configs, starts, alone, together, strict=True)
    ]


def common_ms(marks: Sequence[Sequence[float]], steps: int) -> list[float]:
    """Milliseconds per step of each training in the interval in which all of them ran.

    Two trainings of 100 steps, timed after every 50; the second is twice as fast:

    >>> common_ms([[0.0, 4.0, 8.0], [0.0, 2.0, 4.0]], 100)
    [80.0, 40.0]
    """
    start, end = max(m[0] for m in marks), min(m[-1] for m in marks)
    done = [*range(0, steps, STRIDE), steps]
    counts = [np.interp(end, times, done) - np.interp(start, times, done) for times in marks]
    return [float((end - start) * 1e3 / count) for count in counts]


def summary(
    rows: Sequence[dict[str, Any]], alone: Sequence[float], batch: int, steps: int
) -> dict[str, Any]:
    """Throughput of the trainings together; `alone` is the milliseconds per step of each alone."""
    marks = [row["marks"] for row in rows]
    ms = common_ms(marks, steps)
    wall = max(m[-1] for m in marks) - min(m[0] for m in marks)
    serial = sum(alone) * steps / 1e3
    views = [batch * row["start"]["views"] for row in rows]
    return {
        "seconds": wall,
        "serial_seconds": serial,
        "time": wall / serial,
        "shares": sum(a / b for a, b in zip(alone, ms, strict=True)),
        "views_per_second": sum(v / m * 1e3 for v, m in zip(views, ms, strict=True)),
        "ready_seconds": max(row["start"]["seconds"] for row in rows),
        "rows": [
            {
                **{k: row[k] for k in ("method", "start", "alone_ms")},
                "together_ms": m,
                "seconds": row["marks"][-1] - row["marks"][0],
            }
            for row, m in zip(rows, ms, strict=True)
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    device = chosen_device(a.device)
    cuda = device.type == "cuda"
    steps = a.steps or (1500 if cuda else 20)
    model = a.model or ("resnet18" if cuda else "small_cnn")
    size, images = a.size or (32 if cuda else 8), a.images or (20_000 if cuda else 1_000)
    kernels = a.kernels if cuda else a.kernels[:1]
    with tempfile.TemporaryDirectory() as folder:
        data = timing.random_images(Path(folder) / "random.npz", images, size, 10)
        common = {"model": model, "device": device.type, "output": folder, "batch_size": a.batch}
        configs = [benchmark_config(data, **common, method=m) for m in a.methods]
        trainings = {}
        with shared_gpu(device, len(configs), print):
            for choice in kernels:
                trainings[choice] = run_trainings(configs, choice, steps)
    variants = zip(*trainings.values(), strict=True)
    alone = [min(row["alone_ms"] for row in rows) for rows in variants]
    report = {
        "settings": {
            "model": model, "size": size, "batch": a.batch, "steps": steps, "images": images,
            "methods": list(a.methods),
        },
        "kernels": {c: summary(rows, alone, a.batch, steps) for c, rows in trainings.items()},
    }  # fmt: skip
    for choice, results in report["kernels"].items():
        print(f"{choice}: ready in {results['ready_seconds']:.1f} s; all at once take "
              f"{results['time']:.3f} times as long as in sequence; throughput "
              f"{results['shares']:.3f} times that of one, "
              f"{results['views_per_second']:,.0f} views per second")  # fmt: skip
        for row in results["rows"]:
            print(f"  {row['method']:<15}{row['alone_ms']:>8.3f} ms alone"
                  f"{row['together_ms']:>8.3f} ms with the others  "
                  f"{row['start']['engine']} {row['start']['note'] or ''}")  # fmt: skip
    written = timing.write_results(a.json, "sharing", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
