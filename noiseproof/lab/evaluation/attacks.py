"""Accuracy of a trained run under attack: one row per attack, in attacks.jsonl, apart from the rows
of noise.

The images are those that `certify` takes by default. A row holds the hash of the weights; what has
a row is not attacked again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from noiseproof.adversarial import pgd
from noiseproof.lab.command import command_record
from noiseproof.lab.console import print_plain, print_status, progress_bars, terminal
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.certificates import default_every
from noiseproof.lab.runs import RunFolder, Weights, open_runs
from noiseproof.lab.validate import read_attack
from noiseproof.modes import measuring
from noiseproof.robustness import batch_size_for, predicted_classes

SCHEMA = 1
FILE = "attacks.jsonl"
STEPS = 20
AttackRow = dict[str, Any]


def attack(
    run: RunFolder,
    attacks: Sequence[str],
    *,
    weights: Weights = "last",
    device: str = "auto",
    progress: bool | None = None,
    dataset: Dataset | None = None,
) -> list[AttackRow]:
    """The rows of `run` for these attacks; those that do not exist yet are computed.

    Args:
        run: a trained run.
        attacks: texts such as linf:2/255 or l2:0.25.
        weights: which of the run's weights.
        device: "auto", "cpu" or "cuda".
        progress: show a progress bar; by default on a terminal, and lines elsewhere.
        dataset: the run's data, if the caller has loaded it already.
    """
    run.require(weights)
    if (damaged := run.drop_damaged_rows(FILE)) and progress is not False:
        print_status(run.name, f"damaged lines removed from {FILE}: {damaged}")
    dataset = run.dataset(dataset)
    names = attack_names(attacks, dataset.size)
    facts = {
        "weights": weights,
        "model": run.weights_hash(weights),
        "fingerprint": run.fingerprint(dataset),
        "steps": STEPS,
    }
    rows = {r["attack"]: r for r in run.read_jsonl(FILE) if facts.items() <= r.items()}
    for name in names:
        if name not in rows:
            rows[name] = {
                "schema": SCHEMA,
                "run": run.name,
                "data": dataset.name,
                "method": run.config.method.method,
                "seed": run.config.run.seed,
                **facts,
                "attack": name,
                **_attacked(run, name, weights, chosen_device(device), dataset, progress),
                **command_record(),
            }
            run.append_jsonl(FILE, [rows[name]])
    return [rows[name] for name in names]


def attack_names(attacks: Sequence[str], size: Sequence[int]) -> list[str]:
    """The canonical texts of these attacks; ValueError if no image can change so far.

    Args:
        attacks: texts such as linf:2/255 or l2:0.25.
        size: C, H, W of the images.
    """
    chosen = [read_attack(text) for text in attacks]
    farthest = math.sqrt(math.prod(size))  # in L2, from black to white
    for each in chosen:
        if each.norm == "l2" and each.epsilon > farthest:
            raise ValueError(
                f"the distance of {each.name} must be above 0 and at most {farthest:.4g}, the "
                f"distance from black to white of images of {' x '.join(map(str, size))}"
            )
    return list(dict.fromkeys(each.name for each in chosen))


def _attacked(
    run: RunFolder,
    name: str,
    weights: Weights,
    device: torch.device,
    dataset: Dataset,
    progress: bool | None,
) -> dict[str, Any]:
    """The accuracy on test images with and without the attack, and their number."""
    norm, epsilon, _ = read_attack(name)
    model, n = run.model(weights, device).float(), dataset.test.count
    index = torch.arange(0, n, default_every(n))
    size = batch_size_for(dataset.size, device)
    workers = run.config.data.workers
    batches = Batches(dataset.test, dataset.size, size, device, index=index, workers=workers)
    clean = attacked = 0
    start = time.perf_counter()
    with progress_bars(progress) as bar, measuring(model, device):
        task = bar.add_task(f"{run.name}: attacking, {name}", total=len(index))
        for pixels, labels, positions in batches:
            x = pixels.float() / 255
            worst = pgd(model, x, labels, norm, epsilon, steps=STEPS, index=positions)
            with torch.no_grad():
                clean += int((predicted_classes(model(x)) == labels).sum())
                attacked += int((predicted_classes(model(worst)) == labels).sum())
            bar.advance(task, len(positions))
    return {
        "metric": "accuracy under attack",
        "value": attacked / len(index),
        "clean": clean / len(index),
        "n": len(index),
        "device": device.type,
        "seconds": round(time.perf_counter() - start, 4),
    }


def attack_rows(run: RunFolder, weights: Weights) -> dict[str, AttackRow]:
    """The rows of the run's current weights and own test images, by attack.

    Args:
        run: the run.
        weights: which of its weights.
    """
    if not run.has(weights):
        return {}
    own = run.measured_with(weights) | {"steps": STEPS}
    return {row["attack"]: row for row in run.read_jsonl(FILE) if own.items() <= row.items()}


def attack_runs(
    paths: Sequence[str | Path],
    attacks: Sequence[str],
    *,
    weights: Sequence[Weights] = ("last",),
    device: str = "auto",
) -> None:
    """Attacks runs and prints one line per run, weights and attack.

    Args:
        paths: run folders.
        attacks: texts such as linf:2/255 or l2:0.25.
        weights: which of the runs' weights; those that a run does not have are skipped.
        device: "auto", "cpu" or "cuda".
    """
    runs = open_runs(paths)
    chosen_device(device)  # refused before the data is loaded, which can take a while
    for run in runs:
        run.require(*weights)  # likewise
    out = terminal()
    for run in runs:
        for which in run.require(*weights):
            for row in attack(run, attacks, weights=which, device=device):
                print_plain(
                    out,
                    f"{run.name}, {which} weights: {100 * row['value']:.1f} % correct under attack "
                    f"{row['attack']}, {100 * row['clean']:.1f} % without, of {row['n']:,} images",
                )
    out.print("A stronger attack may lower these further: they are upper limits.", highlight=False)
    for run in runs:
        out.print(f"Rows: {run.path / FILE}", markup=False, soft_wrap=True)
