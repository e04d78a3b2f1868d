"""Tables from synthetic rows whose answers are known."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import tables, words, writers
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


def test_one_training_gives_mean_and_spread_over_draws():
    cell = tables.build(draws_of("both", [0.90, 0.92, 0.94])).cells["both", NOISE]
    assert (cell.mean, cell.draws_std) == pytest.approx((0.92, 0.02))
    assert (cell.draws, cell.seeds, cell.seeds_std) == (3, 1, None)


def test_the_spread_over_trainings_is_kept_apart_from_that_over_draws():
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


def test_on_the_same_images_only_a_clear_difference_stands_below_the_best():
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


def test_five_images_are_not_enough_to_tell_two_models_apart():
    # The bootstrap interval of 5 : 0 leaves 0 out; McNemar's p is 0.0625.
    shares = {"a": 0.95, "b": 0.9475}
    table = tables.build(
        [row(m, share) for m, share in shares.items()],
        correct=lambda run, weights, spec: right(shares[run[0]]),
    )
    cell = table.cells["b", NOISE]
    assert cell.behind is not None
    assert not cell.behind.contains_zero
    assert cell.p == pytest.approx(0.0625)
    assert cell.mark == "close"


def test_without_predictions_one_training_is_untested():
    table = tables.build([row("a", 0.9), row("b", 0.5)])
    assert table.cells["b", NOISE].mark == "untested"
    assert any("could not be tested" in note for note in words.notes(table))


def test_with_several_trainings_their_spread_decides():
    def trainings(method: str, values: list[float]) -> list[dict[str, Any]]:
        return [row(method, v, run=f"{method}-s{i}") for i, v in enumerate(values)]

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
    # Welch's, by hand in test_stats; the images alone would give 0.040 to 0.060.
    assert cell.behind == pytest.approx((-0.05, -0.0946, -0.0054), abs=2e-4)
    assert (cell.over, cell.mark) == ("trainings", "")
    assert "trainings" in writers.csv_text(table).splitlines()[2]
    once = tables.build(
        [row("a", 0.741), row("b", 0.695)],
        correct=lambda run, weights, spec: right({"a": 0.741, "b": 0.695}[run[0]]),
    ).cells["b", NOISE]
    assert once.behind is not None
    assert once.over == "test images"
    assert once.behind.high - once.behind.low < 0.02


def test_the_footnote_names_the_tests_that_were_made():
    def note(rows: list[dict[str, Any]], **more: Any) -> str:
        table = tables.build(rows, **more)
        assert "close" in {cell.mark for cell in table.cells.values()}
        return next(line for line in words.notes(table) if line.startswith("≈"))

    def same(run: str, weights: str, spec: str) -> np.ndarray:
        return right(0.9 if run[0] == "a" else 0.899)

    several = [row(m, v + i / 100, run=f"{m}-s{i}") for m, v in (("a", 0.9), ("b", 0.899))
               for i in range(2)]  # fmt: skip
    assert "by Welch's t-test over trainings)" in note(several)
    both = note(several, correct=same)
    assert "Welch's" in both
    assert "over test images" in both
    once = note(several[::2], correct=same)
    assert "Welch" not in once
    assert "McNemar" in once
    assert "McNemar" not in both


def test_up_to_so_many_trainings_is_said_only_where_numbers_differ():
    rows = [row(m, 0.9, run=f"{m}-s{i}") for m in "ab" for i in range(3)]
    assert any("Mean over 3 trainings" in note for note in words.notes(tables.build(rows)))
    assert any(
        "Mean over up to 3 trainings" in note for note in words.notes(tables.build(rows[:-1]))
    )


def test_a_method_that_only_guesses_is_named():
    means = {  # clean and noisy accuracy; the most frequent class is a third of the images
        "constant": (1 / 3, 1 / 3),
        "worse": (0.2, 0.34),
        "noise-only": (0.3, 0.9),  # knows noisy images well
        "learned": (0.34, 0.34),
    }
    rows = [row(m, v, perturbation=s) for m, vs in means.items()
            for s, v in zip(("clean", NOISE), vs, strict=True)]  # fmt: skip
    table = tables.build(rows, guess=1 / 3)
    assert table.guessing == ("constant", "worse")
    said = [note for note in words.notes(table) if "is no better than a guess" in note]
    assert [note.split()[0] for note in said] == ["constant", "worse"]
    assert "20.00 %" in said[1]
    assert "33.33 %" in said[1]
    assert tables.build(rows).guessing == ()  # nothing is known of the classes
    assert tables.build(rows, guess=1.0).guessing == ()  # one class: nothing to learn
    assert tables.build([row("a", 0.1)], guess=1 / 3).guessing == ()  # under noise alone


def test_trainings_that_agree_by_chance_do_not_outvote_the_images():
    values = {"a": 0.95, "b": 0.949}  # no spread over trainings at all: Welch's p is 0
    rows = [row(m, v, run=f"{m}-s{i}") for m, v in values.items() for i in range(2)]
    table = tables.build(rows, correct=lambda run, weights, spec: right(values[run[0]]))
    assert table.cells["b", NOISE].p == 0.0
    assert table.cells["b", NOISE].mark == "close"


def test_equal_means_are_both_the_best():
    table = tables.build([row("a", 0.9), row("b", 0.9)])
    assert {cell.mark for cell in table.cells.values()} == {"best"}


@pytest.mark.parametrize(("name", "other"), [("fingerprint", "g"), ("noise_seed", 1), ("n", 3)])
def test_rows_of_other_images_or_other_noise_are_refused(name: str, other: Any):
    with pytest.raises(ValueError, match=name):
        tables.build([row("a", 0.9), row("b", 0.9, **{name: other})])


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        tables.build([])


def test_best_weights_get_a_line_of_their_own_beside_the_last():
    both = tables.build([row("a", 0.9), row("a", 0.8, weights="best")])
    assert both.labels == ("a (last epoch)", "a (best epoch)")
    alone = tables.build([row("a", 0.8, weights="best")])
    assert alone.labels == ("a",)
    assert alone.weights == {"a": "best"}


def test_the_weights_of_one_run_do_not_compete():
    rows = [row("a", 0.9), row("a", 0.8, weights="best")]
    alone = tables.build(rows, correct=lambda run, weights, spec: right(0.9))
    assert {cell.mark for cell in alone.cells.values()} == {"best"}
    assert words.summary(alone) == []
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
    last, other, _ = words.summary(table)
    assert last == "Weights of the last epoch, at σ=8/255: b 70.00 %; best a 90.00 %."
    assert other == "Weights of the best epoch, at σ=8/255: a 80.00 %; best b 85.00 %."


def test_several_tables_share_one_csv_header():
    made = [tables.build([row("a", 0.9)]), tables.build([row("a", 0.8, weights="best")])]
    lines = list(csv.DictReader(io.StringIO(writers.written(made, ".csv"))))
    assert [(x["weights"], float(x["mean"])) for x in lines] == [("last", 0.9), ("best", 0.8)]
    assert writers.written(made, ".md").count("| method |") == 2


def test_percentages_carry_as_many_decimals_as_the_images_support():
    many = tables.build(draws_of("a", [0.9, 0.92]))
    few = tables.build(draws_of("a", [0.9, 0.92], n=540))
    assert writers.cell_text(many, many.cells["a", NOISE]) == "91.00 ± 1.41"
    assert writers.cell_text(few, few.cells["a", NOISE]) == "91.0 ± 1.4"


def test_a_single_pass_shows_no_spread_and_a_missing_cell_a_dash():
    rows = [row("a", 0.9, perturbation="clean"), *draws_of("b", [0.8, 0.9])]
    text = writers.markdown(tables.build(rows))
    assert "| a | **90.00** | – |" in text
    assert "| b | – | **85.00 ± 7.07** |" in text


def test_several_trainings_show_both_spreads_and_say_which_is_which():
    rows = draws_of("a", [0.90, 0.92]) + draws_of("a", [0.80, 0.82], run="a-s1")
    table = tables.build(rows)
    assert writers.cell_text(table, table.cells["a", NOISE]) == "86.00 ± 7.07 (1.41)"
    assert any("over trainings; in brackets" in note for note in words.notes(table))


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


def test_nothing_from_outside_is_markup_in_markdown():
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


def test_nothing_from_outside_is_a_command_in_latex():
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


def test_the_terminal_shows_the_best_in_bold_and_reads_no_markup_from_names():
    table = tables.build([row("[bold]x[/bold]", 0.5), row("b", 0.9)])
    text = rendered(table, 100)
    assert "[bold]x[/bold]" in text
    assert "\x1b[1m  90.00\x1b[0m" in text
    assert "50.00 ?" in text


def test_a_table_too_wide_for_the_terminal_is_turned():
    rows = [row(m, 0.5, perturbation=f"gaussian:{k}/255") for m in "ab" for k in range(1, 15)]
    table = tables.build(rows)
    text = rendered(table, 60)
    assert len(text.splitlines()) > 14
    assert all(f"σ={k}/255" in text for k in range(1, 15))
    assert "50.00" in text


def test_the_sentence_names_who_is_apart_and_who_is_within_noise():
    shares = {"normal": 0.727, "noisy": 0.949, "both": 0.948, "stability": 0.9485, "d": 0.95}
    table = tables.build(
        [row(m, share) for m, share in shares.items()],
        correct=lambda run, weights, spec: right(shares[run.removesuffix("-s0")]),
    )
    assert words.sentence(table, NOISE) == (
        "At σ=8/255: normal 72.70 %; the other four between 94.80 and 95.00 %, "
        "within noise of the best (d)."
    )


def test_two_trainings_a_method_are_called_too_few():
    shares = {"normal": (0.47, 0.54), "both": (0.80, 0.82)}  # Welch's p is 0.07
    rows = [row(m, x, run=f"{m}-s{i}") for m, pair in shares.items() for i, x in enumerate(pair)]
    table = tables.build(rows)
    said, last = words.summary(table)
    assert said.startswith("At σ=8/255: the two methods between 50.50 and 81.00 %")
    assert said.endswith("not told from the best (both).")
    assert last.startswith("Two trainings a method tell little")


def test_the_summary_speaks_of_clean_images_and_of_the_widest_gap():
    rows = [row("a", 0.9, perturbation="clean"), row("b", 0.9, perturbation="clean")]
    rows += [row("a", 0.8), row("b", 0.79)]
    rows += [row("a", 0.7, perturbation="downup:3"), row("b", 0.2, perturbation="downup:3")]
    shares = {("a", "downup:3"): 0.7, ("b", "downup:3"): 0.2, ("a", NOISE): 0.8, ("b", NOISE): 0.79}
    table = tables.build(
        rows, correct=lambda run, weights, spec: right(shares.get((run[0], spec), 0.9))
    )
    first, second, last = words.summary(table)
    assert first == "On clean images: the two methods at 90.00 %, within noise of the best (b)."
    assert second == "At down-up 3: b 20.00 %; best a 70.00 %."
    assert last.startswith("One training a method")


def test_a_table_turns_into_plain_values():
    cells = writers.as_dict(tables.build([row("a", 0.9)]))["cells"]
    assert cells[0]["method"] == "a"
    assert cells[0]["mean"] == 0.9
