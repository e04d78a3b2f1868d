"""The folder of a comparison: which runs it has, and which one it recommends.

    comparison.json        settings, runs, tables and summary
    recommendation.json    the run to take, and why, or why there is none

Commands that take runs accept such a folder for all its runs; those that take one run, such as
`predict` and `export`, take the recommended one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

COMPARISON, RECOMMENDATION = "comparison.json", "recommendation.json"


class Recommended(NamedTuple):
    """The run that a comparison recommends, and the sentences that say why."""

    run: Path
    sentences: list[str]


def is_comparison(path: str | Path) -> bool:
    """Whether `path` is the folder of a comparison."""
    return (Path(path) / COMPARISON).is_file() and not (Path(path) / "config.json").exists()


def runs_of(folder: str | Path) -> list[Path]:
    """The finished runs of a comparison; ValueError if it has none or its file is damaged.

    Args:
        folder: of the comparison.
    """
    facts = _read(Path(folder) / COMPARISON)
    try:
        names = [run["run"] for run in facts["runs"] if run.get("status", "done") == "done"]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(_damaged(Path(folder) / COMPARISON)) from None
    runs = [_inside(folder, name) for name in names]
    if not runs:
        raise ValueError(f"{folder} is a comparison without finished runs; repeat `compare`")
    return runs


def command_of(folder: str | Path) -> str | None:
    """The command line of a comparison, if it was recorded.

    Args:
        folder: of the comparison.
    """
    command = _read(Path(folder) / COMPARISON).get("command")
    return command if isinstance(command, str) else None


def recommended(folder: str | Path) -> Recommended:
    """The run that a comparison recommends; ValueError if it recommends none.

    Args:
        folder: of the comparison.
    """
    path = Path(folder) / RECOMMENDATION
    runs = ", ".join(str(run) for run in runs_of(folder))
    if not path.is_file():
        raise ValueError(
            f"{folder} has no recommendation yet; `noiseproof report {folder}` writes it, or name "
            f"a run: {runs}"
        )
    facts = _read(path)
    try:
        name, sentences = facts["run"], [str(text) for text in facts["text"]]
    except (KeyError, TypeError):
        raise ValueError(_damaged(path)) from None
    if name is None:
        raise ValueError(
            f"{folder} recommends no run: {' '.join(sentences)}. To use one anyway, name it: {runs}"
        )
    return Recommended(_inside(folder, name), sentences)


def _inside(folder: str | Path, name: object) -> Path:
    """The run `name` of a comparison, which may not lead out of its folder."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"a run of {folder} must be a folder in it, got {name!r}")
    return Path(folder) / name


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(_damaged(path))
    return content


def _damaged(path: Path) -> str:
    return f"{path} is damaged; repeat `noiseproof compare`, which trains nothing again"
