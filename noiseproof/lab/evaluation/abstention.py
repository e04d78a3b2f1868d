"""Abstention: a model that does not answer where it is likely to be wrong.

A score says how sure the model is of each answer; it answers where the score is at least a
threshold. The coverage is the share of images that it answers, the risk the share of wrong answers
among those.

>>> risk_coverage(np.array([0.9, 0.5, 0.7]), np.array([False, True, False]))[1].tolist()
[0.0, 0.0, 0.3333333333333333]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating]
Wrong = NDArray[np.bool_]


def risk_coverage(score: Scores, wrong: Wrong) -> tuple[NDArray[Any], NDArray[Any]]:
    """Coverage and risk if the 1, 2, … n images of the highest scores are answered.

    Images of equal score are answered together: each has the risk of the last of them.

    Args:
        score: how sure the model is of each answer; higher is surer.
        wrong: whether the answer is wrong.
    """
    order = np.argsort(-score, kind="stable")
    count = np.arange(1, len(score) + 1)
    ordered = score[order]
    last = np.searchsorted(-ordered, -ordered, side="right") - 1  # of the images of equal score
    risk = (np.cumsum(wrong[order]) / count)[last]
    return count[last] / len(score), risk


def auroc(score: Scores, wrong: Wrong) -> float | None:
    """The chance that a right answer has a higher score than a wrong one, ties counting half; None
    if all answers are right, or all are wrong. Arguments as for `risk_coverage`.

    >>> auroc(np.array([0.9, 0.5, 0.7, 0.7]), np.array([False, True, False, True]))
    0.875
    """
    if wrong.all() or not wrong.any():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(~wrong, score))


Combination = Callable[[NDArray[Any]], Scores]


def fit_combination(scores: NDArray[Any], wrong: Wrong) -> Combination | None:
    """One score from several, by logistic regression: a function of n x k scores. None if all
    answers are right, or all are wrong.

    Args:
        scores: n x k, each as for `risk_coverage`; the first is a probability, of which the
            log-odds are used.
        wrong: as for `risk_coverage`.
    """
    if wrong.all() or not wrong.any():
        return None
    from scipy.special import logit
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    def log_odds(values: NDArray[Any]) -> NDArray[Any]:
        return np.column_stack([logit(values[:, 0].clip(1e-12, 1 - 1e-12)), values[:, 1:]])

    model = make_pipeline(FunctionTransformer(log_odds), StandardScaler(), LogisticRegression())
    return model.fit(scores, ~wrong).decision_function


class Threshold(NamedTuple):
    """Where to abstain, and what that gave on the images it was chosen on."""

    score: float  # the lowest that is answered
    coverage: float
    wrong: int
    answered: int


def threshold_text(probability: float) -> str:
    """The lowest probability of an answer as a percentage, rounded down: none is less sure.

    >>> threshold_text(0.9996)
    '99.9 %'
    """
    return f"{math.floor(1000 * probability) / 10:g} %"


def fit_threshold(score: Scores, wrong: Wrong, error: float) -> Threshold | None:
    """The lowest threshold whose estimated error is at most `error`; None if there is none.

    The estimate counts one wrong answer more than there were, (wrong + 1) / (answered + 1), since a
    threshold chosen on few images would otherwise promise too much.

    Args:
        score: as for `risk_coverage`.
        wrong: as for `risk_coverage`.
        error: share of wrong answers to allow, in (0, 1).

    >>> fit_threshold(np.arange(100.0), np.arange(100) < 10, 0.05)
    Threshold(score=7.0, coverage=0.93, wrong=3, answered=93)
    """
    if not 0 < error < 1:
        raise ValueError(f"error must be above 0 and below 1, got {error}")
    coverage, risk = risk_coverage(score, wrong)
    answered = np.round(coverage * len(score)).astype(int)
    mistakes = np.round(risk * answered).astype(int)
    allowed = np.flatnonzero((mistakes + 1) / (answered + 1) <= error)
    if not len(allowed):
        return None
    k = allowed[-1]
    lowest = np.sort(score)[::-1][answered[k] - 1]
    return Threshold(float(lowest), float(coverage[k]), int(mistakes[k]), int(answered[k]))
