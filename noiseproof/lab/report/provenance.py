"""How the runs of a report were made: commands, data, machine, versions, settings."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from noiseproof.lab.analysis.store import read
from noiseproof.lab.command import current_command
from noiseproof.lab.config import to_dict
from noiseproof.lab.paths import with_relative_paths
from noiseproof.lab.report.results import Results
from noiseproof.lab.report.summary import duration
from noiseproof.lab.report.worst_case_section import worst_case_rows
from noiseproof.lab.runs import DERIVED, RunFolder
from noiseproof.perturb.text import heading

_OMITTED = {"output", "name", "resume"}  # where a run is and how it was started
_ARITHMETIC = {"no": "float32", "bf16": "bfloat16", "fp16": "float16", "float64": "float64"}


def commands(results: Results, output: Path) -> list[str]:
    """The commands that the results record, from training to this report, each once.

    What was made from Python, or by a version that recorded no commands, is given in a general
    form: a run's config.json holds every setting, and a row of an evaluation names its noise.
    """
    lines = [run.info.get("command") or _train_again(run) for run in results.runs.values()]
    changes = [run.info.get(name, {}) for run in results.runs.values() for name in DERIVED]
    lines += [facts["command"] for facts in changes if "command" in facts]
    rows = [row for rows in results.rows.values() for row in rows]
    lines += [row["command"] for row in rows if "command" in row]
    if unrecorded := {row["run"] for row in rows if "command" not in row}:
        lines.append(_evaluate_again(results, unrecorded))
    lines += [row["command"] for row in worst_case_rows(results) if "command" in row]
    analyses = {run: read(run, results.weights) for run in results.runs.values()}
    parts = [(run, p) for run, a in analyses.items() if a for p in a.content["parts"].values()]
    lines += [part["command"] for _, part in parts if "command" in part]
    if older := dict.fromkeys(str(run.path) for run, part in parts if "command" not in part):
        lines.append(_shell("analyse", *older))
    paths = [str(run.path) for run in results.runs.values()]
    lines.append(current_command() or _shell("report", *paths, "--output", str(output)))
    return list(dict.fromkeys(lines))


def _train_again(run: RunFolder) -> str:
    return _shell("train", "--config", str(run.path / "config.json"), "--name", f"{run.name}-again")


def _evaluate_again(results: Results, keys: Container[str]) -> str:
    paths = [str(run.path) for key, run in results.runs.items() if key in keys]
    table, seed = results.table, str(results.noise_seed)
    noise = ["--perturb", *results.perturbations, "--draws", str(table.draws), "--noise-seed", seed]
    return _shell("evaluate", *paths, *noise)


def _shell(*words: str) -> str:
    return shlex.join(["noiseproof", *words])


def facts(results: Results) -> list[tuple[str, str]]:
    """Names and values; if runs differ, all values."""
    infos = [run.info for run in results.runs.values()]
    machines = [info.get("environment") or {} for info in infos]
    first = infos[0]
    counts = first.get("samples") or {}
    size = " × ".join(map(str, first.get("size", ())))
    split = ", ".join(f"{count:,} {part}" for part, count in counts.items())
    specs = ", ".join(heading(spec) for spec in results.table.columns)
    seconds = [info["seconds"] for info in infos if isinstance(info.get("seconds"), (int, float))]
    rows = [
        ("data", f"{with_relative_paths(results.first.config).data.data} ({size}; {split})"),
        ("test images", f"fingerprint {first.get('fingerprint')}"),
        ("conditions", f"{specs}; {results.table.draws} draws, noise seed {results.noise_seed}"),
        ("training seeds", _values(run.config.run.seed for run in results.runs.values())),
        ("training time", f"{duration(sum(seconds))} for {len(seconds)} runs" if seconds else ""),
        ("device", _values(m.get("device") for m in machines)),
        ("cores, threads", _values(f"{m.get('cores')}, {m.get('threads')}" for m in machines)),
        ("arithmetic", _values(_ARITHMETIC.get(str(info.get("precision"))) for info in infos)),
        ("engine", _values(info.get("engine") for info in infos)),
        ("processes", _values(info.get("ranks") for info in infos)),
    ]
    versions = ("platform", "noiseproof", "commit", "python", "torch", "torchvision")
    rows += [(name, _values(m.get(name) for m in machines)) for name in versions]
    return [(name, value) for name, value in rows if value]


def settings(results: Results) -> dict[str, list[tuple[str, str]]]:
    """Every setting, by group; if runs differ, all values in the order of the runs."""
    configs = [to_dict(with_relative_paths(run.config)) for run in results.runs.values()]
    return {
        "Optimisation" if group == "optim" else group.capitalize(): [
            (name.replace("_", " "), _values(_text(config[group][name]) for config in configs))
            for name in values
            if name not in _OMITTED
        ]
        for group, values in configs[0].items()
    }


def _values(values: Iterable[Any]) -> str:
    """The distinct values, in order of appearance.

    >>> _values([1, 2, 1, None])
    '1, 2'
    """
    return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value)) or None
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
