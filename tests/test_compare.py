"""The comparison, on the digits with one epoch."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from noiseproof.lab import runs
from noiseproof.lab.comparison import compare, jobs, workers
from noiseproof.lab.comparison.jobs import Announce, ComparisonJob
from noiseproof.lab.config import (
    Comparison,
    Config,
    Data,
    Method,
    MethodName,
    Model,
    Optim,
    Run,
    run_name,
)
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.interrupt import signals_as_interrupt
from noiseproof.lab.training.memory import MemoryEstimate
from noiseproof.perturb.text import REGISTERED
from tests.flat import Flat


def base(folder: Path, model: str = "flat", **run) -> Config:
    return Config(
        model=Model(model, feature_dim=16),
        method=Method(noise="gaussian:0.2"),
        optim=Optim(epochs=1, batch_size=128, sched="constant"),
        run=Run(output=str(folder), device="cpu", **run),
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Iterator[Path]:
    """The folder of a comparison of two methods, one seed, one epoch, without a report."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        assert quick(base(folder), ["normal", "both"]) == 0
        yield folder / "compare-digits"


def quick(config: Config, methods: list[MethodName], **options) -> int:
    comparison = Comparison(tuple(methods), 1, 1, draws=2, **{"report": False, **options})
    return compare.compare(config, comparison)


def test_every_method_and_seed_gets_a_run_of_the_same_settings():
    start = Config(run=Run(seed=3))
    configs = compare.plan(start, Comparison(("normal", "discriminative", "normal"), 2))
    assert [run_name(c) for c in configs] == [
        "normal-s3",
        "discriminative-s3",
        "normal-s4",
        "discriminative-s4",
    ]
    assert {c.run.output for c in configs} == {os.path.join("runs", "compare-digits")}
    for config in configs:
        assert config.optim == start.optim
        assert config.data == start.data
        assert replace(config.method, method=start.method.method) == start.method
        assert config.run.resume


def test_the_folder_is_named_after_the_data_or_by_the_user():
    def folder(config: Config) -> str:
        return compare.plan(config, Comparison(("both",)))[0].run.output

    assert folder(Config(data=Data(data="some/photos/"))) == os.path.join("runs", "compare-photos")
    assert folder(Config(run=Run(name="mine", output="o"))) == os.path.join("o", "mine")


