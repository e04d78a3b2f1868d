"""Tests on the test images during training.

The authors' code keeps the epoch that is best on the test images. No result here is chosen that
way, but these tests show what the choice would gain: every few epochs the network is tested with
one draw of each noise, and the accuracies are written to along.jsonl in the run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noiseproof.lab.evaluation.predictions import Predictor, evaluation_batches
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.session import Session
from noiseproof.perturb import parse

FILE = "along.jsonl"


@dataclass(frozen=True)
class EpochTests:
    """Tests every `interval` epochs and after the last; a callback for `train`'s `each_epoch`.

    Args:
        interval: epochs between two tests.
        suite: perturbations to test under.
    """

    interval: int
    suite: Sequence[str]

    def __call__(self, run: RunFolder, session: Session) -> None:
        if session.epoch % self.interval and session.epoch != session.config.optim.epochs:
            return
        data, device = session.data, session.fabric.device
        labels = data.test.labels.numpy()
        predictor = Predictor(run, "last", data, device, evaluation_batches(run, data, device))
        predictor.model = session.model
        accuracy = {}
        session.model.eval()
        with session.engine.average.applied():
            for name in self.suite:
                (classes,), _ = predictor.predict(parse(name), [0])
                accuracy[name] = round(100 * float((classes == labels).mean()), 4)
        session.model.train()
        run.append_jsonl(FILE, [{"epoch": session.epoch, "accuracy": accuracy}])


def read_epoch_tests(run: RunFolder) -> list[dict[str, Any]]:
    """The tests of a run by epoch; if an epoch was trained twice, those of the second time."""
    by_epoch = {row["epoch"]: row for row in run.read_jsonl(FILE)}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]
