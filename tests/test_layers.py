"""Imports run one way: a module imports from the lines above its own, or from its own package.

`docs/architecture.md` shows the same order. Every import counts, inside functions and for types
alone as well: an import inside a function is for heavy libraries, not for hiding a circle.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import noiseproof

ROOT = Path(noiseproof.__file__).resolve().parent

# From the bottom up. Names of one line do not import each other.
ORDER = """
draws modes perturb.values
perturb geometry wrapped
centroids augment
loss curvature
objectives robustness
theory
smoothing adversarial
lab.config
lab.recipes
lab.validate lab.paths lab.files lab.console lab.command lab.plugins lab.comparison_files
lab.device
lab.data
lab.models
lab.runs
lab.training lab.evaluation
lab.analysis
lab.figures
lab.report
lab.comparison lab.deploy
paper
cli
__main__
"""
RANKS = {
    f"noiseproof.{name}": rank
    for rank, line in enumerate(ORDER.strip().splitlines())
    for name in line.split()
}


class Import(NamedTuple):
    """`source` imports `target`, in line `line` of `file`."""

    source: str
    target: str
    file: Path
    line: int


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("noiseproof", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports_of(module: str, text: str, path: Path) -> Iterator[Import]:
    """The modules of the package that `text` imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write the import in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            target = name if name in MODULES else name.rpartition(".")[0]
            if target == "noiseproof" != name:  # a public name: the module that defines it
                public = getattr(noiseproof, name.rpartition(".")[2])
                target = getattr(public, "__module__", "noiseproof")  # a string has none
            if target in MODULES and target not in ("noiseproof", module):
                yield Import(module, target, path, node.lineno)


def every_import() -> list[Import]:
    found = []
    for module, path in MODULES.items():
        if module != "noiseproof":  # it offers the public names of all others, lazily
            found += imports_of(module, path.read_text(), path)
    return found


def room_of(module: str) -> str:
    """The longest name of the order that the module is, or lies in."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in RANKS), "")


def runs_up(one: Import) -> bool:
    source, target = room_of(one.source), room_of(one.target)
    return source != target and RANKS[target] >= RANKS[source]


def test_every_module_has_a_place_in_the_order():
    packages = {"noiseproof", "noiseproof.lab"}
    assert [m for m in MODULES if not room_of(m) and m not in packages] == []
    rooms = {room_of(m) for m in MODULES}
    assert [name for name in RANKS if name not in rooms] == [], "the order names what is not there"


def test_no_import_runs_up():
    wrong = [
        f"{one.file.relative_to(ROOT.parent)}:{one.line}: {one.source} -> {one.target}"
        for one in every_import()
        if runs_up(one)
    ]
    assert not wrong, "these imports run up:\n" + "\n".join(wrong)


def test_the_package_imports_nothing_that_is_not_installed_with_it():
    beside = {"tools", "tests", "benchmarks", "examples"}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong = [name for name in names if name.partition(".")[0] in beside]
            assert not wrong, f"{path}: imports {wrong}"


def test_no_modules_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for one in every_import():
        graph.setdefault(one.source, set()).add(one.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_packages_define_nothing_in_their_init():
    lazy = {"noiseproof", "noiseproof.perturb"}  # resolve their names on first use
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module not in lazy:
            defined = [
                node
                for node in ast.parse(path.read_text()).body
                if not isinstance(node, (ast.ImportFrom, ast.Expr, ast.Assign))
            ]
            assert not defined, f"{path}:{defined[0].lineno} defines something"


@pytest.mark.parametrize(
    ("line", "up"),
    [
        ("from noiseproof.lab.training import train", False),
        ("from noiseproof.lab.analysis.store import read", False),
        ("    from noiseproof.paper import experiments", True),
        ("from noiseproof.lab.report.page import report", True),
        ("import noiseproof.cli.main", True),
    ],
)
def test_an_import_that_runs_up_is_found(line: str, up: bool):
    text = f"def f():\n{line}\n" if line.startswith(" ") else line
    module = "noiseproof.lab.analysis.curvature"
    (one,) = itertools.islice(imports_of(module, text, Path("x.py")), 1)
    assert runs_up(one) is up
