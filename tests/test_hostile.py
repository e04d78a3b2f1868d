"""Files from strangers: nothing in them is executed or unfolds without bound, and each is refused
in one line. `test_hostile_data` is about images, folders and names."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import get_model_weights

import noiseproof
from noiseproof.__main__ import main
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.files import read_tensors
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.paper.tables import read_records
from tests.flat import Flat, digits

Refused = Callable[..., str]


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "flat", Flat)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What a payload creates."""
    return tmp_path / "executed"


@pytest.fixture
def refused(marker: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command, which must fail in one line without executing a payload; the line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        status = main([str(word) for word in words])
        assert not marker.exists(), "the payload was executed"
        error = capsys.readouterr().err
        assert status == 2, error
        lines = error.splitlines()
        assert [line for line in lines if line.startswith("noiseproof: ")] == lines[-1:], error
        assert "weights_only" not in error  # torch's advice is to turn the protection off
        assert "unsafely" not in error  # and so is numpy's
        return lines[-1]

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        config = digits(tmp_path_factory.mktemp("trained"), epochs=1, checkpoint_minutes=0)
        run = train(config, progress=False)
        evaluate(run, ["clean"], device="cpu", progress=False)
    return run.path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be tampered with."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "one"))


# pickles


def torch_file(content: object) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def npz_file(content: object) -> bytes:
    """Arrays of objects."""
    array = np.empty(1, dtype=object)
    array[0] = content
    splits = [f"{part}_{kind}" for part in ("train", "test") for kind in ("images", "labels")]
    names = ("classes", "labels", "draws", "model", "fingerprint")
    out = io.BytesIO()
    np.savez(out, **dict.fromkeys([*splits, *names], array))  # pyright: ignore
    return out.getvalue()


def npy_file(content: object) -> bytes:
    array = np.empty(1, dtype=object)
    array[0] = content
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


FORMS: dict[str, Callable[[object], bytes]] = {
    "torch": torch_file,
    "pickle": pickle.dumps,
    "npz": npz_file,
}


def test_the_payload_works_where_nothing_protects_from_it(marker: Path):
    np.load(io.BytesIO(npz_file(Payload(marker))), allow_pickle=True)["classes"]
    marker.rmdir()
    torch.load(io.BytesIO(torch_file(Payload(marker))), weights_only=False)
    marker.rmdir()
    with pytest.raises(RuntimeError, match="magic number"):  # too late
        torch.load(io.BytesIO(pickle.dumps(Payload(marker))), weights_only=False)
    marker.rmdir()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_are_not_unpickled(form, suffix, tmp_path: Path, marker: Path, refused: Refused):
    path = tmp_path / f"evil{suffix}"
    path.write_bytes(FORMS[form]({"weight": Payload(marker)}))
    line = refused("train", "--data", "digits", "--weights", path, "--output", tmp_path / "out")
    assert f"{path} cannot be read as weights: " in line
    assert "expected a state dict" in line


def test_a_program_is_not_loaded_as_weights(tmp_path: Path, refused: Refused):
    path = tmp_path / "program.pt"
    with zipfile.ZipFile(path, "w") as archive:  # as torch.jit.save writes them
        archive.writestr("program/constants.pkl", pickle.dumps(()))
        archive.writestr("program/data.pkl", pickle.dumps(()))
        archive.writestr("program/version", "3")
    line = refused("train", "--data", "digits", "--weights", path, "--output", tmp_path / "out")
    assert "it holds other objects than tensors" in line


def test_cached_imagenet_weights_are_not_unpickled(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    url = get_model_weights("squeezenet1_1").DEFAULT.url  # pyright: ignore
    cached = tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2]
    cached.parent.mkdir(parents=True)
    cached.write_bytes(torch_file({"weight": Payload(marker)}))
    command = ["train", "--data", "digits", "--output", tmp_path / "out"]
    line = refused(*command, "--model", "squeezenet1_1", "--weights", "imagenet")
    assert f"delete them from {tmp_path}/hub if they are there" in line
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_are_not_unpickled(form, run: Path, marker: Path, refused: Refused):
    (run / "model.safetensors").unlink()
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(FORMS[form]({"schema": 1, "model": Payload(marker)}))
    command = ["train", "--config", run / "config.json", "--output", run.parent, "--name", "one"]
    assert "all checkpoints are damaged" in refused(*command, "--resume")


@pytest.mark.parametrize("form", FORMS)
def test_data_is_not_unpickled(form, tmp_path: Path, marker: Path, refused: Refused):
    content = FORMS[form](Payload(marker))
    for name in ("data.npz", "train_32x32.mat", "test_32x32.mat"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    for data in (tmp_path / "data.npz", "cifar10", "svhn"):
        refused("train", "--data", data, "--data-dir", tmp_path, "--no-download")


@pytest.mark.parametrize("form", [*FORMS, "npy"])
def test_corrupted_arrays_are_not_unpickled(form, run: Path, marker: Path, refused: Refused):
    folder = run.parent / "corrupted"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(2, np.int64))
    content = {**FORMS, "npy": npy_file}[form](Payload(marker))
    for name in ("fog.npy", "labels.npy"):
        (folder / name).write_bytes(content)
        line = refused("evaluate", run, "--data", folder)
        assert f"{name} cannot be read: " in line
        np.save(folder / "fog.npy", np.zeros((10, 8, 8, 1), np.uint8))


@pytest.mark.parametrize("shape", [(), (-5, 8, 8, 1), (10**16, 8, 8, 1)])
def test_an_array_of_an_impossible_shape_is_refused(shape, run: Path, refused: Refused):
    folder = run.parent / "corrupted"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(2, np.int64))
    with open(folder / "fog.npy", "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(640))
    assert "fog.npy " in refused("evaluate", run, "--data", folder)


# Files of a run that are valid but not what they should be, without a checksum or with a new one


def test_a_config_without_a_checksum_may_not_hold_anything(run: Path, refused: Refused):
    file = run / "config.json"
    whole = json.loads(file.read_text())
    del whole["crc32"]
    for group, name, value, message in (
        ("schema", None, float("inf"), "cannot convert float infinity"),
        ("config", None, {"lr": "fast"}, "lr must be a float, got 'fast'"),
        ("config", None, {"data": None}, "data must be a str, got None"),
        ("config", None, {"decay_milestones": [0.5]}, "decay_milestones must be tuple[int, ...]"),
        ("info", "classes", 10, "classes must be a list, got 10"),
        ("info", "size", None, "size must be a list"),
    ):
        value = value if name is None else {**whole[group], name: value}
        file.write_text(json.dumps({**whole, group: value}))
        line = refused("evaluate", run, "--perturb", "gaussian:0.2", "--draws", 1)
        assert f"{file} cannot be read as a run's config: " in line
        assert message in line
        assert "crc32" not in line  # the file has none to delete


def test_a_binary_config_is_a_short_line(run: Path, refused: Refused):
    (run / "config.json").write_bytes(b"PK\xff" * 5000)
    assert len(refused("evaluate", run)) < 400


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": Infinity, "parts": {}}', "null"])
@pytest.mark.usefixtures("undrawn")
def test_an_analysis_or_a_record_that_is_none_is_named(text, run: Path, refused: Refused):
    (run / "analysis").mkdir()
    for name in ("analysis.json", "record.json"):
        (run / "analysis" / name).write_text(text)
    assert "analysis.json is damaged; measure it again with `noiseproof" in refused("report", run)
    (run / "analysis" / "analysis.json").unlink()
    if "schema" not in text:
        with pytest.raises(ValueError, match=r"record\.json is damaged"):
            read_records(run, "analysis")


ROW = {"weights": "last", "model": "x", "metric": "accuracy", "perturbation": "clean", "draw": 0,
       "noise_seed": 0, "value": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, *(json.dumps(ROW | change) for change in (
        {"value": "</script>"}, {"draw": [0]}, {"weights": {}}, {"noise_seed": None}))],
)  # fmt: skip
def test_a_row_that_is_none_is_removed_or_named(
    line, run: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
):
    with open(run / "evaluation.jsonl", "a") as file:
        file.write(line + "\n")
    message = refused("report", run)
    assert "line 2 of" in message
    assert "crc32" not in message  # the line has none to delete
    assert main(["evaluate", str(run), "--perturb", "clean"]) == 0
    assert "damaged lines removed from evaluation.jsonl: 1" in capsys.readouterr().err


