"""docs/results.md from the records in results/: the paper's tables with our numbers beside them.

    python -m noiseproof.recipes.publish results docs/results.md

The page is generated and never edited. Words stand in results/notes.md, and those that explain a
table in results/NAME/notes.md, and are copied into it; figures that `recipes.figures` has drawn
follow the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from noiseproof.recipes.experiments import EXPERIMENTS, Experiment

_HEAD = """# Results

Made by `python -m noiseproof.recipes.publish results docs/results.md` from the records in
`results/`; not edited by hand. A record is one training: config, seed, commit, versions, device,
time, and the accuracy of every noise draw.

A cell shows **paper / measured / difference**, in % of the test images. Measured is the mean over
noise draws (10 for random perturbations), with their standard deviation in brackets; with several
trainings it is the mean over them, and ± is the standard deviation between trainings. `–` is a
number that the paper does not give, `not run` one that we have not measured.
"""


def page(results: Path) -> str:
    """The whole page. It lies in a folder beside `results`."""
    notes = results / "notes.md"
    words = [notes.read_text().strip() + "\n"] if notes.exists() else []
    return "\n".join([_HEAD, *words, *(section(results, name) for name in EXPERIMENTS)])


def section(results: Path, name: str) -> str:
    """The part of one experiment: notes, table, where the numbers come from, figures."""
    experiment, notes = EXPERIMENTS[name](), results / name / "notes.md"
    records = [json.loads(p.read_text()) for p in sorted((results / name).glob("*.json"))]
    lines = [f"## {experiment.title}", "", f"`noiseproof reproduce {name}`", ""]
    if notes.exists():
        lines += [notes.read_text().strip(), ""]
    whole = [r for r in records if not r["shortened"]]
    lines += _table(
        experiment, {row: [r for r in whole if r["row"] == row] for row in experiment.rows}
    )
    short = [r for r in records if r["shortened"]]
    for epochs in sorted({r["epochs"] for r in short}):
        lines += ["", f"Shortened to {epochs} epochs (the schedule scaled):", ""]
        mine = [r for r in short if r["epochs"] == epochs]
        rows = [row for row in experiment.rows if any(r["row"] == row for r in mine)]
        lines += _table(experiment, {row: [r for r in mine if r["row"] == row] for row in rows})
    if records:
        lines += ["", *_provenance(records)]
    lines += _along(experiment, [r for r in records if r.get("along")])
    drawn = results / name / "figures" / "figures.json"
    if drawn.exists():
        lines += _figures(name, json.loads(drawn.read_text()))
    return "\n".join(lines) + "\n"


def _figures(name: str, content: dict[str, Any]) -> list[str]:
    runs = ", ".join(f"`{run['run']}`" for run in content["runs"])
    numbers = f"results/{name}/figures/numbers.jsonl"
    lines = ["", f"Figures of {runs}, by `noiseproof analyse`; its numbers are in `{numbers}`:"]
    for figure in content["figures"]:
        place = f"../results/{name}/figures/{figure['file']}"
        lines += ["", f"![{figure['alt']}]({place})", "", figure["caption"]]
    return lines


def _table(experiment: Experiment, rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    titles = [_title(spec) for spec in experiment.suite]
    lines = [
        "| method | trainings | " + " | ".join(titles) + " |",
        "|---|---|" + "---|" * len(titles),
    ]
    for row, records in rows.items():
        printed = experiment.paper.get(row)
        cells = [
            _cell(printed[i] if printed else None, [r["accuracy"].get(spec) for r in records])
            for i, spec in enumerate(experiment.suite)
        ]
        lines.append(f"| {row} | {len(records) or 'not run'} | " + " | ".join(cells) + " |")
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
        "What choosing the epoch by accuracy on the clean **test** images, as the paper does, "
        "would be worth: accuracy at that epoch, and at the last in brackets; then the lowest and "
        "highest of all looks in the last third of the training. One draw of noise each. Nothing "
        "above is chosen so.",
        "",
        "| training | seed | looked every | best epoch | "
        + " | ".join(_title(spec) for spec in experiment.suite)
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


def _title(spec: str) -> str:
    return spec.replace("gaussian:", "σ=").replace("+", " + ").replace(":", " ")


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


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m noiseproof.recipes.publish RESULTS PAGE.md", file=sys.stderr)
        return 2
    Path(argv[1]).write_text(page(Path(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
