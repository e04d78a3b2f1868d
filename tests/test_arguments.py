"""From words to settings: flags override a file, which overrides the recipe for the data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noiseproof.cli.arguments import CompareArguments, TrainArguments, TuneArguments
from noiseproof.cli.parsing import parse_training
from noiseproof.cli.verbs import _with_recipe
from noiseproof.lab.config import PAPER_METHODS, Comparison, Config, to_dict
from noiseproof.lab.recipes import RECIPES, recipe, robust_epochs
from noiseproof.lab.validate import validate


def resolved(*words: str) -> Config:
    """The config that `noiseproof train` would train with."""
    return parse_training(TrainArguments, "train", list(words))[1]


def test_without_flags_the_recipe_for_the_data_is_used() -> None:
    assert resolved() == Config()
    assert resolved("--data", "svhn") == recipe("robust", "svhn")
    assert resolved("--data=cifar10", "--recipe=modern") == recipe("modern", "cifar10")


def test_flags_take_values_in_every_usual_form(tmp_path: Path) -> None:
    config = resolved(
        *("--data", str(tmp_path), "--img-size", "250", "300", "--batch_size", "8"),
        *("--decay-milestones", "10", "20", "--epochs=30", "--resume", "--no-download"),
        *("--weights", "none", "--noise", "gaussian:0..0.1"),
        *("--compact-hinge", "plain", "--margin-hinge", "squared"),
    )
    assert config.data.img_size == (250, 300)
    assert config.data.download is False
    assert config.optim.decay_milestones == (10, 20)
    assert (config.optim.batch_size, config.optim.epochs) == (8, 30)
    assert config.run.resume is True
    assert config.model.weights is None
    assert config.method.noise == "gaussian:0..0.1"
    assert (config.method.compact_hinge, config.method.margin_hinge) == ("plain", "squared")


def test_flags_override_the_file_and_the_file_overrides_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: cifar10\nrecipe: modern\nlr: 1e-2\noptim:\n  batch-size: 32\namp: no\n")
    config = resolved("--config", str(file), "--batch-size", "16")
    assert config.data == recipe("modern", "cifar10").data
    assert (config.optim.sched, config.optim.lr, config.optim.batch_size) == ("onecycle", 0.01, 16)
    assert config.run.amp == "no"
    # --data and --recipe change the recipe, and the other values of the file still override it.
    config = resolved(f"--config={file}", "--data", "svhn", "--recipe", "paper")
    assert config.method == recipe("paper", "svhn").method
    assert (config.data.data, config.optim.sched, config.optim.lr) == ("svhn", "multistep", 0.01)


def test_values_in_a_file_may_be_written_in_every_usual_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"data: {{data: {tmp_path}, img-size: [250, 300], download: No, val_noise: null}}\n"
        "optim:\n  lr: 1e-3\n  decay_milestones: []\n  sched: cosine\n"
        "weights: none\nresume: yes\namp: no\nnoise: 'gaussian:0.1'\nname: ~\nmethod:\nrun:\n"
    )
    config = resolved("--config", str(file))
    assert (config.data.data, config.data.img_size) == (str(tmp_path), (250, 300))
    assert (config.data.download, config.data.val_noise) == (False, None)
    assert (config.optim.lr, config.optim.decay_milestones) == (1e-3, ())
    assert (config.model.weights, config.run.name, config.run.resume) == (None, None, True)
    assert (config.run.amp, config.method.noise) == ("no", "gaussian:0.1")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert resolved("--config", str(tmp_path / "empty.yaml")) == Config()


def test_the_config_of_a_run_can_be_trained_again(tmp_path: Path) -> None:
    config = recipe("paper", "svhn")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"schema": 1, "config": to_dict(config), "info": {"cores": 2}}))
    assert resolved("--config", str(file)) == config
    assert resolved("--config", str(file), "--seed", "1") == (
        replace(config, run=replace(config.run, seed=1))
    )


def test_a_run_of_an_older_version_has_the_defaults_of_settings_that_came_later(
    tmp_path: Path,
) -> None:
    settings = to_dict(recipe("paper", "svhn"))
    del settings["method"]["ramp_epochs"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"schema": 1, "config": settings, "info": {}}))
    assert recipe("modern", "svhn").method.ramp_epochs == 5
    assert resolved("--config", str(file), "--recipe", "modern").method.ramp_epochs == 0


def compared(*words: str) -> CompareArguments:
    return parse_training(CompareArguments, "compare", list(words))[0]


def test_a_comparison_has_the_papers_methods_and_the_default_one() -> None:
    for data in ("digits", "photos/"):
        assert compared("--data", data).comparison.methods == PAPER_METHODS
    assert compared("--data", "cifar10").comparison.methods == (*PAPER_METHODS, "spheres")
    assert compared("--data", "cifar10", "--methods", "both").comparison.methods == ("both",)


@pytest.mark.parametrize("indent", ["", "comparison:\n  "])
def test_a_file_may_hold_the_settings_of_a_comparison(indent: str, tmp_path: Path) -> None:
    file = tmp_path / "compare.yaml"
    lines = "methods: [normal, noisy]", "seeds: 2", "report: false"
    file.write_text("epochs: 3\n" + indent + ("\n  " if indent else "\n").join(lines))
    found = compared("--config", str(file))
    assert found.comparison == Comparison(("normal", "noisy"), seeds=2, report=False)
    assert found.optim.epochs == 3
    over = compared("--config", str(file), "--seeds", "4", "--methods", "both")
    assert over.comparison == Comparison(("both",), seeds=4, report=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "there is no setting 'lrr' (did you mean 'lr'?)"),
        ("optim: {epoch: 1}", "there is no setting 'epoch' (did you mean 'epochs'?)"),
        ("optim: {noise: clean}", "there is no setting 'noise'"),
        ("optim: 5", "there is no setting 'optim'"),
        ("3: 1", "there is no setting '3'"),
        ("config: other.yaml", "there is no setting 'config'"),
        ("resume: maybe", "resume must be true or false, got 'maybe'"),
        ("methods: [normal]", "there is no setting 'methods' (did you mean 'method'?)"),
        ("a: [1", "is not valid YAML"),
        ("- 1", "must hold settings as `name: value`, got ['1']"),
        ("recipe: papr", "there is no recipe 'papr'"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_an_invalid_file_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError) as caught:
        resolved("--config", str(file))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "words", [["224"], ["foo", "--epochs", "3"], ["--epochs", "3"], ["224", "x"], []]
)
def test_an_invalid_image_size_is_refused_in_one_sentence(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--img-size must be auto, native, or a height and a wid"):
        resolved("--data", "photos/", "--img-size", *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: many", "--epochs"),
        ("epochs: 1.5", "--epochs"),
        ("epochs: true", "--epochs"),
        ("epochs: null", "--epochs"),
        ("lr: fast", "could not convert string to float: 'fast'"),
        ("opt: sdg", "sgd"),
        ("img_size: [250]", "--img-size"),
        ("decay_milestones: [a]", "--decay-milestones"),
        ("methods: [normal, nosy]", "--methods"),
        ("seeds: many", "--seeds"),
    ],
)
def test_an_invalid_value_in_a_file_is_refused_like_that_of_a_flag(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        compared("--config", str(file))
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "wrong.yaml" in printed


@pytest.mark.parametrize("indent", ["", "comparison:\n  "])
def test_a_setting_of_a_run_is_not_one_of_a_comparison(indent: str, tmp_path: Path) -> None:
    file = tmp_path / "compare.yaml"
    file.write_text(indent + "seed: 1")
    if indent:
        with pytest.raises(ValueError, match=r"no setting 'seed' \(did you mean 'seeds'\?\)"):
            compared("--config", str(file))
    else:
        assert compared("--config", str(file)).run.seed == 1


def test_milestones_without_multistep_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect with --sched onecycle"):
        resolved("--decay_milestones", "10", "20")
    config = resolved("--decay_milestones", "10", "20", "--sched", "multistep")
    assert config.optim.decay_milestones == (10, 20)
    # A recipe's own milestones do not forbid another schedule.
    assert resolved("--data", "cifar10", "--sched", "cosine").optim.sched == "cosine"


@pytest.mark.parametrize("data", ["digits", "cifar10", "arrays.npz"])
def test_a_test_share_is_refused_for_data_with_a_test_split(data: str) -> None:
    with pytest.raises(ValueError, match=f"--test-share has no effect with --data {data}, which"):
        resolved("--data", data, "--test-share=0.3")
    assert resolved("--data", "photos/", "--test-share=0.3").data.test_share == 0.3


@pytest.mark.parametrize("flag", ["radius", "margin"])
def test_the_papers_radius_and_margin_are_refused_where_they_have_no_effect(flag: str) -> None:
    with pytest.raises(ValueError, match=f"no effect with --method spheres; .* --spheres-{flag}"):
        resolved("--data", "cifar10", f"--{flag}", "3")
    config = resolved("--data", "cifar10", "--method", "discriminative", f"--{flag}", "3")
    assert getattr(config.method, flag) == 3
    compared("--data", "cifar10", f"--{flag}", "3")  # for discriminative, one of the methods


@pytest.mark.parametrize("changed", ["--augment=none", "--views=paired"])
def test_the_recipes_noisy_augmentation_goes_with_its_augmentation(changed: str) -> None:
    assert resolved("--data", "cifar10").data.noisy_augment == "crop-flip+trivial+hybrid"
    config = resolved("--data", "cifar10", changed)
    assert config.data.noisy_augment is None
    validate(config)
    assert resolved("--data", "cifar10", "--views=independent") == resolved("--data", "cifar10")
    given = resolved("--data", "cifar10", "--augment", "crop", "--noisy-augment", "none")
    assert (given.data.augment, given.data.noisy_augment) == ("crop", "none")


def test_augment_replaces_both_augmentations_of_a_config_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"config": to_dict(resolved("--data", "cifar10"))}))
    assert resolved("--config", str(file)).data.noisy_augment == "crop-flip+trivial+hybrid"
    config = resolved("--config", str(file), "--augment", "crop")
    assert (config.data.augment, config.data.noisy_augment) == ("crop", None)


def test_milestones_of_a_recipe_move_with_the_epochs(tmp_path: Path) -> None:
    for name in RECIPES:
        for data in ("digits", "cifar10", "svhn", str(tmp_path)):
            ready = recipe(name, data)
            for epochs in (1, 2, 3, 10, 60, ready.optim.epochs, 400):
                config = recipe(name, data, epochs)
                validate(config)
                marks = config.optim.decay_milestones
                assert bool(marks) == bool(ready.optim.decay_milestones and epochs > 1)
                optim = replace(ready.optim, epochs=epochs, decay_milestones=marks)
                assert config == replace(ready, optim=optim)  # the ramp and all else stay
                if epochs == ready.optim.epochs:
                    assert config == ready
            given = resolved("--data", data, "--recipe", name, "--epochs", "10")
            assert given == recipe(name, data, 10)
    short = resolved("--data", "svhn", "--recipe", "paper", "--epochs", "20")
    assert short.optim.decay_milestones == (6, 12, 16)


@pytest.mark.parametrize("text", ["decay-milestones: [50]", "optim: {decay_milestones: [50]}"])
def test_given_milestones_do_not_move_and_must_fit(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"data: svhn\nrecipe: paper\n{text}\n")
    config = resolved("--config", str(file), "--epochs", "100")
    assert config.optim.decay_milestones == (50,)
    with pytest.raises(ValueError, match=r"must be epochs from 1 to 1 .* got 50"):
        validate(resolved("--config", str(file), "--epochs", "2"))
    words = "--data svhn --recipe paper --epochs 2 --decay-milestones 3"
    with pytest.raises(ValueError, match=r"must be epochs from 1 to 1 .* got 3"):
        validate(resolved(*words.split()))


def test_epochs_in_a_file_move_the_milestones_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: svhn\nrecipe: paper\nepochs: 20\n")
    assert resolved("--config", str(file)).optim.decay_milestones == (6, 12, 16)


def test_milestones_in_a_config_json_move_only_if_they_are_the_recipes(tmp_path: Path) -> None:
    config = recipe("paper", "svhn")
    config = replace(config, optim=replace(config.optim, epochs=180))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"schema": 1, "config": to_dict(config), "info": {}}))
    assert resolved("--config", str(file), "--resume").optim == config.optim
    # But those that a run has from its recipe move with its epochs, as the recipe's do.
    config = resolved("--data", "svhn", "--epochs", "20", "--recipe", "paper")
    file.write_text(json.dumps({"schema": 1, "config": to_dict(config), "info": {}}))
    assert resolved("--config", str(file)).optim == config.optim
    longer = resolved("--config", str(file), "--epochs", "100").optim
    assert (longer.epochs, longer.decay_milestones) == (100, (30, 60, 80))


@pytest.fixture
def arrays(tmp_path: Path) -> str:
    """A .npz file with 1,000 training images, as far as counting needs it."""
    np.savez(tmp_path / "mine.npz", train_labels=np.zeros(1000, int))
    return str(tmp_path / "mine.npz")


def test_few_small_images_are_trained_on_for_more_epochs(arrays: str, capsys: Any) -> None:
    config = resolved("--data", arrays)
    epochs = robust_epochs(900)  # a tenth is for validation
    assert epochs > 100
    assert config == recipe("robust", arrays, epochs)
    assert capsys.readouterr().err == (
        f"{epochs} epochs instead of 100, since there are few training images; "
        "--epochs sets another number\n"
    )
    assert compared("--data", arrays).optim.epochs == epochs


@pytest.mark.parametrize(
    ("words", "images"),
    [
        ("--train-share 0.5", 4500),
        ("--train_share=.5", 4500),
        ("--val-share 0.5", 5000),
        ("--data cifar10 --train-share 0.1", 5000),
        ("--data cifar10 --train-share 0.1 --val-share 0.1", 4500),
    ],
)
def test_the_epochs_follow_the_settings_that_change_the_number_of_images(
    words: str, images: int, arrays: str, tmp_path: Path
) -> None:
    np.savez(arrays, train_labels=np.zeros(10_000, int))
    epochs = robust_epochs(images)
    assert 100 < epochs < 800
    config = resolved("--data", arrays, *words.split())
    assert config.optim.epochs == epochs
    settings = words.replace("--", "\n").replace("=", " ").split("\n")
    lines = [setting.strip().replace(" ", ": ") for setting in settings]
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join([f"data: {arrays}"] * ("--data" not in words) + lines))
    assert resolved("--config", str(file)) == config


def test_a_small_file_in_the_data_folder_is_counted_instead(arrays: str) -> None:
    folder = Path(arrays).parent
    Path(arrays).rename(folder / "svhn.npz")
    config = resolved("--data", "svhn", "--data-dir", str(folder))
    assert config.optim.epochs == robust_epochs(1000)


def test_given_epochs_are_kept(arrays: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.yaml"
    for text in ("epochs: 7", "optim: {epochs: 7}"):
        file.write_text(f"data: {arrays}\n{text}\n")
        assert resolved("--config", str(file)) == recipe("robust", arrays, 7)
    assert resolved("--config", str(file), "--epochs", "8").optim.epochs == 8
    assert resolved("--data", arrays, "--epochs=100") == recipe("robust", arrays)
    assert capsys.readouterr().err == ""


def test_a_run_is_repeated_with_its_epochs_however_many_images_there_are(arrays: str) -> None:
    file = Path(arrays).with_name("config.json")
    for config in (resolved("--data", arrays), recipe("robust", arrays)):  # of an earlier version
        file.write_text(json.dumps({"config": to_dict(config)}))
        assert resolved("--config", str(file)) == config
        np.savez(arrays, train_labels=np.zeros(300, int))
        assert resolved("--config", str(file)) == config


def test_a_recorded_command_names_epochs_that_the_recipe_did_not_set(arrays: str) -> None:
    def recorded(*argv: str) -> str:
        arguments, _ = parse_training(TrainArguments, "train", list(argv))
        return _with_recipe("train", list(argv), arguments)

    line = f"noiseproof train --recipe robust --epochs 800 --data {arrays}"
    assert recorded("--data", arrays) == line
    assert recorded(*line.split()[2:]) == line
    assert recorded("--data", "cifar10") == "noiseproof train --recipe robust --data cifar10"


def test_only_the_robust_recipe_counts_images(arrays: str, tmp_path: Path) -> None:
    for name in set(RECIPES) - {"robust"}:
        assert resolved("--data", arrays, "--recipe", name) == recipe(name, arrays)
    for name in ("tune", "robust"):
        words = ["--data", arrays, "--recipe", name]
        assert parse_training(TuneArguments, "tune", words, default="tune")[1] == recipe(
            name, arrays
        )
    for data in ("digits", str(tmp_path)):
        assert resolved("--data", data, "--train-share=0.1").optim == recipe("robust", data).optim


def test_a_missing_file_is_left_to_those_who_read_it(arrays: str, capsys: Any) -> None:
    Path(arrays).unlink()
    assert resolved("--data", arrays) == recipe("robust", arrays)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", ["--val-share inf", "--train-share nan"])
def test_settings_that_cannot_be_counted_with_are_left_to_validation(
    words: str, arrays: str
) -> None:
    flag, value = words.split()
    with pytest.raises(ValueError, match=f"{flag} must be .* got {value}"):
        validate(resolved("--data", arrays, flag, value))
    with pytest.raises(SystemExit):  # of the parser
        resolved("--data", arrays, flag, "x")


def test_help_shows_the_epochs_for_the_data(arrays: str, capsys: Any) -> None:
    for data, epochs in ((arrays, robust_epochs(900)), ("missing.npz", 100)):
        with pytest.raises(SystemExit):
            resolved("--data", data, "--help")
        shown = " ".join(capsys.readouterr().out.split())
        assert f"Passes over the training data. (default: {epochs})" in shown
