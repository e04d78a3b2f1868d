"""The sentences of a report say what its table does, and no more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from noiseproof.lab.config import Config, Method
from noiseproof.lab.evaluation.stats import Difference
from noiseproof.lab.evaluation.tables import Cell, Table
from noiseproof.lab.report import summary
from noiseproof.lab.report.accuracy_sections import accuracy_figures
from noiseproof.lab.report.results import Results, SharedPredictions
from noiseproof.lab.runs import RunFolder


def _results(means: dict[str, list[float]], marks: dict[str, str], seconds: dict[str, float]):
    """Results with one hand-made column each for clean and noisy images."""
    specs = ("clean", "gaussian:0.2")
    cells = {}
    for label, values in means.items():
        for spec, value, mark in zip(specs, values, marks[label], strict=True):
            behind = None if mark == "b" else Difference(-0.05, -0.07, -0.03)
            name = {"b": "best", "~": "close", ".": "", "?": "untested"}[mark]
            cells[label, spec] = Cell(value, None, 1, None, 1, name, behind)  # pyright: ignore
    table = Table("t", "method", tuple(means), specs, cells, {x: "last" for x in means}, 2000)
    runs = {
        x: RunFolder(Path(x), Config(method=Method(x)), {"seconds": seconds[x]})  # pyright: ignore
        for x in means
    }
    rows = [{"data": "digits"}]
    groups = {x: [x] for x in means}
    stored = SharedPredictions(runs, 0, {})
    return Results(runs, "method", groups, {"last": rows}, {"last": table}, stored)


def test_a_lead_is_told_with_its_interval():
    results = _results(
        {"normal": [0.97, 0.60], "both": [0.96, 0.85], "discriminative": [0.98, 0.90]},
        {"normal": "..", "both": "..", "discriminative": "bb"},
        {"normal": 5.0, "both": 10.0, "discriminative": 11.0},
    )
    assert summary.headline(results) == "discriminative is best in the two conditions tested."
    assert summary.sentence(results.table, "gaussian:0.2") == (
        "At σ=0.2, discriminative has the highest mean, 90.00 %, 5.0 points above both, the next "
        "(95 % interval over test images 3.0 to 7.0); normal is last with 60.00 %."
    )
    said = " ".join(summary.paragraph(results))
    assert "took 10.0 s with both; against that, normal 0.5 × and discriminative 1.1 ×" in said
    assert summary.facts(results)[-1][1:3] == ("1.1 ×", "discriminative")


def test_what_is_within_noise_is_not_ranked():
    results = _results(
        {"normal": [0.97, 0.60], "both": [0.98, 0.85], "stability": [0.96, 0.86]},
        {"normal": "~.", "both": "b~", "stability": "~b"},
        {"normal": 1.0, "both": 1.0, "stability": 1.0},
    )
    assert summary.headline(results) == (
        "both and stability are best, or within noise of the best, in the two conditions tested."
    )
    assert summary.sentence(results.table, "clean") == (
        "On clean images, both has the highest mean, 98.00 %, but no method can be told from it "
        "on these images."
    )
    assert summary.sentence(results.table, "gaussian:0.2") == (
        "At σ=0.2, stability has the highest mean, 86.00 %; both cannot be told from it; "
        "normal is last with 60.00 %."
    )


def test_no_winner_is_said_to_be_none():
    results = _results(
        {"normal": [0.97, 0.60], "both": [0.90, 0.85]},
        {"normal": "b.", "both": ".b"},
        {"normal": 1.0, "both": 1.0},
    )
    assert summary.headline(results) == (
        "No method is best, or within noise of the best, in the two conditions tested."
    )


def test_one_run_is_described_alone():
    results = _results({"normal": [0.97, 0.60]}, {"normal": "bb"}, {"normal": 1.0})
    assert summary.headline(results) == (
        "normal has 97.00 % on clean images and keeps 60.00 % at σ=0.2, 37.0 points less."
    )


def test_of_several_trainings_the_interval_is_said_to_be_over_them():
    results = _results(
        {"normal": [0.96, 0.60], "both": [0.97, 0.90]},
        {"normal": "~.", "both": "bb"},
        {"normal": 1.0, "both": 1.0},
    )
    cells = {
        key: dataclasses.replace(
            cell, seeds=3, seeds_std=0.01,
            tests=() if cell.mark == "best" else ("bootstrap", "welch"),
            unsure=("welch",) if cell.mark == "close" else (),
        )
        for key, cell in results.table.cells.items()
    }  # fmt: skip
    table = dataclasses.replace(results.table, cells=cells)
    assert "(95 % interval over trainings 3.0 to 7.0)" in summary.sentence(table, "gaussian:0.2")
    assert summary.sentence(table, "clean").endswith("can be told from it with these trainings.")
    results.tables["last"] = table
    assert "were trained with 3 seeds on" in summary.paragraph(results)[0]
    fewer = {**cells, ("both", "clean"): dataclasses.replace(cells["both", "clean"], seeds=2)}
    results.tables["last"] = dataclasses.replace(table, cells=fewer)
    assert "were trained with up to 3 seeds on" in summary.paragraph(results)[0]


def _guessing(*means: tuple[str, float, float]) -> Results:
    """Results on images of which 34.2 % are of one class, with the marks that build would give."""
    labels = [label for label, *_ in means]
    top = [max(values) for values in zip(*(m[1:] for m in means), strict=True)]
    results = _results(
        {label: [*values] for label, *values in means},
        {label: "".join("b" if v == t else "." for v, t in zip(values, top, strict=True))
         for label, *values in means},
        {label: 1.0 for label in labels},
    )  # fmt: skip
    results.tables["last"] = dataclasses.replace(results.table, guess=0.342)
    return results


def test_methods_that_all_guess_are_not_called_robust():
    results = _guessing(("normal", 0.342, 0.342), ("discriminative", 0.342, 0.342))
    assert summary.headline(results).startswith("No method is better than a guess")
    said = summary.paragraph(results)
    for label in ("normal", "discriminative"):
        assert any(line.startswith(f"{label} is no better than a guess") for line in said)
    assert not [fact for fact in summary.facts(results) if "differ most" in fact.title]
    assert results.telling() is None
    assert _guessing(("normal", 0.342, 0.34), ("both", 0.34, 0.342)).telling() is None
    (plate,) = accuracy_figures(_with_levels(results))
    assert "robust" not in plate.caption
    assert "loses" not in plate.caption
    assert "`normal` and `discriminative` are no better than a guess" in plate.caption


def test_of_some_methods_that_guess_the_others_are_told_as_ever():
    results = _guessing(("normal", 0.342, 0.342), ("both", 0.95, 0.90))
    assert summary.headline(results) == "both is best in the two conditions tested."
    assert "normal is no better than a guess" in " ".join(summary.paragraph(results))
    assert any("differ most" in fact.title for fact in summary.facts(results))
    (plate,) = accuracy_figures(_with_levels(results))
    assert "unless it is no better than a guess: `normal`." in plate.caption
    assert "`normal` loses" not in plate.caption
    assert "`both` loses 5.0" in plate.caption


def test_one_run_that_guesses_is_said_to_be_no_better():
    results = _guessing(("normal", 0.342, 0.342))
    assert summary.headline(results).startswith("normal is no better than a guess")
    assert "34.20 %" in summary.headline(results)


def _with_levels(results: Results) -> Results:
    """The same with a second level of the noise, as a curve needs."""
    table = results.table
    cells = {**table.cells} | {(x, "gaussian:0.4"): table.cells[x, "gaussian:0.2"]
                               for x in table.labels}  # fmt: skip
    specs = (*table.perturbations, "gaussian:0.4")
    results.tables["last"] = dataclasses.replace(table, cells=cells, perturbations=specs)
    return results
