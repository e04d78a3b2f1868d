"""The rows of metrics as TensorBoard scalars, where they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Board:
    """Writes a row an epoch into `folder`. Where it is not `wanted`, it does nothing.

    What an earlier, killed part of the run wrote after `epoch` is hidden from view.
    """

    def __init__(self, folder: Path, wanted: bool, epoch: int = 0):
        self.writer: Any = None
        if wanted:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(f"--tensorboard needs the package tensorboard ({error})") from None
            self.writer = SummaryWriter(str(folder), purge_step=epoch + 1)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.writer is not None:
            self.writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Every number of the row but the epoch, which is the scalars' step."""
        if self.writer is None:
            return
        for name, value in row.items():
            if name != "epoch":
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()
