"""Records: what one training of an experiment measured, and all it depends on, as a JSON file.

A record holds the config, seed, commit, versions, device and time, and the accuracy of every noise
draw. Records are in RESULTS/EXPERIMENT/RUN.json; paths of the machine are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from noiseproof.lab.config import to_dict

if TYPE_CHECKING:
    from noiseproof.lab.runs import RunFolder

SCHEMA = 1
Record = dict[str, Any]


def read_records(results: Path, experiment: str) -> list[Record]:
    """The records of one experiment, in the order of their file names.

    Args:
        results: the folder of all records.
        experiment: the name of the experiment.
    """
    files = sorted((results / experiment).glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


def make_record(
    experiment: str,
    row: str,
    run: RunFolder,
    rows: Sequence[dict[str, Any]],
    *,
    weights: str,
    shortened: bool,
) -> Record:
    """The record of one run.

    Args:
        experiment: the name of the experiment.
        row: the row of its table.
        run: the finished run.
        rows: its evaluation, one row per perturbation and draw.
        weights: which weights were evaluated, last or best.
        shortened: whether the training has fewer epochs than the experiment asks for.
    """
    accuracy: dict[str, list[float]] = {}
    for measured in rows:
        accuracy.setdefault(measured["perturbation"], []).append(100 * measured["value"])
    metrics = run.metrics()
    return {
        "schema": SCHEMA,
        "experiment": experiment,
        "row": row,
        "shortened": shortened,
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
        **({"best": run.info["best"]} if weights == "best" else {}),  # with its epoch
        "accuracy": {
            spec: {
                "mean": round(fmean(values), 4),
                "std": round(stdev(values), 4) if len(values) > 1 else None,
                "draws": [round(value, 4) for value in values],
            }
            for spec, values in accuracy.items()
        },
        "config": _config_without_paths(run),
    }


def _config_without_paths(run: RunFolder) -> dict[str, dict[str, Any]]:
    config = to_dict(run.config)
    for setting in ("output", "name", "resume"):
        config["run"].pop(setting)
    config["data"].pop("data_dir")
    config["data"]["data"] = Path(config["data"]["data"]).name
    if config["model"]["weights"]:
        config["model"]["weights"] = Path(config["model"]["weights"]).name
    return config
