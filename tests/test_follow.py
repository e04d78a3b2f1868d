"""A log is followed as it grows."""

from __future__ import annotations

from pathlib import Path

from noiseproof.lab.comparison.follow import Follower


def test_each_stage_is_heard_once_as_it_begins_and_the_last_line_is_kept(tmp_path: Path):
    log = tmp_path / "both-s0.log"
    log.write_text(
        "both-s0: training, 9 epochs\nboth-s0: epoch 3/9\n"
    )  # of a call that was stopped
    heard = Follower("both-s0", log)
    assert (heard.begun(), heard.said) == ([], "")

    def write(text: str) -> None:
        with open(log, "a") as file:
            file.write(text)

    write("both-s0: training, 9 epochs\nboth-s0: epoch 4/9  loss 1.0\nboth-s0: evalua")
    assert heard.begun() == ["training, 9 epochs"]
    assert heard.said == "epoch 4/9  loss 1.0"
    write("ting on 38 test images\nboth-s0: evaluating, clean, last weights  3 %\n")
    assert heard.begun() == ["evaluating on 38 test images"]
    assert heard.said == "evaluating, clean, last weights  3 %"
    write("both-s0: evaluating, clean, best weights  60 %\n\n\x1b[2J\n")
    assert heard.begun() == []
    write("both-s0: analysing 20 of 38 test images\n")
    assert heard.begun() == ["analysing 20 of 38 test images"]


def test_a_log_that_is_not_there_yet_says_nothing(tmp_path: Path):
    heard = Follower("a", tmp_path / "a.log")
    assert (heard.begun(), heard.said) == ([], "")
    (tmp_path / "a.log").write_text("a: training, 1 epochs\n")
    assert heard.begun() == ["training, 1 epochs"]
