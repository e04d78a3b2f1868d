"""Tables from synthetic rows whose answers are known."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import stats, tables, words, writers
from noiseproof.perturb.text import heading

NOISE = "gaussian:8/255"


def row(method: str, value: float, **more: Any) -> dict[str, Any]:
    base = {"run": f"{method}-s0", "method": method, "weights": "last", "perturbation": NOISE}
    base |= {"draw": 0, "noise_seed": 0, "fingerprint": "f", "value": value, "n": 2000}
    return base | more


def right(share: float, n: int = 2000, draws: int = 1) -> np.ndarray:
    """The first `share` of the images are right: two such vectors disagree on the fewest."""
    return np.tile(np.arange(n) < round(share * n), (draws, 1))


def draws_of(method: str, values: list[float], **more: Any) -> list[dict[str, Any]]:
    return [row(method, value, draw=i, **more) for i, value in enumerate(values)]


def test_one_training_gives_mean_and_standard_deviation_over_draws():
    cell = tables.build(draws_of("both", [0.90, 0.92, 0.94])).cells["both", NOISE]
    assert (cell.mean, cell.draws_std) == pytest.approx((0.92, 0.02))
    assert (cell.draws, cell.seeds, cell.seeds_std) == (3, 1, None)


def test_the_standard_deviations_over_trainings_and_over_draws_are_separate():
    rows = draws_of("both", [0.90, 0.92, 0.94]) + draws_of("both", [0.81, 0.82], run="both-s1")
    cell = tables.build(rows).cells["both", NOISE]
    means = (0.92, 0.815)
    assert cell.mean == pytest.approx(sum(means) / 2)  # not the mean of the five values
    assert cell.seeds_std == pytest.approx(abs(means[0] - means[1]) / math.sqrt(2))
    assert cell.draws_std == pytest.approx(math.sqrt((0.02**2 + 0.01**2 / 2) / 2))
    assert (cell.draws, cell.seeds) == (3, 2)


def test_a_repeated_row_counts_once():
    rows = [row("both", 0.5), row("both", 0.9)]
    assert tables.build(rows).cells["both", NOISE].mean == 0.9


def test_on_the_same_images_only_a_significant_difference_is_below_the_best():
    shares = {"a": 0.95, "b": 0.949, "c": 0.90}
    table = tables.build(
        [row(m, share) for m, share in shares.items()],
        correct=lambda run, weights, spec: right(shares[run[0]]),
    )
    marks = {m: table.cells[m, NOISE].mark for m in shares}
    assert marks == {"a": "best", "b": "close", "c": ""}
    behind = table.cells["c", NOISE].behind
    assert behind is not None
    assert behind.diff == pytest.approx(-0.05)
    assert behind.high < 0


def test_five_images_are_not_enough_for_a_significant_difference():
    # McNemar's p of 5 : 0 is 0.0625.
    shares = {"a": 0.95, "b": 0.9475}
    table = tables.build(
        [row(m, share) for m, share in shares.items()],
        correct=lambda run, weights, spec: right(shares[run[0]]),
    )
    cell = table.cells["b", NOISE]
    assert cell.behind is not None
    assert cell.behind.contains_zero
    assert cell.p == pytest.approx(0.0625, abs=0.01)
    assert cell.mark == "close"


def test_without_predictions_one_training_is_untested():
    table = tables.build([row("a", 0.9), row("b", 0.5)])
    assert table.cells["b", NOISE].mark == "untested"
    assert any("could not be tested" in note for note in words.notes(table))


def trainings(method: str, values: Sequence[float]) -> list[dict[str, Any]]:
    return [row(method, v, run=f"{method}-s{i}") for i, v in enumerate(values)]


def test_with_several_trainings_the_spread_between_them_decides():
    rows = trainings("a", [0.90, 0.95, 0.94]) + trainings("b", [0.89, 0.93, 0.95])
    rows += trainings("c", [0.70, 0.71, 0.69])
    cells = tables.build(rows).cells
    assert [cells[m, NOISE].mark for m in "abc"] == ["best", "close", ""]


def test_with_several_trainings_the_interval_is_that_over_trainings():
    values = {"a": [0.738, 0.741, 0.745], "b": [0.671, 0.695, 0.708]}
    rows = [row(m, v, run=f"{m}-s{i}") for m, vs in values.items() for i, v in enumerate(vs)]
    table = tables.build(
        rows, correct=lambda run, weights, spec: right(values[run[0]][int(run[-1])])
    )
    cell = table.cells["b", NOISE]
    assert cell.behind is not None
    # By hand in test_stats; the images alone would give 0.040 to 0.060.
    assert cell.behind == pytest.approx((-0.05, -0.0946, -0.0054), abs=2e-4)
    assert (cell.interval_over, cell.mark) == ("trainings", "")
    assert "trainings" in writers.csv_text(table).splitlines()[2]
    once = tables.build(
        [row("a", 0.741), row("b", 0.695)],
        correct=lambda run, weights, spec: right({"a": 0.741, "b": 0.695}[run[0]]),
    ).cells["b", NOISE]
    assert once.behind is not None
    assert once.interval_over == "test images"
    assert once.behind.high - once.behind.low < 0.02


def test_the_note_names_the_tests_that_were_used():
    def note(rows: list[dict[str, Any]], **more: Any) -> str:
        table = tables.build(rows, **more)
        assert "close" in {cell.mark for cell in table.cells.values()}
        return next(line for line in words.notes(table) if line.startswith("≈"))

    def same(run: str, weights: str, spec: str) -> np.ndarray:
        return right(0.9 if run[0] == "a" else 0.899)

    several = [row(m, v + i / 100, run=f"{m}-s{i}") for m, v in (("a", 0.9), ("b", 0.899))
               for i in range(2)]  # fmt: skip
    assert note(several).endswith("; the Games-Howell test over trainings).")
    assert "Tukey" not in note(several)
    both = note(several, correct=same)
    assert "Games-Howell test over trainings and the paired Tukey-Kramer test over test" in both
    once = note(several[::2], correct=same)
    assert "Games-Howell" not in once
    assert "Tukey-Kramer" in once


def test_the_note_says_up_to_so_many_trainings_only_if_numbers_differ():
    rows = [row(m, 0.9, run=f"{m}-s{i}") for m in "ab" for i in range(3)]
    assert any("Mean over 3 trainings" in note for note in words.notes(tables.build(rows)))
    assert any(
        "Mean over up to 3 trainings" in note for note in words.notes(tables.build(rows[:-1]))
    )


def test_a_method_at_chance_is_named():
    means = {  # clean and noisy accuracy; the most frequent class is a third of the images
        "constant": (1 / 3, 1 / 3),
        "worse": (0.2, 0.34),
        "noise-only": (0.3, 0.9),  # knows noisy images well
        "learned": (0.34, 0.34),
    }
    rows = [row(m, v, perturbation=s) for m, vs in means.items()
            for s, v in zip(("clean", NOISE), vs, strict=True)]  # fmt: skip
    table = tables.build(rows, majority_share=1 / 3)
    assert table.at_chance == ("constant", "worse")
    assert words.notes(table)[-2].startswith("`constant` is at chance: its 33.33 %")
    assert words.notes(table)[-1] == (
        "`worse` is at chance: its 20.00 % on clean images is not above the 33.33 % of always "
        "predicting the most frequent class."
    )
    assert words.main_sentences(tables.build(rows[:4], majority_share=1 / 3)) == []  # all of them
    assert tables.build(rows).at_chance == ()  # the classes are unknown
    assert tables.build(rows, majority_share=1.0).at_chance == ()  # one class: nothing to learn
    assert tables.build([row("a", 0.1)], majority_share=1 / 3).at_chance == ()  # no clean images


def test_trainings_that_agree_by_chance_do_not_overrule_the_images():
    values = {"a": 0.95, "b": 0.949}
    rows = [row(m, v, run=f"{m}-s{i}") for m, v in values.items() for i in range(2)]
    cell = tables.build(rows, correct=lambda run, weights, spec: right(values[run[0]])).cells[
        "b", NOISE
    ]
    assert (cell.mark, cell.tests) == ("close", ("tukey-kramer",))
    # Hardly any spread: over trainings alone, b would be worse.
    close = [row(m, v + i / 1e5, run=f"{m}-s{i}") for m, v in values.items() for i in range(4)]
    assert tables.build(close).cells["b", NOISE].mark == ""
    cell = tables.build(close, correct=lambda run, weights, spec: right(values[run[0]])).cells[
        "b", NOISE
    ]
    assert (cell.mark, cell.interval_over) == ("close", "test images")
    assert cell.tests == ("games-howell", "tukey-kramer")
    assert cell.unsure == ("tukey-kramer",)
    # Without predictions, trainings that agree exactly cannot be tested.
    assert tables.build(rows).cells["b", NOISE].mark == "untested"


def test_equal_means_are_both_the_best():
    table = tables.build([row("a", 0.9), row("b", 0.9)])
    assert {cell.mark for cell in table.cells.values()} == {"best"}
    rows = trainings("a", [0.1, 0.2, 0.3]) + trainings("b", [0.3, 0.2, 0.1])  # equal up to rounding
    assert {cell.mark for cell in tables.build(rows).cells.values()} == {"best"}


def five_close(seed: int, n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {method: rng.random((1, n)) < rng.uniform(0.8, 0.95) for method in "abcde"}


@pytest.mark.parametrize("n", [30, 200, 2000])
def test_a_cell_is_called_worse_exactly_if_its_interval_excludes_zero(n: int):
    for seed in range(10):
        correct = five_close(seed, n)
        table = tables.build(
            [row(m, float(x.mean()), n=n) for m, x in correct.items()],
            correct=lambda run, weights, spec, correct=correct: correct[run[0]],
        )
        for cell in table.cells.values():
            if cell.mark != "best":
                assert cell.behind is not None
                assert cell.p is not None
                assert (cell.mark == "") == (cell.behind.high < 0) == (cell.p < 0.05)


def test_the_same_difference_needs_more_evidence_among_more_methods():
    two, five = {"a": 0.95, "b": 0.9465}, {m: 0.95 for m in "acde"} | {"b": 0.9465}  # 7 images
    assert compared(two).cells["b", NOISE].mark == ""
    assert compared(five).cells["b", NOISE].mark == "close"


def test_predictions_of_different_draws_and_numbers_of_trainings_can_be_compared():
    # a: three trainings of two draws; b: one training of five draws; c: predictions are missing
    draws = {"a": 2, "b": 5}
    rows = [x for i in range(3) for x in draws_of("a", [0.9, 0.9], run=f"a-s{i}")]
    rows += draws_of("b", [0.8] * 5) + draws_of("c", [0.5])
    table = tables.build(
        rows,
        correct=lambda run, weights, spec: (
            None if run[0] == "c" else right({"a": 0.9, "b": 0.8}[run[0]], draws=draws[run[0]])
        ),
    )
    cell = table.cells["b", NOISE]
    assert (cell.mark, cell.interval_over) == ("", "test images")
    assert cell.behind is not None
    assert cell.behind.diff == pytest.approx(-0.1)
    assert table.cells["c", NOISE].mark == "untested"
    assert (
        "One training of `b` and `c`: there the variation between trainings is not covered."
        in words.notes(table)
    )


def test_stored_predictions_without_the_drawn_noise_count_as_missing():
    table = tables.build(
        [row("a", 0.9), row("b", 0.5)],
        correct=lambda run, weights, spec: right(0.9)[: run[0] == "a"],
    )
    assert table.cells["b", NOISE].mark == "untested"


def test_too_few_images_cannot_be_tested():
    table = tables.build(
        [row("a", 1.0, n=7), row("b", 0.0, n=7)],
        correct=lambda run, weights, spec: right(float(run[0] == "a"), n=7),
    )
    assert table.cells["b", NOISE].mark == "untested"


def test_with_one_training_the_table_says_that_the_luck_of_training_is_not_covered():
    table = compared({"a": 0.9, "b": 0.8})
    caveat = "One training per method: the variation between trainings is not covered"
    assert any(line.startswith(caveat) for line in words.notes(table))
    assert caveat in writers.markdown(table)
    assert caveat in writers.latex(table)
    assert any(line.startswith(caveat) for line in writers.as_dict(table)["notes"])
    console = Console(width=200, file=io.StringIO(), record=True)
    writers.show(table, console)
    assert console.export_text().count("variation between trainings") == 1
    by_run = tables.build([row("a", 0.9), row("b", 0.8)], by="run")
    assert any(line.startswith("Every training was done once: the") for line in words.notes(by_run))
    three = tables.build(trainings("a", [0.1, 0.2, 0.3]) + trainings("b", [0.3, 0.4, 0.5]))
    for other in (compared({"a": 0.9}), three):
        assert "luck" not in writers.markdown(other)


def test_a_small_significant_difference_is_not_shown_as_zero():
    n = 500_000
    shares = {"a": 0.9, "b": 0.8997}
    table = tables.build(
        [row(m, share, n=n) for m, share in shares.items()],
        correct=lambda run, weights, spec: right(shares[run[0]], n),
    )
    assert words.column_sentence(table, NOISE) == (
        "At σ=8/255, `a` has the highest accuracy, 90.00 %, 0.03 points above `b`, the next best "
        "(95 % interval over test images: 0.03 to 0.03)."
    )


@pytest.mark.parametrize(("name", "other"), [("fingerprint", "g"), ("noise_seed", 1), ("n", 3)])
def test_rows_with_different_images_or_noise_raise(name: str, other: Any):
    with pytest.raises(ValueError, match=name):
        tables.build([row("a", 0.9), row("b", 0.9, **{name: other})])


def test_no_rows_raise():
    with pytest.raises(ValueError, match=r"^a table needs at least one evaluation row, got none$"):
        tables.build([])


def test_last_and_best_weights_have_separate_labels():
    both = tables.build([row("a", 0.9), row("a", 0.8, weights="best")])
    assert both.labels == ("a (last epoch)", "a (best epoch)")
    alone = tables.build([row("a", 0.8, weights="best")])
    assert alone.labels == ("a",)
    assert alone.weights == {"a": "best"}


def test_the_weights_of_one_run_are_ranked_separately():
    rows = [row("a", 0.9), row("a", 0.8, weights="best")]
    alone = tables.build(rows, correct=lambda run, weights, spec: right(0.9))
    assert {cell.mark for cell in alone.cells.values()} == {"best"}
    assert words.main_sentences(alone) == []
    shares = {("a", "last"): 0.9, ("a", "best"): 0.8, ("b", "last"): 0.7, ("b", "best"): 0.85}
    table = tables.build(
        [row(m, share, weights=weights) for (m, weights), share in shares.items()],
        correct=lambda run, weights, spec: right(shares[run[0], weights]),
    )
    best = {label for (label, _), cell in table.cells.items() if cell.mark == "best"}
    assert best == {"a (last epoch)", "b (best epoch)"}
    behind = table.cells["a (best epoch)", NOISE].behind
    assert behind is not None
    assert behind.diff == pytest.approx(-0.05)  # to b's best epoch, not to its own last
    last, other = words.main_sentences(table)
    assert last.startswith(
        "With the weights of the last epoch, at σ=8/255, `a` has the highest accuracy, 90.00 %, "
        "20.0 points above `b`, the next best (95 % interval over test images: "
    )
    assert other.startswith(
        "With the weights of the best epoch, at σ=8/255, `b` has the highest accuracy, 85.00 %, "
        "5.0 points above `a`, the next best"
    )


def test_several_tables_share_one_csv_header():
    made = [tables.build([row("a", 0.9)]), tables.build([row("a", 0.8, weights="best")])]
    lines = list(csv.DictReader(io.StringIO(writers.written(made, ".csv"))))
    assert [(x["weights"], float(x["mean"])) for x in lines] == [("last", 0.9), ("best", 0.8)]
    assert writers.written(made, ".md").count("| method |") == 2


def test_percentages_have_fewer_decimals_for_few_images():
    many = tables.build(draws_of("a", [0.9, 0.92], n=1000))
    few = tables.build(draws_of("a", [0.9, 0.92], n=999))
    assert writers.cell_text(many, many.cells["a", NOISE]) == "91.00 ± 1.41"
    assert writers.cell_text(few, few.cells["a", NOISE]) == "91.0 ± 1.4"


def test_a_single_pass_has_no_deviation_and_a_missing_cell_is_a_dash():
    rows = [row("a", 0.9, perturbation="clean"), *draws_of("b", [0.8, 0.9])]
    text = writers.markdown(tables.build(rows))
    assert "| a | **90.00** | – |" in text
    assert "| b | – | **85.00 ± 7.07** |" in text


def test_several_trainings_show_both_standard_deviations():
    rows = draws_of("a", [0.90, 0.92]) + draws_of("a", [0.80, 0.82], run="a-s1")
    table = tables.build(rows)
    assert writers.cell_text(table, table.cells["a", NOISE]) == "86.00 ± 7.07 (1.41)"
    assert any("over trainings; in brackets, " in note for note in words.notes(table))


@pytest.mark.parametrize(
    ("spec", "title"),
    [
        ("clean", "clean"),
        ("identity", "clean"),
        ("gaussian:8/255", "σ=8/255"),
        ("gaussian:0.2", "σ=0.2"),
        ("gaussian:0..40/255", "σ=0–40/255"),
        ("uniform:0.06", "uniform ±0.06"),
        ("occlusion:20x70", "occlusion 20×70"),
        ("stripes:10x6", "stripes 10×6"),
        ("downup:3", "down-up 3"),
        ("gaussian:40/255+occlusion:20x70x50", "σ=40/255 + occlusion 20×70×50"),
    ],
)
def test_column_titles_are_readable(spec: str, title: str):
    assert heading(spec) == title


NASTY = "<script>alert(1)</script>|_x_ & 50% $a$ #1 \\ {b} ~^ [bold]\x1b[31m\n"


def test_names_are_escaped_in_markdown():
    text = writers.markdown(tables.build([row(NASTY, 0.9)], title=NASTY))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "\\|\\_x\\_ &amp;" in text
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 3
    assert all(len(_unescaped_bars(line)) == 3 for line in lines)


def _unescaped_bars(line: str) -> list[int]:
    return [i for i, c in enumerate(line) if c == "|" and line[i - 1 : i] != "\\"]


def test_names_are_escaped_in_latex():
    text = writers.latex(tables.build([row(NASTY, 0.9)], title=NASTY))
    line = next(x for x in text.splitlines() if x.startswith(r"\textless{}script"))
    assert line == (
        r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{}\textbar{}"
        r"\_x\_ \& 50\% \$a\$ \#1 \textbackslash{} \{b\} \textasciitilde{}"
        r"\textasciicircum{} [bold] [31m  & \textbf{90.00} \\"
    )
    assert r"\toprule" in text
    assert r"$\sigma$=8/255" in text
    assert all(ord(c) < 128 for c in text)


def test_csv_holds_the_raw_numbers():
    table = tables.build([*draws_of(NASTY, [0.9, 1 / 3])])
    (line,) = csv.DictReader(io.StringIO(writers.csv_text(table)))
    assert line["method"] == printable(NASTY)
    assert float(line["mean"]) == table.cells[printable(NASTY), NOISE].mean
    assert line["seeds_std"] == ""
    assert (line["draws"], line["n"], line["perturbation"]) == ("2", "2000", NOISE)


def rendered(table: tables.Table, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(writers.console(table, width))
    return console.export_text(styles=True)


def test_the_terminal_shows_the_best_in_bold_and_names_without_markup():
    table = tables.build([row("[bold]x[/bold]", 0.5), row("b", 0.9)])
    text = rendered(table, 100)
    assert "[bold]x[/bold]" in text
    assert "\x1b[1m  90.00\x1b[0m" in text
    assert "50.00 ?" in text


def test_a_table_too_wide_for_the_terminal_is_transposed():
    rows = [row(m, 0.5, perturbation=f"gaussian:{k}/255") for m in "ab" for k in range(1, 15)]
    table = tables.build(rows)
    text = rendered(table, 60)
    assert len(text.splitlines()) > 14
    assert all(f"σ={k}/255" in text for k in range(1, 15))
    assert "50.00" in text
    caption = writers.console(table, 60).caption
    assert "Rows and columns are swapped to fit this terminal" in str(caption)
    assert writers.console(table, 200).caption is None


def test_a_table_wider_than_the_terminal_both_ways_cuts_no_name():
    methods = ["normal-s0", "stability-s0", "stability-s1", "discriminative-s0"]
    rows = [row(m, 0.5, perturbation=p) for m in methods for p in ("clean", "occlusion:20x5")]
    text = re.sub(r"\x1b\[[0-9;]*m", "", rendered(tables.build(rows), 40))
    assert "…" not in text
    head = re.sub(r"\s", "", text.split("─")[0])
    assert sorted(head) == sorted("".join(["perturbation", *methods]))


def compared(shares: dict[str, float], untested: str = "") -> tables.Table:
    """A table of one training each, tested on the same images; `untested` has no predictions."""
    return tables.build(
        [row(method, share) for method, share in shares.items()],
        correct=lambda run, weights, spec: (
            None if run == f"{untested}-s0" else right(shares[run.removesuffix("-s0")])
        ),
    )


def test_the_best_has_no_sign_where_bold_is_lost_and_the_note_says_so():
    close, far = compared({"a": 0.9, "b": 0.899}), compared({"a": 0.9, "b": 0.5})
    assert not any("no sign" in note for note in words.notes(close))
    best = "No sign: the best under the same condition, or significantly below it ("
    assert any(note.startswith(best) for note in words.notes(far))
    both = compared({"a": 0.9, "b": 0.899, "c": 0.5})
    assert any("; no sign: the best itself, or significantly" in note for note in words.notes(both))


def test_a_sentence_names_the_best_the_tied_and_the_lowest():
    shares = {"normal": 0.727, "noisy": 0.949, "both": 0.948, "stability": 0.8, "d": 0.95}
    assert words.column_sentence(compared(shares), NOISE) == (
        "At σ=8/255, `d` has the highest accuracy, 95.00 %; `noisy` and `both` are not "
        "significantly different from it; `normal` has the lowest, 72.70 %."
    )


def test_a_sentence_gives_the_lead_of_the_best_with_its_interval():
    table = compared({"normal": 0.6, "noisy": 0.85, "both": 0.9})
    behind = table.cells["noisy", NOISE].behind
    assert behind is not None
    low, high = -100 * behind.high, -100 * behind.low
    assert words.column_sentence(table, NOISE) == (
        "At σ=8/255, `both` has the highest accuracy, 90.00 %, 5.0 points above `noisy`, the next "
        f"best (95 % interval over test images: {low:.1f} to {high:.1f}); `normal` has the lowest, "
        "60.00 %."
    )


def test_a_sentence_says_if_no_difference_is_significant_and_what_was_tested():
    assert words.column_sentence(compared({"a": 0.9, "b": 0.899, "c": 0.898}), NOISE) == (
        "At σ=8/255, `a` has the highest accuracy, 90.00 %; the other methods are not "
        "significantly different from it (tested over test images)."
    )
    values = {"normal": (0.47, 0.54), "both": (0.80, 0.82)}  # p is 0.07
    table = tables.build([x for method, pair in values.items() for x in trainings(method, pair)])
    (sentence,) = words.main_sentences(table)
    assert sentence == (
        "At σ=8/255, `both` has the highest accuracy, 81.00 %; `normal` is not significantly "
        "different from it (tested over trainings)."
    )
    assert words.notes(table)[-1].startswith("Two trainings per method give a test little power")


def test_a_sentence_names_who_was_not_tested_and_who_shares_the_best():
    assert words.column_sentence(compared({"a": 0.9, "b": 0.7, "c": 0.5}, "c"), NOISE).endswith(
        "; `c` could not be tested against it."
    )
    assert words.column_sentence(
        compared({"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.8}, "c"), NOISE
    ).endswith("; `c` could not be tested against it; `b` is significantly lower, 70.00 %.")
    assert words.column_sentence(compared({"a": 0.9, "b": 0.9, "c": 0.5}), NOISE).startswith(
        "At σ=8/255, `a` and `b` share the highest accuracy, 90.00 %, 40.0 points above `c`"
    )
    assert words.column_sentence(compared({"a": 0.9, "b": 0.9}), NOISE) == (
        "At σ=8/255, `a` and `b` have the same accuracy of 90.00 %."
    )
    assert words.column_sentence(compared({"a`b": 0.9}), NOISE) == (
        "At σ=8/255, `a'b` has an accuracy of 90.00 %."
    )


def test_a_cell_is_compared_with_the_best_of_its_column():
    table = compared({"a": 0.9, "b": 0.899, "c": 0.5}, "c")
    best, close, untested = (words.cell_comparison(table.cells[x, NOISE]) for x in "abc")
    assert best == "highest mean of this column"
    assert close.startswith("0.1 points below the best (95 % interval over test images: ")
    assert close.endswith("; not significantly different")
    assert untested == ""


def test_the_summary_describes_clean_images_and_the_widest_gap():
    rows = [row("a", 0.9, perturbation="clean"), row("b", 0.9, perturbation="clean")]
    rows += [row("a", 0.8), row("b", 0.79)]
    rows += [row("a", 0.7, perturbation="downup:3"), row("b", 0.2, perturbation="downup:3")]
    shares = {("a", "downup:3"): 0.7, ("b", "downup:3"): 0.2, ("a", NOISE): 0.8, ("b", NOISE): 0.79}
    table = tables.build(
        rows, correct=lambda run, weights, spec: right(shares.get((run[0], spec), 0.9))
    )
    clean, widest = words.main_sentences(table)
    assert clean == "On clean images, `a` and `b` have the same accuracy of 90.00 %."
    assert widest.startswith("Under down-up 3, `a` has the highest accuracy, 70.00 %, 50.0 points")


def test_the_widest_gap_needs_a_difference_and_something_learned():
    specs = ("clean", NOISE, "downup:3")

    def table(values: dict[str, tuple[float, ...]], **more: Any) -> tables.Table:
        rows = [
            row(method, value, perturbation=spec)
            for method, accuracies in values.items()
            for spec, value in zip(specs, accuracies, strict=False)
        ]
        return tables.build(rows, **more)

    assert table({"a": (0.9, 0.8, 0.7), "b": (0.5, 0.7, 0.69)}).widest_gap() == NOISE
    assert table({"a": (0.9, 0.8, 0.7)}).widest_gap() == "downup:3"  # the least accurate
    assert table({"a": (0.9,), "b": (0.8,)}).widest_gap() is None
    assert table({"a": (0.9, 0.8), "b": (0.8, 0.8)}).widest_gap() is None
    at_chance = {"a": (0.34, 0.34), "b": (0.33, 0.3)}
    assert table(at_chance, majority_share=0.34).widest_gap() is None


def test_a_table_turns_into_plain_values():
    cells = writers.as_dict(tables.build([row("a", 0.9)]))["cells"]
    assert cells[0]["method"] == "a"
    assert cells[0]["mean"] == 0.9


def test_unbalanced_classes_have_macro_f1_and_recalls():
    rows = []
    for draw, predicted in enumerate(([0, 0, 0, 0, 1], [0, 0, 0, 1, 0])):
        scores = stats.class_scores([0, 0, 0, 0, 1], predicted, ["cat", "dog"])
        value = [1.0, 0.6][draw]
        rows.append(row("normal", value, draw=draw) | {"class_scores": asdict(scores)})
    table = tables.build(rows)
    (cell,) = table.cells.values()
    assert cell.classes is not None
    assert cell.classes.recall == {"cat": 0.875, "dog": 0.5}
    assert cell.classes.macro_f1 == pytest.approx((1 + (0.75 + 0) / 2) / 2)
    (line,) = [note for note in words.notes(table) if "Macro-F1" in note]
    assert line.startswith("Classes are unbalanced. Macro-F1 ")
    assert line.endswith(": `normal` 68.75 % (lowest recall: 50.00 %, dog).")
    (written,) = csv.DictReader(io.StringIO(writers.csv_text(table)))
    assert (float(written["macro_f1"]), written["recall"]) == (0.6875, "cat 0.8750; dog 0.5000")
    del rows[1]["class_scores"]  # of an older version
    (cell,) = tables.build(rows).cells.values()
    assert cell.classes is None
