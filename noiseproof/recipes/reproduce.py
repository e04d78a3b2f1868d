"""Runs an experiment of the paper, row by row, and keeps what came out as one small file a run.

What is finished is not trained again, what was interrupted is resumed. A record holds the config,
seed, commit, versions, device, time, and the accuracy of every draw; `publish` makes the tables.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from noiseproof.lab.config import Config, to_dict
from noiseproof.recipes.experiments import EXPERIMENTS, Experiment, shortened

SCHEMA = 1


def reproduce(
    name: str,
    *,
    only: Sequence[str] = (),
    epochs: int | None = None,
    seed: int = 0,
    data: str | None = None,
    data_dir: str = "data",
    weights: str | None = None,
    output: str = "runs",
    results: str = "results",
    device: str = "auto",
    draws: int = 10,
) -> list[Path]:
    """Trains and evaluates the rows of experiment `name` (those in `only`); returns the records.

    data: another place of the data, such as a .npz file or a folder.
    weights: a local file of pretrained weights, where they cannot be downloaded (road).
    """
    experiment = EXPERIMENTS[name]()
    plan = planned(name, experiment, only, epochs, seed)

    from noiseproof.lab.evaluate import evaluate
    from noiseproof.lab.train import train

    written = []
    for row, config in plan.items():
        place = dataclasses.replace(config.data, data=data or config.data.data, data_dir=data_dir)
        where = replace(config.run, output=output, device=device)
        model = replace(config.model, weights=weights or config.model.weights)
        run = train(replace(config, data=place, model=model, run=where))
        chosen: Any = experiment.weights if run.has(experiment.weights) else "last"  # pyright: ignore[reportArgumentType]
        rows = evaluate(run, experiment.suite, draws=draws, weights=(chosen,), device=device)
        found = record(name, row, epochs is not None, run, rows, chosen)
        path = Path(results) / name / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        written.append(path)
    return written


def planned(
    name: str, experiment: Experiment, only: Sequence[str], epochs: int | None, seed: int
) -> dict[str, Config]:
    """Row -> config of what is asked for; unknown rows are refused with the nearest known."""
    for row in only:
        if row not in experiment.rows:
            near = get_close_matches(row, experiment.rows, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(experiment.rows)
            raise ValueError(f"{name} has no row {row!r}; expected {known}{hint}")
    plan = {}
    for row, config in experiment.rows.items():
        if only and row not in only:
            continue
        config = shortened(config, epochs) if epochs else config
        slug = row.replace("=", "").replace(" ", "-")
        run = f"{name}-{slug}{f'-e{epochs}' if epochs else ''}-s{seed}"
        plan[row] = replace(config, run=replace(config.run, name=run, seed=seed, resume=True))
    return plan


def record(
    name: str, row: str, short: bool, run: Any, rows: Sequence[dict[str, Any]], weights: str
) -> dict[str, Any]:
    """What one run measured, and all it depends on."""
    accuracy: dict[str, list[float]] = {}
    for r in rows:
        accuracy.setdefault(r["perturbation"], []).append(100 * r["value"])
    config = to_dict(run.config)
    for private in ("output", "name", "resume"):  # where it ran, not what ran
        config["run"].pop(private)
    config["data"].pop("data_dir")
    config["data"]["data"] = Path(config["data"]["data"]).name
    if config["model"]["weights"]:
        config["model"]["weights"] = Path(config["model"]["weights"]).name
    metrics = run.metrics()
    return {
        "schema": SCHEMA,
        "experiment": name,
        "row": row,
        "shortened": short,
        "seed": run.config.run.seed,
        "epochs": run.config.optim.epochs,
        "weights": weights,
        "seconds": round(run.info["seconds"], 1),
        "samples": run.info["samples"],
        "fingerprint": run.info["fingerprint"],
        "engine": run.info["engine"],
        "precision": run.info["precision"],
        "environment": run.info["environment"],
        "last_epoch": metrics[-1] if metrics else {},
        "accuracy": {
            spec: {
                "mean": round(fmean(values), 4),
                "std": round(stdev(values), 4) if len(values) > 1 else None,
                "draws": [round(v, 4) for v in values],
            }
            for spec, values in accuracy.items()
        },
        "config": config,
    }
