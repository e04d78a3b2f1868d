"""The config: its groups, JSON, and the settings that are refused before torch is imported."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noiseproof.lab.config import (
    GROUPS,
    METHODS,
    Config,
    Data,
    Method,
    MethodName,
    Model,
    Optim,
    Run,
    from_dict,
    run_name,
    to_dict,
)
from noiseproof.lab.recipes import RECIPES, recipe
from noiseproof.lab.validate import validate, validate_launcher

DATA = ["digits", "cifar10", "svhn", "photos/", "arrays.npz"]


def changed(**values: Any) -> Config:
    """The config for the digits with some settings changed, of any type."""
    config = Config()
    for name, value in values.items():
        group = next(g for g, cls in GROUPS.items() if name in cls.__dataclass_fields__)
        inner = replace(getattr(config, group), **{name: value})
        config = replace(config, **{group: inner})
    return config


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("data", DATA)
def test_a_config_survives_json(name: str, data: str) -> None:
    config = recipe(name, data)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_no_setting_is_in_two_groups_and_every_setting_has_help() -> None:
    names = [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    source = Path(sys.modules[Config.__module__].__file__ or "").read_text()
    for name in names:
        line = source.partition(f"\n    {name}: ")[2].splitlines()[1]
        assert line.strip().startswith('"""'), name
        assert line.endswith('"""'), f"{name}: help keeps line breaks, so it must be one line"


def test_the_method_names_and_their_help_agree() -> None:
    assert list(METHODS) == list(MethodName.__args__)  # pyright: ignore[reportAttributeAccessIssue]


def test_values_may_be_flat_or_nested_and_override_a_base() -> None:
    base = recipe("paper", "cifar10")
    config = from_dict({"batch_size": 32, "optim": {"lr": 2e-3}}, base)
    assert (config.optim.batch_size, config.optim.lr) == (32, 2e-3)
    assert config.method == base.method
    assert from_dict({"data": "svhn"}).data.data == "svhn"
    assert from_dict({"img_size": [250, 300]}).data.img_size == (250, 300)
    assert from_dict({"weights": None}).model.weights is None


@pytest.mark.parametrize("values", [{"epoch": 1}, {"optim": {"epoch": 1}}])
def test_unknown_settings_are_refused_with_a_suggestion(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no setting 'epoch' \(did you mean 'epochs'\?\)"):
        from_dict(values)


def test_a_run_is_named_after_data_method_and_seed() -> None:
    assert run_name(Config(run=Run(seed=3))) == "digits-discriminative-s3"
    assert run_name(changed(data="a/b/photos/")) == "photos-discriminative-s0"
    assert run_name(changed(data="a/b.npz", method="both")) == "b-both-s0"
    assert run_name(changed(name="mine")) == "mine"


def test_a_run_on_the_working_directory_is_named_after_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "photos" / "dry").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "photos")
    assert {run_name(changed(data=d)) for d in (".", "./")} == {"photos-discriminative-s0"}
    monkeypatch.chdir("dry")
    assert {run_name(changed(data=d)) for d in ("..", "../")} == {"photos-discriminative-s0"}


