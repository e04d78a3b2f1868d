"""Time of one training epoch of each method on the digits, against `normal`.

    python benchmarks/epoch.py [--rounds 3] [--epochs 4] [--threads N] [--json FILE]

Every method is trained for a few epochs with the settings of the quickstart, all of them in turn
and several rounds of it, so that whatever else the machine does falls on all alike. The median over
epochs is shown; the first epoch of each training, which warms up, is left out. An epoch counts its
training steps; validation comes on top and is the same for all.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to be run by its path, too
from noiseproof.lab.config import Config, MethodName
from noiseproof.lab.device import environment
from noiseproof.lab.recipes import DEFAULT, recipe
from noiseproof.lab.training.train import train


def settings(method: MethodName, folder: str, name: str, epochs: int) -> Config:
    """The quickstart's settings of one method, for fewer epochs."""
    base = recipe(DEFAULT, "digits")
    return replace(
        base,
        method=replace(base.method, method=method),
        optim=replace(base.optim, epochs=epochs, decay_milestones=()),
        run=replace(base.run, output=folder, name=name),
    )


def epochs_of(config: Config) -> list[float]:
    """Seconds of each epoch of one training but the first."""
    run = train(config, progress=False)
    with open(run.path / "metrics.csv", newline="") as file:
        return [float(row["seconds"]) for row in csv.DictReader(file)][1:]


def measure(methods: Sequence[MethodName], rounds: int, epochs: int) -> dict[str, list[float]]:
    """Seconds of every epoch that counts, by method."""
    taken: dict[str, list[float]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for method in methods:
                config = settings(method, folder, f"{method}-{number}", epochs)
                taken[method] += epochs_of(config)
    return taken


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Time of an epoch of each method on the digits.")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--epochs", type=int, default=4, help="epochs a training, at least 2")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.epochs < 2:
        parser.error("there must be at least 1 round of at least 2 epochs")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    facts = environment("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{facts['device']}, {facts['cores']} cores, {facts['threads']} threads, "
        f"torch {facts['torch']}\n"
    )
    taken = measure(get_args(MethodName), chosen.rounds, chosen.epochs)
    base = median(taken["normal"])
    print(f"{'method':16} {'ms an epoch':>12} {'fastest':>9} {'against normal':>16}")
    for method, seconds in taken.items():
        middle = median(seconds)
        print(f"{method:16} {1e3 * middle:12.1f} {1e3 * min(seconds):9.1f} {middle / base:16.2f}")
    results = {"environment": facts, "seconds": taken}
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
