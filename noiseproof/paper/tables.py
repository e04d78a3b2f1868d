"""The paper's tables with our numbers beside them, from the records of `reproduce`, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from noiseproof.lab.recipes import kind
from noiseproof.paper.experiments import EXPERIMENTS, Experiment
from noiseproof.perturb.text import heading

_CHOSEN = """\
What choosing the epoch by accuracy on the clean **test** images, as the paper does, would be worth:
accuracy at that epoch, and at the last in brackets; then the lowest and highest of all looks in the
last third of the training. One draw of noise each. No table above is chosen so."""


def section(results: Path, name: str) -> str:
    """The part of one experiment: its table, and what is to be said of it."""
    experiment, notes = EXPERIMENTS[name](), results / name / "notes.md"
    records = _records(results, name)
    whole = [r for r in records if not r["shortened"]]
    lines = [f"## {experiment.title}", "", f"`{_command(name, experiment)}`", ""]
    lines += _table(experiment, whole)
    short = [r for r in records if r["shortened"]]
    for epochs in sorted({r["epochs"] for r in short}):
        lines += ["", f"Shortened to {epochs} epochs (the schedule scaled):", ""]
        lines += _table(experiment, [r for r in short if r["epochs"] == epochs], absent=False)
    measured = {r["row"] for r in whole}
    ours = [f"`{row}`" for row in experiment.rows if row not in measured | set(experiment.paper)]
    if ours:
        lines += ["", f"Not in the paper, and not run yet: {', '.join(ours)}."]
    if notes.exists():
        lines += ["", notes.read_text().strip()]
    if (results / name / "figures" / "figures.json").exists():
        lines += ["", f"Its figures: [figures.md](figures.md#{anchor(experiment.title)})."]
    return "\n".join(lines) + "\n"


def sources(results: Path, name: str) -> str:
    """How the trainings of one experiment were made, and what was seen along their way."""
    experiment, records = EXPERIMENTS[name](), _records(results, name)
    if not records:
        return ""
    lines = [f"### {experiment.title}", "", *_provenance(records)]
    lines += _along(experiment, [r for r in records if len(r.get("along", ())) > 1])
    return "\n".join(lines) + "\n"


def _records(results: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted((results / name).glob("*.json"))]


def _command(name: str, experiment: Experiment) -> str:
    own = any(kind(config.data.data) == "folder" for config in experiment.rows.values())
    return f"noiseproof reproduce {name}" + (" --data FOLDER" if own else "")


def anchor(title: str) -> str:
    """What a heading is called in a link."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def _table(experiment: Experiment, records: list[dict[str, Any]], absent: bool = True) -> list[str]:
    """A row for each that is measured, and, with `absent`, for each that the paper has."""
    titles = [heading(spec) for spec in experiment.suite]
    lines = [
        "| method | trainings | " + " | ".join(titles) + " |",
        "|---|---|" + "---|" * len(titles),
    ]
    for row in experiment.rows:
        mine, printed = [r for r in records if r["row"] == row], experiment.paper.get(row)
        if not mine and not (absent and printed):
            continue
        cells = [
            _cell(printed[i] if printed else None, [r["accuracy"].get(spec) for r in mine])
            for i, spec in enumerate(experiment.suite)
        ]
        lines.append(f"| {row} | {len(mine) or 'not run'} | " + " | ".join(cells) + " |")
    return lines


def _cell(paper: float | None, measured: list[dict[str, Any] | None]) -> str:
    values = [m["mean"] for m in measured if m]
    shown = "–" if paper is None else f"{paper:.2f}"
    if not values:
        return f"{shown} / not run"
    mean, draws = fmean(values), (measured[0] or {}).get("std")
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else f" ({draws:.2f})" if draws else ""
    difference = "" if paper is None else f" / {mean - paper:+.2f}".replace("-", "−")
    return f"{shown} / **{mean:.2f}**{spread}{difference}"


def _along(experiment: Experiment, records: list[dict[str, Any]]) -> list[str]:
    """What the paper's way to choose an epoch would have given, beside the last epoch."""
    if not records:
        return []
    lines = [
        "",
        _CHOSEN,
        "",
        "| training | seed | looked every | best epoch | "
        + " | ".join(heading(spec) for spec in experiment.suite)
        + " |",
        "|---|---|---|---|" + "---|" * len(experiment.suite),
    ]
    for r in records:
        seen = r["along"]
        best, last = max(seen, key=lambda row: row["accuracy"]["clean"]), seen[-1]
        late = [row["accuracy"] for row in seen if 3 * row["epoch"] > 2 * last["epoch"]]
        cells = " | ".join(
            f"{best['accuracy'][spec]:.2f} ({last['accuracy'][spec]:.2f}), "
            f"{min(row[spec] for row in late):.2f} to {max(row[spec] for row in late):.2f}"
            for spec in experiment.suite
        )
        lines.append(
            f"| {r['row']} | {r['seed']} | {seen[0]['epoch']} | {best['epoch']} | {cells} |"
        )
    return lines


def _provenance(records: list[dict[str, Any]]) -> list[str]:
    head = ("training", "seed", "epochs", "minutes (trainings at a time)", "engine", "device",
            "torch", "commit")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in records:
        e = r["environment"]
        minutes = f"{r['seconds'] / 60:.1f} ({r.get('jobs', '?')})"
        lines.append(
            f"| {r['row']} | {r['seed']} | {r['epochs']} | {minutes} | "
            f"{r['engine']}, {r['precision']} | {e['device']} | {e['torch']} | {e['commit']} |"
        )
    return lines
