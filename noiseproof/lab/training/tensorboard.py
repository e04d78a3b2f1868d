"""Metrics as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes the metrics of every epoch into `folder`, if enabled. What a killed run has written
    after `epoch`, the number of finished epochs, is hidden."""

    def __init__(self, folder: Path, *, enabled: bool, epoch: int = 0):
        self.writer: Any = None
        if enabled:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(f"--tensorboard needs the package tensorboard ({error})") from None
            self.writer = SummaryWriter(str(folder), purge_step=epoch + 1)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.writer is not None:
            self.writer.close()

    def write(self, metrics: dict[str, Any]) -> None:
        """Adds one scalar per metric, at step `metrics["epoch"]`."""
        if self.writer is None:
            return
        for name, value in metrics.items():
            if name != "epoch":
                self.writer.add_scalar(name, value, metrics["epoch"])
        self.writer.flush()
