"""How a network does on the test images while it trains.

The paper keeps the epoch that is best on the test images. Nothing here chooses one; but what that
choice would be worth can be seen by looking: every few epochs the network is tested, with one draw
of each noise, and the rows go beside the run's metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from noiseproof.lab.evaluation.predictor import Predictor, evaluation_batches
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.session import Session
from noiseproof.perturb import parse

FILE = "along.jsonl"


class _Training(Predictor):
    """The network of a training that goes on."""

    def __init__(self, run: RunFolder, session: Session):
        data, device = session.data, session.fabric.device
        super().__init__(run, "last", data, device, evaluation_batches(run, data, device))
        self._model = session.model

    @property
    def model(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._model


@dataclass(frozen=True)
class Along:
    """Tests after every `every`-th epoch and after the last; for `train`'s `each_epoch`."""

    every: int
    suite: Sequence[str]

    def __call__(self, run: RunFolder, session: Session) -> None:
        done = session.epoch
        if done % self.every and done != session.config.optim.epochs:
            return
        labels = session.data.test.labels.numpy()
        predictor, found = _Training(run, session), {}
        session.model.eval()
        with session.engine.average.applied():
            for name in self.suite:
                classes = predictor.predict(parse(name), [0])
                found[name] = round(100 * float((classes[0] == labels).mean()), 4)
        session.model.train()
        run.append_jsonl(FILE, [{"epoch": done, "accuracy": found}])


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """What was seen, by epoch; of an epoch that was trained twice, the second time."""
    found = {row["epoch"]: row for row in run.read_jsonl(FILE)}
    return [found[epoch] for epoch in sorted(found)]
