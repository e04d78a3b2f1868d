"""Seconds to robust accuracy: a schedule, fixed beforehand, with and without compilation.

    python benchmarks/time_to_accuracy.py                              # CIFAR-10 on one GPU
    python benchmarks/time_to_accuracy.py --schedule short
    python benchmarks/time_to_accuracy.py --schedule mine.json --held-out 0.2 --seeds 1
                                                                       # to choose a schedule

A schedule is chosen on images held out from training, and the test images are for the chosen one.
Every training happens in a new process with empty caches, like the first one on a machine. Its
seconds are those of a whole `train`, from image files to weight files: reading, compiling,
capturing and all steps. The start of Python and the test that follows are not part of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from benchmarks import timing
from noiseproof import accuracy
from noiseproof.lab.config import Config, from_dict, to_dict
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.device import chosen_device, precision
from noiseproof.lab.recipes import DEFAULT, recipe
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.perturb import parse

Mode = Literal["compiled", "uncompiled"]

# Chosen on held-out images (docs/performance.md); other settings are the default recipe's.
_COMMON = {"noisy_augment": None, "batch_size": 512, "lr": 0.4, "smoothing": 0.1}
SCHEDULES: dict[str, dict[str, Any]] = {
    "long": {
        **_COMMON,
        "method": "both",
        "noise": "gaussian:16/255",
        "augment": "crop-flip+erase",
        "epochs": 50,
        "ema_decay": 0.995,
    },
    "short": {
        **_COMMON,
        "method": "noisy",
        "noise": "gaussian:16/255@0.5",
        "augment": "crop-flip",
        "epochs": 32,
        "ema_decay": 0.98,
    },
}


@dataclass(frozen=True)
class Arguments:
    """Times one schedule with and without compilation, and tests what it reaches."""

    schedule: str = "long"
    """long, short, or a JSON file of settings that differ from the recipe's: {"epochs": 20}."""
    data: str = "cifar10"
    """A dataset's name or a .npz file."""
    data_dir: str = "data"
    """Folder of the datasets that are known by name."""
    held_out: float = 0.0
    """Share of the training images to hold out and test on, instead of the test images."""
    seeds: int = 3
    """Trainings per mode, with seeds from 0 upwards."""
    modes: tuple[Mode, ...] = ("compiled", "uncompiled")
    """Kernels to train with."""
    perturb: tuple[str, ...] = ("clean", "gaussian:16/255")
    """Perturbations to test."""
    draws: int = 10
    """Noise draws of each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto uses a GPU if there is one."""
    json: Path | None = None
    """Result file; results/benchmarks/time-to-accuracy-SCHEDULE-DEVICE.json by default."""


def schedule(a: Arguments, output: str) -> Config:
    """The settings of all trainings but for seed, engine and name."""
    changes = SCHEDULES.get(a.schedule)
    if changes is None:
        if not Path(a.schedule).exists():
            raise ValueError(f"expected --schedule long, short or a JSON file, got {a.schedule}")
        changes = json.loads(Path(a.schedule).read_text())
    usual = {"data_dir": a.data_dir, "val_share": a.held_out, "device": a.device, "output": output}
    return from_dict({**changes, **usual, "checkpoint_minutes": 60.0}, recipe(DEFAULT, a.data))


def worker(
    pipe: Connection, config: Config, mode: Mode, perturb: Sequence[str], draws: int
) -> None:
    """Trains and tests, and sends seconds and accuracies."""
    if mode == "uncompiled":
        timing.turn_off_compilation()
    notes: list[str | None] = []
    began = time.perf_counter()
    run = train(
        config, progress=False, each_epoch=lambda _, session: notes.append(session.engine_note)
    )
    seconds = time.perf_counter() - began
    pipe.send({
        "engine": run.info["engine"],
        "note": notes[-1],
        "seconds": seconds,
        "step_seconds": run.info["seconds"],  # of the steps alone
        "train_accuracy": run.metrics()[-1]["train_accuracy"],
        "accuracy": reached(run, perturb, draws),
    })  # fmt: skip


