"""Mutation tests: do the tests notice a small change of the code?

    make mutants
    python -m tools.mutate loss geometry --seed 1 --jobs 8

Draws mutants of a subject (mutmut's operators: a changed number, operator, string or condition, a
dropped argument, …), runs the subject's tests with each in place, and prints those that survive.
mutmut's operators take turns: otherwise half of the mutants would be dropped arguments, which are
the easiest to notice. The code is changed in a temporary copy. Each mutant is tested in a fork of a
process that has imported torch already, which saves seconds.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst  # pyright: ignore[reportMissingImports]
import libcst.matchers as m  # pyright: ignore[reportMissingImports]
import pytest
from mutmut.mutation.mutators import (  # pyright: ignore[reportMissingImports]
    mutation_operators,
)

ROOT = Path(__file__).resolve().parents[1]

# What is mutated, and the tests of it: quick ones first.
SUBJECTS = {
    "loss": ("noiseproof/loss.py",
             "tests/test_centroids.py tests/test_loss.py tests/test_recompute.py"),
    "centroids": ("noiseproof/centroids.py",
                  "tests/test_centroids.py tests/test_loss.py tests/test_recompute.py"),
    "geometry": ("noiseproof/geometry.py", "tests/test_geometry.py tests/test_loss.py"),
    "perturb": ("noiseproof/perturb", "tests/test_perturb.py"),
    "corruptions": ("noiseproof/perturb/corruptions", "tests/test_corruptions.py"),
    "stats": ("noiseproof/lab/evaluation/stats.py", "tests/test_stats.py"),
    "tables": ("noiseproof/lab/evaluation/tables.py", "tests/test_tables.py"),
}  # fmt: skip


class Mutant(NamedTuple):
    file: Path  # relative to the repository
    operator: str
    module: Any
    node: Any
    replacement: Any

    def code(self) -> str:
        """The mutated file."""
        return self.module.deep_replace(self.node, self.replacement).code

    def __str__(self) -> str:
        """The changed lines, with the number of the first."""
        old, new = self.module.code.splitlines(), self.code().splitlines()
        first = next(i for i, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1)
        lines = difflib.unified_diff(old, new, n=0, lineterm="")
        changes = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        return "\n".join([f"{self.file}:{first + 1} ({self.operator})", *changes])


class _Collector(cst.CSTVisitor):
    """Every mutant of a file except those in annotations, decorators, imports and `__all__`."""

    def __init__(self, file: Path, module: cst.Module):
        self.file, self.module = file, module
        self.mutants: list[Mutant] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
            return False
        if isinstance(node, cst.Assign) and m.matches(node.targets[0].target, m.Name("__all__")):
            return False  # ruff checks it
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                name = operator.__name__.removeprefix("operator_")
                made = operator(node)
                self.mutants += [Mutant(self.file, name, self.module, node, new) for new in made]
        return True


def draw(source: Path, number: int, seed: int) -> list[Mutant]:
    """Mutants of a file or folder in random order, the operators taking turns."""
    by_operator: dict[str, list[Mutant]] = {}
    for path in sorted(source.glob("*.py")) if source.is_dir() else [source]:
        module = cst.parse_module(path.read_text())
        collector = _Collector(path.relative_to(ROOT), module)
        module.visit(collector)
        for mutant in collector.mutants:
            by_operator.setdefault(mutant.operator, []).append(mutant)
    generator, drawn = random.Random(seed), []
    for group in by_operator.values():
        generator.shuffle(group)
    while len(drawn) < number and any(by_operator.values()):
        drawn += [group.pop() for group in by_operator.values() if group]
    return drawn[:number]


def start(folder: Path, arguments: list[str], seconds: int) -> int:
    """Runs pytest in a fork with a limit of CPU time, and returns the id of the process."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path.insert(0, str(folder))
        with (folder / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os._exit(int(pytest.main(arguments)))
    return child


def survivors(name: str, number: int, seed: int, jobs: int) -> None:
    """Prints the mutants of a subject that its tests do not notice, and how many they do."""
    source, tests = SUBJECTS[name]
    arguments = ["-x", "-p", "no:cacheprovider", "-m", "not long", source, *tests.split()]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    drawn = draw(ROOT / source, number, seed)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(i)) for i in range(jobs)]
        for part in ("noiseproof", "tests"):
            shutil.copytree(ROOT / part, folders[0] / part)
        shutil.copy(ROOT / "pyproject.toml", folders[0])
        sys.dont_write_bytecode = False
        before = _cpu_seconds()
        if os.waitpid(start(folders[0], arguments, 3600), 0)[1]:
            sys.exit((folders[0] / "output.txt").read_text() + "\nthe tests fail without a mutant")
        limit = 10 + 5 * (_cpu_seconds() - before)
        sys.dont_write_bytecode = True  # of mutants
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        survived, waiting = 0, drawn[::-1]
        running: dict[int, tuple[Path, Mutant]] = {}
        while waiting or running:
            if waiting and folders:
                folder, mutant = folders.pop(), waiting.pop()
                (folder / mutant.file).write_text(mutant.code())
                running[start(folder, arguments, limit)] = folder, mutant
                continue
            process, status = os.wait()
            folder, mutant = running.pop(process)
            shutil.copy2(ROOT / mutant.file, folder / mutant.file)
            folders.append(folder)
            if status == 0:
                survived += 1
                print(f"{mutant}\n", flush=True)
    killed = len(drawn) - survived
    print(f"{name}: {killed} of {len(drawn)} mutants killed, seed {seed}\n", flush=True)


def _cpu_seconds() -> int:
    """CPU time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return int(usage.ru_utime + usage.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--number", type=int, default=100, help="mutants per subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants tested at a time"
    )
    options = parser.parse_args()
    for module in ("torch._dynamo", "torch.distributed", "hypothesis", "scipy.stats"):
        __import__(module)
    for name in options.subjects:
        survivors(name, options.number, options.seed, options.jobs)


if __name__ == "__main__":
    main()