def test_a_row_of_ones_own_is_left_alone(run: Path):
    with open(run / "evaluation.jsonl", "a") as file:
        file.write('{"metric": "beauty"}\n')
    assert len(gather([RunFolder.open(run)]).rows["last"]) == 1


def test_damaged_weights_are_not_other_weights(run: Path, refused: Refused):
    """A report would be about the best weights alone, without a word."""
    assert main(["evaluate", str(run), "--perturb", "clean"]) == 0
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "model.safetensors").write_bytes(content)
    for verb in ("report", "evaluate", "analyse"):
        assert "model.safetensors is damaged (wrong checksum)" in refused(verb, run)


def test_weights_and_checkpoints_of_another_model_are_refused(run: Path, refused: Refused):
    save_file({"a": torch.zeros(3)}, run / "model.safetensors")
    line = refused("evaluate", run, "--weights", "last", "--perturb", "clean")
    assert "model.safetensors does not hold the weights of this run's model: " in line
    (run / "model.safetensors").unlink()
    position = {"schema": 1, "epoch": 0, "step": 0}
    command = ["train", "--config", run / "config.json", "--output", run.parent, "--name", "one"]
    for state, message in (
        ({"schema": 1}, "all checkpoints are damaged"),
        (position, "the checkpoint is of another model or training (KeyError: 'model')"),
        (position | {"model": {"a": torch.zeros(3)}}, "(RuntimeError: Error(s) in loading"),
    ):
        for path in (run / "checkpoints").iterdir():
            path.write_bytes(torch_file(state))
        assert message in refused(*command, "--resume")