def reached(run: RunFolder, perturb: Sequence[str], draws: int) -> dict[str, float]:
    """Accuracies in %, on held-out images if there are any, otherwise on the test images."""
    data, device = run.dataset(), chosen_device(run.config.run.device)
    split = data.test if data.validation is None else data.validation
    model = run.model("last", device)
    bf16 = precision(run.config, device.type) == "bf16"
    pair = split.pixels.to(device).float() / 255, split.labels
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        measured = accuracy(model, pair, list(perturb), draws=draws)
    return {name: 100 * result.mean for name, result in measured.items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over seeds of the seconds and of each accuracy.

    >>> row = {"seconds": 3.0, "step_seconds": 2.0, "accuracy": {"clean": 94.0}}
    >>> summary([row, {**row, "accuracy": {"clean": 96.0}}])["clean"]
    {'mean': 95.0, 'std': 1.4142135623730951}
    """
    columns = {name: [row[name] for row in rows] for name in ("seconds", "step_seconds")}
    columns |= {name: [row["accuracy"][name] for row in rows] for name in rows[0]["accuracy"]}
    return {
        name: {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        }
        for name, values in columns.items()
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    times = f"{row['seconds']:>9.1f}{row['step_seconds']:>10.1f}"
    accuracies = "".join(f"{value:>17.2f}" for value in row["accuracy"].values())
    note = f"  {row['note']}" if row["note"] else ""
    return f"{row['mode']:<12}{row['seed']:>5} {row['engine']:<8}{times}{accuracies}{note}"


def sentence(mode: Mode, results: dict[str, dict[str, float]], count: int) -> str:
    """The summary of a mode as a line."""
    parts = [
        f"{name} {value['mean']:.2f}" + (f" ± {value['std']:.2f}" if count > 1 else "")
        for name, value in results.items()
    ]
    return f"{mode} ({count} training{'s' * (count > 1)}): {', '.join(parts)}"


def recorded(config: Config) -> dict[str, Any]:
    """The settings that decide the result, without places on this machine."""
    groups = to_dict(config)
    data = groups["data"]
    data["data"] = Path(data["data"]).stem
    return {"data": {k: v for k, v in data.items() if k != "data_dir"}} | {
        name: groups[name] for name in ("model", "method", "optim")
    }


def main(argv: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, args=argv)
    if a.seeds < 1 or not a.modes:
        raise ValueError(f"expected at least one seed and one mode, got {a.seeds} and {a.modes}")
    for text in a.perturb:
        parse(text)  # before a training, not after it
    device = chosen_device(a.device)
    name = f"time-to-accuracy-{Path(a.schedule).stem}{'-held-out' * (a.held_out > 0)}"
    with tempfile.TemporaryDirectory() as folder:
        config = schedule(a, folder)
        load_dataset(config.data)  # downloads before the clock starts, and fails early
        report: dict[str, Any] = {
            "settings": {
                "recipe": DEFAULT,
                "tested_on": "held-out images" if a.held_out else "test images",
                "draws": a.draws,
                **recorded(config),
            },
            "rows": [],
            "summary": {},
        }
        print(f"{'mode':<12}{'seed':>5} {'engine':<8}{'seconds':>9}{'of steps':>10}"
              + "".join(f"{name:>17}" for name in a.perturb))  # fmt: skip
        for mode in a.modes:
            engine = timing.engine_for(device, mode == "compiled")
            rows: list[dict[str, Any]] = []
            for seed in range(a.seeds):
                one = from_dict({"seed": seed, "engine": engine, "name": f"{mode}-{seed}"}, config)
                measured = timing.in_new_process(
                    f"{mode}, seed {seed}", worker, one, mode, a.perturb, a.draws
                )
                rows.append({"mode": mode, "seed": seed, **measured})
                print(line(rows[-1]), flush=True)
                report["rows"].append(rows[-1])
                report["summary"][mode] = summary(rows)
                timing.write_results(a.json, name, device, report)  # the rows so far
    for mode in a.modes:
        print(sentence(mode, report["summary"][mode], a.seeds))
    written = timing.write_results(a.json, name, device, report)
    print(f"written to {written.name}")


if __name__ == "__main__":
    main()
