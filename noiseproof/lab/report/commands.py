"""The commands that make a set of runs, and a report on them, again.

A command names the settings that differ from what the default recipe gives for the data, so that it
is short and still exact: parsed again, it gives the same config.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noiseproof.lab.analysis.store import read
from noiseproof.lab.config import GROUPS, METHODS, Config, run_name
from noiseproof.lab.paths import anchored, near
from noiseproof.lab.recipes import DEFAULT, recipe, shortened, suite
from noiseproof.lab.report.measured import analyse_words, made_by_compare
from noiseproof.lab.report.results import Results
from noiseproof.lab.runs import RunFolder

__all__ = ["again", "compare_command", "flags", "train_command"]

_NEVER = {"resume"}  # how a run was started, not what it is


def flags(config: Config, leave: Sequence[str] = ()) -> list[str]:
    """The flags that turn the default recipe for the data into `config`.

    >>> from noiseproof.lab.config import Optim
    >>> flags(Config(optim=Optim(epochs=12)))
    ['--data', 'digits', '--epochs', '12']
    """
    config = near(config)
    start = recipe(DEFAULT, config.data.data)
    marks = shortened(start, config.optim.epochs).optim.decay_milestones
    start = dataclasses.replace(
        start, optim=dataclasses.replace(start.optim, decay_milestones=marks)
    )
    words = ["--data", config.data.data]
    for group in GROUPS:
        mine, default = getattr(config, group), getattr(start, group)
        for field in dataclasses.fields(mine):
            name, value = field.name, getattr(mine, field.name)
            if name == "data" or name in leave or name in _NEVER:
                continue
            if name == "decay_milestones" and config.optim.sched != "multistep":
                continue  # without effect, and refused as a flag
            if value != getattr(default, name):
                words += _words(name.replace("_", "-"), value)
    return words


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", str(value)]


def train_command(run: RunFolder) -> str:
    """`noiseproof train` with the run's settings; a name only where it is not the default one."""
    plain = dataclasses.replace(run.config, run=dataclasses.replace(run.config.run, name=None))
    leave = ("name",) if run_name(plain) == run.config.run.name else ()
    return _shell("train", *flags(run.config, leave))


def compare_command(runs: Sequence[RunFolder], draws: int) -> str | None:
    """The one `compare` that makes all these runs, or None where no such command does."""
    from noiseproof.lab.comparison.compare import plan

    first = min(runs, key=lambda run: run.config.run.seed).config
    methods = [m for m in METHODS if any(run.config.method.method == m for run in runs)]
    seeds = {run.config.run.seed for run in runs}
    folder = Path(first.run.output)
    start = recipe(DEFAULT, first.data.data)
    base = dataclasses.replace(
        first,
        method=dataclasses.replace(first.method, method=start.method.method),
        run=dataclasses.replace(first.run, output=str(folder.parent), name=None),
    )
    if first.run.output != plan(base, methods, 1)[0].run.output:
        base = dataclasses.replace(base, run=dataclasses.replace(base.run, name=folder.name))
    planned = plan(base, methods, len(seeds))
    if sorted(map(_essence, planned)) != sorted(_essence(run.config) for run in runs):
        return None
    words = flags(base, leave=("method", "threads"))
    if methods != list(METHODS):
        words += ["--methods", *methods]
    if len(seeds) > 1:
        words += ["--seeds", str(len(seeds))]
    if draws != 10:
        words += ["--draws", str(draws)]
    return _shell("compare", *words)


def _essence(config: Config) -> str:
    """The config without what `compare` sets for itself."""
    config = anchored(config)
    run = dataclasses.replace(config.run, threads=0, resume=True)
    return repr(dataclasses.replace(config, run=run))


def again(results: Results, output: Path) -> list[str]:
    """Every command, from training to this report; paths are as the runs were made and given."""
    runs = list(results.runs.values())
    paths = [str(run.path) for run in runs]
    specs = list(results.table.perturbations)
    compared = compare_command(runs, results.table.draws)
    analyses = [read(run, results.weights) for run in runs]
    whole = bool(compared) and made_by_compare(runs, analyses)
    lines = [train_command(run) for run in runs]
    if compared:
        lines = [compared if whole else f"{compared} --no-report"]
    seed = ["--noise-seed", str(results.noise_seed)] if results.noise_seed else []
    draws = ["--draws", str(results.table.draws)] if results.table.draws != 10 else []
    usual = suite(runs[0].config.data.data, runs[0].info["size"])
    if not compared or specs != usual or seed:  # else `compare` has evaluated just so
        lines.append(_shell("evaluate", *paths, "--perturb", *specs, *draws, *seed))
    if not whole:  # else `compare` has analysed just so
        asked = analyse_words(runs, analyses, results.weights)
        lines += [_shell("analyse", *words) for words in asked]
    lines.append(_shell("report", *paths, "--output", str(output)))
    return lines


def _shell(*words: str) -> str:
    return shlex.join(["noiseproof", *words])
