"""What a person sees of a training: a live bar on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from noiseproof.lab.config import Config, run_name
from noiseproof.lab.console import printable
from noiseproof.objectives import METHODS

if TYPE_CHECKING:
    from noiseproof.lab.data.datasets import Dataset
    from noiseproof.lab.training.session import Session

_CLASSES = 8  # so many are named


class Progress:
    """Reports of one run. `wanted`: None shows a bar on terminals, True plain lines, False nothing.

    Ranks other than the first say nothing.
    """

    def __init__(self, first_rank: bool, wanted: bool | None, config: Config):
        self.silent = not first_rank or wanted is False
        self.console = Console(stderr=True)
        self.config, self.name = config, run_name(config)
        self.bar: Bar | None = None
        self.terms = ("loss", *METHODS[config.method.method].terms)
        self.validation = ""
        if not self.silent and wanted is None and sys.stderr.isatty():
            self.bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=self.console,
            )

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=self.config.optim.epochs, facts="")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar:
            self.bar.stop()

    def note(self, text: str) -> None:
        if self.silent:
            return
        line = f"{self.name}: {text}"
        if self.bar:  # above the bar, which a plain print would tear
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def step(self, session: Session, means: dict[str, float]) -> None:
        """Called every few dozen steps with the means of the epoch so far."""
        if not self.bar:
            return
        images = int(means["images"])
        done = session.epoch + session.step / session.loader.steps
        facts = [self._losses(means)]
        if session.epoch_seconds > 0:
            facts.insert(0, f"{images / session.epoch_seconds:,.0f} img/s")
        self.bar.update(self.task, completed=done, facts="  ".join([*facts, self.validation]))

    def epoch(self, row: dict[str, Any]) -> None:
        """Called after each epoch with its row of metrics."""
        if "val_accuracy" in row:
            self.validation = f"val {row['val_accuracy']:.2%}"
        if "val_noisy_accuracy" in row:
            self.validation += f"  noisy {row['val_noisy_accuracy']:.2%}"
        if self.silent or self.bar:
            return
        validation = f"  {self.validation}" if self.validation else ""
        self.note(
            f"epoch {row['epoch']}/{self.config.optim.epochs}  {self._losses(row)}"
            f"  train {row['train_accuracy']:.2%}{validation}"
            f"  lr {row['lr']:.2g}  {row['images_per_second']:,.0f} img/s"
        )

    def _losses(self, values: dict[str, Any]) -> str:
        return "  ".join(f"{name} {values[name]:.3f}" for name in self.terms if name in values)


def counted(data: Dataset) -> str:
    """How many images are for what, where they come from, and the classes."""
    parts = [f"{data.train.count:,} images to train"]
    if data.validation is not None:
        parts.append(f"{data.validation.count:,} to validate ({data.validation_from})")
    source = f" ({data.test_from})" if data.test_from else ""
    names, more = data.classes[:_CLASSES], len(data.classes) - _CLASSES
    classes = printable(", ".join(names)) + (f" and {more} more" if more > 0 else "")
    return f"{', '.join(parts)}, {data.test.count:,} to test{source}; classes {classes}"
