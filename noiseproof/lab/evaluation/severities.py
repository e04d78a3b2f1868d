"""The corruptions of a suite in few numbers: one for each corruption, and one for all of them.

A mean over the severities 1 to 5 is named like "fog:1..5", the mean over all corruptions and
severities "corruptions:1..5". They stand in tables, never in a run folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.evaluation.calibration import SCORES, mean_scores
from noiseproof.lab.evaluation.stats import Correct
from noiseproof.lab.runs import EvaluationRow
from noiseproof.perturb import parse
from noiseproof.perturb.text import CORRUPTION_FAMILIES, CORRUPTIONS, heading, steps

_OWN = (*SCORES, "bins", "class_scores")  # keys of a row that a mean does not share with it
_RANGE = ":1..5"
ALL = f"corruptions{_RANGE}"
_MEMBERS = {
    f"{name}{_RANGE}": tuple(text for text in CORRUPTIONS if steps(text)[0].name == name)
    for name in CORRUPTION_FAMILIES
}
MEANS = tuple(_MEMBERS)
"""The means over severities, one for each corruption."""
_RANDOM = {text for text in CORRUPTIONS if not parse(text).deterministic}

_Cells = dict[str, dict[int, EvaluationRow]]  # by perturbation, by draw


def members(perturbation: str) -> tuple[str, ...]:
    """The perturbations in a mean; any other perturbation is its only member.

    >>> members("fog:1..5")[:2], members("gaussian:0.1")
    (('fog:1', 'fog:2'), ('gaussian:0.1',))
    """
    return CORRUPTIONS if perturbation == ALL else _MEMBERS.get(perturbation, (perturbation,))


def title(mean: str) -> str:
    """
    >>> title("jpeg:1..5"), title("gaussian_noise:1..5"), title(ALL)
    ('JPEG', 'gaussian noise', 'all 15')
    """
    return "all 15" if mean == ALL else heading(mean.removesuffix(_RANGE))


def averaged(rows: Iterable[EvaluationRow], keep: Collection[str] = ()) -> list[EvaluationRow]:
    """The rows with means instead of single severities, for each run that was tested under all
    corruptions and severities: first its other rows, then the mean over all corruptions, then those
    of each.

    Corruptions of a run that was tested under some of them only stay as they are, and so do those
    of the other runs under the same ones. Means have the draws that all random corruptions in them
    share; the only draw of deterministic ones counts for each.

    Args:
        rows: of one or more runs.
        keep: single severities that stay as well.
    """
    by_run: dict[tuple[str, str], _Cells] = {}
    for row in rows:
        cells = by_run.setdefault((row["run"], row["weights"]), {})
        cells.setdefault(row["perturbation"], {})[row["draw"]] = row
    kept = set(keep)
    for cells in by_run.values():
        if not _is_complete(cells):
            kept.update(cells)
    result: list[EvaluationRow] = []
    for cells in by_run.values():
        single = [name for name in cells if name not in CORRUPTIONS or name in kept]
        result += [row for name in single for row in cells[name].values()]
        for mean in (ALL, *MEANS) if _is_complete(cells) else ():
            result += _means(mean, {name: cells[name] for name in members(mean)})
    return result


def _is_complete(cells: Collection[str]) -> bool:
    return set(CORRUPTIONS) <= set(cells)


def _means(mean: str, cells: _Cells) -> list[EvaluationRow]:
    """The rows of a mean over all `cells`, one for each draw."""
    random = [set(by_draw) for name, by_draw in cells.items() if name in _RANDOM]
    rows = []
    for draw in sorted(set.intersection(*random)) if random else [0]:
        used = [by_draw[draw if name in _RANDOM else 0] for name, by_draw in cells.items()]
        value = float(np.mean([row["value"] for row in used]))
        changes = {"perturbation": mean, "level": None, "draw": draw, "value": value}
        seconds = sum(row["seconds"] for row in used)
        shared = {name: value for name, value in used[0].items() if name not in _OWN}
        rows.append({**shared, **changes, "seconds": seconds, **mean_scores(used)})
    return rows


def averaged_correct(correct: Correct) -> Correct:
    """Looks up predictions for means as well: those of all corruptions and severities in the mean,
    one after the other along the axis of the draws.

    Args:
        correct: looks them up for single perturbations.
    """

    def look_up(run: str, weights: str, perturbation: str) -> NDArray[np.bool_] | None:
        parts = {name: correct(run, weights, name) for name in members(perturbation)}
        known = {name: part for name, part in parts.items() if part is not None}
        if len(known) < len(parts):
            return None
        if len(known) == 1:
            return known[perturbation]
        # Every member weighs the same: as many draws of each random one, and copies of the others.
        draws = min([len(part) for name, part in known.items() if name in _RANDOM], default=1)
        equal = [
            p[:draws] if name in _RANDOM else np.repeat(p, draws, 0) for name, p in known.items()
        ]
        return np.concatenate(equal)

    return look_up
