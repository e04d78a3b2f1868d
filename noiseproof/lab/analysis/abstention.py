"""Which score best detects wrong answers: the softmax, or distances in feature space?

Four scores of an answer, higher is surer: the probability of the predicted class; minus the
distance to its centroid, over the radius; the distance to its nearest boundary; and their
combination by a logistic regression, fitted on validation images, clean and under the noise of the
analysis. The mean of the ranks by the first three needs no fit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noiseproof.geometry import boundary_distances
from noiseproof.lab.analysis.subject import (
    VIEWS,
    Arrays,
    Features,
    Measured,
    Progress,
    Row,
    Subject,
    row,
)
from noiseproof.lab.evaluation.abstention import Combination, auroc, fit_combination, risk_coverage
from noiseproof.robustness import canonical_name

COVERAGE = 0.9  # at which the risk is reported
_POINTS = 201  # of a curve

Scores = dict[str, NDArray[Any]]


@torch.no_grad()
def measure_abstention(subject: Subject, progress: Progress) -> Measured:
    """AUROC of right against wrong answers, and risk against coverage, by each score: on clean and
    noisy images, and under every condition that the run was evaluated under."""
    from scipy.stats import rankdata

    combine = _combination(subject)
    grid = np.linspace(0, 1, _POINTS)[1:]
    arrays: Arrays = {"coverage": grid}
    rows: list[Row] = []
    views = [(view, subject.facts(view), partial(subject.features, view)) for view in VIEWS]
    evaluated = [
        (spec, {"data": "evaluated", "perturbation": spec}, partial(subject.features_under, spec))
        for spec in subject.settings.conditions
    ]
    for i, (name, facts, features) in enumerate([*views, *evaluated]):
        progress(i / len([*views, *evaluated]))
        scores, wrong = _scores(subject, features())
        if combine is not None:
            scores["combination"] = combine(np.stack(list(scores.values()), 1))
        parts = ("probability", "centroid", "boundary")
        scores["all three"] = np.mean([rankdata(scores[part]) for part in parts], 0)
        for score, values in scores.items():
            coverage, risk = risk_coverage(values, wrong)
            curve = risk[np.searchsorted(coverage, grid - 1e-9)]
            arrays[f"{name}.{score}"] = curve
            about = {"score": score, **facts, "n": len(wrong)}
            rows.append(row("AUROC of right against wrong answers", auroc(values, wrong), **about))
            at = float(curve[np.searchsorted(grid, COVERAGE - 1e-9)])
            rows.append(row("risk", at, coverage=COVERAGE, **about))
        rows.append(row("risk", float(wrong.mean()), coverage=1.0, **facts, n=len(wrong)))
    progress(1.0)
    return Measured(arrays, rows)


def _scores(subject: Subject, features: Features) -> tuple[Scores, NDArray[np.bool_]]:
    """The three scores of each answer, and whether it is wrong."""
    q, head = features.penultimate, subject.head
    logits = head(q)
    answers = logits.argmax(1)
    scores = {
        "probability": logits.double().softmax(1).amax(1),
        "centroid": -(q - subject.centroids[answers]).norm(dim=1) / subject.radius,
        "boundary": boundary_distances(q, answers, head).amin(1),
    }
    values = {name: score.double().numpy() for name, score in scores.items()}
    return values, (answers != features.labels).numpy()


def _combination(subject: Subject) -> Combination | None:
    """Fitted on validation images, clean and noisy; None without such images, or errors on them."""
    if subject.dataset.validation is None:
        return None
    measured = [
        _scores(subject, subject.validation_features(spec))
        for spec in dict.fromkeys(("clean", canonical_name(subject.noise)))
    ]
    scores = np.concatenate([np.stack(list(values.values()), 1) for values, _ in measured])
    return fit_combination(scores, np.concatenate([wrong for _, wrong in measured]))