def test_predictions_that_are_not_one_class_per_image_are_refused(run: Path, refused: Refused):
    (file,) = (run / "predictions").glob("last_clean*")
    with np.load(file) as stored:
        arrays = dict(stored)
    for change in ({"classes": arrays["classes"][:, :-1]}, {"classes": arrays["classes"] + 0.5}):
        np.savez(file, **arrays | change)
        for verb in ("evaluate", "report"):
            assert "are not one class per draw and image; delete " in refused(verb, run)


def test_every_loader_in_the_source_is_a_safe_one():
    """A loader that is added without its protection fails here, and so does a new kind."""
    required = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    forbidden = {
        "pickle.load", "pickle.loads", "joblib.load", "yaml.unsafe_load", "yaml.full_load",
        "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "eval", "exec",
        "marshal.loads", "shelve.open", "os.system", "dill.load", "dill.loads",
    }  # fmt: skip
    root = Path(noiseproof.__file__).parent
    checked = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name, where = ast.unparse(node.func), f"{path.relative_to(root)}:{node.lineno}"
            assert name not in forbidden, where
            assert name != "yaml.load" or ast.unparse(node.args[1]) == "_plain_loader()", where
            if name in required:
                keyword, value = required[name]
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get(keyword) == str(value), where
                checked.add(name)
    assert checked == set(required)


# what unfolds


def test_a_checkpoint_that_unpacks_to_more_than_it_holds_is_refused(tmp_path: Path):
    torch.save({"a": torch.zeros(1 << 18)}, tmp_path / "plain.pt")
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w") as bomb:
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 5000
    for verify in (False, True):
        assert read_tensors(tmp_path / "plain.pt", verify=verify)["a"].shape == (1 << 18,)
        with pytest.raises(ValueError, match="it would unpack to 1 MB"):
            read_tensors(path, verify=verify)


LAUGHS = "a0: &a0 [x, x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "epochs: !!python/object/apply:os.mkdir [MARKER]",
            "python/object/apply:os.mkdir' in line 1",
        ),
        ("!!python/name:os.system epochs: 3", "the tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("epochs: !evil 3", "only plain values are allowed, not the tag '!evil' in line 1"),
        (LAUGHS, "only plain values are allowed, not the alias *a0 in line 2"),
        ("img_size: [[1, 2], [3]]", "img_size must be a value or a list of values"),
        ("lr: {a: 1}", "lr must be a value or a list of values"),
        ("[" * 2000, "is nested too deeply"),
        ("a: 1\n" * 300_000, "is longer than 1 MB; expected a file of settings"),
        ("? [1]\n: 2", "found unhashable key"),
    ],
)
def test_settings_are_plain_values(text, message, tmp_path: Path, marker: Path, refused: Refused):
    path = tmp_path / "settings.yaml"
    path.write_text(text.replace("MARKER", str(marker)))
    line = refused("train", "--config", path)
    assert f"--config {path}" in line
    assert message in line


def test_standard_tags_and_aliases_of_values_are_plain(tmp_path: Path, refused: Refused):
    path = tmp_path / "settings.yaml"
    path.write_text("radius: &r !!float 0.5\nmargin: *r\nepochs: 0")
    assert refused("train", "--config", path).endswith("--epochs must be at least 1, got 0")
