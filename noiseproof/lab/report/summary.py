"""The report's words, computed from its rows: nothing about any method is written beforehand.

A difference counts as one only where the table's tests tell it from chance; otherwise the sentence
says that it cannot be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from noiseproof.lab.config import BASELINES
from noiseproof.lab.evaluation.tables import Cell, Table
from noiseproof.lab.evaluation.words import guesses, trainings
from noiseproof.lab.report.results import Results
from noiseproof.perturb.text import heading

__all__ = [
    "Fact",
    "costs",
    "duration",
    "facts",
    "first_alone",
    "headline",
    "listed",
    "number",
    "paragraph",
    "sentence",
]


class Fact(NamedTuple):
    """A number worth a large letter: what it is of, the number, who has it, and a remark."""

    title: str
    value: str
    who: str
    remark: str


def headline(results: Results) -> str:
    """Who is best, or cannot be told from the best, wherever it was tested."""
    table = results.table
    if len(table.guessing) == len(table.labels):
        who = table.labels[0] if len(table.labels) == 1 else f"No {table.by}"
        verb = "is no better than a guess" if len(table.labels) == 1 else "is better than a guess"
        guess = table.percent(table.guess or 0.0)
        return (
            f"{who} {verb}: always answering the most frequent class would do at least as well, "
            f"with {guess} % of clean images."
        )
    if len(table.labels) == 1:
        return _alone(table)
    places = len(table.perturbations)
    everywhere = [x for x in table.labels if all(_near(table, x, s) for s in table.perturbations)]
    every = "the" if places == 2 else "all"
    where = f"in {every} {number(places)} conditions tested" if places > 1 else "on clean images"
    if not everywhere:
        return f"No {table.by} is best, or within noise of the best, {where}."
    if len(everywhere) == len(table.labels):
        return f"No difference between the {table.by}s stands out from noise {where}."
    only = "Only " if len(everywhere) == 1 else ""
    verb = "is" if len(everywhere) == 1 else "are"
    outright = [s for s in table.perturbations if _leaders(table, s)[1:] == ([], [])]
    if len(everywhere) == 1 and len(outright) == places:
        return f"{everywhere[0]} is best {where}."
    return f"{only}{listed(everywhere)} {verb} best, or within noise of the best, {where}."


def paragraph(results: Results) -> list[str]:
    """What was done, what came out where it matters most, and what it cost."""
    table = results.table
    sentences = [_setting(results), *guesses(table)]
    chosen = [spec for spec in table.perturbations if spec == "clean"]
    telling = results.telling()
    chosen += [telling] if telling else []
    if len(table.labels) > 1:
        sentences += [sentence(table, spec) for spec in chosen]
        cost = _cost_sentence(results)
        sentences += [cost] if cost else []
        if results.by == "method" and table.seeds == 1:
            sentences.append(
                f"Each {table.by} was trained once: the tests compare these trained models, and "
                "another seed may change small differences."
            )
    return sentences


def sentence(table: Table, spec: str) -> str:
    """Who is best under `spec`, by how much, and who cannot be told from it.

    Points are percentage points on the same images; the interval is the table's, over trainings or
    over test images.
    """
    where = "On clean images" if spec == "clean" else f"At {heading(spec)}"
    best, near, untested = _leaders(table, spec)
    present = _present(table, spec)
    if not [x for x in present if x not in best]:
        verb = "is" if len(best) == 1 else "are level"
        return f"{where}, {listed(best)} {verb} at {_mean(table, best[0], spec)} %."
    verb = "has" if len(best) == 1 else "share"
    text = f"{where}, {listed(best)} {verb} the highest mean, {_mean(table, best[0], spec)} %"
    far = [x for x in present if x not in (*best, *near, *untested)]
    if near and not far and not untested:
        given = {test for x in near for test in table.cells[x, spec].unsure}
        by = "with these trainings" if "welch" in given else "on these images"
        return text + f", but no {table.by} can be told from it {by}."
    if near:
        text += f"; {listed(near)} cannot be told from {'it' if len(best) == 1 else 'them'}"
    elif far:
        second = max(far, key=lambda x: table.cells[x, spec].mean)
        ahead = 100 * (table.cells[best[0], spec].mean - table.cells[second, spec].mean)
        text += f", {ahead:.1f} points above {second}, the next"
        text += _interval(table.cells[second, spec])
        far = [x for x in far if x != second]
    if untested:
        text += f"; {listed(untested)} could not be tested against it"
    if far:
        worst = min(far, key=lambda x: table.cells[x, spec].mean)
        lowest = min(table.cells[x, spec].mean for x in present)
        place = "last" if table.cells[worst, spec].mean == lowest else "lower"
        text += f"; {worst} is {place} with {_mean(table, worst, spec)} %"
    return text + "."


def facts(results: Results) -> list[Fact]:
    """The highest accuracy on clean images and where the methods differ most, and the cost."""
    table = results.table
    found: list[Fact] = []
    telling = results.telling()
    for spec in [s for s in table.perturbations if s == "clean"] + ([telling] if telling else []):
        best, near, _ = _leaders(table, spec)
        title = "Clean images" if spec == "clean" else f"{heading(spec)}"
        if spec != "clean" and len(table.labels) > 1:
            title += ", where they differ most"
        low = min(table.cells[x, spec].mean for x in _present(table, spec))
        if best[0] in table.guessing:
            remark = "no more than guessing gives"
        elif near:
            remark = f"not told apart: {', '.join(near)}"
        elif len(_present(table, spec)) > len(best):
            remark = f"the lowest has {table.percent(low)} %"
        else:
            remark = ""
        found.append(Fact(title, f"{_mean(table, best[0], spec)} %", ", ".join(best), remark))
    times = costs(results)
    leader = _leaders(table, telling or table.perturbations[0])[0][0]
    base = next((name for name in BASELINES if name in times and name != leader), None)
    if leader in times and base:
        ratio, remark = times[leader] / times[base], f"against {base}, {duration(times[base])}"
        found.append(Fact("Training time", f"{ratio:.1f} ×", leader, remark))
    elif leader in times:
        found.append(Fact("Training time", duration(times[leader]), leader, ""))
    return found


def costs(results: Results) -> dict[str, float]:
    """Seconds of one training of each label, the mean over its trainings, where recorded."""
    found: dict[str, float] = {}
    for label, keys in results.groups.items():
        seconds = [results.runs[key].info.get("seconds") for key in keys]
        known = [float(s) for s in seconds if isinstance(s, (int, float))]
        if known:
            found[label] = sum(known) / len(known)
    return found


def first_alone(results: Results) -> str:
    """Said where a section shows one training of each label and the table several; else empty."""
    if all(len(keys) == 1 for keys in results.groups.values()):
        return ""
    seeds = {results.run(label).config.run.seed for label in results.groups}
    which = f" (seed {min(seeds)})" if len(seeds) == 1 else ""
    return (
        f" Of the trainings of each {results.by} the first alone is shown here{which}, so that "
        "numbers may differ from the table's means."
    )


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _setting(results: Results) -> str:
    table, config = results.table, results.first.config
    labels, seeds = len(table.labels), table.seeds
    each = "once" if seeds == 1 else f"with {trainings(table)} seeds"
    epochs = {run.config.optim.epochs for run in results.runs.values()}
    once = epochs == {1}
    length = f" for {'one epoch' if once else f'{min(epochs)} epochs'}" if len(epochs) == 1 else ""
    model = {run.config.model.model for run in results.runs.values()}
    who = (
        f"{number(labels).capitalize()} {table.by}s were" if labels > 1
        else f"{table.labels[0]} was"
    )  # fmt: skip
    many = len(table.perturbations)
    conditions = "one condition" if many == 1 else f"{number(many)} conditions"
    draws = f", each noise drawn {table.draws} times" if table.draws > 1 else ""
    return (
        f"{who} trained {each} on {results.data_name}"
        f" ({' / '.join(sorted(model))}{length}, training noise {config.method.noise})"
        f" and tested on the same {table.n:,} images under"
        f" {conditions}{draws}."
    )


def _alone(table: Table) -> str:
    label = table.labels[0]
    cells = {spec: table.cells[label, spec] for spec in table.perturbations}
    worst = min(cells, key=lambda spec: cells[spec].mean)
    if "clean" in cells and worst != "clean":
        lost = 100 * (cells["clean"].mean - cells[worst].mean)
        return (
            f"{label} has {table.percent(cells['clean'].mean)} % on clean images and keeps "
            f"{table.percent(cells[worst].mean)} % at {heading(worst)}, "
            f"{lost:.1f} points less."
        )
    return f"{label} has {table.percent(cells[worst].mean)} % ({heading(worst)})."


def _cost_sentence(results: Results) -> str | None:
    """Times against `both` where it is there (the plain way to train on noise), else `normal`."""
    times = costs(results)
    if len(times) < 2:
        return None
    base = _reference(times)
    ratios = [f"{x} {seconds / times[base]:.1f} ×" for x, seconds in times.items() if x != base]
    return (
        f"One training took {duration(times[base])} with {base}; against that, "
        f"{listed(ratios)} (as timed, whatever else the machine was doing)."
    )


def _reference(times: dict[str, float]) -> str:
    return next((name for name in BASELINES if name in times), next(iter(times)))


def duration(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def _leaders(table: Table, spec: str) -> tuple[list[str], list[str], list[str]]:
    """(labels with the highest mean, those not told from it, those not tested)."""
    present = _present(table, spec)

    def marked(mark: str) -> list[str]:
        return [x for x in present if table.cells[x, spec].mark == mark]

    return marked("best"), marked("close"), marked("untested")


def _present(table: Table, spec: str) -> list[str]:
    return [x for x in table.labels if (x, spec) in table.cells]


def _near(table: Table, label: str, spec: str) -> bool:
    cell = table.cells.get((label, spec))
    return cell is not None and cell.mark in ("best", "close")


def _mean(table: Table, label: str, spec: str) -> str:
    return table.percent(table.cells[label, spec].mean)


def _interval(cell: Cell) -> str:
    if cell.behind is None:
        return ""
    low, high = -100 * cell.behind.high, -100 * cell.behind.low
    return f" (95 % interval over {cell.over} {low:.1f} to {high:.1f})"


def number(n: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[n] if n < len(words) else str(n)
