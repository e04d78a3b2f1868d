"""The corruptions of a suite in few numbers: one for each corruption, and one for all of them.

A mean over the severities 1 to 5 is named like "fog:1..5", the mean over all corruptions and
severities "corruptions:1..5". They stand in tables, never in a run folder.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.evaluation.calibration import SCORES, mean_scores
from noiseproof.lab.evaluation.tables import Correct
from noiseproof.lab.runs import EvaluationRow
from noiseproof.perturb.text import CORRUPTIONS, steps

__all__ = ["ALL", "averaged", "averaged_correct"]

_OWN = (*SCORES, "bins")  # keys of a row that a mean does not share with it
_RANGE = ":1..5"
ALL = f"corruptions{_RANGE}"
_NAMES = tuple(dict.fromkeys(steps(text)[0].name for text in CORRUPTIONS))
_MEMBERS = {ALL: CORRUPTIONS} | {
    f"{name}{_RANGE}": tuple(text for text in CORRUPTIONS if steps(text)[0].name == name)
    for name in _NAMES
}


def averaged(rows: Iterable[EvaluationRow]) -> list[EvaluationRow]:
    """The rows of a suite of corruptions with means instead of single severities: first the rows
    that are no corruptions, then the mean over all of them, then those of each.

    A mean of draw d uses the only draw of deterministic corruptions for every d.

    Args:
        rows: of one or more runs, each with all corruptions and severities, or without any.
    """
    by_run: dict[tuple[str, str], dict[str, dict[int, EvaluationRow]]] = {}
    others: dict[tuple[str, str], list[EvaluationRow]] = {}
    for row in rows:
        key, name = (row["run"], row["weights"]), row["perturbation"]
        others.setdefault(key, [])
        if name in CORRUPTIONS:
            by_run.setdefault(key, {}).setdefault(name, {})[row["draw"]] = row
        else:
            others[key].append(row)
    result: list[EvaluationRow] = []
    for key, plain in others.items():
        result += plain
        cells = by_run.get(key, {})
        for mean, members in _MEMBERS.items() if cells else ():
            for draw in sorted({draw for member in members for draw in cells[member]}):
                used = [cells[member].get(draw, cells[member][0]) for member in members]
                value = float(np.mean([row["value"] for row in used]))
                changes = {"perturbation": mean, "level": None, "draw": draw, "value": value}
                seconds = sum(row["seconds"] for row in used)
                shared = {name: value for name, value in used[0].items() if name not in _OWN}
                result.append({**shared, **changes, "seconds": seconds, **mean_scores(used)})
    return result


def averaged_correct(correct: Correct) -> Correct:
    """Looks up predictions for means as well: those of all corruptions and severities in the mean,
    one after the other along the axis of the draws.

    Args:
        correct: looks them up for single perturbations.
    """

    def look_up(run: str, weights: str, perturbation: str) -> NDArray[np.bool_] | None:
        parts = [
            correct(run, weights, name) for name in _MEMBERS.get(perturbation, (perturbation,))
        ]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        most = max(len(part) for part in known)  # a deterministic one weighs as much as the others
        return np.concatenate([np.repeat(p, most // len(p), axis=0) for p in known])

    return look_up
