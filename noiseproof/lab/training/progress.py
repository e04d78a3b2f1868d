"""What a training shows: a live bar on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from noiseproof.lab import console
from noiseproof.lab.config import Config, run_name
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.training.session import Session
from noiseproof.objectives import METHODS

_MAX_CLASSES = 8  # how many are named


class Progress:
    """Shows the progress of one run; only the first rank prints. `enabled`: None shows a bar on
    terminals and lines elsewhere, True lines, False nothing."""

    def __init__(self, config: Config, *, enabled: bool | None = None, first_rank: bool = True):
        self.silent = not first_rank or enabled is False
        self.epochs, self.name = config.optim.epochs, run_name(config)
        self.terms = ("loss", *METHODS[config.method.method].terms)
        self.validation = ""
        self.bar = console.LiveBars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=self.silent or enabled is not None or not sys.stderr.isatty(),
        )

    def __enter__(self) -> Progress:
        self.bar.start()
        self.task = self.bar.add_task(self.name, total=self.epochs, facts="")
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        """Prints a line about the run."""
        if not self.silent:
            console.print_status(self.name, text, self.bar)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.note(f"warning: {text}")

    def step(self, session: Session, means: dict[str, float]) -> None:
        """Shows the means of the epoch so far; called every few dozen steps."""
        facts = [self._losses(means), self.validation]
        if session.epoch_seconds > 0:
            facts.insert(0, f"{means['images'] / session.epoch_seconds:,.0f} img/s")
        completed = session.epoch + session.step / session.loader.steps
        self.bar.update(self.task, completed=completed, facts="  ".join(facts))

    def epoch(self, metrics: dict[str, Any]) -> None:
        """Shows the metrics of the epoch that has just ended."""
        if "val_accuracy" in metrics:
            self.validation = f"val {metrics['val_accuracy']:.2%}"
        if "val_noisy_accuracy" in metrics:
            self.validation += f"  noisy {metrics['val_noisy_accuracy']:.2%}"
        if self.bar.disable:
            validation = f"  {self.validation}" if self.validation else ""
            self.note(
                f"epoch {metrics['epoch']}/{self.epochs}  {self._losses(metrics)}"
                f"  train {metrics['train_accuracy']:.2%}{validation}"
                f"  lr {metrics['lr']:.2g}  {metrics['images_per_second']:,.0f} img/s"
            )

    def _losses(self, values: dict[str, Any]) -> str:
        return "  ".join(f"{name} {values[name]:.3f}" for name in self.terms if name in values)


def training_summary(config: Config, methods: Sequence[str]) -> str:
    """What is done to the training images, and the model.

    Args:
        config: settings of the training.
        methods: those that are trained. The view of a method with one, such as `noisy`, is
            augmented with `--augment`.
    """
    data = config.data
    augment = f"augmentation {data.augment}"
    second = any(METHODS[method].num_views == 2 for method in methods)
    if second and data.noisy_augment not in (None, data.augment):
        augment += f", of a second, noisy view {data.noisy_augment}"
    return f"{augment}; {'balanced classes; ' * data.balance}model {config.model.model}"


def dataset_summary(data: Dataset) -> str:
    """How many images are used for what, where the splits come from, how many groups they are in,
    how images in files get their size, and the classes."""
    splits = [f"{data.train.count:,} training images"]
    if data.validation is None:
        splits.append("none for validation")
    else:
        splits.append(f"{data.validation.count:,} for validation ({data.validation_from})")
    source = f" ({data.test_from})" if data.test_from else ""
    splits.append(f"{data.test.count:,} for testing{source}")
    if data.groups:
        splits.append(f"in {data.groups:,} group{'s' * (data.groups > 1)}")
    names, more = data.classes[:_MAX_CLASSES], len(data.classes) - _MAX_CLASSES
    classes = console.printable(", ".join(names)) + (f" and {more} more" if more > 0 else "")
    resized = f"{data.resized}; " if data.resized else ""
    return f"{', '.join(splits)}; {resized}classes {classes}"
