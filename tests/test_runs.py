"""The run folder: complete files, readable rows, clear errors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from noiseproof.lab import runs
from noiseproof.lab.config import Config, Model, Optim, Run
from noiseproof.lab.device import environment
from noiseproof.lab.files import write_atomically
from noiseproof.lab.models.classifier import build_classifier
from noiseproof.lab.runs import SCHEMA, RunFolder, changed_settings, open_runs

INFO = {"classes": ["a", "b", "c"], "size": [1, 8, 8], "mean": [0.5], "std": [0.25]}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(Config(run=Run(output=str(tmp_path), name="one")), dict(INFO))


def test_a_folder_opens_with_the_config_it_was_created_with(run):
    again = RunFolder.open(run.path)
    assert (again.name, again.config) == ("one", run.config)
    assert again.info == INFO
    assert not again.finished
    assert not again.has("last")


def test_the_working_directory_opens_with_its_name(run, monkeypatch):
    monkeypatch.chdir(run.path)
    assert RunFolder.open(".").name == "one"
    with pytest.raises(ValueError, match=re.escape(f"--output {run.path.parent} --name one")):
        RunFolder.open(".").require("last")
    (run.path / "predictions").mkdir()
    monkeypatch.chdir("predictions")
    assert RunFolder.open("..").name == "one"
    assert [found.name for found in open_runs(["..", run.path])] == ["one"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fails(file):
        file.write(b"half of the new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_weights_are_loaded_as_a_model_in_eval_mode(run):
    torch.manual_seed(0)
    model = build_classifier(Model(), num_classes=3, size=(1, 8, 8), mean=[0.5], std=[0.25])
    x = torch.rand(4, 1, 8, 8)
    model(x)  # moves the running statistics
    run.save_weights("last", model.state_dict())
    again = run.model()
    assert not again.training
    assert torch.equal(again(x), model.eval()(x))
    with pytest.raises(ValueError, match=r"no best weights \(it has: last\)"):
        run.model("best")


def test_damaged_weights_raise_an_error_that_says_what_to_do(run):
    run.save_weights("last", {"w": torch.zeros(20)})
    path = run.weights_path("last")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged.*delete.*and resume"):
        run.model()


def test_the_hash_of_weights_is_computed_once_and_follows_the_file(run, monkeypatch):
    run.save_weights("last", {"w": torch.zeros(2)})
    first = run.weights_hash()
    assert first == hashlib.sha256(run.weights_path().read_bytes()).hexdigest()[:16]
    with monkeypatch.context() as patch:
        patch.setattr(runs.hashlib, "sha256", None)
        assert run.weights_hash() == first
    run.save_weights("last", {"w": torch.ones(2)})
    assert run.weights_hash() != first


def test_a_finished_run_is_marked_and_has_weights(run):
    run.finish(seconds=1.0)
    assert not RunFolder.open(run.path).finished
    run.save_weights("last", {"w": torch.zeros(2)})
    assert RunFolder.open(run.path).finished
    assert RunFolder.open(run.path).info["seconds"] == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a run folder"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"schema": 1}', "cannot be read.*config"),
        (b'{"schema": "x", "config": {}, "info": {}}', "cannot be read"),
        (b'{"schema": 99, "config": 0}', f"newer noiseproof.*is 99.*up to {SCHEMA}.*upgrade"),
    ],
)
def test_opening_something_else_raises_an_error_with_the_reason(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        RunFolder.open(tmp_path)


def test_metrics_are_read_as_written_and_later_epochs_truncated(run):
    assert run.metrics() == []
    rows = [{"epoch": e, "loss": 1 / e, "val_accuracy": 0.1 * e} for e in (1, 2, 3)]
    for row in rows:
        run.append_metrics(row)
    assert run.metrics() == rows
    before = (run.path / "metrics.csv").read_bytes()
    run.truncate_metrics(3)
    assert (run.path / "metrics.csv").read_bytes() == before
    run.truncate_metrics(2)
    assert run.metrics() == rows[:2]
    run.append_metrics(rows[2])
    assert (run.path / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("left", ["", "epoc", "epoch,loss\r\n", "epoch,loss\r\n1,0."])
def test_a_metrics_file_cut_off_in_its_first_rows_starts_again_with_a_header(run, left):
    path = run.path / "metrics.csv"
    path.write_text(left, newline="")
    run.truncate_metrics(1)
    run.append_metrics({"epoch": 1, "loss": 0.5})
    assert run.metrics() == [{"epoch": 1.0, "loss": 0.5}]
    assert path.read_text().splitlines() == ["epoch,loss", "1,0.5"]


@pytest.mark.parametrize("cut", ["2,0.", "2,3e-", "2", "2,0.25\r"])
def test_an_incomplete_row_of_metrics_is_skipped(run, cut):
    (run.path / "metrics.csv").write_text(f"epoch,loss\r\n1,0.5\r\n{cut}", newline="")
    assert run.metrics() == [{"epoch": 1.0, "loss": 0.5}]


@pytest.mark.parametrize("fragment", ['{"b": 2, "c', '{"b": "\udcff', "3"])
def test_an_incomplete_line_is_an_error_until_rows_are_added(run, fragment):
    assert run.evaluation() == []
    run.append_evaluation([{"a": 1}])
    with open(run.path / "evaluation.jsonl", "a", errors="surrogateescape") as file:
        file.write(fragment)
    with pytest.raises(ValueError, match=r"line 2 of .* is damaged; repeat the command"):
        run.evaluation()
    run.append_evaluation([{"d": 4}, {"e": 5}])
    assert run.evaluation() == [{"a": 1}, {"d": 4}, {"e": 5}]


def test_a_complete_row_without_a_line_end_counts(run):
    (run.path / "evaluation.jsonl").write_text('{"a": 1}\n{"b": 2}')
    run.append_evaluation([{"c": 3}])
    assert run.evaluation() == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_predictions_are_read_as_written_and_damage_raises(run):
    key = "last/gaussian:8/255+occlusion:2x3"
    assert run.predictions(key) is None
    run.save_predictions(key, correct=np.array([True, False]))
    found = run.predictions(key)
    assert found is not None
    assert found["correct"].tolist() == [True, False]
    (path,) = (run.path / "predictions").iterdir()
    whole = path.read_bytes()
    flipped = [whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :] for i in (29, 61, 62)]
    for damaged in (b"", whole[:-30], *flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            run.predictions(key)


def test_files_of_older_versions_have_no_checksums_and_are_read_as_they_are(run):
    model = build_classifier(Model(), num_classes=3, size=(1, 8, 8), mean=[0.5], std=[0.25])
    run.append_metrics({"epoch": 1, "loss": 0.5})
    run.finish()
    file = run.path / "config.json"
    content = json.loads(file.read_text())
    del content["crc32"], content["info"]["metrics_checksum"]
    file.write_text(json.dumps(content))
    save_file(model.state_dict(), run.weights_path())
    again = RunFolder.open(run.path)
    assert again.finished
    assert again.config == run.config
    assert again.metrics() == [{"epoch": 1.0, "loss": 0.5}]
    assert torch.equal(again.model().head.weight, model.head.weight)


def test_an_edited_config_is_refused_until_its_checksum_is_deleted(run):
    file = run.path / "config.json"
    lines = file.read_text().replace('"lr": 0.05', '"lr": 0.06').splitlines(keepends=True)
    file.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"config.json .*checksum.* delete its line `crc32`"):
        RunFolder.open(run.path)
    file.write_text("".join(line for line in lines if "crc32" not in line))
    assert RunFolder.open(run.path).config.optim.lr == 0.06


def test_other_values_in_the_metrics_of_a_finished_run_raise(run):
    run.append_metrics({"epoch": 1, "loss": 0.5})
    run.save_weights("last", {"w": torch.zeros(2)})
    run.finish()
    file = run.path / "metrics.csv"
    file.write_text(file.read_text().replace("0.5", "0.4"))
    with pytest.raises(ValueError, match=r"metrics.csv is damaged \(wrong checksum\); delete it"):
        run.metrics()


def test_a_row_of_ones_own_needs_no_checksum(run):
    run.append_evaluation([{"value": 0.5}])
    file = run.path / "evaluation.jsonl"
    file.write_text(file.read_text() + '{"value": 0.75}\n')
    run.append_evaluation([{"value": 0.25}])
    assert [row["value"] for row in run.evaluation()] == [0.5, 0.75, 0.25]


def test_an_edited_row_is_refused_until_its_checksum_is_deleted(run):
    run.append_evaluation([{"value": 0.5}, {"value": 0.75}])
    file = run.path / "evaluation.jsonl"
    text = file.read_text().replace("0.75", "0.76")
    file.write_text(text)
    with pytest.raises(ValueError, match=r"line 2 of .*jsonl is damaged; .* delete its `crc32`"):
        run.evaluation()
    file.write_text(re.sub(r'"crc32": "\w+", ', "", text))
    assert [row["value"] for row in run.evaluation()] == [0.5, 0.76]


@pytest.mark.skipif(sys.platform != "linux", reason="zombies are recognised on Linux")
def test_a_file_that_a_killed_process_was_writing_is_removed_when_it_is_written_again(tmp_path):
    ended, zombie = (subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2))
    ended.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    for pid in (ended.pid, zombie.pid, os.getppid()):
        (tmp_path / f".a[1].npz.{pid}.tmp").touch()
    write_atomically(tmp_path / "a[1].npz", "new")
    zombie.wait()
    assert [file.name for file in tmp_path.glob(".*")] == [f".a[1].npz.{os.getppid()}.tmp"]


def test_temporary_files_of_a_killed_training_are_removed(run):
    (run.path / "checkpoints").mkdir()
    for name in (".config.json.7.tmp", "checkpoints/.next.pt.7.tmp", "checkpoints/last.pt"):
        (run.path / name).touch()
    run.remove_temporary_files()
    left = sorted(str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file())
    assert left == ["checkpoints/last.pt", "config.json"]


def test_changed_settings_leave_out_where_and_how_fast_a_run_computes():
    old = Config()
    new = Config(
        optim=Optim(lr=0.1, epochs=7), run=Run(output="x", threads=3, resume=True, engine="eager")
    )
    assert changed_settings(old, new) == ["epochs was 40, is now 7", "lr was 0.05, is now 0.1"]
    assert changed_settings(old, old) == []


def test_the_environment_holds_versions_and_machine_as_plain_values():
    facts = environment("cpu")
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(facts)) == facts
