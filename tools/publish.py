"""docs/results.md and docs/figures.md from the records in results/: the paper's tables with our
numbers beside them, and its figures.

    python -m tools.publish results docs

The pages are generated and never edited. Words stand in results/notes.md, and those that explain a
table in results/NAME/notes.md, and are copied after it; figures are those that `recipes.figures`
has drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from noiseproof.lab.recipe_kinds import kind
from noiseproof.paper.experiments import EXPERIMENTS, Experiment

_MADE = """\
Made by `python -m tools.publish results docs` from `results/`; not edited by hand."""

_HEAD = f"""# Results

{_MADE}
A record there is one training: config, seed, commit, versions, device, time, and the accuracy of
every noise draw.

A cell shows **paper / measured / difference**, in % of the test images. Measured is the mean over
noise draws (10 for random perturbations), with their standard deviation in brackets; with several
trainings it is the mean over them, and ± is the standard deviation between trainings. `–` is a
number that the paper does not give, `not run` one that we have not measured.
"""

_SOURCES = """## Where the numbers come from

`--only ROW --seed SEED` after a table's command makes one of its trainings, and `--along 10` looks
at it every tenth epoch. Minutes say little where trainings shared a GPU, which those of separate
commands did; the commands of a `(3)` shared it by `--jobs 3`.
"""

_CHOSEN = """\
What choosing the epoch by accuracy on the clean **test** images, as the paper does, would be worth:
accuracy at that epoch, and at the last in brackets; then the lowest and highest of all looks in the
last third of the training. One draw of noise each. No table above is chosen so."""


def pages(results: Path) -> dict[str, str]:
    """The pages by the names of their files. They lie in a folder beside `results`."""
    notes = results / "notes.md"
    words = [notes.read_text().strip() + "\n"] if notes.exists() else []
    tables = [section(results, name) for name in EXPERIMENTS]
    origins = [made for name in EXPERIMENTS if (made := sources(results, name))]
    drawn = [made for name in EXPERIMENTS if (made := _figures(results, name))]
    made = {
        "results.md": "\n".join(
            [_HEAD, *words, *tables, *([_SOURCES, *origins] if origins else [])]
        )
    }
    if drawn:
        made["figures.md"] = "\n".join(
            [
                "# Figures",
                "",
                _MADE,
                "What they show is said in [results.md](results.md).",
                "",
                *drawn,
            ]
        )
    return made


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
        lines += ["", f"Its figures: [figures.md](figures.md#{_anchor(experiment.title)})."]
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


def _anchor(title: str) -> str:
    """What a heading is called in a link."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def _figures(results: Path, name: str) -> str:
    file = results / name / "figures" / "figures.json"
    if not file.exists():
        return ""
    content = json.loads(file.read_text())
    runs = ", ".join(f"`{run['run']}`" for run in content["runs"])
    lines = [
        f"## {EXPERIMENTS[name]().title}",
        "",
        f"Of {runs}, by `noiseproof analyse`; its numbers are in "
        f"`results/{name}/figures/numbers.jsonl`.",
    ]
    for figure in content["figures"]:
        place = f"../results/{name}/figures/{figure['file']}"
        lines += ["", f"![{figure['alt']}]({place})", "", figure["caption"]]
    return "\n".join(lines) + "\n"


def _table(experiment: Experiment, records: list[dict[str, Any]], absent: bool = True) -> list[str]:
    """A row for each that is measured, and, with `absent`, for each that the paper has."""
    titles = [_title(spec) for spec in experiment.suite]
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
        print("usage: python -m tools.publish RESULTS FOLDER", file=sys.stderr)
        return 2
    for name, text in pages(Path(argv[0])).items():
        (Path(argv[1]) / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
