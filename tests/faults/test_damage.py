"""Cut files and flipped bits: what is read is what was written, or an error names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noiseproof.cli.arguments import TrainArguments
from noiseproof.cli.parsing import parse_training
from noiseproof.lab.analysis import store
from noiseproof.lab.analysis.analyse import analyse
from noiseproof.lab.config import to_dict
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.predictions import predictions
from noiseproof.lab.files import with_checksum
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training import checkpoint
from noiseproof.lab.training.train import train
from noiseproof.paper import tables
from tests.flat import Flat, digits

NOISE = ("clean", "gaussian:0.1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with every kind of file, and a record of it beside it."""
    output = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        run = train(digits(output, epochs=2, checkpoint_minutes=0), progress=False)
        evaluate(run, NOISE, draws=2, weights=("last", "best"), progress=False)
        analyse(run, parts=["separation"], samples=40, draws=2, progress=False)
        record = {"row": "normal", "values": [0.1 + i for i in range(20)]}
        text = json.dumps(with_checksum(record), indent=1)
        (run.path / "record.json").write_text(text)
        yield run.path


def content(value: Any) -> Any:
    """Anything that is read from a run folder as plain values that can be compared."""
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [content(item) for item in value]
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def includes(found: Any, expected: Any) -> bool:
    """Whether both are equal; `found` may hold the checksum, too, if its name is damaged."""
    if isinstance(expected, dict):
        return all(key in found and includes(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(includes, found, expected))
    return found == expected


def read_config(path: Path) -> Any:
    run = RunFolder.open(path)
    return to_dict(run.config), run.info


def read_settings(path: Path) -> Any:
    return to_dict(parse_training(TrainArguments, "train", ["--config", f"{path}/config.json"])[1])


def read_predictions(path: Path) -> Any:
    run = RunFolder.open(path)
    return [predictions(run, noise, weights="last") for noise in NOISE]


def read_analysis(path: Path) -> Any:
    analysis = store.read(RunFolder.open(path))
    assert analysis is not None
    return analysis.content, analysis.arrays("separation")


# The files of a run, and who reads them back. The rows are read as a report reads them.
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config": ("config.json", read_config),
    "settings": ("config.json", read_settings),
    "metrics": ("metrics.csv", lambda path: RunFolder.open(path).metrics()),
    "rows": ("evaluation.jsonl", lambda path: gather([RunFolder.open(path)]).rows),
    "predictions": ("predictions/last_gaussian*.npz", read_predictions),
    "analysis": ("analysis/analysis.json", read_analysis),
    "arrays": ("analysis/separation.npz", read_analysis),
    "last weights": ("model.safetensors", lambda path: RunFolder.open(path).model().state_dict()),
    "best weights": (
        "best.safetensors",
        lambda path: RunFolder.open(path).model("best").state_dict(),
    ),
    "record": ("record.json", lambda path: tables.read_records(path.parent, path.name)),
}


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """`whole` with one flipped bit, or cut, but not between two lines: a file with fewer rows is
    valid."""
    place = rng.randrange(len(whole))
    if rng.random() < 0.25 and b"\n" not in whole[place - 1 : place + 1]:
        return whole[:place]
    return whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]


TRIALS = [40, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_as_it_was_or_named(trained, tmp_path, name, trials):
    pattern, read = READERS[name]
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    if name == "record":
        for file in folder.glob("*.json"):
            file.unlink() if file.name != "record.json" else None
    (file,) = folder.glob(pattern)
    whole, expected, rng = file.read_bytes(), content(read(folder)), random.Random(name)
    named = 0
    for trial in range(trials):
        file.write_bytes(damaged(whole, rng))
        message = ""
        try:
            found = content(read(folder))
        except ValueError as error:
            found, message = None, str(error)
        if message:
            assert file.name in message or "noiseproof evaluate" in message, f"trial {trial}"
        else:
            assert includes(found, expected), f"trial {trial}"
        named += bool(message)
    assert named > trials / 2


@pytest.mark.parametrize("trials", TRIALS)
def test_a_damaged_checkpoint_is_read_as_it_was_or_replaced_by_the_one_before(
    trained, tmp_path, trials
):
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints"
    previous = content(torch.load(folder / "previous.pt", weights_only=True))
    expected = content(torch.load(folder / "last.pt", weights_only=True))
    assert previous != expected
    whole, rng, replaced = (folder / "last.pt").read_bytes(), random.Random(0), 0
    for trial in range(trials):
        (folder / "last.pt").write_bytes(damaged(whole, rng))
        warnings: list[str] = []
        found = content(checkpoint.load(folder, warnings.append))
        assert found == (previous if warnings else expected), f"trial {trial}"
        assert all("last.pt" in warning and "\n" not in warning for warning in warnings)
        replaced += bool(warnings)
    assert replaced > trials / 2


def test_an_analysis_of_an_older_version_is_read_as_it_is(trained, tmp_path):
    """It has no checksums."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    expected = content(read_analysis(folder))
    file = folder / "analysis" / "analysis.json"
    values = json.loads(file.read_text())
    del values["crc32"], values["parts"]["separation"]["arrays_checksum"]
    file.write_text(json.dumps(values))
    del expected[0]["parts"]["separation"]["arrays_checksum"]
    assert content(read_analysis(folder)) == expected


def test_arrays_beside_rows_about_others_are_refused(trained, tmp_path):
    """An analysis with other settings that is killed between its two files leaves them."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    file = folder / "analysis" / "separation.npz"
    with np.load(file) as arrays:
        np.savez_compressed(
            file, **{key: array[:-1] for key, array in arrays.items() if array.ndim}
        )
    with pytest.raises(
        ValueError, match=r"separation\.npz is missing or damaged; measure it again"
    ):
        read_analysis(folder)
