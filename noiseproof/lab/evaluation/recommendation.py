"""Which method to take: the decision that a comparison ends with.

The rule: of the methods that are not significantly below the highest mean accuracy over all noise
tested, those that are not significantly below the best on clean images either, if there are any;
of these, the one with the highest mean under noise, then on clean images. Means are compared by the
tests of `evaluation.tables`, over the same images and noise. For a kind of noise under which that
method is significantly below the best, another one is named by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import tables
from noiseproof.lab.evaluation.stats import Correct
from noiseproof.lab.evaluation.tables import Cell, Table
from noiseproof.lab.evaluation.words import condition, interval, listed, names, number_word, points
from noiseproof.lab.runs import EvaluationRow
from noiseproof.perturb.text import family, heading, is_clean

_ALL = "noise"  # the column of the mean over all noise


@dataclass(frozen=True)
class Recommendation:
    """A decision and its reasons.

    Attributes:
        label: the method or run to take.
        sentences: what to take, what it costs on clean images, how sure that is, and where another
            one is better.
        tied: those that are not significantly different under noise.
        seeds: the number of trainings per method that would say more; None if there is no tie over
            three trainings or more.
    """

    label: str
    sentences: tuple[str, ...]
    tied: tuple[str, ...] = ()
    seeds: int | None = None


def recommend(table: Table, rows: Iterable[EvaluationRow], correct: Correct) -> Recommendation:
    """The method or run to take; ValueError that says why if nothing can be recommended.

    Args:
        table: accuracies of one kind of weights.
        rows: those it was built from.
        correct: looks up predictions, as for `tables.build`.
    """
    learned = [label for label in table.labels if label not in table.at_chance]
    if not learned:
        raise ValueError(
            f"no {table.by} is better than always predicting the most frequent class; train longer "
            "(--epochs) or with another learning rate (--lr)"
        )
    kinds = _kinds(table, learned)
    if not kinds:
        raise ValueError(
            f"no noise was tested with every {table.by}; evaluate all of them under the same noise"
        )
    rows = [row for row in rows if printable(str(row[table.by])) in learned]
    means = _mean_table(table, kinds, rows, correct)
    clean = next((table.column(spec) for spec in table.perturbations if is_clean(spec)), {})
    cells = means.column(_ALL)
    label = _choose(cells, clean)
    tied = [x for x, cell in cells.items() if cell.mark and x != label]
    sentences = [
        _answer(table, cells, label, tied, _where(kinds[_ALL])),
        *_cost(table, clean, label),
        *_certainty(table, cells, label, tied),
        *(_elsewhere(table, means.column(kind), clean, label, kind) for kind in kinds),
    ]
    trainings = cells[label].seeds
    unsure = len(cells) > 1 and (tied or trainings < 3)
    return Recommendation(
        label, tuple(filter(None, sentences)), tuple(tied), _enough(trainings) if unsure else None
    )


def _choose(cells: Mapping[str, Cell], clean: Mapping[str, Cell]) -> str:
    """The label to take, by the rule of this module.

    Args:
        cells: mean accuracies under noise.
        clean: accuracies on clean images, if they were tested.
    """
    tied = [label for label, cell in cells.items() if cell.mark in ("best", "close")]
    also_clean = [label for label in tied if label in clean and clean[label].mark]

    def accuracies(label: str) -> tuple[float, float]:
        return cells[label].mean, clean[label].mean if label in clean else 0.0

    return max(also_clean or tied, key=accuracies)


def _answer(
    table: Table, cells: Mapping[str, Cell], label: str, tied: Sequence[str], where: str
) -> str:
    text = f"Take {names([label])}: {where} it has {table.percent(cells[label].mean)} % accuracy"
    highest = max(cells, key=lambda x: cells[x].mean)
    if len(cells) == 1:
        return f"{text}."
    if not tied:
        return f"{text}, significantly more than every other {table.by}."
    if cells[label].mark == "best" and any(cells[x].mark == "untested" for x in tied):
        return f"{text}, the highest, not tested against {names(tied)}."
    if cells[label].mark == "best":
        return f"{text}, the highest, in a statistical tie with {names(tied)}."
    top = table.percent(cells[highest].mean)
    return (
        f"{text}, statistically tied with the highest, {top} % of {names([highest])}, which is "
        "significantly lower on clean images."
    )


def _cost(table: Table, clean: Mapping[str, Cell], label: str) -> list[str]:
    """What the choice costs on clean images; nothing if they were not tested."""
    if label not in clean:
        return []
    cell, best = clean[label], max(clean, key=lambda x: clean[x].mean)
    text = f"On clean images it has {table.percent(cell.mean)} %"
    if len(clean) == 1:
        return [f"{text}."]
    if cell.mark == "best":
        return [f"{text}, the highest: robustness costs nothing there."]
    (lost,) = points(clean[best].mean - cell.mean)
    verdict = " (not a significant difference)" if cell.mark == "close" else interval(cell)
    return [f"{text}, {lost} points below the best, {names([best])}{verdict}."]


def _certainty(
    table: Table, cells: Mapping[str, Cell], label: str, tied: Sequence[str]
) -> list[str]:
    """How sure the choice is, and what would settle it."""
    if len(cells) == 1:
        return []
    trainings = cells[label].seeds
    flag = f" (`--seeds {_enough(trainings)}`)" if table.by == "method" else ""
    if tied:
        rivals = listed(f"{names([x])} {table.percent(cells[x].mean)} %" for x in tied)
        why = f"a tie with {rivals}, not significantly different; of tied {table.by}s, the "
        why += "highest mean is taken"
        if any(cells[x].mark == "untested" for x in tied):
            why = f"{rivals} could not be tested, for lack of stored predictions or of images"
        return [f"How sure: {why}. More trainings{flag} or more test images would settle it."]
    second = max((x for x in cells if x != label), key=lambda x: cells[x].mean)
    (lead,) = points(cells[label].mean - cells[second].mean)
    text = f"How sure: the next best, {names([second])}, is {lead} points lower"
    text += f"{interval(cells[second])}."
    if trainings < 3:
        count = f"{number_word(trainings)} training{'s' if trainings > 1 else ''}"
        text += (
            f" With {count} per {table.by} the variation between trainings is not covered; "
            f"more{flag} would show whether the order holds."
        )
    return [text]


def _enough(trainings: int) -> int:
    """How many trainings per method say more than `trainings`."""
    return 3 if trainings < 3 else 2 * trainings


def _elsewhere(
    table: Table, cells: Mapping[str, Cell], clean: Mapping[str, Cell], label: str, kind: str
) -> str:
    """What to take instead for one kind of noise; empty if the choice is not worse there."""
    if cells[label].mark:
        return ""
    other = _choose(cells, clean)
    (ahead,) = points(cells[other].mean - cells[label].mean)
    return (
        f"{kind}: take {names([other])} instead, with "
        f"{table.percent(cells[other].mean)} %, {ahead} points more."
    )


def _where(specs: Sequence[str]) -> str:
    """The noise that a mean is over.

    >>> _where(["gaussian:0.1", "gaussian:0.4"])
    'averaged over two levels of noise (σ=0.1 to σ=0.4)'
    """
    if len(specs) == 1:
        return condition(specs[0])
    count = number_word(len(specs))
    if len({family(spec) for spec in specs}) > 1:
        return f"averaged over {count} noise conditions"
    ends = f"{heading(specs[0])} to {heading(specs[-1])}"
    return f"averaged over {count} levels of noise ({ends})"


def _kinds(table: Table, labels: Sequence[str]) -> dict[str, list[str]]:
    """The noise that all labels were tested under: all of it, then by family if it has several."""
    shared = [
        spec
        for spec in table.columns
        if not is_clean(spec) and all((label, spec) in table.cells for label in labels)
    ]
    by_family: dict[str, list[str]] = {}
    for spec in shared:
        by_family.setdefault(family(spec), []).append(spec)
    kinds = {_ALL: shared} if shared else {}
    return kinds | (by_family if len(by_family) > 1 else {})


def _mean_table(
    table: Table,
    kinds: Mapping[str, Sequence[str]],
    rows: Sequence[EvaluationRow],
    correct: Correct,
) -> Table:
    """A table with one column for each kind of noise: the mean over its conditions, of which each
    has the same weight."""
    by_run: dict[str, dict[str, list[EvaluationRow]]] = {}
    for row in rows:
        by_run.setdefault(row["run"], {}).setdefault(row["perturbation"], []).append(row)
    means = []
    for cells in by_run.values():
        for kind, specs in kinds.items():
            if all(spec in cells for spec in specs):
                values = [np.mean([row["value"] for row in cells[spec]]) for spec in specs]
                mean = {"perturbation": kind, "draw": 0, "value": float(np.mean(values))}
                means.append({**cells[specs[0]][0], **mean})

    def correct_means(run: str, weights: str, kind: str) -> NDArray[np.floating] | None:
        parts = [correct(run, weights, spec) for spec in kinds[kind]]
        known = [part.mean(axis=0) for part in parts if part is not None]
        return np.stack(known) if len(known) == len(parts) else None

    return tables.build(means, by=table.by, correct=correct_means)
