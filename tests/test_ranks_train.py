"""Two gloo processes, started as torchrun starts them, train to the weights of one process.

They train every case in one process group.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from noiseproof.lab.config import METHODS, Config
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training import session
from noiseproof.lab.training.session import Session
from noiseproof.lab.training.train import train
from tests.faults.commands import CONTEXT
from tests.flat import Flat, digits, resumed

CASES = {
    **{method: {"method": method} for method in METHODS},
    "everything": {
        "method": "discriminative", "clip_grad": 0.5, "ema_decay": 0.9, "smoothing": 0.1,
        "ramp_epochs": 1.5, "views": "independent", "augment": "crop", "opt": "adamw", "lr": 0.003,
    },
}  # fmt: skip
TIMES = ("seconds", "images_per_second")


def config(output: str, case: str) -> Config:
    base = digits(output, amp="float64", epochs=2, batch_size=80, **CASES[case])
    return replace(base, run=replace(base.run, name=case))


def interrupted(config: Config) -> str:
    """Trains, is stopped in the middle of the second epoch on all ranks, and resumes."""
    config = replace(config, run=replace(config.run, name="interrupted", checkpoint_minutes=1e-9))
    whole = Session.advance

    def stops(self):
        if (self.epoch, self.step) == (1, 5):
            raise KeyboardInterrupt
        return whole(self)

    Session.advance = stops
    try:
        train(config, progress=False)
        return "was not stopped"
    except KeyboardInterrupt:
        pass
    finally:
        Session.advance = whole
    train(resumed(config), progress=False)
    return ""


def main(output: str) -> None:
    """The program of a rank, which writes what went wrong to its own file."""
    BACKBONES["flat"] = Flat
    problems = ""
    for case in CASES:
        train(config(output, case), progress=False)
    try:
        train(config(output, "normal"), progress=False)
        problems += "the folder was not refused. "
    except ValueError as error:
        problems += "" if "already exists" in str(error) else f"{error} "
    session._STRIDE = 5  # so that a checkpoint is written inside an epoch of 13 steps
    problems += interrupted(config(output, "everything"))
    Path(output, f"rank{os.environ['RANK']}.txt").write_text(problems)


def launch(output: str) -> None:
    """Does what torchrun does, which is a command line for this function of torch; its processes
    are forks of this one instead of interpreters of their own."""
    printed = os.open(f"{output}/printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    warnings.simplefilter("error", UserWarning)
    options = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                           start_method="fork")  # fmt: skip
    elastic_launch(options, main)(output)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The output folder of the two processes."""
    output = tmp_path_factory.mktemp("ranks")
    launcher = CONTEXT.Process(target=launch, args=(str(output),))
    launcher.start()
    launcher.join()
    printed = (output / "printed.txt").read_text()
    assert launcher.exitcode == 0, printed
    assert "Initializing" not in printed
    return output


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_to_the_weights_and_metrics_of_one(case, two, tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    alone = train(config(str(tmp_path), case), progress=False)
    shared = RunFolder.open(two / case)
    assert (alone.info["ranks"], shared.info["ranks"]) == (1, 2)
    same(alone.path / "model.safetensors", shared.path / "model.safetensors", 1e-9)
    same(alone.path / "best.safetensors", shared.path / "best.safetensors", 1e-9)
    same_metrics(alone, shared, 1e-6)


def test_two_processes_resume_inside_an_epoch(two):
    whole, again = two / "everything", two / "interrupted"
    same(whole / "model.safetensors", again / "model.safetensors", 1e-12)
    same_metrics(RunFolder.open(whole), RunFolder.open(again), 1e-9)


def test_every_rank_refuses_an_existing_folder(two):
    assert [(two / f"rank{r}.txt").read_text() for r in range(2)] == ["", ""]


@pytest.mark.long
def test_two_nodes_train_with_the_command_of_the_docs(tmp_path):
    """Two torchrun commands of one process each, which find each other by HOST and port."""
    page = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text().replace("\\\n", "")
    line = next(line for line in page.splitlines() if line.startswith("torchrun --nnodes 2"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = line.replace("HOST:29500", f"127.0.0.1:{port}").replace("--output runs", "--output .")
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    nodes = [subprocess.Popen(command, cwd=tmp_path, env=environment) for _ in range(2)]
    assert [node.wait(300) for node in nodes] == [0, 0]
    run = RunFolder.open(tmp_path / "digits-discriminative-s0")
    assert (run.finished, run.info["ranks"]) == (True, 2)


def test_sync_bn_converts_every_batch_norm_on_gpus_and_is_refused_on_a_cpu(tmp_path):
    settings = digits(tmp_path, model="small_cnn", sync_bn=True)
    data = load_dataset(settings.data)
    fabric: Any = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    modules = list(session._make_model(settings, data, fabric).modules())
    assert any(isinstance(module, nn.SyncBatchNorm) for module in modules)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in modules)
    fabric.device = torch.device("cpu")
    with pytest.raises(ValueError, match="--sync-bn needs GPUs"):
        session._make_model(settings, data, fabric)


def same(one: Path, other: Path, tolerance: float) -> None:
    a, b = load_file(one), load_file(other)
    assert list(a) == list(b)
    assert a["head.weight"].dtype == torch.float64
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=tolerance), name


def same_metrics(run: RunFolder, other: RunFolder, tolerance: float) -> None:
    for row, expected in zip(run.metrics(), other.metrics(), strict=True):
        values = {k: v for k, v in row.items() if k not in TIMES}
        expected = {k: v for k, v in expected.items() if k not in TIMES}
        assert values == pytest.approx(expected, rel=tolerance)
