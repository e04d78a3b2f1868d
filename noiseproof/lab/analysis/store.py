"""The analysis of a run, as files in the run folder.

    analysis/analysis.json    rows of numbers, settings, times
    analysis/PART.npz         the arrays of a part, one file per part

The analysis of the best weights is in analysis-best/.
"""

from __future__ import annotations

import datetime
import io
import json
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.files import with_checksum, without_checksum, write_atomically
from noiseproof.lab.runs import SCHEMA, RunFolder, Weights, check_schema, read_arrays

Row = dict[str, Any]


class Analysis:
    """The parts of a run that have been measured.

    folder: where the files are.
    content: the content of analysis.json.
    """

    def __init__(self, folder: Path, content: dict[str, Any]):
        self.folder, self.content = folder, content

    @property
    def parts(self) -> list[str]:
        return list(self.content["parts"])

    def rows(self, part: str | None = None, metric: str | None = None, **facts: Any) -> list[Row]:
        """The rows with this part, metric and facts, such as stage="features"; all by default."""
        wanted = {"part": part, "metric": metric, **facts}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        rows = (row for content in self.content["parts"].values() for row in content["rows"])
        return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]

    def value(self, part: str, metric: str, **facts: Any) -> float | None:
        """The value of the first row with this part, metric and facts; None if there is none."""
        return next((row["value"] for row in self.rows(part, metric, **facts)), None)

    def settings(self, part: str) -> dict[str, Any]:
        """The settings that a part was measured with."""
        return self.content["parts"][part]["settings"]

    def arrays(self, part: str) -> dict[str, NDArray[Any]] | None:
        """The arrays of a part; None if it was not measured. ValueError if the file is damaged."""
        if part not in self.parts:
            return None
        path = self.folder / f"{part}.npz"
        expected = self.content["parts"][part].get("arrays_checksum")
        try:
            # A process killed in `write` leaves new arrays beside rows about the old ones
            if expected and expected != f"{zlib.crc32(path.read_bytes()):08x}":
                raise ValueError("not the arrays that the rows are about")
            return read_arrays(path)
        except Exception:  # numpy, zipfile and zlib raise errors of their own
            raise ValueError(
                f"{path} is missing or damaged; measure it again with `{self._command(part)}`"
            ) from None

    def _command(self, part: str) -> str:
        """The command that measures a part again on the same samples."""
        samples, weights = self.settings(part).get("samples"), self.content["weights"]
        words = ["noiseproof", "analyse", str(self.folder.parent), "--parts", part]
        words += ["--samples", str(samples)] if samples else []
        return shlex.join([*words, "--weights", weights])

    def is_current(self, part: str, settings: Mapping[str, Any]) -> bool:
        """Whether the part was measured with these settings and its arrays can be read."""
        try:
            return self.arrays(part) is not None and self.settings(part) == settings
        except ValueError:
            return False

    def write(
        self,
        part: str,
        arrays: Mapping[str, NDArray[Any]],
        rows: list[Row],
        settings: Mapping[str, Any],
        **facts: Any,
    ) -> None:
        """Writes a part, or replaces it: first the arrays, then the rows about them.

        Args:
            part: its name.
            arrays: written to PART.npz.
            rows: of one number each.
            settings: that the part was measured with, as JSON has them (lists, not tuples).
            facts: recorded with them, such as the seconds it took.
        """
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType]
        write_atomically(self.folder / f"{part}.npz", buffer.getvalue())
        self.content["parts"][part] = {
            "settings": settings,
            "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **facts,
            "arrays_checksum": f"{zlib.crc32(buffer.getvalue()):08x}",
            "rows": [{"part": part, **row} for row in rows],
        }
        text = json.dumps(with_checksum(self.content), indent=1, allow_nan=False) + "\n"
        write_atomically(self.folder / "analysis.json", text)


def read(run: RunFolder, weights: Weights = "last") -> Analysis | None:
    """The analysis of the run's current weights and data; None if there is none. ValueError if its
    file is damaged.

    Args:
        run: the run folder.
        weights: of the last or of the best epoch.
    """
    if not run.has(weights):
        return None
    analysis = open_analysis(run, weights, restart=False)
    return analysis if analysis.parts else None


def open_analysis(run: RunFolder, weights: Weights, *, restart: bool = True) -> Analysis:
    """The analysis of the run's current weights and data; without parts if there is none.

    Args:
        run: the run folder.
        weights: of the last or of the best epoch.
        restart: start over if analysis.json is damaged; else ValueError.
    """
    folder = run.path / ("analysis" if weights == "last" else f"analysis-{weights}")
    about = {
        "schema": SCHEMA,
        "run": run.name,
        "data": run.config.data.data,
        "fingerprint": run.info.get("fingerprint"),
        "method": run.config.method.method,
        "seed": run.config.run.seed,
        "weights": weights,
        "model": run.weights_hash(weights),
    }
    path = folder / "analysis.json"
    try:
        content = without_checksum(json.loads(path.read_bytes()))
        schema, parts = int(content["schema"]), dict(content["parts"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if path.exists() and not restart:
            command = shlex.join(["noiseproof", "analyse", str(run.path), "--weights", weights])
            raise ValueError(f"{path} is damaged; measure it again with `{command}`") from error
        return Analysis(folder, {**about, "parts": {}})
    check_schema(folder, schema)
    same = all(content.get(key) == about[key] for key in ("fingerprint", "model"))
    return Analysis(folder, {**about, "parts": parts if same else {}})
