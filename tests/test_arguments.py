"""From words to settings: flags go over a file, and a file over the recipe for the data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from noiseproof.cli.arguments import CompareArguments, Comparison, TrainArguments
from noiseproof.cli.parsing import parsed, settings, starting_point
from noiseproof.lab.config import Config, to_dict
from noiseproof.lab.recipes import RECIPES, recipe
from noiseproof.lab.validate import validate


def resolved(*words: str) -> Config:
    """The config that `noiseproof train` would train with."""
    argv = list(words)
    start = starting_point(TrainArguments, argv)
    return settings(parsed(TrainArguments, "train", argv, start), argv)


def test_without_flags_the_recipe_of_the_data_holds() -> None:
    assert resolved() == Config()
    assert resolved("--data", "svhn") == recipe("paper", "svhn")
    assert resolved("--data=cifar10", "--recipe=modern") == recipe("modern", "cifar10")


def test_flags_take_values_in_every_usual_form(tmp_path: Path) -> None:
    config = resolved(
        *("--data", str(tmp_path), "--img-size", "250", "300", "--batch_size", "8"),
        *("--decay-milestones", "10", "20", "--epochs=30", "--resume", "--no-download"),
        *("--weights", "none", "--noise", "gaussian:0..0.1"),
    )
    assert config.data.img_size == (250, 300)
    assert config.data.download is False
    assert config.optim.decay_milestones == (10, 20)
    assert (config.optim.batch_size, config.optim.epochs) == (8, 30)
    assert config.run.resume is True
    assert config.model.weights is None
    assert config.method.noise == "gaussian:0..0.1"


def test_flags_go_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: cifar10\nrecipe: modern\nlr: 1e-2\noptim:\n  batch-size: 32\namp: no\n")
    config = resolved("--config", str(file), "--batch-size", "16")
    assert config.data == recipe("modern", "cifar10").data
    assert (config.optim.sched, config.optim.lr, config.optim.batch_size) == ("onecycle", 0.01, 16)
    assert config.run.amp == "no"
    # --data and --recipe choose anew, and the file's other values still go over them.
    config = resolved(f"--config={file}", "--data", "svhn", "--recipe", "paper")
    assert config.method == recipe("paper", "svhn").method
    assert (config.data.data, config.optim.sched, config.optim.lr) == ("svhn", "multistep", 0.01)


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


def compared(*words: str) -> CompareArguments:
    argv = list(words)
    return parsed(CompareArguments, "compare", argv, starting_point(CompareArguments, argv))


@pytest.mark.parametrize("indent", ["", "comparison:\n  "])
def test_a_file_may_hold_what_is_compared(indent: str, tmp_path: Path) -> None:
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
        ("methods: [normal, nosy]", "methods must be a list of normal | noisy | both"),
        ("methods: normal", "got 'normal'"),
        ("seeds: many", "seeds must be int, got 'many'"),
    ],
)
def test_a_wrong_comparison_in_a_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        compared("--config", str(file))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "there is no setting 'lrr' (did you mean 'lr'?)"),
        ("a: [1", "is not valid YAML"),
        ("- 1", "must hold settings as `name: value`, got [1]"),
        ("recipe: papr", "there is no recipe 'papr'"),
        ("recipe: 3", "recipe must be one of paper, modern, got 3"),
        ("epochs: many", "epochs must be int, got 'many'"),
        ("methods: [normal]\nseeds: 2", "methods, seeds: of compare, not of train"),
        ("comparison: {seed: 1}", "comparison has no 'seed'; expected methods, seeds, jobs"),
        ("comparison: 2", "comparison must hold settings as `name: value`, got 2"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError) as caught:
        resolved("--config", str(file))
    assert message in str(caught.value)


def test_milestones_without_their_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect with --sched onecycle"):
        resolved("--decay_milestones", "10", "20")
    config = resolved("--decay_milestones", "10", "20", "--sched", "multistep")
    assert config.optim.decay_milestones == (10, 20)
    # A recipe's own milestones do not forbid another schedule.
    assert resolved("--data", "cifar10", "--sched", "cosine").optim.sched == "cosine"


def test_milestones_of_a_recipe_move_with_the_epochs(tmp_path: Path) -> None:
    for name in RECIPES:
        for data in ("digits", "cifar10", "svhn", str(tmp_path)):
            ready = recipe(name, data)
            for epochs in (1, 2, 3, 10, 60, ready.optim.epochs, 400):
                config = resolved("--data", data, "--recipe", name, "--epochs", str(epochs))
                validate(config)
                marks = config.optim.decay_milestones
                assert bool(marks) == bool(ready.optim.decay_milestones and epochs > 1)
                optim = replace(ready.optim, epochs=epochs, decay_milestones=marks)
                assert config == replace(ready, optim=optim)  # the ramp and all else stay
                if epochs == ready.optim.epochs:
                    assert config == ready
    assert resolved("--data", "svhn", "--epochs", "20").optim.decay_milestones == (6, 12, 16)
    # Where they have no effect they are left alone.
    still = resolved("--data", "svhn", "--epochs", "20", "--sched", "cosine")
    assert still.optim.decay_milestones == recipe("paper", "svhn").optim.decay_milestones


@pytest.mark.parametrize("text", ["decay-milestones: [50]", "optim: {decay_milestones: [50]}"])
def test_milestones_that_were_given_stay_and_must_fit(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"data: svhn\n{text}\n")
    config = resolved("--config", str(file), "--epochs", "100")
    assert config.optim.decay_milestones == (50,)
    with pytest.raises(ValueError, match="--decay-milestones 50 must lie below --epochs 2"):
        validate(resolved("--config", str(file), "--epochs", "2"))
    with pytest.raises(ValueError, match="--decay-milestones 3 must lie below --epochs 2"):
        validate(resolved("--data", "svhn", "--epochs", "2", "--decay-milestones", "3"))


def test_epochs_of_a_file_move_the_milestones_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: svhn\nepochs: 20\n")
    assert resolved("--config", str(file)).optim.decay_milestones == (6, 12, 16)


def test_the_milestones_of_a_recorded_run_stay(tmp_path: Path) -> None:
    config = recipe("paper", "svhn")
    config = replace(config, optim=replace(config.optim, epochs=180))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"schema": 1, "config": to_dict(config), "info": {}}))
    assert resolved("--config", str(file), "--resume").optim == config.optim
    # But those that a run has from its recipe move with its epochs, as the recipe's do.
    config = resolved("--data", "svhn", "--epochs", "20")
    file.write_text(json.dumps({"schema": 1, "config": to_dict(config), "info": {}}))
    assert resolved("--config", str(file)).optim == config.optim
    longer = resolved("--config", str(file), "--epochs", "100").optim
    assert (longer.epochs, longer.decay_milestones) == (100, (30, 60, 80))
