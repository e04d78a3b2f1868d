"""What has been found out about a run, as it lies in the run folder.

    analysis/analysis.json    scalar rows, what was asked for, seeds, times
    analysis/PART.npz         the arrays of a part, one file each

Findings about the best weights lie in analysis-best/.
"""

from __future__ import annotations

import datetime
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.evaluation.evaluate import model_hash
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder, Weights

__all__ = ["Analysis", "begin", "read"]

SCHEMA = 1
Row = dict[str, Any]


class Analysis:
    """The parts of one run that have been analysed."""

    def __init__(self, folder: Path, content: dict[str, Any]):
        self.folder, self.content = folder, content

    @property
    def parts(self) -> list[str]:
        return list(self.content["parts"])

    @property
    def method(self) -> str:
        return self.content["method"]

    def rows(self, part: str | None = None, metric: str | None = None, **facts: Any) -> list[Row]:
        """The rows of a part with this metric and these facts, such as stage="features"."""
        wanted = {"part": part, "metric": metric, **facts}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        every = (row for made in self.content["parts"].values() for row in made["rows"])
        return [row for row in every if all(row.get(k) == v for k, v in wanted.items())]

    def value(self, part: str, metric: str, **facts: Any) -> float | None:
        """The value of the first such row; None where there is none."""
        return next((row["value"] for row in self.rows(part, metric, **facts)), None)

    def asked(self, part: str) -> dict[str, Any]:
        """The settings that a part was made with."""
        return self.content["parts"][part]["settings"]

    def arrays(self, part: str) -> dict[str, NDArray[Any]] | None:
        """The arrays of a part; None where it was not analysed or its file is damaged."""
        if part not in self.content["parts"]:
            return None
        try:
            with np.load(self.folder / f"{part}.npz", allow_pickle=False) as file:
                return dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None

    def known(self, part: str, settings: Mapping[str, Any]) -> bool:
        """Whether the part was made with these settings, and its arrays can be read."""
        made = self.content["parts"].get(part)
        same = made is not None and made["settings"] == _as_read(settings)
        return same and self.arrays(part) is not None

    def write(
        self,
        part: str,
        arrays: Mapping[str, NDArray[Any]],
        rows: list[Row],
        settings: Mapping[str, Any],
        **facts: Any,
    ) -> None:
        """Replaces a part: the arrays first, then the rows that speak of them."""

        def put(file: Any) -> None:
            np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]

        write_atomically(self.folder / f"{part}.npz", put)
        self.content["parts"][part] = {
            "settings": _as_read(settings),
            "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **facts,
            "rows": [{"part": part, **_plain(row)} for row in rows],
        }
        text = json.dumps(self.content, indent=1, allow_nan=False) + "\n"
        write_atomically(self.folder / "analysis.json", lambda file: _put(file, text))


def read(run: RunFolder, weights: Weights = "last") -> Analysis | None:
    """The analysis of the run's present weights and data; None where there is none.

    >>> import tempfile
    >>> from noiseproof.lab.config import Config
    >>> read(RunFolder(Path(tempfile.mkdtemp()), Config(), {})) is None
    True
    """
    if not run.has(weights):
        return None
    found = begin(run, weights)
    return found if found.parts else None


def begin(run: RunFolder, weights: Weights) -> Analysis:
    """What lies there of the run's present weights and data, or an empty analysis."""
    folder = run.path / ("analysis" if weights == "last" else f"analysis-{weights}")
    about = {
        "schema": SCHEMA,
        "run": run.name,
        "data": run.config.data.data,
        "fingerprint": run.info.get("fingerprint"),
        "method": run.config.method.method,
        "seed": run.config.run.seed,
        "weights": weights,
        "model": model_hash(run, weights),
    }
    try:
        content = json.loads((folder / "analysis.json").read_text())
        schema, parts = int(content["schema"]), dict(content["parts"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one: begin anew
        return Analysis(folder, {**about, "parts": {}})
    if schema > SCHEMA:
        raise ValueError(
            f"{folder} was written by a newer noiseproof (its schema is {schema}, "
            f"this one reads up to {SCHEMA}); please upgrade"
        )
    same = all(content.get(key) == about[key] for key in ("fingerprint", "model"))
    return Analysis(folder, {**about, "parts": parts if same else {}})


def _as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists and not tuples."""
    return json.loads(json.dumps(dict(settings)))


def _plain(row: Row) -> Row:
    """Numbers that JSON has: what is not finite becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _put(file: Any, text: str) -> None:
    file.write(text.encode())
