"""What the log of a run says while it is written: its last line, and the stages that begin.

A run in a process of its own writes to a file. Whoever waits for it reads that file as it grows.
"""

from __future__ import annotations

from pathlib import Path

from noiseproof.lab.console import printable

__all__ = ["STAGES", "Follower"]

STAGES = ("training", "evaluating", "analysing")  # the first word of what `progress.note` is told


class Follower:
    """Reads the log at `path` from its present end on: what stands there is of an earlier call."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.said = self._stage = ""
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def begun(self) -> list[str]:
        """The lines that have begun a stage since the last call, without the run's name."""
        found = []
        for line in self._new():
            self.said = line
            stage = line.partition(" ")[0].rstrip(",")
            if stage in STAGES and stage != self._stage:
                self._stage = stage
                found.append(line)
        return found

    def _new(self) -> list[str]:
        """Whole lines, without what a terminal would obey."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._at)
            self._rest += file.read()
            self._at = file.tell()
        *whole, self._rest = self._rest.split(b"\n")
        texts = [printable(line.decode(errors="replace").strip()) for line in whole]
        return [text.removeprefix(f"{self.name}: ") for text in texts if text]