def test_runs_are_not_written_among_the_images(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for output in ("runs", ".", str(tmp_path / "dry" / "runs")):
        with pytest.raises(ValueError, match=r"would be read as a class.*such as"):
            validate(changed(data=".", output=output))
    for output in (".runs", "../runs", str(tmp_path.with_name("runs"))):
        validate(changed(data=".", output=output))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_is_valid_for_every_method(name: str, method: Any, tmp_path: Path) -> None:
    (tmp_path / "arrays.npz").touch()
    for data in ["digits", "cifar10", "svhn", str(tmp_path), str(tmp_path / "arrays.npz")]:
        config = recipe(name, data)
        assert validate(replace(config, method=replace(config.method, method=method))) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
        ({"feature_dim": 999999999}, "--feature-dim must be from 1 to 65536, got 999999999"),
        ({"threads": 100000}, "--threads must be from 0 to 1024, got 100000"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"lr": 0.0}, "--lr must be above 0, got 0.0"),
        ({"lr": float("nan")}, "--lr must be a finite number, got nan"),
        ({"margin": float("inf")}, "--margin must be a finite number, got inf"),
        ({"val_share": 1.0}, "--val-share must be at least 0 and below 1, got 1.0"),
        ({"val_noise": "gausian:1"}, "--val-noise: unknown perturbation 'gausian'"),
        ({"test_share": 0.0}, "--test-share must be above 0 and below 1, got 0.0"),
        ({"train_share": 0.0}, "--train-share must be above 0 and at most 1, got 0.0"),
        ({"momentum": 1.0}, "--momentum must be at least 0 and below 1, got 1.0"),
        ({"radius": -0.1}, "--radius must be at least 0, got -0.1"),
        ({"decay_rate": 1.5}, "--decay-rate must be above 0 and at most 1, got 1.5"),
        ({"seed": -1}, "--seed must be at least 0 and below 2**63, got -1"),
        ({"data": "cifr10"}, "did you mean 'cifar10'?"),
        ({"data": "no/such/folder"}, "--data no/such/folder does not exist"),
        ({"data": "none.npz"}, "--data none.npz does not exist"),
        ({"data": __file__}, "is a file; expected a folder of images or a .npz file"),
        ({"img_size": (3, 32)}, "--img-size must have sides from 4 to 10000, got 3 32"),
        ({"img_size": (32, 100000)}, "--img-size must have sides from 4 to 10000, got 32 100000"),
        ({"img_size": (32, 32)}, "--img-size resizes the images of a folder, got --data digits"),
        ({"augment": "road"}, "--augment road needs a folder of images, got --data digits"),
        ({"augment": "crop+road"}, "--augment crop+road needs a folder of images, got --data"),
        ({"augment": "crop+trivail"}, "cutmix; got 'trivail' in 'crop+trivail' (did you mean 'tri"),
        ({"augment": "cutmix+crop"}, "can be used, at the end, got 'cutmix+crop'"),
        ({"augment": "cutmix+mixup"}, "--augment: only one of mixup and cutmix can be used, at"),
        (
            {"augment": "crop+cutmix", "batch_size": 1},
            "mixes images of a batch, got --batch-size 1",
        ),
        ({"noisy_augment": "crop"}, "--noisy-augment needs --views independent, got paired"),
        (
            {"noisy_augment": "crop+cutmix", "views": "independent"},
            "--noisy-augment crop+cutmix: cutmix belongs in --augment; both views are mixed",
        ),
        ({"augment": ""}, "--augment must be names joined by +, of none, crop, crop-flip, road, "),
        ({"storage": "stream"}, "--storage stream needs a folder of images, got --data digits"),
        ({"model": ""}, "--model must name a network"),
        ({"model": "timm:"}, "--model timm: must be followed by a name"),
        ({"weights": "imagenet"}, "--weights imagenet does not exist for --model small_cnn"),
        ({"weights": "no.pth"}, "--weights no.pth does not exist"),
        ({"method": "discriminativ"}, "did you mean 'discriminative'?"),
        ({"noise": "gausian:0.1"}, "--noise: unknown perturbation 'gausian'"),
        ({"noise": "clean"}, "--method discriminative trains with noise, got --noise clean"),
        ({"noise": "gaussian:0"}, "trains with noise, got --noise gaussian:0"),
        ({"noise": "15"}, "did you mean 'gaussian:15/255'?"),
        ({"sched": "multistep"}, "--sched multistep needs --decay-milestones, such as 20 30"),
        (
            {"warmup_epochs": 2.0},
            "--sched onecycle has its own warm-up, got",
        ),
        (
            {"sched": "cosine", "warmup_epochs": 40.0},
            "--warmup-epochs must be less than --epochs 40, got 40",
        ),
        ({"name": "a/b"}, "--name must be the name of a folder, without separators, got 'a/b'"),
        ({"output": __file__}, "--output must be a folder, got the file"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        validate(changed(**values))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("milestones", "epochs", "message"),
    [
        (
            (60, 120, 160),
            20,
            "from 1 to 19 in increasing order for --epochs 20, got 60 120 160",
        ),
        ((60, 120, 160), 160, "from 1 to 159"),
        ((60, 120, 160), 1, "--decay-milestones must be none for --epochs 1, got 60 120 160"),
        ((60, 60), 100, "in increasing order for --epochs 100, got 60 60"),
        ((60, 50), 100, "got 60 50"),
        ((0, 60), 100, "got 0 60"),
    ],
)
def test_milestones_must_increase_within_the_epochs(
    milestones: tuple[int, ...], epochs: int, message: str
) -> None:
    optim = Optim(epochs=epochs, sched="multistep", decay_milestones=milestones)
    with pytest.raises(ValueError) as caught:
        validate(Config(optim=optim))
    assert message in str(caught.value)


def test_normal_training_needs_no_noise() -> None:
    assert validate(Config(method=Method(method="normal", noise="clean"))) is None


def test_a_folder_may_be_streamed_and_resized(tmp_path: Path) -> None:
    data = Data(data=str(tmp_path), img_size=(250, 250), augment="road", storage="stream")
    assert validate(Config(data=data)) is None
    assert validate(Config(data=replace(data, storage="memory"))) is None


def test_missing_libraries_are_reported_before_they_are_needed(monkeypatch: Any) -> None:
    monkeypatch.setattr("noiseproof.lab.validate.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        validate(Config(run=Run(tensorboard=True)))
    with pytest.raises(ValueError, match=r'needs timm: pip install "noiseproof\[timm\]"'):
        validate(Config(model=Model(model="timm:resnet18")))
    with pytest.raises(ValueError, match=r'needs submitit: pip install "noiseproof\[slurm\]"'):
        validate_launcher("slurm", ())
    monkeypatch.setattr("noiseproof.lab.validate.find_spec", lambda name: object())
    assert validate(Config(run=Run(tensorboard=True), model=Model(model="timm:resnet18"))) is None


def test_a_config_is_checked_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from noiseproof.lab.config import Config
from noiseproof.lab.validate import validate
from noiseproof.lab.recipes import recipe, suite
validate(recipe("modern", "cifar10"))
print(suite("svhn")[-1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "gaussian:42/255\n"
