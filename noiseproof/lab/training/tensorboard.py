"""Metrics as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes the metrics of every epoch; does nothing if it is not enabled."""

    def __init__(self, folder: Path, *, enabled: bool, epoch: int = 0):
        """
        Args:
            folder: where event files are written.
            enabled: whether to write at all.
            epoch: number of finished epochs; what a killed run wrote after them is hidden.
        """
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
