"""Means over the severities of corruptions."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from noiseproof.lab.evaluation import tables, writers
from noiseproof.lab.evaluation.severities import ALL, MEANS, averaged, averaged_correct
from noiseproof.lab.evaluation.words import corruption_notes, main_sentences, notes
from noiseproof.perturb import CORRUPTIONS, parse


def suite_rows(run: str, draws: int) -> list[dict[str, Any]]:
    rows = []
    for i, name in enumerate(["clean", *CORRUPTIONS]):
        for draw in range(1 if name == "clean" or parse(name).deterministic else draws):
            facts = {"run": run, "weights": "last", "perturbation": name, "draw": draw}
            rows.append({**facts, "value": (i + 100 * draw) / 1000, "seconds": 1.0})
    return rows


def test_severities_become_one_mean_each_and_one_of_all():
    rows = averaged([*suite_rows("a", 1), *suite_rows("b", 1)])
    assert len(rows) == 2 * (1 + 1 + 15)
    assert [row["perturbation"] for row in rows[:4]] == [
        "clean", ALL, "gaussian_noise:1..5", "shot:1..5",
    ]  # fmt: skip
    values = {row["perturbation"]: row["value"] for row in rows if row["run"] == "b"}
    assert values["clean"] == 0
    assert values["gaussian_noise:1..5"] == pytest.approx(np.mean([1, 2, 3, 4, 5]) / 1000)
    assert values[ALL] == pytest.approx(np.mean(np.arange(1, 76)) / 1000)


def test_the_only_draw_of_a_deterministic_corruption_counts_for_every_draw():
    values = {
        (row["perturbation"], row["draw"]): row["value"] for row in averaged(suite_rows("a", 3))
    }
    assert [d for name, d in values if name == "jpeg:1..5"] == [0]
    assert [d for name, d in values if name == ALL] == [0, 1, 2]
    random = np.mean([not parse(name).deterministic for name in CORRUPTIONS])
    assert values[ALL, 2] - values[ALL, 0] == pytest.approx(0.2 * random)


def test_a_mean_has_the_draws_that_its_random_corruptions_share():
    rows = suite_rows("a", 1)
    fog = next(row for row in rows if row["perturbation"] == "fog:3")
    more = [{**fog, "draw": draw, "value": 1.0} for draw in (1, 2)]
    assert averaged([*rows, *more]) == averaged(rows)


def test_an_incomplete_suite_keeps_its_severities_for_all_runs():
    whole = suite_rows("a", 1)
    part = [row for row in suite_rows("b", 1) if row["perturbation"] in ("clean", "fog:3")]
    rows = averaged([*whole, *part], keep=["jpeg:1"])
    assert [row["perturbation"] for row in rows if row["run"] == "b"] == ["clean", "fog:3"]
    names = [row["perturbation"] for row in rows if row["run"] == "a"]
    assert names[:4] == ["clean", "fog:3", "jpeg:1", ALL]
    assert len(names) == 3 + 1 + 15


def test_rows_without_corruptions_stay_as_they_are():
    rows = [row for row in suite_rows("a", 1) if row["perturbation"] == "clean"]
    assert averaged(rows) == rows


def test_the_words_below_the_table_explain_and_describe_the_mean():
    rows = averaged([*suite_rows("a", 1), *suite_rows("b", 1)])
    shared = {"fingerprint": "f", "noise_seed": 0, "n": 100}
    raised = [
        {**row, **shared, "value": row["value"] + (0.01 if row["run"] == "b" else 0)}
        for row in rows
    ]
    table = tables.build(raised, by="run")
    assert "1–5 is the mean over the severities" in notes(table)[1]
    sentences = main_sentences(table)
    assert [s.partition(",")[0] for s in sentences[:2]] == [
        "On clean images",
        "On average over all corruptions",
    ]
    assert "1–5" not in "".join(notes(tables.build(raised[:1], by="run")))


def test_predictions_of_a_mean_weigh_every_severity_alike():
    def correct(run: str, weights: str, name: str):
        if run == "unknown" and name == "fog:3":
            return None
        draws = 1 if name == "clean" or parse(name).deterministic else 2
        return np.full((draws, 4), name == "fog:1" or name == "jpeg:1")

    look_up = averaged_correct(correct)
    found = averaged_correct(lambda *_: np.ones((7, 4)))("known", "last", "gaussian:0.1")
    assert found is not None
    assert found.shape == (7, 4)
    for name, share in (("fog:1..5", 0.2), ("jpeg:1..5", 0.2), (ALL, 2 / 75), ("clean", 0)):
        found = look_up("known", "last", name)
        assert found is not None
        assert found.mean() == pytest.approx(share)
    assert look_up("unknown", "last", "fog:1..5") is None


def corrupted_table(accuracies: dict[str, float], *, weights: tuple[str, ...] = ("last",)):
    """Each run has this accuracy under fog and 0.5 under the other corruptions, 0.9 on clean."""
    rows = []
    for run, fog in accuracies.items():
        for which in weights:
            for row in suite_rows(run, 1):
                name = row["perturbation"]
                value = 0.9 if name == "clean" else fog if name.startswith("fog") else 0.5
                shared = {"fingerprint": "f", "noise_seed": 0, "n": 100, "weights": which}
                rows.append({**row, **shared, "value": value})
    return tables.build(averaged(rows), by="run", title="digits")


def test_corruption_error_is_the_error_divided_by_that_of_the_baseline():
    table = tables.with_baseline(corrupted_table({"a": 0.4, "b": 0.7}), "a")
    assert table.corruption_error("b", "fog:1..5") == pytest.approx(0.3 / 0.6)
    assert table.corruption_error("b", "snow:1..5") == pytest.approx(1.0)
    # the mean of 15 quotients, which is not the quotient of the means
    assert table.corruption_error("b", ALL) == pytest.approx((14 + 0.5) / 15)
    assert table.corruption_error("a", ALL) == pytest.approx(1.0)
    assert table.drop("b", "fog:1..5") == pytest.approx(0.2)
    assert table.drop("b", "clean") == 0


def test_a_drop_that_rounds_to_zero_has_no_sign():
    text = writers.markdown(corrupted_table({"a": 0.9001}))
    assert "| weather | fog | 90.0 | 0.0 |" in text


def test_there_is_no_corruption_error_without_a_baseline_or_its_errors():
    table = corrupted_table({"a": 1.0, "b": 0.7})
    assert table.corruption_error("b", "fog:1..5") is None
    assert tables.with_baseline(table, "c").baseline == {}
    perfect = tables.with_baseline(table, "a")
    assert perfect.corruption_error("b", "fog:1..5") is None
    assert perfect.corruption_error("b", ALL) is None
    assert perfect.corruption_error("b", "snow:1..5") == 1
    assert "| weather | fog | – | – |" in writers.markdown(perfect)


def test_the_baseline_of_each_weights_is_that_of_the_same_weights():
    table = tables.with_baseline(
        corrupted_table({"a": 0.4, "b": 0.7}, weights=("last", "best")), "a"
    )
    assert table.baseline["b (best epoch)"] == "a (best epoch)"
    assert table.baseline["b (last epoch)"] == "a (last epoch)"
    assert "those of `a`, in %" in " ".join(corruption_notes(table))


def test_tables_have_one_column_and_fifteen_rows_of_corruptions():
    table = corrupted_table({"a": 0.4, "b": 0.7})
    assert table.columns == ("clean", ALL)
    assert table.corruptions == (ALL, *MEANS)
    titles = list(writers.corruption_tables(table))
    assert [title.split(",")[0] for title in titles] == [
        "Accuracy under corruptions",
        "Drop against clean images",
    ]
    titles = list(writers.corruption_tables(tables.with_baseline(table, "a")))
    assert titles[2] == "Corruption error (CE), in %, digits"
    text = writers.markdown(tables.with_baseline(table, "a"))
    assert "| run | clean | corruptions 1–5 |" in text
    assert "| weather | fog | 40.0 ? | **70.0** |" in text
    assert "| weather | fog | 50.0 | 20.0 |" in text
    assert "| weather | fog | 100.0 | 50.0 |" in text
    assert text.count("| noise | shot |") == 3
    assert writers.latex(table).count(r"\toprule") == 3


def test_one_run_has_all_measures_side_by_side():
    table = corrupted_table({"a": 0.4})
    (columns,) = writers.corruption_tables(table).values()
    assert [column.head for column in columns] == ["accuracy (%)", "drop (points)"]
    assert "| weather | fog | 40.0 | 50.0 |" in writers.markdown(table)
    out = Console(file=io.StringIO(), width=100)
    writers.show(table, out)
    assert "fog" in out.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    rows = list(csv.DictReader(io.StringIO(writers.csv_text(table))))
    assert {row["perturbation"]: row["drop"] for row in rows}["clean"] == ""
    fog = next(row for row in rows if row["perturbation"] == "fog:1..5")
    assert (float(fog["drop"]), fog["ce"]) == (pytest.approx(0.5), "")
