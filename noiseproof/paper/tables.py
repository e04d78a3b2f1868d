"""The paper's tables from the records of `reproduce`, as Markdown: what was measured, and how far
that is from the paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from noiseproof.lab.evaluation.suites import SENSOR
from noiseproof.lab.files import without_checksum
from noiseproof.lab.recipes import kind
from noiseproof.paper.experiments import EXPERIMENTS, Experiment
from noiseproof.perturb.text import CORRUPTIONS, heading

Record = dict[str, Any]  # of one training; `noiseproof.paper.reproduce` writes them

_EPOCH_CHOICE = """\
What choosing the epoch by accuracy on the clean **test** images, as the authors' code does, would
gain. Each cell has the accuracy at that epoch minus that at the last one, then the range over all
epochs evaluated in the last third of training. One noise draw each. No result is chosen
this way."""


MEAN_CORRUPTION, ECE = "corruptions", "ece"  # columns that are not perturbations
_DERIVED = {MEAN_CORRUPTION: "mean of 75 corruptions", ECE: "calibration error, clean"}


def read_records(results: Path, experiment: str) -> list[Record]:
    """The records of one experiment, in the order of their file names.

    Args:
        results: the folder of all records.
        experiment: the name of the experiment.
    """
    return [_read_record(file) for file in sorted((results / experiment).glob("*.json"))]


def _read_record(file: Path) -> Record:
    try:
        return without_checksum(json.loads(file.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} is damaged ({error}); delete it and repeat the command, which writes it again"
        ) from None


def whole(records: Iterable[Record]) -> list[Record]:
    """The records without those of shortened trainings."""
    return [r for r in records if not r["shortened"]]


def section(results: Path, name: str) -> str:
    """One experiment: the command, the measured table, and its differences from the paper.

    Args:
        results: the folder of records; those of this experiment are in `results/NAME`.
        name: the experiment, one of `EXPERIMENTS`.
    """
    experiment, records = EXPERIMENTS[name](), read_records(results, name)
    full = whole(records)
    own_data = any(kind(config.data.data) == "folder" for config in experiment.rows.values())
    command = f"noiseproof reproduce {name}" + (" --data FOLDER" if own_data else "")
    lines = [f"## {experiment.title}", "", f"`{command}`", ""]
    lines += measured(experiment, full)
    epochs = {r["row"]: r["epochs"] for r in full}
    if len(set(epochs.values())) > 1:  # rows with one view or three, beside those with two
        groups = [
            f"{n} ({', '.join(f'`{row}`' for row in experiment.rows if epochs.get(row) == n)})"
            for n in sorted(set(epochs.values()), reverse=True)
        ]
        lines += ["", f"Epochs, for the same number of views: {', '.join(groups)}."]
    if experiment.once and full:
        lines += ["", "By corruption, the mean over five severities:", ""]
        lines += by_condition(experiment, full, _by_corruption())
    if any(SENSOR[0] in r["accuracy"] for r in full):  # earlier records have none
        lines += ["", "Under the noise of cameras and in low light:", ""]
        lines += by_condition(experiment, full, {heading(spec): (spec,) for spec in SENSOR})
    if experiment.paper and full:
        lines += ["", "Measured minus paper, in points:", ""]
        lines += differences(experiment, full)
    short = [r for r in records if r["shortened"]]
    for epochs in sorted({r["epochs"] for r in short}):
        length = f"{epochs} epoch{'s' * (epochs > 1)}"
        lines += ["", f"Shortened to {length}, with the schedule scaled:", ""]
        same = [r for r in short if r["epochs"] == epochs]
        lines += measured(experiment, same, missing=False)
    done = {r["row"] for r in full}
    ours = [f"`{row}`" for row in experiment.rows if row not in done | set(experiment.paper)]
    if ours:
        lines += ["", f"Defined but not run yet (not in the paper): {', '.join(ours)}."]
    return "\n".join(lines) + "\n"


def measured(
    experiment: Experiment,
    records: Sequence[Record],
    columns: Sequence[str] | None = None,
    *,
    digits: int = 2,
    missing: bool = True,
) -> list[str]:
    """A table of mean accuracies in %, with ± the standard deviation over trainings where there are
    several.

    Args:
        experiment: the table of the paper.
        records: its records.
        columns: perturbations to show, or `MEAN_CORRUPTION`, or `ECE`; by default all that the
            experiment measures.
        digits: decimal places.
        missing: whether rows of the paper without a record are shown, as "not run".
    """

    def cell(row: str, spec: str, values: list[float]) -> str:
        return _mean(values, digits)

    done = {r["row"] for r in records}
    rows = [row for row in experiment.rows if row in done or (missing and row in experiment.paper)]
    derived = tuple(_DERIVED) if experiment.once else ()
    return _accuracies(records, rows, columns or (*experiment.suite, *derived), cell)


def differences(
    experiment: Experiment, records: Sequence[Record], columns: Sequence[str] | None = None
) -> list[str]:
    """A table of measured minus paper, in points, of the rows that the paper has and we measured.

    Arguments as for `measured`.
    """

    def cell(row: str, spec: str, values: list[float]) -> str:
        if not values:
            return "–"
        points = round(fmean(values) - experiment.paper[row][experiment.suite.index(spec)], 1)
        return "0.0" if points == 0 else f"{points:+.1f}".replace("-", "−")

    done = {r["row"] for r in records}
    rows = [row for row in experiment.paper if row in done]
    return _accuracies(records, rows, columns or experiment.suite, cell)


def gains(
    pairs: Mapping[str, tuple[Sequence[Record], Sequence[Record]]], columns: Sequence[str]
) -> list[str]:
    """A table of what one row gains over another, in points, ± the standard error of the difference
    over trainings. Differences of more than two standard errors are bold, and columns that were not
    measured have a dash.

    Args:
        pairs: records of the one and of the other row, at least two each, by title of the line.
        columns: as for `measured`.
    """

    def cell(ours: list[float], theirs: list[float]) -> str:
        if not ours:
            return "–"
        gain = fmean(ours) - fmean(theirs)
        error = sum(variance(values) / len(values) for values in (ours, theirs)) ** 0.5
        text = f"{gain:+.2f} ± {error:.2f}".replace("-", "−")
        return f"**{text}**" if abs(gain) > 2 * error else text

    lines = []
    for title, (ours, theirs) in pairs.items():
        lines.append([title, *(cell(_values(ours, c), _values(theirs, c)) for c in columns)])
    return _table(["", *(_DERIVED.get(c) or heading(c) for c in columns)], lines)


def _accuracies(
    records: Sequence[Record],
    rows: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[str, str, list[float]], str],
) -> list[str]:
    """A table whose cells are made from a row, a column, and the value of each training."""
    lines = []
    for row in rows:
        trainings = [r for r in records if r["row"] == row]
        cells = (cell(row, spec, _values(trainings, spec)) for spec in columns)
        lines.append([f"`{row}`", len(trainings), *cells])
    return _table(["", "trainings", *(_DERIVED.get(c) or heading(c) for c in columns)], lines)


def _values(trainings: Sequence[Record], column: str) -> list[float]:
    """The value of a column for each training that has one: an accuracy in %, the mean over noise
    draws; or a column of `_DERIVED`."""
    if column == ECE:
        scores = [r["calibration"]["clean"]["ece"] for r in trainings if "calibration" in r]
        return [100 * score for score in scores]
    specs = CORRUPTIONS if column == MEAN_CORRUPTION else (column,)
    return [_over(r, specs) for r in _with(trainings, specs)]


def _with(trainings: Iterable[Record], specs: Iterable[str]) -> list[Record]:
    """The trainings that were tested under all of these perturbations."""
    needed = set(specs)
    return [r for r in trainings if r["accuracy"].keys() >= needed]


def _over(training: Record, specs: Iterable[str]) -> float:
    """The mean accuracy of a training over perturbations, in %."""
    return fmean(training["accuracy"][spec]["mean"] for spec in specs)


def _mean(values: Sequence[float], digits: int) -> str:
    """The mean, with ± the standard deviation if there are several values."""
    if not values:
        return "not run"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    mean = round(fmean(values), 6)  # equal means look equal, whatever the last bits of their sums
    return f"{mean:.{digits}f}{spread}"


def _by_corruption() -> dict[str, tuple[str, ...]]:
    """The severities of each corruption, by its name as code."""
    groups = groupby(CORRUPTIONS, lambda spec: spec.partition(":")[0])
    return {f"`{name}`": tuple(specs) for name, specs in groups}


def by_condition(
    experiment: Experiment, records: Sequence[Record], conditions: Mapping[str, Sequence[str]]
) -> list[str]:
    """A table of mean accuracies in %, ± the standard deviation over trainings: a line per
    condition, and a column per row that was tested under all of them.

    Args:
        experiment: the table of the paper.
        records: its records. Trainings without one of the conditions do not count.
        conditions: perturbations by title; a cell is their mean.
    """
    tested = _with(records, (spec for specs in conditions.values() for spec in specs))
    trainings = {row: [r for r in tested if r["row"] == row] for row in experiment.rows}
    columns = {row: found for row, found in trainings.items() if found}
    lines: list[list[object]] = [["trainings", *map(len, columns.values())]]
    for title, specs in conditions.items():
        cells = (_mean([_over(r, specs) for r in found], 1) for found in columns.values())
        lines.append([title, *cells])
    return _table(["", *(f"`{row}`" for row in columns)], lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def sources(results: Path, name: str) -> str:
    """How the trainings of one experiment were made, and what choosing the epoch would gain;
    empty if there are no records."""
    experiment, records = EXPERIMENTS[name](), read_records(results, name)
    if not records:
        return ""
    head = "training, seed, epochs, minutes, trainings at a time, engine, device, torch, commit"
    rows = []
    for r in records:
        machine, minutes = r["environment"], f"{r['seconds'] / 60:.1f}"
        run = (minutes, r.get("jobs", "?"), f"{r['engine']}, {r['precision']}")
        versions = (machine["device"], machine["torch"], machine["commit"] or "–")
        rows.append((f"`{r['row']}`", r["seed"], r["epochs"], *run, *versions))
    lines = [f"## {experiment.title}", "", *_table(head.split(", "), rows)]
    lines += _epoch_choice(experiment, [r for r in records if len(r.get("along", ())) > 1])
    return "\n".join(lines) + "\n"


def _epoch_choice(experiment: Experiment, records: Sequence[Record]) -> list[str]:
    """What the paper's way of choosing an epoch would have gained over the last epoch."""
    if not records:
        return []
    head = ["training", "seed", "evaluated every", "best epoch", *map(heading, experiment.suite)]
    rows = []
    for r in records:
        tests = r["along"]
        best, last = max(tests, key=lambda test: test["accuracy"]["clean"]), tests[-1]
        late = [test["accuracy"] for test in tests if 3 * test["epoch"] > 2 * last["epoch"]]
        cells = []
        for spec in experiment.suite:
            gain = best["accuracy"][spec] - last["accuracy"][spec]
            text = f"{gain:+.2f}".replace("-", "−") if round(gain, 2) else "0"
            if len(late) > 1:
                values = [accuracy[spec] for accuracy in late]
                text += f", {min(values):.2f} to {max(values):.2f}"
            cells.append(text)
        epochs = f"{tests[0]['epoch']} epochs", best["epoch"]
        rows.append((f"`{r['row']}`", r["seed"], *epochs, *cells))
    return ["", _EPOCH_CHOICE, "", *_table(head, rows)]
