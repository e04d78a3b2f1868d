"""The paper's figures from analysed runs, and their place in the page of results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from noiseproof.lab.analysis.analyse import analyse
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits
from tools import figures, publish


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two trained and evaluated runs, of which the first is analysed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        made = []
        for method in ("normal", "discriminative"):
            config = digits(tmp_path_factory.mktemp("runs"), method=method, epochs=1)
            run = train(replace(config, run=replace(config.run, name=method, device="cpu")))
            evaluate(run, ["clean", "gaussian:0.2"], draws=2, device="cpu")
            made.append(run)
        analyse(made[0], parts=("curvature",), samples=20, probes=2, device="cpu")
        yield made


def test_what_was_analysed_is_drawn_and_shown_in_the_page(runs, tmp_path):
    made = figures.draw("cifar10", tmp_path, tmp_path / "docs", runs)
    names = ["curvature-boxplot.png", "curvature-between-kinks.png"]
    assert [path.name for path in made] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    content = json.loads((tmp_path / "cifar10/figures/figures.json").read_text())
    assert [run["run"] for run in content["runs"]] == ["normal", "discriminative"]
    rows = (tmp_path / "cifar10/figures/numbers.jsonl").read_text().splitlines()
    assert {json.loads(row)["run"] for row in rows} == {"normal"}
    assert "median curvature" in {json.loads(row)["metric"] for row in rows}
    assert all(path.parent == tmp_path / "docs/results/figures/cifar10" for path in made)
    text = publish.pages(tmp_path)["results/cifar10.md"]
    for figure, name in zip(content["figures"], names, strict=True):
        assert f"![{figure['alt']}](figures/cifar10/{name})" in text
        assert figure["caption"] in text
    assert "### Figures" not in publish.pages(tmp_path)["results/svhn.md"]


def test_runs_without_an_analysis_and_unknown_experiments_are_refused(runs, tmp_path, capsys):
    with pytest.raises(ValueError, match="noiseproof analyse"):
        figures.draw("cifar10", tmp_path, tmp_path, runs[1:])
    with pytest.raises(ValueError, match="cifar10"):
        figures.draw("cifar", tmp_path, tmp_path, runs)
    assert figures.main(["cifar10"]) == 2
    assert figures.main(["cifar10", str(tmp_path), str(tmp_path), "no/such/run"]) == 2
    assert capsys.readouterr().err.endswith(
        "no/such/run is not a run folder: it has no config.json\n"
    )
