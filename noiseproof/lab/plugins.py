"""Files of the user's own that register perturbations: `--plugin FILE.py`.

A file is run because a command line names it, never because a run folder or a file of settings
does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from noiseproof.perturb.text import REGISTERED

_loaded: dict[str, None] = {}  # absolute paths, in order


def load_plugins(files: Iterable[str]) -> None:
    """Runs each file, which must register a perturbation, unless it has been run before. ValueError
    if it does not exist, raises an exception or registers nothing.

    Args:
        files: Python files that call `noiseproof.perturb.register`.
    """
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
