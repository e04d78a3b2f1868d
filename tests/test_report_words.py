"""The headline, opening paragraph and large figures of a report state what its table shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab.config import Config, Method
from noiseproof.lab.data.duplicates import Leak
from noiseproof.lab.evaluation.stats import Difference
from noiseproof.lab.evaluation.tables import Cell, Table
from noiseproof.lab.report import summary
from noiseproof.lab.report.accuracy_sections import accuracy_figures
from noiseproof.lab.report.decision import decide
from noiseproof.lab.report.results import Results
from noiseproof.lab.runs import EvaluationRow, RunFolder


def _results(means: dict[str, list[float]], marks: dict[str, str], seconds: dict[str, float]):
    """Results with given means and marks on clean and noisy images."""
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
    groups = {x: [x] for x in means}
    return Results(runs, "method", groups, {"last": _rows(cells)}, 0, {}, {"last": table})


def _rows(cells: Mapping[tuple[str, str], Cell]) -> list[EvaluationRow]:
    """One row for each cell."""
    shared = {"data": "digits", "weights": "last", "draw": 0, "noise_seed": 0, "fingerprint": "f"}
    return [
        {**shared, "run": x, "method": x, "perturbation": spec, "value": cell.mean, "n": 2000}
        for (x, spec), cell in cells.items()
    ]


def _with_table(results: Results, **changes: Any) -> Results:
    return dataclasses.replace(
        results, tables={"last": dataclasses.replace(results.table, **changes)}
    )


def test_the_paragraph_says_what_was_done_and_what_it_costs():
    results = _results(
        {"normal": [0.97, 0.60], "both": [0.96, 0.85], "discriminative": [0.98, 0.90]},
        {"normal": "..", "both": "..", "discriminative": "bb"},
        {"normal": 5.0, "both": 10.0, "discriminative": 11.0},
    )
    setting, clean, noisy, times, caveat = summary.paragraph(results)
    assert setting == (
        "Three methods were trained once on digits (small_cnn for 40 epochs, training noise "
        "gaussian:0.2) and tested on the same 2,000 images under two conditions."
    )
    assert clean.startswith("On clean images, `discriminative` has the highest accuracy, 98.00 %")
    assert noisy.startswith("At σ=0.2, `discriminative` has the highest accuracy, 90.00 %")
    assert times.startswith(
        "One training took 10.0 s with `both`, 0.5 × as long with `normal` and 1.1 × as long with "
        "`discriminative`"
    )
    assert caveat.startswith("One training per method")
    assert summary.headline_figures(results)[-1][1:3] == ("1.1 ×", "`discriminative`")


def test_methods_that_are_statistically_tied_are_not_ranked():
    results = _results(
        {"normal": [0.97, 0.60], "both": [0.98, 0.85], "stability": [0.96, 0.86]},
        {"normal": "~.", "both": "b~", "stability": "~b"},
        {"normal": 1.0, "both": 1.0, "stability": 1.0},
    )
    assert summary.headline_figures(results)[0].remark == (
        "statistically tied: `normal` and `stability`"
    )


def test_the_headline_is_the_answer_of_the_recommendation():
    results = _near_chance(("normal", 0.97, 0.60), ("both", 0.95, 0.90))
    choice = decide(_with_predictions(results))
    assert choice.run is results.runs["both"]
    assert summary.headline(results, choice) == (
        "Take `both`: at σ=0.2 it has 90.00 % accuracy, significantly more than every other method."
    )
    assert summary.headline(results, None).endswith("so none is recommended.")


def test_a_single_run_has_a_headline_of_its_own():
    results = _results({"normal": [0.97, 0.60]}, {"normal": "bb"}, {"normal": 1.0})
    assert summary.headline(results, None) == (
        "`normal` has 97.00 % on clean images and 60.00 % at σ=0.2, 37.0 points less."
    )


def test_the_paragraph_gives_the_number_of_trainings():
    results = _results(
        {"normal": [0.96, 0.60], "both": [0.97, 0.90]},
        {"normal": "~.", "both": "bb"},
        {"normal": 1.0, "both": 1.0},
    )
    cells = {k: dataclasses.replace(c, seeds=3) for k, c in results.table.cells.items()}
    results = _with_table(results, cells=cells)
    assert "were trained with 3 seeds on" in summary.paragraph(results)[0]
    fewer = {**cells, ("both", "clean"): dataclasses.replace(cells["both", "clean"], seeds=2)}
    results = _with_table(results, cells=fewer)
    assert "were trained with up to 3 seeds on" in summary.paragraph(results)[0]


def _near_chance(*means: tuple[str, float, float]) -> Results:
    """Results on images of which 34.2 % are of one class, with the marks that build would give."""
    labels = [label for label, *_ in means]
    top = [max(values) for values in zip(*(m[1:] for m in means), strict=True)]
    results = _results(
        {label: [*values] for label, *values in means},
        {label: "".join("b" if v == t else "." for v, t in zip(values, top, strict=True))
         for label, *values in means},
        {label: 1.0 for label in labels},
    )  # fmt: skip
    return _with_table(results, majority_share=0.342)


def test_methods_at_chance_are_not_called_robust():
    results = _near_chance(("normal", 0.342, 0.342), ("discriminative", 0.342, 0.342))
    assert summary.headline(results, None) == (
        "No method is better than always predicting the most frequent class, which gets 34.20 % "
        "of clean images right."
    )
    sentences = summary.paragraph(results)
    assert any(
        line.startswith("`normal` and `discriminative` are at chance: their 34.20 %")
        for line in sentences
    )
    figures = summary.headline_figures(results)
    assert [figure.title for figure in figures] == [
        "Highest accuracy on clean images",
        "Training time of the most accurate on clean images",
    ]
    assert figures[0].remark == "at chance"
    (figure,) = accuracy_figures(_with_levels(results))
    assert "robust" not in figure.caption
    assert "loses" not in figure.caption
    assert "`normal` and `discriminative` are at chance" in figure.caption


def test_images_in_two_splits_are_named():
    results = _near_chance(("normal", 0.9, 0.8))
    leak = ("near-duplicates", "test", 1, 20, [("test/a.png", "train/b.png")])
    results.first.info["leaks"] = [Leak(*leak)._asdict()]
    assert summary.leaks(results)[0] == (
        "1 of 20 test images has near-duplicates in training or validation, which makes accuracy "
        "look better than it is: test/a.png and train/b.png."
    )
    results.first.info["leaks"] = [Leak(*leak)._replace(images=9)._asdict()]
    assert summary.leaks(results)[0].endswith("train/b.png; …")


def test_if_some_methods_are_at_chance_the_others_are_compared():
    results = _near_chance(("normal", 0.342, 0.342), ("both", 0.95, 0.90))
    assert decide(_with_predictions(results)).choice.label == "both"
    assert "`normal` is at chance" in " ".join(summary.paragraph(results))
    assert any("differ most" in figure.title for figure in summary.headline_figures(results))
    (figure,) = accuracy_figures(_with_levels(results))
    assert "unless it is at chance: `normal`." in figure.caption
    assert "loses" not in figure.caption  # there is nothing to compare `both` with


def test_a_single_run_at_chance_has_a_headline_that_says_so():
    results = _near_chance(("normal", 0.342, 0.342))
    assert summary.headline(results, None) == (
        "`normal` is no better than always predicting the most frequent class, which gets "
        "34.20 % of clean images right."
    )


def _with_levels(results: Results) -> Results:
    """The same with a second level of the noise, as a curve needs."""
    table = results.table
    cells = {**table.cells} | {(x, "gaussian:0.4"): table.cells[x, "gaussian:0.2"]
                               for x in table.labels}  # fmt: skip
    specs = (*table.perturbations, "gaussian:0.4")
    return dataclasses.replace(
        _with_table(results, cells=cells, perturbations=specs), rows={"last": _rows(cells)}
    )


class _WithPredictions(Results):
    """Predictions that are right for the first images, as many as the accuracy says."""

    def correct(self, key: str, weights: str, spec: str) -> NDArray[np.bool_]:
        return np.arange(2000)[None] < 2000 * self.table.cells[key, spec].mean


def _with_predictions(results: Results) -> Results:
    fields = {f.name: getattr(results, f.name) for f in dataclasses.fields(results)}
    return _WithPredictions(**fields)


def _caption(*means: tuple[str, float, float]) -> str:
    """Of the figure of accuracy by level."""
    (figure,) = accuracy_figures(_with_predictions(_with_levels(_near_chance(*means))))
    return figure.caption


def test_the_figure_names_who_loses_least_and_most_if_that_is_significant():
    means = ("normal", 0.97, 0.60), ("both", 0.95, 0.90), ("stability", 0.96, 0.88)
    assert (
        "From clean to σ=0.4, `both` loses 5.0 points and `normal` significantly more, 37.0. "
        in _caption(*means)
    )
    assert "loses 5.0 points and `normal` significantly more" in _caption(*means[:2])


def test_nothing_is_said_about_losses_that_are_tied_or_where_accuracy_rises():
    tied = ("normal", 0.951, 0.90), ("both", 0.95, 0.90), ("stability", 0.95, 0.901)
    rising = ("normal", 0.97, 0.60), ("noisy", 0.60, 0.804)
    same = ("normal", 0.9, 0.9), ("both", 0.9, 0.9)
    perfect = ("normal", 1.0, 1.0), ("both", 1.0, 1.0)
    alone = (("normal", 0.97, 0.60),)
    weak = ("normal", 0.97, 0.60), ("stability", 0.46, 0.40)  # has less to lose
    for means in (tied, rising, same, perfect, alone, weak):
        assert _caption(*means) == (
            "A high, flat line means a robust model. Bands: ± one standard deviation over noise "
            "draws."
        )


def test_losses_that_cannot_be_tested_are_not_compared():
    results = _with_levels(_near_chance(("normal", 0.97, 0.60), ("both", 0.95, 0.90)))
    (figure,) = accuracy_figures(results)  # without predictions
    assert "loses" not in figure.caption


def test_a_headline_never_ranks_what_could_not_be_tested():
    results = _near_chance(("normal", 0.97, 0.60), ("both", 0.90, 0.85))
    choice = decide(results)  # without predictions
    assert summary.headline(results, choice) == (
        "Take `both`: at σ=0.2 it has 85.00 % accuracy, the highest, not tested against `normal`."
    )
    assert "`normal` 60.00 % could not be tested" in choice.sentences[-1]


def test_a_condition_is_not_said_to_differ_most_if_all_are_tied_there():
    means, seconds = {"normal": [0.97, 0.85], "both": [0.97, 0.86]}, {"normal": 1.0, "both": 1.0}
    tied = _results(means, {"normal": "b~", "both": "bb"}, seconds)
    assert [figure.title for figure in summary.headline_figures(tied)[:2]] == [
        "Highest accuracy on clean images",
        "Highest accuracy at σ=0.2",
    ]


def test_the_headline_of_a_single_run_gives_a_loss_only_if_there_is_one():
    same = _results({"normal": [1.0, 1.0]}, {"normal": "bb"}, {"normal": 1.0})
    assert summary.headline(same, None) == "`normal` has 100.00 % on clean images."
    rises = _results({"normal": [0.6, 0.9]}, {"normal": "bb"}, {"normal": 1.0})
    assert summary.headline(rises, None) == "`normal` has 60.00 % on clean images."
    small = _results({"normal": [0.9, 0.8998]}, {"normal": "bb"}, {"normal": 1.0})
    assert summary.headline(small, None).endswith("89.98 % at σ=0.2, 0.02 points less.")
