"""Perturbations of the user's own: files that register them, `--plugin FILE.py`, and installed
packages with an entry point.

A file is run because a command line names it, and a package because it is installed; neither is
because a run folder or a file of settings names it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from noiseproof.perturb.text import REGISTERED

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "noiseproof.perturbations"
"""The group of entry points: modules that register perturbations, or functions that do."""

_loaded: dict[str, None] = {}  # absolute paths, in order
_installed: set[EntryPoint] = set()


def load_plugins(files: Iterable[str]) -> None:
    """Loads the entry points of installed packages and runs each file, unless that was done before.

    A file must register a perturbation: ValueError if it does not exist, raises an exception or
    registers nothing. An entry point that fails is named on stderr and left out, since the command
    may not need it.

    Args:
        files: Python files that call `noiseproof.perturb.register`.
    """
    from importlib.metadata import entry_points  # heavy, and not needed for help

    for entry in entry_points(group=GROUP):
        if entry not in _installed:
            _installed.add(entry)
            _load_installed(entry)
    for file in files:
        path = Path(file).expanduser().resolve()
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"--plugin {file} does not exist; expected a Python file")
        if str(path) in _loaded:
            continue
        before = dict(REGISTERED)
        spec = importlib.util.spec_from_file_location(f"noiseproof_plugin_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # as for any module: dataclasses and pickle look there
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"--plugin {file} raised {type(error).__name__}: {error}") from error
        if before == REGISTERED:
            raise ValueError(
                f"--plugin {file} registers no perturbation; expected a call of "
                "noiseproof.perturb.register"
            )
        _loaded[str(path)] = None


def loaded_plugins() -> tuple[str, ...]:
    """The files that have been run in this process, for worker processes to run as well."""
    return tuple(_loaded)


def _load_installed(entry: EntryPoint) -> None:
    try:
        target = entry.load()
        if callable(target):
            target()
    except Exception as error:
        package = entry.dist.name if entry.dist else entry.value
        text = (
            f"the perturbations of the installed package {package} are left out: "
            f"{entry.value} raised {type(error).__name__}: {error}"
        )
        print(f"noiseproof: {' '.join(text.split())}", file=sys.stderr)
