"""`noiseproof certify`: rows per image, which are kept, continued and printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from noiseproof import smoothing
from noiseproof.__main__ import main
from noiseproof.lab.evaluation import certificates as module
from noiseproof.lab.evaluation.certificates import (
    FILE,
    Smoothing,
    certificates,
    certified_radii,
    certify,
    radius_steps,
)
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits

FEW = Smoothing(0.2, samples=60, selection=10, alpha=0.01)


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "flat", Flat)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        return train(digits(tmp_path_factory.mktemp("trained"), epochs=2), progress=False)


@pytest.fixture
def run(trained: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(trained.path, tmp_path / "one")
    return RunFolder.open(tmp_path / "one")


def few(run: RunFolder, every: int = 60, **options: Any) -> list[dict[str, Any]]:
    return certify(run, FEW, every=every, device="cpu", progress=False, **options)


class Clipped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.clamp(0, 1))


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their duration and the name of their run."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "run")} for row in rows]


def test_rows_are_those_of_the_core(run):
    rows, test = few(run), run.dataset().test
    index = torch.arange(0, test.count, 60)
    assert [row["image"] for row in rows] == index.tolist()
    images = test.images[index].float() / 255
    model = Clipped(run.model())  # as in training
    expected = smoothing.certify(
        model, images, 0.2, samples=60, selection=10, alpha=0.01, index=index
    )
    assert [row["count"] for row in rows] == expected.counts.tolist()
    assert [row["radius"] for row in rows] == expected.radii.tolist()
    assert [-1 if row["class"] is None else row["class"] for row in rows] == (
        expected.classes.tolist()
    )
    labels = test.labels[index]
    assert [row["label"] for row in rows] == labels.tolist()
    for distance in (0.0, 0.1, 0.3):
        share = smoothing.certified_accuracy(expected.classes, expected.radii, labels, distance)
        assert (certified_radii(rows) >= distance).mean() == share
    assert (certified_radii(rows) >= 0).mean() > 0.2  # chance is 0.1


def test_rows_of_unclipped_noise_are_not_used(run):
    first = few(run)
    old = [{**row, "schema": 1, "count": 0} for row in first]
    (run.path / FILE).unlink()
    run.append_jsonl(FILE, old)
    assert certificates(run, "last") == {}
    assert untimed(few(run)) == untimed(first)
    assert list(certificates(run, "last")) == [FEW]


def test_nothing_is_certified_twice(run, monkeypatch):
    rows = few(run)
    monkeypatch.setattr(module, "certify_images", None)  # raises if called
    assert few(run) == rows
    assert few(run, every=120) == rows[::2]


def test_more_images_add_to_those_that_exist(run):
    rows = few(run, every=120)
    assert few(run)[::2] == rows
    lines = (run.path / FILE).read_text().splitlines()
    assert len(lines) == len(few(run))


def test_batches_make_no_difference(run, tmp_path):
    expected = few(run)
    shutil.copytree(run.path, tmp_path / "other")
    (tmp_path / "other" / FILE).unlink()
    other = few(RunFolder.open(tmp_path / "other"), batch_size=7)
    assert untimed(other) == untimed(expected)


def test_a_file_that_was_cut_is_continued(run):
    expected, path = few(run), run.path / FILE
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:50])
    with pytest.raises(ValueError, match=f"line 4 of .*{FILE} is damaged"):
        certificates(run, "last")
    assert untimed(few(run)) == untimed(expected)
    assert len(path.read_text().splitlines()) == len(lines)


def test_an_interrupted_command_keeps_what_it_has_certified(run, monkeypatch):
    calls, real = [], module.certify_images

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "certify_images", interrupted)
    with pytest.raises(KeyboardInterrupt):
        few(run, batch_size=60)  # one image at a time
    assert len((run.path / FILE).read_text().splitlines()) == 2
    few(run, batch_size=60)
    assert len(calls) == 3 + len(few(run)) - 2


def test_other_settings_and_other_weights_have_rows_of_their_own(run):
    few(run)
    other = Smoothing(0.1, samples=50, selection=10, alpha=0.01)
    certify(run, other, every=120, device="cpu", progress=False)
    found = certificates(run, "last")
    assert list(found) == [FEW, other]
    assert {s: len(rows) for s, rows in found.items()} == {FEW: 9, other: 5}
    assert certificates(run, "best") == {}
    state = {name: value + 1 for name, value in run.model().state_dict().items()}
    run.save_weights("last", state)
    assert certificates(run, "last") == {}


def test_the_command_prints_accuracy_by_radius(run, capsys):
    command = f"certify {run.path} --sigma 0.2 --samples 60 --alpha 0.01 --every 60 --device cpu"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "Certified accuracy in %, by L2 radius (σ 0.2, 60 samples, α 0.01)" in out
    (rows,) = certificates(run, "last").values()
    radii = certified_radii(rows)
    lines = out.partition("This share")[0].splitlines()
    assert max(map(len, lines)) <= 80
    shown = dict(line.split() for line in lines if len(line.split()) == 2)
    shares = {f"{i / 20:g}": f"{100 * (radii >= i / 20).mean():.1f}" for i in range(6)}
    assert shares.items() <= shown.items()  # the largest radius is 0.29
    assert (shown["radius"], shown["images"]) == (run.name, str(len(rows)))
    assert "wrong with probability 0.01 at most" in " ".join(out.split())
    assert f"Rows: {run.path / FILE}" in out
    stored = [json.loads(line) for line in (run.path / FILE).read_text().splitlines()]
    assert {row["command"] for row in stored} == {f"noiseproof {command}"}


def test_the_table_has_the_radii_of_the_literature():
    assert radius_steps(Smoothing(0.25, samples=100_000)) == [0.0, 0.25, 0.5, 0.75]
    assert radius_steps(Smoothing(0.12)) == [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]


def test_an_unfinished_training_says_how_to_finish_it(run):
    run.weights_path("last").unlink()
    with pytest.raises(ValueError, match=r"not finished .* resume it with"):
        few(run)


def test_names_that_do_not_fit_the_terminal_are_wrapped(run, capsys, monkeypatch):
    monkeypatch.setattr(module, "terminal", lambda: Console(width=14))
    command = f"certify {run.path} --sigma 0.2 --samples 60 --alpha 0.01 --every 60 --device cpu"
    assert main(command.split()) == 0
    table = capsys.readouterr().out.partition("This share")[0]
    assert "…" not in table
