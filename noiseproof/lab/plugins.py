"""Code of the user's own: files that register perturbations, `--plugin FILE.py`, or make a network,
`FILE.py:FUNCTION`, and installed packages with an entry point.

A file is run because a command line names it, and a package because it is installed; neither is
because a run folder or a file of settings names it.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from noiseproof.perturb.text import REGISTERED

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "noiseproof.perturbations"
"""The group of entry points: modules that register perturbations, or functions that do."""

_loaded: dict[str, ModuleType] = {}  # by absolute path, with :FUNCTION if that was named; in order
_installed: set[EntryPoint] = set()


def load_plugins(files: Iterable[str], flag: str = "--plugin ") -> None:
    """Loads the entry points of installed packages and runs each file, unless that was done before.

    ValueError if a file does not exist, raises an exception, registers nothing, or does not define
    the function that is named. An entry point that fails is named on stderr and left out, since the
    command may not need it.

    Args:
        files: Python files that call `noiseproof.perturb.register`, or FILE.py:FUNCTION.
        flag: what named them, for messages.
    """
    from importlib.metadata import entry_points  # heavy, and not needed for help

    for entry in entry_points(group=GROUP):
        if entry not in _installed:
            _installed.add(entry)
            _load_installed(entry)
    for text in files:
        path, function = _parts(text)
        if path.suffix != ".py" or not path.is_file():
            problem = "is not a .py file" if path.exists() else "does not exist"
            raise ValueError(f"{flag}{text} {problem}; expected a Python file")
        name = f"{path}:{function}" if function else str(path)
        if name in _loaded:
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
            raise ValueError(f"{flag}{text} raised {type(error).__name__}: {error}") from error
        if function and not callable(getattr(module, function, None)):
            raise ValueError(f"{flag}{text}: the file defines no function {function!r}")
        if not function and before == REGISTERED:
            raise ValueError(
                f"{flag}{text} registers no perturbation; expected a call of "
                "noiseproof.perturb.register"
            )
        _loaded[name] = module


def loaded_plugins() -> tuple[str, ...]:
    """The files that have been run in this process, for worker processes to run as well."""
    return tuple(_loaded)


def function_in_file(text: str) -> Callable[[], Any]:
    """The function of a file that has been run; ValueError if the file has not.

    Args:
        text: FILE.py:FUNCTION.
    """
    path, function = _parts(text)
    module = _loaded.get(f"{path}:{function}")
    if module is None:
        raise ValueError(
            f"the network is made by {function!r} in {path}, and a file is run only if the command "
            f"names it: add --plugin {path}:{function}, or in Python call "
            "noiseproof.lab.plugins.load_plugins with a list of it"
        )
    return getattr(module, function)


def raised_by(error: BaseException) -> str | None:
    """A line about an error that a function of a loaded file raised; None about other errors.

    Args:
        error: the error.
    """
    files = {_parts(name)[0] for name in _loaded}
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if Path(frame.filename) in files:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return f"{frame.name} in {frame.filename}, line {frame.lineno}, raised {text}"
    return None


def _parts(text: str) -> tuple[Path, str]:
    """The file and the function, which may be missing."""
    file, colon, function = text.rpartition(".py:")
    file = f"{file}.py" if colon else text
    return Path(file).expanduser().resolve(), function if colon else ""


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
