"""Time of one training epoch of each method on the digits, relative to `normal`.

    python benchmarks/epoch.py [--rounds 3] [--epochs 4] [--threads N] [--json FILE]

Every method is trained for a few epochs with the settings of the quickstart. The methods take turns
for several rounds, so that whatever else the machine does affects all of them. The median over
epochs is shown, without the first epoch of each training, which is a warm-up. Validation, which is
the same for all methods, is not included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from noiseproof.lab.config import PAPER_METHODS, Config, MethodName
from noiseproof.lab.device import environment
from noiseproof.lab.recipes import DEFAULT, recipe
from noiseproof.lab.training.train import train


def quickstart_config(method: MethodName, folder: str, name: str, epochs: int) -> Config:
    """The quickstart's settings of one method, for fewer epochs."""
    base = recipe(DEFAULT, "digits")
    return replace(
        base,
        method=replace(base.method, method=method),
        optim=replace(base.optim, epochs=epochs, decay_milestones=()),
        run=replace(base.run, output=folder, name=name),
    )


def epoch_seconds(config: Config) -> list[float]:
    """Seconds of each epoch of one training except the first."""
    return [row["seconds"] for row in train(config, progress=False).metrics()[1:]]


def measure(methods: Sequence[MethodName], rounds: int, epochs: int) -> dict[str, list[float]]:
    """Seconds of every epoch after the first, by method."""
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for method in methods:
                config = quickstart_config(method, folder, f"{method}-{number}", epochs)
                seconds[method] += epoch_seconds(config)
    return seconds


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Times an epoch of each method on the digits.")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--epochs", type=int, default=4, help="epochs per training, at least 2")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.epochs < 2:
        parser.error("--rounds must be at least 1 and --epochs at least 2")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    facts = environment("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{facts['device']}, {facts['cores']} cores, {facts['threads']} threads, "
        f"torch {facts['torch']}\n"
    )
    seconds = measure(PAPER_METHODS, chosen.rounds, chosen.epochs)
    base = median(seconds["normal"])
    print(f"{'method':16} {'ms per epoch':>12} {'fastest':>9} {'over normal':>12}")
    for method, values in seconds.items():
        middle = median(values)
        print(f"{method:16} {1e3 * middle:12.1f} {1e3 * min(values):9.1f} {middle / base:12.2f}")
    results = {"environment": facts, "seconds": seconds}
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
