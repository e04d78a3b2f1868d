"""What stands below a table: what its numbers and marks mean, and which methods only guess."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from noiseproof.lab.evaluation.writers import column_title

if TYPE_CHECKING:
    from noiseproof.lab.evaluation.tables import Table, Test

__all__ = ["guesses", "notes", "tested_by", "trainings"]

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
    clean = next((s for s in table.perturbations if column_title(s) == "clean"), "")
    return [
        f"{label} is no better than a guess: its {table.percent(table.cells[label, clean].mean)} % "
        "on clean images is not above what always answering the most frequent class gives, "
        f"{table.percent(table.guess or 0.0)} %."
        for label in table.guessing
    ]
