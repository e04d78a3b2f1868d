"""A run finds its data from every directory, and says what to do if it has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from noiseproof.cli import main as cli
from noiseproof.cli.arguments import TrainArguments
from noiseproof.cli.parsing import parse_training
from noiseproof.lab.config import Config, Data, Model, Optim
from noiseproof.lab.evaluation.evaluate import evaluate_runs
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.paths import with_absolute_paths, with_relative_paths
from noiseproof.lab.recipes import kind
from noiseproof.lab.runs import RunFolder, changed_settings
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits, resumed


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two classes of ten images in photos/, below the working directory."""
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    monkeypatch.chdir(tmp_path)
    for label, name in enumerate(("dry", "wet")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            path = tmp_path / "photos" / name / f"{i}.png"
            Image.new("RGB", (8, 8), (100 * label, 10 * i, 7)).save(path)
    return tmp_path / "photos"


def config(**changes) -> Config:
    return digits("runs", epochs=1, data="photos/", batch_size=4, **changes)


def test_a_run_can_be_evaluated_and_resumed_from_another_directory(photos, monkeypatch):
    run = train(config(), progress=False)
    assert run.path == Path("runs/one")
    assert RunFolder.open(run.path).config.data.data == str(photos)
    there = photos.parent / "runs" / "one"
    (photos.parent / "elsewhere").mkdir()
    monkeypatch.chdir(photos.parent / "elsewhere")
    evaluate_runs([there], ["clean"], weights=("last",), device="cpu")
    assert len(RunFolder.open(there).evaluation()) == 1


def test_a_path_may_be_written_in_several_ways(photos, monkeypatch):
    run = train(config(), progress=False)
    for written in ("photos", "./photos/", str(photos)):
        same = replace(config(), data=replace(config().data, data=written))
        assert changed_settings(run.config, same) == []
        assert train(resumed(same), progress=False).finished
    # A run that was recorded with a relative path goes on as well.
    file = run.path / "config.json"
    content = json.loads(file.read_text())
    del content["crc32"]
    content["config"]["data"]["data"] = "photos/"
    content["info"]["finished"] = False
    file.write_text(json.dumps(content))
    again = train(resumed(replace(config(), data=replace(config().data, data=str(photos)))))
    assert again.finished
    (photos.parent / "other").mkdir()
    other = replace(config(), data=replace(config().data, data="other"))
    (found,) = changed_settings(run.config, other)
    assert found.startswith("data was ")


def test_milestones_without_effect_may_differ():
    cosine, steps = Optim(sched="cosine"), Optim(sched="multistep", decay_milestones=(60,))
    for optim, differences in ((cosine, 0), (steps, 1)):
        other = Config(optim=replace(optim, decay_milestones=(6,)))
        assert len(changed_settings(Config(optim=optim), other)) == differences


def test_changed_or_missing_images_are_an_error_that_says_what_to_do(photos, capsys):
    train(config(), progress=False)
    (photos / "dry" / "3.png").unlink()
    capsys.readouterr()
    for words in (["evaluate", "runs/one"], ["analyse", "runs/one"]):
        assert cli.run(words) == 2
        told = capsys.readouterr().err
        assert (
            f"added, removed, renamed or changed in {photos} (adding or removing a single image"
            in told
        )
        assert "Restore the original images, or train again" in told
    photos.rename(photos.with_name("moved"))
    assert cli.run(["evaluate", "runs/one"]) == 2
    told = capsys.readouterr().err
    assert f"the data of run one is no longer at {photos}" in told
    assert "set `data` in runs/one/config.json to its new path and delete the line `crc32`" in told


def test_names_of_datasets_are_not_paths_but_their_folder_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(Config()) == Config()
    made = with_absolute_paths(Config(Data("svhn"), Model("mobilenet_v2", weights="imagenet")))
    assert made.data == Data("svhn", data_dir=str(tmp_path / "data"))
    assert made.model.weights == "imagenet"
    assert with_relative_paths(made).data == Data("svhn")
    local = with_absolute_paths(Config(Data("~/x.npz"), Model("mobilenet_v2", weights="w.pth")))
    assert local.model.weights == str(tmp_path / "w.pth")
    assert local.data.data == str(Path.home() / "x.npz")


def test_paths_are_shown_as_one_would_type_them(tmp_path, monkeypatch):
    def shown(path: str) -> str:
        return with_relative_paths(with_absolute_paths(Config(Data(path)))).data.data

    monkeypatch.chdir(tmp_path)
    assert shown("sets/photos") == "sets/photos"
    for name in ("digits", "svhn"):  # a folder of that name is not the dataset of that name
        assert shown(f"./{name}") == f"./{name}"
    assert shown("/elsewhere/photos") == "/elsewhere/photos"


def test_home_is_expanded_in_a_file_as_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("data: ~/x.npz\noutput: ~/runs\nweights: ~/w.pth\n")
    argv = ["--config", str(tmp_path / "c.yaml")]
    made = parse_training(TrainArguments, "train", argv)[1]
    assert (made.data.data, made.run.output) == (f"{tmp_path}/x.npz", f"{tmp_path}/runs")
    assert made.model.weights == f"{tmp_path}/w.pth"


def test_the_kind_of_a_file_does_not_depend_on_its_folder():
    for folder in ("", "svhn/", "/data/svhn-project/", "cifar/"):
        assert kind(f"{folder}mine.npz") == "cifar10"
        assert kind(f"{folder}svhn.npz") == "svhn"


def test_a_moved_project_is_resumed_and_evaluated_once_its_config_says_where_the_images_are(
    photos, monkeypatch
):
    train(config(), progress=False)
    moved = photos.parent.with_name(photos.parent.name + "-moved")
    photos.parent.rename(moved)
    monkeypatch.chdir(moved)
    assert train(resumed(config()), progress=False).finished
    with pytest.raises(ValueError, match=r"set `data` in runs/one/config\.json"):
        evaluate_runs(["runs/one"], ["clean"], weights=("last",), device="cpu")
    file = Path("runs/one/config.json")
    lines = file.read_text().replace(str(photos), "photos").splitlines()
    file.write_text("\n".join(line for line in lines if "crc32" not in line))
    evaluate_runs(["runs/one"], ["clean"], weights=("last",), device="cpu")


def test_images_may_be_moved_but_not_replaced_by_others(photos):
    train(config(), progress=False)
    photos.rename(photos.with_name("elsewhere"))
    moved = replace(config(), data=replace(config().data, data="elsewhere"))
    assert changed_settings(RunFolder.open("runs/one").config, moved) == []
    for path in list((photos.with_name("elsewhere") / "dry").iterdir()):
        path.rename(path.with_name(f"other-{path.name}"))
    file = Path("runs/one/config.json")
    content = json.loads(file.read_text())
    del content["crc32"]
    content["info"]["finished"] = False
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="are not those of run one"):
        train(resumed(moved), progress=False)
