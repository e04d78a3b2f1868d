"""The commands that make the analyses of runs again: of those alone that have one, as it was asked.

A run's parts may stem from several calls; those whose settings do not contradict each other are
taken for one. Settings that are the default are not named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from noiseproof.cli.arguments import AnalyseArguments
from noiseproof.lab.analysis.analyse import ALL, Analysis, noises_of
from noiseproof.lab.comparison import afford
from noiseproof.lab.config import STAGED
from noiseproof.lab.runs import RunFolder, Weights

__all__ = ["analyse_words", "made_by_compare"]

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(AnalyseArguments)}
_NAMED = ("samples", "probes", "step", "draws", "noise", "seed")


class Call(NamedTuple):
    """One call of `analyse`: what it made, and the settings that are not the default."""

    parts: tuple[str, ...]
    settings: dict[str, Any]
    stages: bool

    def words(self) -> tuple[str, ...]:
        words = [] if self.parts == ALL else ["--parts", *self.parts]
        for name in _NAMED:
            if name in self.settings:
                value = self.settings[name]
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return tuple(words)


def calls_of(run: RunFolder, analysis: Analysis) -> list[Call]:
    """The calls that make `analysis`; usually one."""
    calls: list[tuple[list[str], dict[str, Any]]] = []
    for part in (part for part in ALL if part in analysis.parts):
        mine = analysis.asked(part)
        for parts, settings in calls:
            if all(settings.get(name, value) == value for name, value in mine.items()):
                parts.append(part)
                settings.update(mine)
                break
        else:
            calls.append(([part], dict(mine)))
    usual = {**_DEFAULTS, "noise": list(noises_of(run.config.method.noise))}
    return [
        Call(
            tuple(parts),
            {name: settings[name] for name in _NAMED
             if name in settings and settings[name] != usual[name]},
            bool(settings.get("stages", False)),
        )
        for parts, settings in calls
    ]  # fmt: skip


def analyse_words(
    runs: Sequence[RunFolder], analyses: Sequence[Analysis | None], weights: Weights
) -> list[list[str]]:
    """The arguments of `noiseproof analyse`, call by call; runs that were asked alike share one."""
    calls: dict[tuple[str, ...], list[tuple[RunFolder, Call]]] = {}
    for run, analysis in zip(runs, analyses, strict=True):
        for call in calls_of(run, analysis) if analysis else []:
            calls.setdefault(call.words(), []).append((run, call))
    of_best = [] if weights == _DEFAULTS["weights"] else ["--weights", weights]
    return [
        [*(str(run.path) for run in members), *words, *stages, *of_best]
        for words, asked in calls.items()
        for stages, members in _by_stages(asked)
    ]


def _by_stages(
    asked: Sequence[tuple[RunFolder, Call]],
) -> list[tuple[list[str], list[RunFolder]]]:
    """The runs by the value of --stages, which is left out where `auto` gives the same."""
    runs = [run for run, _ in asked]
    if not any("embedding" in call.parts for _, call in asked):
        return [([], runs)]
    methods = [run.config.method.method for run in runs]
    auto = [m in STAGED and m not in methods[:i] for i, m in enumerate(methods)]
    if auto == [call.stages for _, call in asked]:
        return [([], runs)]
    split = {
        "all": [run for run, call in asked if call.stages],
        "none": [run for run, call in asked if not call.stages],
    }
    return [(["--stages", name], some) for name, some in split.items() if some]


def made_by_compare(runs: Sequence[RunFolder], analyses: Sequence[Analysis | None]) -> bool:
    """Whether these are the analyses that `compare` makes of the first training of each method, as
    much of them as it has chosen."""
    first = min(run.config.run.seed for run in runs)
    for run, analysis in zip(runs, analyses, strict=True):
        made = calls_of(run, analysis) if analysis else []
        if bool(made) != (run.config.run.seed == first):
            return False
        if made:
            some = afford.recorded(run.path.parent)
            if some is None or made != [Call(some.parts, {"samples": some.samples}, False)]:
                return False
    return True