def test_unknown_methods_and_no_seeds_are_refused():
    with pytest.raises(ValueError, match="got \\['bth'\\]"):
        compare.plan(Config(), Comparison(("bth",)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        compare.plan(Config(), Comparison(("both",), 0))


def test_a_precision_that_the_device_lacks_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="--amp fp16 needs a GPU"):
        compare.compare(base(tmp_path, amp="fp16"), Comparison(("normal",), 1, 1))
    assert not list(tmp_path.iterdir())


def test_the_tables_have_the_accuracies_of_the_rows(compared):
    with open(compared / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["method"] for line in lines} == {"normal", "both"}
    assert {line["weights"] for line in lines} == {"last", "best"}
    lines = [line for line in lines if line["weights"] == "last"]
    for method in ("normal", "both"):
        rows = RunFolder.open(compared / f"{method}-s0").evaluation()
        for spec, draws in (("clean", 1), ("gaussian:0.3", 2)):
            values = [
                row["value"]
                for row in rows
                if row["perturbation"] == spec and row["weights"] == "last"
            ]
            (line,) = (x for x in lines if x["method"] == method and x["perturbation"] == spec)
            assert len(values) == int(line["draws"]) == draws
            assert float(line["mean"]) == pytest.approx(sum(values) / draws)
    assert "| normal |" in (compared / "table.md").read_text()
    assert r"\toprule" in (compared / "table.tex").read_text()


def test_the_json_records_what_was_run_and_how_long_it_took(compared):
    facts = json.loads((compared / "comparison.json").read_text())
    assert [run["run"] for run in facts["runs"]] == ["normal-s0", "both-s0"]
    assert {run["status"] for run in facts["runs"]} == {"done"}
    assert set(facts["training_seconds"]) == {"normal", "both"}
    assert min(facts["training_seconds"].values()) > 0
    assert facts["perturbations"][0] == "clean"
    assert facts["seeds"] == [0]
    assert facts["environment"]["torch"]
    assert any("clean images" in line for line in facts["summary"])


def test_a_second_call_trains_nothing(compared, monkeypatch, capsys):
    def refuse(config: Config, leaks: object) -> RunFolder:
        raise AssertionError("trained again")

    before = {p: p.stat().st_mtime_ns for p in compared.glob("*-s0/*.safetensors")}
    monkeypatch.setattr(jobs, "train", refuse)
    assert quick(base(compared.parent), ["normal", "both"]) == 0
    assert before == {p: p.stat().st_mtime_ns for p in compared.glob("*-s0/*.safetensors")}
    assert len(before) == 4
    printed = capsys.readouterr().out
    assert "2 already trained" in printed
    assert printed.count("One training per method") == 1  # the other table is in the files


@pytest.mark.parametrize(("enough", "first"), [(10**9, "after the last"), (1, "of the best")])
def test_the_weights_to_deploy_are_shown_and_analysed(compared, monkeypatch, capsys, enough, first):
    monkeypatch.setattr(runs, "ENOUGH_TO_CHOOSE", enough)
    analysed = []
    monkeypatch.setattr(jobs, "analyse", lambda *_, weights, **__: analysed.append(weights))
    monkeypatch.setattr(compare, "report_runs", lambda *_: None)
    assert quick(base(compared.parent), ["normal", "both"], report=True) == 0
    assert analysed == ["last" if enough > 1 else "best"] * 2
    printed = capsys.readouterr().out
    titles = [line.strip() for line in printed.splitlines() if line.startswith("digits, weights")]
    assert [title.split(" epoch")[0] for title in titles] == [f"digits, weights {first}"]
    assert ".tex; also digits, weights" in printed
    written = (compared / "table.md").read_text()
    assert written.startswith(f"**digits, weights {first}")
    facts = json.loads((compared / "comparison.json").read_text())
    assert facts["tables"][0]["title"] == titles[0]


def test_a_run_of_other_settings_is_not_reused(compared):
    other = base(compared.parent)
    other = replace(other, optim=replace(other.optim, lr=0.01))
    with pytest.raises(ValueError, match=r"s0 was made with different settings.*lr was 0\.05"):
        quick(other, ["normal", "both"])


def test_one_failing_run_does_not_stop_the_others(tmp_path, compared, monkeypatch, capsys):
    def fails(config: Config, leaks: object) -> RunFolder:
        if config.method.method == "normal":
            raise Diverged("the loss is inf")
        if config.method.method == "noisy":
            raise OSError(errno.ENOSPC, "No space left on device", "runs/a")
        os.makedirs(config.run.output, exist_ok=True)
        (tmp_path / "compare-digits" / "both-s0").symlink_to(compared / "both-s0")
        return RunFolder.open(compared / "both-s0")

    monkeypatch.setattr(jobs, "train", fails)
    start = base(tmp_path)
    assert quick(start, ["normal", "noisy", "both"]) == 1
    printed, errors = capsys.readouterr()
    assert "normal-s0: diverged" in printed
    assert "noisy-s0: failed after" in printed
    assert "No space left on device: runs/a; make room" in printed
    assert "Repeat the command to continue" in printed
    assert "Traceback" not in errors
    facts = json.loads((tmp_path / "compare-digits" / "comparison.json").read_text())
    assert [run["status"] for run in facts["runs"]] == ["diverged", "failed", "done"]
    assert quick(start, ["normal", "both"]) == 3


def test_a_comparison_where_nothing_finishes_writes_no_table(tmp_path, monkeypatch, capsys):
    def diverge(config: Config, leaks: object) -> RunFolder:
        raise Diverged("the loss is nan")

    monkeypatch.setattr(jobs, "train", diverge)
    monkeypatch.setattr(compare, "check_start", lambda *_, **__: MemoryEstimate(2 * 10**9, 0))
    assert quick(base(tmp_path), ["both"]) == 3
    printed = capsys.readouterr().out
    assert "1 at a time, about 2.0 GB of memory each" in printed
    assert "1 of 1 runs did not finish" in printed
    assert not (tmp_path / "compare-digits" / "table.md").exists()


def test_the_first_training_of_each_method_is_analysed_for_the_report(
    tmp_path, compared, monkeypatch
):
    reported, analysed = [], []
    monkeypatch.setattr(jobs, "analyse", lambda run, **_: analysed.append(run.name))
    monkeypatch.setattr(compare, "report_runs", lambda paths, folder: reported.append(paths))
    assert compare.compare(base(tmp_path), Comparison(("normal", "both"), 2, 1, draws=1)) == 0
    assert analysed == ["normal-s0", "both-s0"]
    assert [len(paths) for paths in reported] == [4]


@pytest.mark.parametrize(
    ("asked", "runs", "expected"), [(None, 9, 4), (None, 2, 2), (8, 3, 3), (1, 0, 1)]
)
def test_jobs_are_as_many_as_cores_and_runs_allow(monkeypatch, asked, runs, expected):
    monkeypatch.setattr(workers, "usable_cores", lambda: 4)
    assert workers.jobs_at_a_time(asked, runs, "cpu") == expected
    assert workers.jobs_at_a_time(None, runs, "cuda") == 1


@pytest.mark.long
def test_workers_give_the_same_rows_as_this_process(tmp_path, compared, capfd):
    start = base(tmp_path, "small_cnn", threads=1)
    assert compare.compare(start, Comparison(("normal", "both"), 1, 2, draws=2)) == 0
    again = tmp_path / "compare-digits"
    assert "epoch 1/1" in (again / "logs" / "both-s0.log").read_text()
    printed = capfd.readouterr().out
    told = [printed.index(f"both-s0: {stage}") for stage in ("training", "evaluating", "analysing")]
    assert [*told, printed.index("both-s0: done")] == sorted(
        [*told, printed.index("both-s0: done")]
    )
    facts = json.loads((again / "comparison.json").read_text())
    assert facts["jobs"] == 2
    specs = [row["perturbation"] for row in RunFolder.open(again / "both-s0").evaluation()]
    assert specs == [
        row["perturbation"] for row in RunFolder.open(compared / "both-s0").evaluation()
    ]


@pytest.mark.long
def test_a_worker_that_dies_is_reported_and_replaced(tmp_path, capfd):
    start = base(tmp_path, threads=1)
    configs = compare.plan(start, Comparison(("normal", "noisy", "both")))
    dead = [replace(c, data=Data(data="no/such/folder")) for c in configs]
    tasks = [ComparisonJob(c, ("clean",), 1, ("last",)) for c in dead]
    folder = tasks[0].path.parent
    folder.mkdir()
    killer = Killed(**vars(tasks[0]))
    outcomes = workers.run_in_workers([killer, *tasks[1:]], 2, folder, Console())
    assert [outcomes[t.name].status for t in tasks] == ["failed"] * 3
    assert "exit code 7" in outcomes["normal-s0"].message
    assert "no/such/folder" in outcomes["both-s0"].message


class Killed(ComparisonJob):
    """A job that ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (7,)


@dataclass(frozen=True)
class Threads(jobs.Job):
    """A job that writes down how many threads its process was given, and which perturbations."""

    file: Path

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        announce("counting")
        announce("writing")
        self.file.write_text(" ".join([os.environ["OMP_NUM_THREADS"], *REGISTERED]))


class Damaged(jobs.Job):
    """A job that is interrupted while it reads a file, and takes the file for damaged."""

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("the file is damaged")


def test_an_error_that_follows_ctrl_c_is_no_result():
    def interrupted() -> None:
        with signals_as_interrupt():
            Damaged(Config()).run(print)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Damaged(Config()).run(print).status == "failed"  # not in a command


THREADS = Config(run=Run(name="threads"))


def test_workers_share_the_threads_and_announce_their_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(workers, "usable_cores", lambda: 3)
    plugin = tmp_path / "rain.py"
    plugin.write_text("from noiseproof.perturb import register\nregister('rain', abs)")
    monkeypatch.setattr(workers, "loaded_plugins", lambda: (str(plugin),))
    workers.run_in_workers([Threads(THREADS, tmp_path / "seen")], 1, tmp_path, Console())
    assert (tmp_path / "seen").read_text() == "3 rain"
    assert "OMP_NUM_THREADS" not in os.environ
    lines = ["threads: counting", "threads: writing"]
    assert (tmp_path / "logs" / "threads.log").read_text().splitlines() == lines
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "ing" in line] == lines


def test_a_number_of_threads_that_the_user_has_set_stays(tmp_path, monkeypatch):
    seen = []

    class Worker:
        def __init__(self):
            seen.append(os.environ["OMP_NUM_THREADS"])
            raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_Worker", Worker)
    for given in ("5", None):
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        if given is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        with pytest.raises(KeyboardInterrupt):
            workers.run_in_workers([Threads(THREADS, tmp_path)], 1, tmp_path, Console())
        assert os.environ.get("OMP_NUM_THREADS") == given
    assert seen == ["5", str(workers.usable_cores())]
    assert workers.share_cores(Config(run=Run(threads=5)), 2).run.threads == 5


def test_a_worker_that_died_while_it_waited_fails_its_job_only(tmp_path):
    """Its broken pipe must not be taken for that of the terminal, which ends the command."""
    worker = object.__new__(workers._Worker)
    worker.pipe, other_end = multiprocessing.Pipe()
    other_end.close()
    worker.process = SimpleNamespace(join=lambda: None, exitcode=-9)  # pyright: ignore
    worker.start(Threads(THREADS, tmp_path), tmp_path / "log")
    result = worker.receive(Console())
    worker.pipe.close()
    assert result is not None
    assert "the process ended with exit code -9" in result.message


def test_a_run_that_is_continued_alone_keeps_its_share_of_the_cores(
    tmp_path, compared, monkeypatch
):
    """Other threads sum in another order, and the weights would differ in their last bits."""
    shares = []

    def run_jobs(todo: list[ComparisonJob], count: int, *_: object) -> None:
        shares.append((count, [job.config.run.threads for job in todo]))
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "usable_cores", lambda: 4)
    monkeypatch.setattr(compare, "run_jobs", run_jobs)
    shutil.copytree(compared, tmp_path / "compare-digits")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compare.compare(base(tmp_path), Comparison(("normal", "both"), 1, 2, report=False))
        shutil.rmtree(tmp_path / "compare-digits" / "both-s0", ignore_errors=True)
    assert shares == [(1, [2, 2]), (2, [2, 2])]


def test_runs_at_a_time_share_the_cores(monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 6)
    threads = [workers.share_cores(Config(), count).run.threads for count in (1, 2, 4, 9)]
    assert threads == [0, 3, 1, 1]
