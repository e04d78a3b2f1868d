"""The paper's tables from the records of `reproduce`, as Markdown: what was measured, and how far
that is from the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from noiseproof.lab.recipes import kind
from noiseproof.paper.experiments import EXPERIMENTS, Experiment
from noiseproof.paper.records import Record, read_records
from noiseproof.perturb.text import heading

_EPOCH_CHOICE = """\
What it would be worth to choose the epoch by accuracy on the clean **test** images, as the paper
does. Each cell has the accuracy at that epoch minus the accuracy at the last one, then the range
over all evaluated epochs in the last third of training. One noise draw each. No result is chosen
this way."""


def section(results: Path, name: str, *, digits: int = 2) -> str:
    """One experiment: the command, the measured table, and its distance from the paper.

    Args:
        results: the folder of records; those of this experiment are in `results/NAME`.
        name: the experiment, one of `EXPERIMENTS`.
        digits: decimal places of an accuracy in percent.
    """
    experiment, found = EXPERIMENTS[name](), read_records(results, name)
    full = [r for r in found if not r["shortened"]]
    lines = [f"## {experiment.title}", "", f"`{_command(name, experiment)}`", ""]
    lines += measured(experiment, full, digits=digits)
    if experiment.paper and full:
        lines += ["", "Measured minus paper, in points:", ""]
        lines += differences(experiment, full)
    short = [r for r in found if r["shortened"]]
    for epochs in sorted({r["epochs"] for r in short}):
        lines += ["", f"Shortened to {epochs} epochs, with the schedule scaled:", ""]
        some = [r for r in short if r["epochs"] == epochs]
        lines += measured(experiment, some, digits=digits, missing=False)
    done = {r["row"] for r in full}
    ours = [f"`{row}`" for row in experiment.rows if row not in done | set(experiment.paper)]
    if ours:
        lines += ["", f"Defined but not run yet (not in the paper): {', '.join(ours)}."]
    return "\n".join(lines) + "\n"


def measured(
    experiment: Experiment,
    found: Sequence[Record],
    columns: Sequence[str] | None = None,
    *,
    digits: int = 2,
    missing: bool = True,
) -> list[str]:
    """A table of mean accuracies in %, with ± the standard deviation over trainings where there are
    several.

    Args:
        experiment: the table of the paper.
        found: its records.
        columns: perturbations to show; by default all of the experiment.
        digits: decimal places.
        missing: whether rows of the paper without a record are shown, as "not run".
    """

    def cell(row: str, spec: str) -> str:
        values = _means(found, row, spec)
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{spread}" if values else "not run"

    rows = [r for r in experiment.rows if _count(found, r) or (missing and r in experiment.paper)]
    return _table(experiment, found, rows, columns, cell)


def differences(
    experiment: Experiment, found: Sequence[Record], columns: Sequence[str] | None = None
) -> list[str]:
    """A table of measured minus paper, in points, of the rows that the paper has and we measured.

    Arguments as for `measured`.
    """

    def cell(row: str, spec: str) -> str:
        values = _means(found, row, spec)
        paper = experiment.paper[row][experiment.suite.index(spec)]
        if not values:
            return "–"
        points = round(fmean(values) - paper, 1)
        return "0.0" if points == 0 else f"{points:+.1f}".replace("-", "−")

    rows = [row for row in experiment.paper if _count(found, row)]
    return _table(experiment, found, rows, columns, cell)


def _table(
    experiment: Experiment,
    found: Sequence[Record],
    rows: Sequence[str],
    columns: Sequence[str] | None,
    cell: Callable[[str, str], str],
) -> list[str]:
    shown = list(columns or experiment.suite)
    lines = [_row(["", "trainings", *map(heading, shown)]), _row(["---"] * (2 + len(shown)))]
    for row in rows:
        cells = [cell(row, spec) for spec in shown]
        lines.append(_row([f"`{row}`", str(_count(found, row)), *cells]))
    return lines


def _count(found: Sequence[Record], row: str) -> int:
    return sum(r["row"] == row for r in found)


def _means(found: Sequence[Record], row: str, spec: str) -> list[float]:
    """The mean accuracy over noise draws, for each training."""
    return [r["accuracy"][spec]["mean"] for r in found if r["row"] == row and spec in r["accuracy"]]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _command(name: str, experiment: Experiment) -> str:
    own = any(kind(config.data.data) == "folder" for config in experiment.rows.values())
    return f"noiseproof reproduce {name}" + (" --data FOLDER" if own else "")


def sources(results: Path, name: str) -> str:
    """How the trainings of one experiment were made, and what choosing the epoch would be worth;
    empty where there are no records."""
    experiment, found = EXPERIMENTS[name](), read_records(results, name)
    if not found:
        return ""
    head = ("training", "seed", "epochs", "minutes", "trainings at a time", "engine", "device",
            "torch", "commit")  # fmt: skip
    lines = [f"## {experiment.title}", "", _row(head), _row(["---"] * len(head))]
    for r in found:
        machine, minutes = r["environment"], f"{r['seconds'] / 60:.1f}"
        lines.append(
            _row(
                [
                    *(f"`{r['row']}`", str(r["seed"]), str(r["epochs"])),
                    *(minutes, str(r.get("jobs", "?")), f"{r['engine']}, {r['precision']}"),
                    *(machine["device"], machine["torch"], machine["commit"] or "–"),
                ]
            )
        )
    lines += _epoch_choice(experiment, [r for r in found if len(r.get("along", ())) > 1])
    return "\n".join(lines) + "\n"


def _epoch_choice(experiment: Experiment, found: Sequence[Record]) -> list[str]:
    """What the paper's way to choose an epoch would have given, against the last epoch."""
    if not found:
        return []
    head = ["training", "seed", "evaluated every", "best epoch", *map(heading, experiment.suite)]
    lines = ["", _EPOCH_CHOICE, "", _row(head), _row(["---"] * len(head))]
    for r in found:
        looks = r["along"]
        best, last = max(looks, key=lambda look: look["accuracy"]["clean"]), looks[-1]
        late = [look["accuracy"] for look in looks if 3 * look["epoch"] > 2 * last["epoch"]]
        cells = []
        for spec in experiment.suite:
            gain = best["accuracy"][spec] - last["accuracy"][spec]
            text = f"{gain:+.2f}".replace("-", "−") if round(gain, 2) else "0"
            if len(late) > 1:
                values = [accuracy[spec] for accuracy in late]
                text += f", {min(values):.2f} to {max(values):.2f}"
            cells.append(text)
        epochs = f"{looks[0]['epoch']} epochs", str(best["epoch"])
        lines.append(_row([f"`{r['row']}`", str(r["seed"]), *epochs, *cells]))
    return lines
