"""Which score knows best when an answer is wrong: does the sphere know more than the softmax?"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import rankdata

from noiseproof.geometry import boundary_distances
from noiseproof.lab.analysis.subject import VIEWS, Arrays, Measured, Progress, Row, Subject, row
from noiseproof.lab.evaluation.abstention import auroc, risk_coverage

COVERAGE = 0.9  # at which the risk is reported
_POINTS = 201  # of a curve


@torch.no_grad()
def measure_abstention(subject: Subject, progress: Progress) -> Measured:
    """AUROC of right against wrong answers, and risk against coverage, by each score."""
    head, centroids, radius = subject.head, subject.centroids, subject.radius
    progress(0.5)
    grid = np.linspace(0, 1, _POINTS)[1:]
    arrays: Arrays = {"coverage": grid}
    rows: list[Row] = []
    for view in VIEWS:
        features = subject.features(view)
        q, labels = features.penultimate, features.labels
        logits = head(q)
        answers = logits.argmax(1)
        wrong = (answers != labels).numpy()
        scores = {
            "probability": logits.double().softmax(1).amax(1),
            "centroid": -(q - centroids[answers]).norm(dim=1) / radius,
            "boundary": boundary_distances(q, answers, head).amin(1),
        }
        values = {name: score.double().numpy() for name, score in scores.items()}
        values["all three"] = np.mean([rankdata(score) for score in values.values()], 0)
        for name, score in values.items():
            coverage, risk = risk_coverage(score, wrong)
            curve = risk[np.searchsorted(coverage, grid - 1e-9)]
            arrays[f"{view}.{name}"] = curve
            facts = {"score": name, **subject.facts(view), "n": len(labels)}
            rows.append(row("AUROC of right against wrong answers", auroc(score, wrong), **facts))
            at = float(curve[np.searchsorted(grid, COVERAGE - 1e-9)])
            rows.append(row("risk", at, coverage=COVERAGE, **facts))
        error = float(wrong.mean())
        rows.append(row("risk", error, coverage=1.0, **subject.facts(view), n=len(labels)))
    progress(1.0)
    return Measured(arrays, rows)
