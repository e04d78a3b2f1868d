"""How much several trainings get done that share one GPU, against one after the other.

    python benchmarks/sharing.py
    python benchmarks/sharing.py --methods normal noisy both --kernels tuned

Every training is a process, as in `compare --jobs N`, and they share the GPU through MPS. When all
are compiled, each takes so many steps alone while the others wait; then all take as many at once.
`time` is that of all at once, until the last has ended, over the sum of the times alone. `shares`
looks at the while in which all of them ran: speed of each over its speed alone, added up, which is
how much more gets done as long as there is always another training to begin.

It is done twice, since kernels that are fastest alone need not leave most room for others: with
convolutions tuned by each process, and with cuDNN's own choice. Alone a training is as fast as the
faster of both. On a CPU the trainings share its cores, and there is nothing to choose.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to be run by its path, too
from benchmarks import timing
from benchmarks.timing import STRIDE, settings
from noiseproof.lab.comparison.gpu_sharing import shared_gpu
from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.device import chosen_device
from noiseproof.lab.training import cuda_graph

Kernels = Literal["tuned", "given"]


@dataclass(frozen=True)
class Arguments:
    """Times several trainings at once on one GPU, against each of them alone."""

    methods: tuple[MethodName, ...] = ("normal", "both", "discriminative")
    """A training each."""
    kernels: tuple[Kernels, ...] = ("tuned", "given")
    """How convolution kernels are chosen: timed by each process, or as cuDNN gives them."""
    steps: int | None = None
    """Steps that each takes alone and beside the others; 1,500 on a GPU, 20 on a CPU."""
    batch: int = 64
    """Images a step."""
    size: int | None = None
    """Height and width of the random images; 32 on a GPU, 8 on a CPU."""
    images: int | None = None
    """How many; 20,000 on a GPU, 1,000 on a CPU."""
    model: str | None = None
    """resnet18 on a GPU, small_cnn on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU when there is one."""
    json: Path | None = None
    """File of the results; results/benchmarks/sharing-DEVICE.json."""


def worker(pipe: Connection, config: Config, kernels: Kernels) -> None:
    """Makes a training ready, says in what time, and then takes as many steps as it is told to;
    answers with the clock's times at the beginning and after every few steps."""
    began = time.monotonic()
    cuda_graph.TUNE_KERNELS = kernels == "tuned"
    if config.run.device == "cpu":
        torch.set_num_threads(1)
    session = timing.ready(config)
    fabric, run = session.fabric, timing.stepping(session)

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


def trained(configs: Sequence[Config], kernels: Kernels, steps: int) -> list[dict[str, Any]]:
    """Each training's start, its milliseconds a step alone, and its clock beside the others."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for config in configs:
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, config, kernels), daemon=True)
        process.start()
        theirs.close()  # so that the end of a process ends its pipe
        pipes.append(mine)
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


def while_all(marks: Sequence[Sequence[float]], steps: int) -> list[float]:
    """Milliseconds a step of each training in the while in which all of them ran.

    Two trainings of 100 steps, looked at after every 50; the second is twice as fast:

    >>> while_all([[0.0, 4.0, 8.0], [0.0, 2.0, 4.0]], 100)
    [80.0, 40.0]
    """
    begin, end = max(m[0] for m in marks), min(m[-1] for m in marks)
    done = [*range(0, steps, STRIDE), steps]
    counts = [np.interp(end, times, done) - np.interp(begin, times, done) for times in marks]
    return [float((end - begin) * 1e3 / count) for count in counts]


def summary(
    rows: Sequence[dict[str, Any]], alone: Sequence[float], batch: int, steps: int
) -> dict[str, Any]:
    """What came of the trainings together; `alone` is what each takes a step at its best."""
    marks = [row["marks"] for row in rows]
    ms = while_all(marks, steps)
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
        configs = [settings(data, **common, method=m) for m in a.methods]
        made = {}
        with shared_gpu(device, len(configs), print):
            for choice in kernels:
                made[choice] = trained(configs, choice, steps)
    alone = [min(row["alone_ms"] for row in rows) for rows in zip(*made.values(), strict=True)]
    report = {
        "settings": {
            "model": model, "size": size, "batch": a.batch, "steps": steps, "images": images,
            "methods": list(a.methods),
        },
        "kernels": {c: summary(rows, alone, a.batch, steps) for c, rows in made.items()},
    }  # fmt: skip
    for choice, found in report["kernels"].items():
        print(f"{choice}: ready in {found['ready_seconds']:.1f} s; all at once {found['time']:.3f} "
              f"of the time one after the other; shares add up to {found['shares']:.3f}, "
              f"{found['views_per_second']:,.0f} views a second")  # fmt: skip
        for row in found["rows"]:
            print(f"  {row['method']:<15}{row['alone_ms']:>8.3f} ms alone"
                  f"{row['together_ms']:>8.3f} ms beside the others  "
                  f"{row['start']['engine']} {row['start']['note'] or ''}")  # fmt: skip
    written = timing.write(a.json, "sharing", device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
