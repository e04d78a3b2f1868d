"""The commands of a report name what was analysed: which runs, which parts, as they were asked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from noiseproof.cli.arguments import AnalyseArguments
from noiseproof.cli.parsing import parsed
from noiseproof.lab.analysis.analyse import ALL, PARTS, noises_of
from noiseproof.lab.analysis.store import Analysis
from noiseproof.lab.comparison import afford, compare
from noiseproof.lab.config import Config, Method, MethodName, Run
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report import commands
from noiseproof.lab.report.measured import analyse_words
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from tests.flat import Flat, digits

NOISE = "gaussian:0.2"
USUAL = {"probes": 20, "step": 0.01, "draws": 10, "seed": 0, "samples": None, "stages": False}


def run_of(method: MethodName, seed: int = 0) -> RunFolder:
    config = Config(method=Method(method, noise=NOISE), run=Run(seed=seed))
    return RunFolder(Path(f"runs/{method}-s{seed}"), config, {})


def analysis(parts: tuple[str, ...] = ALL, **settings: Any) -> Analysis:
    asked = {**USUAL, "noise": list(noises_of(NOISE)), **settings}
    made = {part: {"settings": {name: asked[name] for name in PARTS[part].settings}, "rows": []}
            for part in parts}  # fmt: skip
    return Analysis(Path("analysis"), {"parts": made})


def test_runs_without_an_analysis_are_not_named():
    runs = [run_of("both"), run_of("both", 1), run_of("noisy")]
    assert analyse_words(runs, [None, None, None], "last") == []
    assert analyse_words(runs, [analysis(), None, analysis()], "last") == [
        ["runs/both-s0", "runs/noisy-s0"]
    ]


def test_settings_and_parts_are_named_where_they_are_not_the_default():
    found = analysis(("curvature", "geometry"), samples=30, probes=3, seed=4, noise=["stripes:2x1"])
    (words,) = analyse_words([run_of("both")], [found], "best")
    asked = parsed(AnalyseArguments, "analyse", words)
    assert asked == AnalyseArguments(
        ("runs/both-s0",), parts=("curvature", "geometry"), samples=30, probes=3, seed=4,
        noise=("stripes:2x1",), weights="best",
    )  # fmt: skip


def test_runs_that_were_asked_differently_get_a_command_each():
    runs = [run_of("both"), run_of("noisy")]
    words = analyse_words(runs, [analysis(samples=30), analysis()], "last")
    assert words == [["runs/both-s0", "--samples", "30"], ["runs/noisy-s0"]]


def test_parts_of_two_calls_get_a_command_each():
    found = analysis(samples=30)
    found.content["parts"] |= analysis(("geometry",), samples=99).content["parts"]
    rest = [part for part in ALL if part != "geometry"]
    assert analyse_words([run_of("both")], [found], "last") == [
        ["runs/both-s0", "--parts", *rest, "--samples", "30"],
        ["runs/both-s0", "--parts", "geometry", "--samples", "99"],
    ]


def test_stages_are_named_where_auto_would_embed_others():
    runs = [run_of("normal"), run_of("both"), run_of("normal", 1)]

    def words(*staged: bool) -> list[list[str]]:
        return analyse_words(runs, [analysis(stages=stages) for stages in staged], "last")

    paths = [str(run.path) for run in runs]
    assert words(True, False, False) == [paths]
    assert words(False, False, False) == [[*paths, "--stages", "none"]]
    assert words(True, True, False) == [
        [*paths[:2], "--stages", "all"],
        [paths[2], "--stages", "none"],
    ]


def test_what_compare_has_analysed_needs_no_command_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    monkeypatch.setattr(afford, "pace", lambda *_: 2.0)  # seconds: 30 images, and no fixed parts
    config = digits(tmp_path, epochs=1, device="cpu", name=None)
    assert compare.compare(config, ["normal", "both"], 2, 1, draws=2) == 0
    folder = tmp_path / "compare-digits"
    runs = [RunFolder.open(path.parent) for path in sorted(folder.glob("*/config.json"))]
    verbs = [shlex.split(line)[1:] for line in commands.again(gather(runs), folder)]
    assert [words[0] for words in verbs] == ["compare", "report"]
    assert "--no-report" not in verbs[0]

    (folder / afford.FILE).unlink()  # had it been asked for by hand
    verbs = [shlex.split(line)[1:] for line in commands.again(gather(runs), folder)]
    assert [words[0] for words in verbs] == ["compare", "analyse", "report"]
    assert verbs[0][-1] == "--no-report"
    asked = parsed(AnalyseArguments, "analyse", verbs[1][1:])
    assert {Path(path).name for path in asked.runs} == {"normal-s0", "both-s0"}
    assert set(asked.parts) == set(ALL) - set(afford.FIXED)
    assert (asked.samples, asked.stages) == (30, "none")
