"""The training loop: what it writes, refuses and prints, and how it stops when it diverges."""

from __future__ import annotations

import json
import math
import shlex
import sys
import types
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from noiseproof.cli import main as cli
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.device import chosen_device, make_fabric, slow_precision
from noiseproof.lab.files import without_checksum
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training import checkpoint, choose_engine, eager, optimizer
from noiseproof.lab.training import session as sessions
from noiseproof.lab.training import train as training
from noiseproof.lab.training.diagnosis import chance_warning
from noiseproof.lab.training.progress import Progress
from noiseproof.lab.training.session import Session, make_objective
from noiseproof.lab.training.step import count_nonfinite
from noiseproof.lab.training.train import Diverged, train
from tests.flat import Flat, digits, resumed


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("noisy", "augmentation crop; "),
        ("both", "augmentation crop, of a second, noisy view erase; "),
    ],
)
def test_the_augmentation_of_a_noisy_view_is_shown_if_there_is_one(
    method, expected, tmp_path, capfd
):
    views = {"augment": "crop", "noisy_augment": "erase", "views": "independent"}
    train(digits(tmp_path, epochs=1, method=method, **views))
    assert expected in capfd.readouterr().err


def test_a_run_learns_and_leaves_weights_metrics_and_a_finished_config(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = train(digits(tmp_path, epochs=8, method="stability"))
    out, err = capfd.readouterr()
    assert out == ""
    first, *lines = err.splitlines()
    assert first == (
        "one: 1,131 training images, 126 for validation (split off), 540 for testing; "
        "classes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more; augmentation none; model flat, device cpu"
    )
    assert [line.split()[:3] for line in lines] == [
        ["one:", "epoch", f"{e}/8"] for e in range(1, 9)
    ]
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["train_accuracy"] > rows[0]["train_accuracy"] + 0.3
    assert rows[0]["loss"] == pytest.approx(rows[0]["ce"] + rows[0]["stability"])
    best = max(reversed(rows), key=lambda row: row["val_accuracy"])  # the last of equals
    assert run.info["best"] == {"epoch": best["epoch"], "accuracy": best["val_accuracy"]}
    again = RunFolder.open(run.path)
    assert again.finished
    assert again.info["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
    state = load_file(run.path / "model.safetensors")
    saved = checkpoint.load(run.path / "checkpoints", pytest.fail)
    assert saved is not None
    assert all(torch.equal(state[k], saved["model"][k]) for k in state)
    best_state = load_file(run.path / "best.safetensors")
    assert all(torch.equal(best_state[k], saved["best"]["weights"][k]) for k in best_state)


def test_of_epochs_with_equal_accuracy_the_last_is_the_best(tmp_path, monkeypatch):
    accuracies = iter([0.5, 0.8, 0.8, 0.7])
    monkeypatch.setattr(Session, "validate", lambda _: {"val_accuracy": next(accuracies)})
    run = train(digits(tmp_path, epochs=4), progress=False)
    assert run.info["best"] == {"epoch": 3, "accuracy": 0.8}


def test_a_name_in_brackets_is_shown_whole_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(digits(tmp_path, name="photos [old]")) as shown:
        assert shown.bar is not None
        row = shown.bar.make_tasks_table(shown.bar.tasks)
    assert "photos [old]" in [str(cell) for cell in row.columns[0].cells]


def test_without_validation_there_is_only_the_last_epoch(tmp_path):
    run = train(digits(tmp_path, val_share=0.0, epochs=1), progress=False)
    assert not run.has("best")
    assert run.info["best"] is None
    assert "val_accuracy" not in run.metrics()[0]


def test_the_weights_to_evaluate_are_the_averaged_ones(tmp_path):
    run = train(digits(tmp_path, ema_decay=0.9, epochs=1), progress=False)
    saved = checkpoint.load(run.path / "checkpoints", pytest.fail)
    assert saved is not None
    weights = load_file(run.path / "model.safetensors")
    names = [name for name, _ in run.model().named_parameters()]
    for name, mean in zip(names, saved["average"][1:], strict=False):
        assert torch.equal(weights[name], mean)
        assert not torch.equal(weights[name], saved["model"][name])


def test_an_existing_folder_is_refused_before_data_is_read(tmp_path, monkeypatch):
    train(digits(tmp_path, epochs=1), progress=False)
    monkeypatch.setattr(training, "Session", lambda *_: pytest.fail("data was read"))
    with pytest.raises(ValueError, match="already exists: add --resume"):
        train(digits(tmp_path, epochs=1))
    with pytest.raises(
        ValueError, match=r"different settings: epochs was 1, is now 2; lr was 0\.05"
    ) as error:
        train(resumed(digits(tmp_path, epochs=2, lr=0.1)))
    _, _, command = str(error.value).partition("or continue with its own settings: noiseproof ")
    assert cli.run(shlex.split(command)) == 0


def test_a_training_that_fails_at_its_first_step_does_not_block_the_folder(tmp_path):
    invalid = digits(tmp_path, epochs=1, method="noisy", noise="occlusion:2x70")
    with pytest.raises(ValueError, match="a patch of 70 x 70 does not fit"):
        train(invalid, progress=False)
    valid = digits(tmp_path, epochs=1, method="noisy", noise="occlusion:2x3")
    assert train(valid, progress=False).finished


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch, capsys):
    run = train(digits(tmp_path, epochs=1), progress=False)
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    monkeypatch.setattr(training, "Session", lambda *_: pytest.fail("it was trained"))
    again = train(resumed(digits(tmp_path, epochs=1)))
    assert again.path == run.path
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == before
    assert "is already trained: nothing to do" in capsys.readouterr().err


def test_resuming_on_other_data_is_refused(tmp_path):
    run = RunFolder.create(digits(tmp_path), {"fingerprint": "another"})
    with pytest.raises(ValueError, match=f"are not those of run {run.path.name}"):
        train(resumed(digits(tmp_path)), progress=False)


def test_a_run_of_a_newer_version_is_refused(tmp_path):
    run = RunFolder.create(digits(tmp_path), {})
    file = run.path / "config.json"
    content = without_checksum(json.loads(file.read_text()))
    file.write_text(json.dumps(content | {"schema": 99}))
    with pytest.raises(ValueError, match="newer noiseproof"):
        train(resumed(digits(tmp_path)), progress=False)


# divergence


def replace_rates(monkeypatch, replaced, rate=1e30, otherwise=None):
    """The learning rate is `rate` in the steps for which `replaced(step)` holds."""

    def patched(optim, step, steps_per_epoch):
        usual = optimizer.learning_rate(optim, step, steps_per_epoch)
        return rate if replaced(step) else usual if otherwise is None else otherwise

    monkeypatch.setattr(eager, "learning_rate", patched)


def good_checkpoint(path, epochs) -> dict[str, Any]:
    """The checkpoint after `epochs`, with finite weights."""
    state = checkpoint.load(path / "checkpoints", pytest.fail)
    assert state is not None
    assert state["epoch"] == epochs
    floats = [t for t in state["model"].values() if t.is_floating_point()]
    assert all(t.isfinite().all() for t in floats)
    return state


def test_a_diverged_run_stops_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    replace_rates(monkeypatch, lambda step: step >= 2 * 17 + 4)
    with pytest.raises(Diverged) as caught:
        train(digits(tmp_path, epochs=5, checkpoint_minutes=0), progress=False)
    path = tmp_path / "one"
    message = str(caught.value)
    for part in ("epoch 3", "--lr (now 0.05)", "--clip-grad 1.0", "--ramp-epochs 5", "checkpoints"):
        assert part in message
    good_checkpoint(path, 2)
    assert not (path / "model.safetensors").exists()
    assert len(RunFolder.open(path).metrics()) == 2
    monkeypatch.undo()
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    assert train(resumed(digits(tmp_path, epochs=5)), progress=False).finished


def test_weights_that_diverge_in_the_last_update_before_a_checkpoint_are_not_written(
    tmp_path, monkeypatch
):
    """The loss of every step of the epoch is fine; the weights after its last update are not."""
    replace_rates(monkeypatch, lambda step: step == 2 * 17 - 1, rate=float("inf"))
    with pytest.raises(Diverged, match=r"epoch 2, at step 17.*weights are not finite"):
        train(digits(tmp_path, epochs=5, checkpoint_minutes=0), progress=False)
    state = good_checkpoint(tmp_path / "one", 1)
    assert all(w.isfinite().all() for w in state["best"]["weights"].values())


def test_a_loss_that_is_finite_but_huge_stops_the_run(tmp_path, monkeypatch):
    replace_rates(monkeypatch, lambda step: step == 0, rate=1e4, otherwise=0.0)
    with pytest.raises(Diverged, match="No checkpoint had been written yet") as caught:
        train(digits(tmp_path, method="normal"), progress=False)
    assert "not finite" not in str(caught.value)
    assert "--ramp-epochs" not in str(caught.value)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_accuracy_at_chance_is_warned_about_once(tmp_path, capsys, smoothing):
    """With such a weight all features become one; the network still learns class frequencies."""
    config = digits(tmp_path, method="stability", stability_weight=1e3, epochs=5,
                    smoothing=smoothing, clip_grad=1.0)  # fmt: skip
    run = train(config, progress=True)
    assert run.metrics()[2]["train_accuracy"] < 0.2
    lines = [x for x in capsys.readouterr().err.splitlines() if "still at chance" in x]
    assert len(lines) == 1
    assert "after 3 epochs" in lines[0]
    assert "--ramp-epochs 5 (now 0)" in lines[0]
    entropy = float(lines[0].split("by class frequency gives ")[1].split(". ")[0])
    assert entropy == pytest.approx(
        math.log(10), abs=0.01
    )  # the digits are equally frequent, nearly


def test_a_network_that_learns_is_not_warned_about(tmp_path, capsys):
    train(digits(tmp_path, method="normal", epochs=4), progress=True)
    assert "still at chance" not in capsys.readouterr().err


def test_nor_is_one_that_is_accurate_and_overconfident(tmp_path):
    config = digits(tmp_path, method="stability", ramp_epochs=5.0)
    data = load_dataset(config.data)

    def warning(epoch: int, accuracy: float) -> str | None:
        return chance_warning(config, data, {"epoch": epoch, "ce": 5.0, "train_accuracy": accuracy})

    assert warning(3, 0.6) is None
    assert warning(4, 0.1) is None
    text = warning(3, 0.1)
    assert text is not None
    assert "--ramp-epochs" not in text  # the run has one
    assert "--batch-size" not in text  # an epoch has enough steps


def test_a_large_batch_of_few_images_is_what_the_warning_names_first(tmp_path):
    config = digits(tmp_path, method="normal", batch_size=500)
    metrics = {"epoch": 3, "ce": 5.0, "train_accuracy": 0.1}
    text = chance_warning(config, load_dataset(config.data), metrics)
    assert text is not None
    assert "Try a smaller --batch-size (now 500: 2 steps per epoch) or a different --lr" in text


def test_the_command_line_reports_divergence_in_one_line_and_exits_with_3(tmp_path, capsys):
    status = cli.run(
        ["train", "--epochs", "1", "--lr", "1e9", "--threads", "1", "--output", str(tmp_path)]
    )
    out, err = capsys.readouterr()
    assert (status, out) == (3, "")
    assert err.splitlines()[-1].startswith("noiseproof: training diverged")
    assert err.count("\n") == 2  # after the line on the data
    assert "--lr (now 1e+09)" in err


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_number_that_is_not_finite_is_found(bad):
    tensors = [torch.ones(3, 4), torch.full((5,), 1e38), torch.zeros(0), torch.ones(2).long()]
    assert int(count_nonfinite(tensors)) == 0
    tensors[0][1, 2] = bad
    assert int(count_nonfinite(tensors)) == 1


# output, device and settings


def test_tensorboard_gets_every_number_of_every_epoch(tmp_path, monkeypatch):
    written: dict[tuple[str, int], float] = {}
    writers: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            writers.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written[name, step] = value

        def flush(self):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            writers.append("closed")

    fake: Any = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    run = train(digits(tmp_path, epochs=2, tensorboard=True), progress=False)
    assert writers == [(str(run.path / "tensorboard"), 1), "closed"]
    for row in run.metrics():
        epoch = int(row.pop("epoch"))
        assert {name: written[name, epoch] for name in row} == row


def test_a_missing_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard needs the package tensorboard"):
        train(digits(tmp_path, tensorboard=True), progress=False)
    assert not list(tmp_path.glob("*/config.json"))  # the folder can be used again


def test_a_missing_gpu_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for request in (
        lambda: train(digits(tmp_path, device="cuda"), progress=False),
        lambda: chosen_device("cuda"),
    ):
        with pytest.raises(ValueError, match=r"device cuda needs a GPU.* use cpu or auto"):
            request()


def test_variables_of_a_queue_do_not_turn_one_process_into_many(tmp_path, monkeypatch):
    for name, value in {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "x", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert train(digits(tmp_path, epochs=1), progress=False).info["ranks"] == 1


def test_the_seed_alone_determines_the_weights(tmp_path):
    def weights(seed, name):
        config = digits(tmp_path, epochs=1, seed=seed)
        torch.manual_seed(len(name))  # what was drawn before does not matter
        run = train(replace(config, run=replace(config.run, name=name)), progress=False)
        return (run.path / "model.safetensors").read_bytes()

    assert weights(1, "a") == weights(1, "bb")
    assert weights(1, "ccc") != weights(2, "d")


def test_the_objective_is_built_once_with_the_steps_of_an_epoch(tmp_path, monkeypatch):
    config = digits(tmp_path, method="stability", ramp_epochs=2.0, views="independent")
    built = []

    def make(*arguments: Any) -> Any:
        built.append(make_objective(*arguments))
        return built[-1]

    monkeypatch.setattr(sessions, "make_objective", make)
    session = Session(config, make_fabric(config))
    assert built == [session.objective]
    assert session.loader.steps == 17
    assert built[0].ramp_steps == 2 * 17
    assert session.loader.second  # pyright: ignore[reportAttributeAccessIssue]


def test_compilation_is_announced_before_it_starts(tmp_path, monkeypatch, capsys):
    announced, make_engine = [], choose_engine.make_engine

    def make(name: str, *rest: Any) -> eager.Engine:
        announced.append((name, capsys.readouterr().err))
        return make_engine("eager", *rest)

    monkeypatch.setattr(sessions, "make_engine", make)
    monkeypatch.setattr(choose_engine, "missing_compiler", lambda _: None)
    line = "one: compiling the training step, which can take a minute\n"
    for name, requested, expected in (
        ("graph", "graph", line),
        ("graph", "auto", ""),  # too few steps
        ("compile", "compile", line),
        ("eager", "auto", ""),
    ):
        monkeypatch.setattr(sessions, "choose_engine", lambda *_, name=name: (name, None))
        announced.clear()
        capsys.readouterr()
        output = tmp_path / f"{name}-{requested}"
        run = train(digits(output, epochs=1, engine=requested), progress=True)
        assert announced == [(name, expected)]
        assert 0 <= run.info["start_seconds"] < 60


def test_fp16_is_refused_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--amp fp16 needs a GPU.*expected no or bf16"):
        train(digits(tmp_path, amp="fp16"), progress=False)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_on_a_cpu_without_it_gives_a_warning_in_one_line(
    tmp_path, monkeypatch, capfd, supported
):
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False
    )
    # Where bf16 is not supported torch switches oneDNN off; without this, for all later tests.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    train(digits(tmp_path, epochs=1, amp="bf16", device="cpu"), progress=True)
    lines = capfd.readouterr().err.splitlines()
    warning = "one: warning: this CPU does not support bf16: --amp no is several times faster here"
    assert (warning in lines) == (not supported)
    assert len(lines) == 2 + (not supported)  # one for the data, one for the epoch
    assert slow_precision(digits(tmp_path), "cpu") is None
