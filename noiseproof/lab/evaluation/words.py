"""What a table says in words: its notes, what a column shows, and which methods only guess."""

from __future__ import annotations

from collections import Counter

from noiseproof.lab.evaluation.tables import Table, Test
from noiseproof.perturb.text import heading, is_clean

__all__ = ["guesses", "notes", "sentence", "summary", "tested_by", "trainings"]

_TESTS: dict[Test, str] = {
    "welch": "Welch's t-test over trainings",
    "bootstrap": "a paired bootstrap over test images",
    "mcnemar": "McNemar's exact test where each image has one prediction",
}


def notes(table: Table) -> list[str]:
    lines = [f"Accuracy in % on {table.n:,} test images."]
    if table.seeds > 1:
        lines.append(
            f"Mean over {trainings(table)} trainings ± standard deviation over trainings; in "
            "brackets the standard deviation over noise draws of one training."
        )
    elif table.draws > 1:
        lines.append(
            f"± is the standard deviation over {table.draws} noise draws of one training; a "
            "value without ± comes from a single pass."
        )
    marks = {cell.mark for cell in table.cells.values()}
    if "close" in marks:
        lines.append(
            f"≈ cannot be told from the best of its column (5 % level, by {tested_by(table)})."
        )
    if "untested" in marks:
        lines.append("? could not be tested against the best of its column.")
    weights = Counter(table.weights.values())
    if len(weights) > 1 and max(weights.values()) > 1:
        lines.append("Weights of the last and of the best epoch are ranked apart.")
    return [*lines, *guesses(table)]


def trainings(table: Table) -> str:
    """How many a cell has: '3', or 'up to 3' where some have fewer."""
    fewest = min(cell.seeds for cell in table.cells.values())
    return f"{'up to ' if fewest < table.seeds else ''}{table.seeds}"


def tested_by(table: Table) -> str:
    """The tests that were made, in words; empty where there was none."""
    made = {test for cell in table.cells.values() for test in cell.tests}
    used = [words for test, words in _TESTS.items() if test in made]
    return " or ".join([", ".join(used[:-1]), used[-1]] if len(used) > 1 else used)


def guesses(table: Table) -> list[str]:
    """A sentence on each label that one answer for all images would equal."""
    clean = next((s for s in table.perturbations if is_clean(s)), "")
    return [
        f"{label} is no better than a guess: its {table.percent(table.cells[label, clean].mean)} % "
        "on clean images is not above what always answering the most frequent class gives, "
        f"{table.percent(table.guess or 0.0)} %."
        for label in table.guessing
    ]


def sentence(table: Table, spec: str, weights: str | None = None) -> str:
    """What one column says: who stands apart from the best, and who cannot be told from it.

    Of a table of both weights, those of the last epoch and of the best are spoken of apart.
    """
    cells = {
        label.removesuffix(f" ({weights} epoch)"): table.cells[label, spec]
        for label in table.labels
        if (label, spec) in table.cells and weights in (None, table.weights[label])
    }
    order = sorted(cells, key=lambda label: cells[label].mean)
    best = order[-1]
    near = [label for label in order if cells[label].mark in ("best", "close")]
    far = [label for label in order if cells[label].mark == ""]
    untested = [label for label in order if cells[label].mark == "untested"]
    words = [f"{label} {table.percent(cells[label].mean)} %" for label in far]
    if len(near) == 1:
        words.append(f"best {best} {table.percent(cells[best].mean)} %")
    else:
        if len(near) == len(order):
            who = f"{'the' if len(near) == 2 else 'all'} {_count(len(near))} {table.by}s"
        elif len(near) > 2 and not untested:
            who = f"the other {_count(len(near))}"
        else:
            who = " and ".join(near) if len(near) == 2 else ", ".join(near)
        low, high = (table.percent(cells[near[i]].mean) for i in (0, -1))
        span = f"at {low} %" if low == high else f"between {low} and {high} %"
        few = min(cells[label].seeds for label in near) == 2
        told = "not told from" if few else "within noise of"
        words.append(f"{who} {span}, {told} the best ({best})")
    words += [f"{x} {table.percent(cells[x].mean)} % (not tested)" for x in untested]
    where = "On clean images" if is_clean(spec) else f"At {heading(spec)}"
    if weights:
        where = f"Weights of the {weights} epoch, {where[0].lower()}{where[1:]}"
    return f"{where}: {'; '.join(words)}."


def summary(table: Table) -> list[str]:
    """Sentences from the table: clean images, the column that differs most, the caveat: a test
    between two trainings and two has so little to go by that it can miss thirty points."""

    kinds = dict.fromkeys(table.weights.values())
    text = [line for kind in kinds for line in _sentences(table, kind, len(kinds) > 1)]
    if not text:
        return []
    if table.by == "method" and table.seeds == 1:
        text.append("One training a method: another seed may change small differences.")
    if table.by == "method" and table.seeds == 2:
        text.append(
            "Two trainings a method tell little: three or more (--seeds) tell methods apart."
        )
    return text


def _sentences(table: Table, weights: str, apart: bool) -> list[str]:
    """Those about the labels of these weights; none where a label is alone."""
    labels = [label for label in table.labels if table.weights[label] == weights]
    if len(labels) == 1:
        return []
    means = {
        spec: [table.cells[x, spec].mean for x in labels if (x, spec) in table.cells]
        for spec in table.perturbations
    }
    gaps = {spec: max(values) - min(values) for spec, values in means.items() if values}
    chosen = [spec for spec in gaps if is_clean(spec)]
    noisy = [spec for spec in gaps if spec not in chosen]
    if noisy:
        chosen.append(max(noisy, key=lambda spec: gaps[spec]))
    return [sentence(table, spec, weights if apart else None) for spec in chosen]


def _count(n: int) -> str:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[n] if n < len(words) else str(n)
