"""Accuracy class by class, and which class is taken for which, as plain values for the page.

With many classes a matrix is unreadable and large: beyond `MATRIX` classes the page gets the most
frequent confusions and the classes that fare worst instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.report.results import Results
from noiseproof.perturb.text import heading

__all__ = ["MATRIX", "build", "confused", "recalls"]

MATRIX = 20


def build(results: Results) -> dict[str, Any] | None:
    """For each condition and label: recall of each class, and the matrix or its largest entries.

    None where predictions are not known for any condition.
    """
    labels, classes = list(results.table.labels), results.classes
    conditions = []
    for spec in results.table.perturbations:
        counts = {label: results.confusion(label, spec) for label in labels}
        known = {label: c for label, c in counts.items() if c is not None}
        if known:
            conditions.append(_condition(spec, labels, known, len(classes)))
    if not conditions:
        return None
    telling = results.telling() or "clean"
    titles = [c["spec"] for c in conditions]
    return {
        "labels": labels,
        "classes": classes,
        "conditions": conditions,
        "start": titles.index(telling) if telling in titles else 0,
        "label": len(labels) - 1,
        "images": _images(results),
    }


def _condition(
    spec: str, labels: list[str], counts: dict[str, NDArray[np.int64]], count: int
) -> dict[str, Any]:
    recall = {label: recalls(c) for label, c in counts.items()}
    filled = np.array([[-1.0 if np.isnan(v) else v for v in r] for r in recall.values()])
    shown = np.arange(count)
    if count > MATRIX:
        mean = np.where(filled.min(axis=0) < 0, np.inf, filled.mean(axis=0))
        shown = np.argsort(mean, kind="stable")[:MATRIX]
    return {
        "spec": spec,
        "title": heading(spec),
        "shown": shown.tolist(),
        "recall": [
            [_rounded(recall[x][i]) for i in shown] if x in recall else None for x in labels
        ],
        "matrix": [counts[x].tolist() if x in counts and count <= MATRIX else None for x in labels],
        "pairs": [confused(counts[x], 10) if x in counts else None for x in labels],
    }


def recalls(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share of each true class that was recognised; NaN for a class without images.

    >>> recalls(np.array([[3, 1], [0, 2]])).tolist()
    [0.75, 1.0]
    """
    total = counts.sum(axis=1)
    return np.where(total > 0, counts.diagonal() / np.maximum(total, 1), np.nan)


def confused(counts: NDArray[np.int64], most: int) -> list[tuple[int, int, float]]:
    """The most frequent confusions: (true class, taken for, share of the true class).

    >>> confused(np.array([[3, 1], [0, 2]]), 5)
    [(0, 1, 0.25)]
    """
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(share, 0.0)
    order = np.argsort(-share, axis=None, kind="stable")[:most]
    rows, columns = np.unravel_index(order, share.shape)
    found = zip(rows.tolist(), columns.tolist(), share[rows, columns].tolist(), strict=True)
    return [(i, j, round(s, 4)) for i, j, s in found if s > 0]


def _images(results: Results) -> list[int] | None:
    """How many test images each class has."""
    truth = results.truth(results.weights)
    return None if truth is None else np.bincount(truth, minlength=len(results.classes)).tolist()


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)
