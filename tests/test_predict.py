"""New images to classes: files are read as in training, and none is lost silently."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.__main__ import main
from noiseproof.lab.config import Data
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.images import DataError
from noiseproof.lab.evaluation import predict
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "flat", Flat)


def photographs(folder: Path, count: int = 10) -> Path:
    """Two classes, by brightness; the sizes differ, some are grey and some lie on their side."""
    rng = np.random.default_rng(0)
    for name, shade in (("dark", 60), ("light", 190)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            shape = (8 + i % 3, 12, 3) if i % 2 else (8, 8)
            image = Image.fromarray(rng.normal(shade, 20, shape).clip(0, 255).astype(np.uint8))
            exif = Image.Exif()
            exif[0x0112] = 6 if i == 5 else 1
            image.save(folder / name / f"{i}.png", exif=exif)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Path]:
    folder = tmp_path_factory.mktemp("trained")
    photos = photographs(folder / "photos")
    config = digits(folder, epochs=6, batch_size=4, device="cpu", lr=0.02)
    settings = Data(data=str(photos), img_size=(8, 8), val_share=0.2, storage="memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        return train(replace(config, data=settings)), photos


def classes_of(line: str) -> str:
    return line.rpartition("% ")[2]


def test_files_are_read_and_classified_as_the_test_images_are(trained):
    run, _ = trained
    stored = load_dataset(replace(run.config.data, storage="stream")).test.files or ()
    test = load_dataset(run.config.data).test
    assert test.images is not None
    assert torch.equal(predict.pixels_of(run, stored), test.images.float() / 255)
    found = list(predict.predict(run, stored, top=2, weights="last", batch_size=3))
    chances = run.model("last")(test.images.float() / 255).softmax(1)
    assert [f.file for f in found] == list(stored)
    for one, row in zip(found, chances, strict=True):
        order = row.argsort(descending=True)
        assert one.classes == tuple(run.info["classes"][i] for i in order)
        assert one.chances == pytest.approx(row[order].tolist(), abs=1e-6)
    assert {f.classes[0] for f in found} == {"dark", "light"}


def test_the_command_prints_a_line_a_file_and_writes_them(trained, tmp_path, capsys):
    run, photos = trained
    out = tmp_path / "new" / "out.csv"
    command = ["predict", str(run.path), str(photos / "light"), str(photos / "dark" / "3.png")]
    assert main([*command, "--top", "5", "--out", str(out)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"Predictions: {out}"
    expected = [str(photos / "light" / f"{i}.png") for i in range(10)]
    expected.append(str(photos / "dark" / "3.png"))
    assert [line.split()[0] for line in lines] == expected
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows[::2]] == expected
    assert [row["rank"] for row in rows] == ["1", "2"] * 11  # of two classes five are two
    assert {row["class"] for row in rows[:2]} == {"dark", "light"}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert float(first["probability"]) + float(second["probability"]) == pytest.approx(1)
        assert float(first["probability"]) >= float(second["probability"])


@pytest.mark.parametrize(("images", "expected"), [(999, "last"), (1000, "best")])
def test_the_best_epoch_is_used_if_it_was_chosen_on_enough_images(
    trained, images: int, expected: Weights
):
    run, photos = trained
    file = [photos / "dark" / "1.png"]
    info = {**run.info, "samples": {**run.info["samples"], "validation": images}}
    other = RunFolder(run.path, run.config, info)
    chosen, named = (next(predict.predict(other, file, weights=w)) for w in (None, expected))
    assert other.default_weights() == expected
    assert chosen == named
    other.has = lambda weights="last": weights == "last"  # pyright: ignore
    assert other.default_weights() == "last"
    assert other.weights_note("last") == "Weights of the last epoch, 6."


def test_the_command_says_which_epoch_it_uses(trained, capsys):
    run, photos = trained
    command = ["predict", str(run.path), str(photos / "dark" / "1.png")]
    notes = {
        (): "Weights of the last epoch, 6; 4 validation images are too few to choose one (fewer "
        "than 1,000).",
        ("--weights", "best"): f"Weights of epoch {run.info['best']['epoch']} of 6, the best on 4 "
        "validation images.",
    }
    for words, note in notes.items():
        assert main([*command, *words]) == 0
        assert capsys.readouterr().err == f"{note}\n"


def test_unreadable_files_are_all_named_and_the_others_classified(trained, tmp_path, capsys):
    run, _ = trained
    new = photographs(tmp_path / "new", count=2)
    (new / "broken.jpg").write_bytes(b"no image")
    (new / "dark" / "empty.png").touch()
    whole = (new / "dark" / "1.png").read_bytes()
    (new / "light" / "half.png").write_bytes(whole[: len(whole) // 2])
    (new / "notes.txt").touch()
    (new / ".hidden.png").touch()
    os.symlink(new, new / "light" / "again")
    os.symlink(new / "light", new / "a link")  # files keep the name of the folder that is one
    assert main(["predict", str(run.path), str(new)]) == 1
    out, err = capsys.readouterr()
    names = ["dark/0.png", "dark/1.png", "light/0.png", "light/1.png"]
    assert [line.split()[0] for line in out.splitlines()] == [str(new / name) for name in names]
    for name in ("broken.jpg cannot", "dark/empty.png cannot", "light/half.png cannot"):
        assert name in err
    assert "notes.txt: expected images (jpg " in err
    assert err.splitlines()[-1] == "noiseproof: 3 of 7 files could not be read"
    with pytest.raises(DataError, match=r"broken\.jpg cannot be read"):
        list(predict.predict(run, [new / "broken.jpg"]))


def test_odd_names_are_printed_on_one_line_and_kept_in_the_table(trained, tmp_path, capsys):
    run, photos = trained
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9,\x1b[1m.png")
    with open(odd, "wb") as file:
        file.write((photos / "dark" / "1.png").read_bytes())
    out = tmp_path / "out.csv"
    assert main(["predict", str(run.path), odd, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 2
    with out.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        assert [row["file"] for row in csv.DictReader(file)] == [odd]


@pytest.mark.parametrize("kind", ["digits", "npz"])
def test_runs_of_other_data_take_files_too(kind: str, tmp_path, capsys):
    config = digits(tmp_path, epochs=2, device="cpu")
    if kind == "npz":
        rng = np.random.default_rng(0)
        labels = np.arange(60) % 3
        images = (rng.integers(0, 80, (60, 8, 8, 3)) + 80 * labels[:, None, None, None]).astype(
            "u1"
        )
        arrays = {f"{part}_images": images for part in ("train", "test")}
        arrays |= {f"{part}_labels": labels for part in ("train", "test")}
        arrays["classes"] = np.array(["low", "mid", "high"])
        np.savez(tmp_path / "mine.npz", **arrays)  # pyright: ignore[reportArgumentType]
        config = replace(config, data=Data(data=str(tmp_path / "mine.npz"), val_share=0.1))
    run = train(config)
    test = load_dataset(config.data).test
    assert test.images is not None
    files = []
    for i, image in enumerate(test.images[:20].numpy()):
        files.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(image.transpose(1, 2, 0).squeeze()).save(files[-1])
    assert torch.equal(predict.pixels_of(run, files), test.images[:20].float() / 255)
    capsys.readouterr()
    assert main(["predict", str(run.path), *files, "--weights", "last"]) == 0
    chosen = run.model()(test.images[:20].float() / 255).argmax(1).tolist()
    names = [run.info["classes"][i] for i in chosen]
    assert [classes_of(line) for line in capsys.readouterr().out.splitlines()] == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "no/such.jpg"], "no/such.jpg does not exist; expected an image or a folder"),
        (["no/such/run", "{photos}"], "no/such/run does not exist; expected a run folder"),
        (["{photos}", "{photos}"], "is not a run folder"),
        (["{run}", "{photos}", "--top", "0"], "--top must be at least 1, got 0"),
        (["{run}", "{photos}", "--out", "a.txt"], "--out must end in .csv, got a.txt"),
        (["{run}", "{empty}"], "there are no images in"),
        (["{run}"], "predict needs images or folders of images after the run, got none"),
    ],
)
def test_an_invalid_command_fails_with_one_line(words, message, trained, tmp_path, capsys):
    run, photos = trained
    places = {"run": run.path, "photos": photos, "empty": tmp_path}
    assert main(["predict", *(word.format(**places) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
