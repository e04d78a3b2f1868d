"""Calibration: whether the probabilities of a model are right, from sums over batches.

With p the softmax of the logits of an image, y its class and p̂ = max p:

- negative log-likelihood, the mean of −log p_y, in nats;
- Brier score, the mean of Σ_k (p_k − [k = y])², from 0 to 2;
- expected calibration error of the predicted class (Guo et al. 2017): with the images in 15 bins of
  equal width by p̂, Σ_bins |number of correct predictions − sum of p̂| / number of images.

A bin includes its lower edge, and the last bin also p̂ = 1. So does torchmetrics'
`MulticlassCalibrationError(n_bins=15, norm="l1")`, except that it puts p̂ = 1 in a bin of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

BINS = 15
SCORES = ("ece", "nll", "brier")  # keys of an evaluation row; lower is better


class Bins(NamedTuple):
    """Sums over the images of each bin, lowest confidence first; bins of several draws add up."""

    images: list[int]
    correct: list[int]
    confidence: list[float]  # sum of the probabilities of the predicted classes


class Calibration(NamedTuple):
    """The calibration of a model under one noise draw."""

    ece: float
    nll: float  # infinite if a true class has probability 0, by a logit of −∞
    brier: float
    bins: Bins

    def row(self) -> dict[str, Any]:
        """As keys of an evaluation row. JSON has no infinity: an infinite NLL becomes None."""
        nll = self.nll if math.isfinite(self.nll) else None
        confidence = [round(value, 6) for value in self.bins.confidence]
        bins = self.bins._replace(confidence=confidence)._asdict()
        return {"ece": self.ece, "nll": nll, "brier": self.brier, "bins": bins}


def is_calibrated(row: Mapping[str, Any]) -> bool:
    """Whether an evaluation row has calibration; rows of older versions do not."""
    return all(name in row for name in SCORES)


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean of each score over evaluation rows, None for an infinite NLL; empty if a row has no
    calibration."""
    if not all(map(is_calibrated, rows)):
        return {}
    columns = {name: [row[name] for row in rows] for name in SCORES}
    return {name: None if None in column else fmean(column) for name, column in columns.items()}


class CalibrationSums:
    """Adds up what calibration needs, batch by batch, in float64 on the device.

    Logits that have no largest value, because one is NaN or +∞ or all are −∞, make every score of
    their draw NaN.

    Args:
        draws: number of noise draws.
        device: of the logits.
    """

    def __init__(self, draws: int, device: torch.device):
        float64: Any = {"dtype": torch.float64, "device": device}
        self._totals = torch.zeros(draws, 2, **float64)  # −log p_y, Brier score
        self._bins = torch.zeros(draws, BINS, 3, **float64)  # images, correct, confidence
        self._edges = torch.linspace(0, 1, BINS + 1, **float64)[1:-1]
        self._numbers = torch.arange(BINS, device=device)

    def add(self, draw: int, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch.

        Args:
            draw: position of the draw, from 0.
            logits: B x classes.
            labels: B, the true classes.
        """
        log_p = logits.double().log_softmax(1)
        p = log_p.exp()
        true = labels[:, None]
        nll = -log_p.gather(1, true).squeeze(1)
        brier = p.square().sum(1) - 2 * p.gather(1, true).squeeze(1) + 1
        self._totals[draw] += torch.stack([nll, brier], 1).sum(0)
        confidence = p.amax(1)
        bins = torch.bucketize(confidence, self._edges, right=True)
        members = (bins[:, None] == self._numbers).double()  # B x bins
        correct = (logits.argmax(1) == labels).double()
        columns = torch.stack([torch.ones_like(correct), correct, confidence], 1)
        self._bins[draw] += members.T @ columns

    def result(self) -> list[Calibration]:
        """The calibration of each draw over all images that were added."""
        results = []
        for totals, bins in zip(self._totals.tolist(), self._bins.cpu(), strict=True):
            n = float(bins[:, 0].sum())
            nll, brier = (total / n for total in totals)
            ece = float((bins[:, 1] - bins[:, 2]).abs().sum()) / n
            images, correct, confidence = bins.T.tolist()
            counts = [round(x) for x in images], [round(x) for x in correct]
            results.append(Calibration(ece, nll, brier, Bins(*counts, confidence)))
        return results
