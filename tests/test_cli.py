"""The command line: help, errors in one line, and the arguments that the stages are given."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from noiseproof import __version__
from noiseproof.__main__ import main
from noiseproof.cli.arguments import TrainArguments
from noiseproof.cli.main import VERBS
from noiseproof.cli.parsing import parse_training
from noiseproof.lab.analysis.analyse import ALL
from noiseproof.lab.config import (
    AUGMENTATIONS,
    DATASETS,
    GROUPS,
    METHODS,
    MODELS,
    Comparison,
    Config,
    Run,
    to_dict,
)
from noiseproof.lab.recipes import RECIPES, recipe
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.errors import Diverged
from noiseproof.perturb.text import HELP


class Stages:
    """Stands in for the stages behind the commands, and records how they were called."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.result = 0

    def train(self, config: Config) -> Any:
        if self.error is not None:
            raise self.error
        self.configs.append(config)
        return SimpleNamespace(path=Path("my runs/one"))

    def record(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.result


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages()
    names = {
        "training.train": {"train": stages.train},
        "evaluation.evaluate": {"evaluate_runs": stages.record},
        "evaluation.predict": {"predict_paths": stages.record},
        "evaluation.certificates": {"certify_runs": stages.record},
        "comparison.compare": {"compare": stages.record},
        "analysis.analyse": {"analyse_runs": stages.record},
        "report.page": {"report_runs": stages.record},
    }
    for name, content in names.items():
        module = ModuleType(f"noiseproof.lab.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(f"noiseproof.lab.{name}", module, raising=False)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NOISEPROOF_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return stages


def words(text: str) -> str:
    """The text without boxes and line breaks."""
    return " ".join(word for word in text.split() if word.strip("│╭╮╰╯─|+-"))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error message, which is all that was printed, and one line."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("noiseproof: ")
    assert err.count("\n") == 1
    return err


def test_the_overview_lists_every_command_and_gives_two_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert f"  {name} " in text
        assert verb.help in text
    assert text.count("\n  noiseproof ") == 2
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"noiseproof {__version__}\n"


def test_help_all_is_grouped_and_shows_every_flag_with_its_docstring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help-all"]) == 0
    text = words(capsys.readouterr().out)
    for kind in GROUPS.values():
        assert (kind.__doc__ or "").rstrip(".") + ":" in text
    for group in to_dict(Config()).values():
        for name in group:
            assert f"--{name.replace('_', '-')} " in text.replace(",", " ")
    assert "Passes over the training data. (default: 40)" in text
    assert "--recipe {robust,modern,paper,tune}" in text
    assert "--download, --no-download" in text


def test_help_shows_the_values_for_the_data_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "cifar10", "--recipe", "paper", "--help-all"]) == 0
    text = words(capsys.readouterr().out)
    assert "Passes over the training data. (default: 200)" in text
    assert "a recipe scale with --epochs. (default: 60 120 160)" in text


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_command_is_short_and_names_the_rest(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert main([verb, "--help-all"]) == 0
    everything = capsys.readouterr().out
    shown, flags = (set(re.findall(r"^  (--[a-z-]+)", t, re.MULTILINE)) for t in (text, everything))
    assert text.count("\n") <= 42
    assert max(map(len, text.splitlines())) <= 80
    assert shown <= flags
    assert ("--help-all" in text) == (shown < flags)
    assert shown < flags
    for unwritten in ("None", "(default: )", "STR", "INT", "FLOAT", "MISSING"):
        assert unwritten not in everything
    expected = {
        "compare": "--methods --seeds --jobs --recipe --epochs",
        "evaluate": "RUN --perturb --draws --weights --device --table --calibration",
        "predict": "RUN IMAGE --weights --top --out --device",
        "list": "methods models datasets perturbations recipes",
    }
    assert [word for word in expected.get(verb, "").split() if word not in text] == []


def test_help_leaves_out_what_a_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "--methods " in text
    assert "--method " not in text


def test_the_help_of_tune_does_not_name_a_default_network(capsys):
    for words in (["tune", "--help"], ["tune", "--data", "cifar10", "--help-all"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "default: small_cnn" not in text.replace("\N{NO-BREAK SPACE}", " ")
        assert "--model MODEL" in text


def test_an_unknown_flag_points_to_the_help_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--weight-decy", "0"]) == 2
    error = capsys.readouterr().err
    assert "--weight-decay" in error
    assert error.endswith("All flags: noiseproof train --help-all\n")
    assert "--help\n" not in error.replace(" ", "")


def test_a_flag_that_help_does_not_show_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "--momentum" not in capsys.readouterr().out
    _, config = parse_training(TrainArguments, "train", ["--momentum", "0.5"])
    assert config.optim.momentum == 0.5


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trian", "there is no command 'trian'"),
        ("train --data cifr10", "did you mean 'cifar10'?"),
        ("train --recipe moderm", "did you mean 'modern'?"),
        ("train --epochs 0", "--epochs must be at least 1, got 0"),
        ("train --noise gausian:0.1", "did you mean 'gaussian:0.1'?"),
        (
            "train --data cifar10 --recipe paper --epochs 20 --decay-milestones 60 120 160",
            "must be epochs from 1 to 19",
        ),
        ("train --decay-milestones 10", "no effect with --sched onecycle"),
        ("compare --seeds 0", "--seeds must be at least 1, got 0"),
        (
            f"compare --seed {2**63 - 1} --seeds 2",
            f"the last seed, must be at least 0 and below 2**63, got {2**63}",
        ),
        ("compare --jobs -1", "--jobs must be at least 0, got -1"),
        ("compare --method both", "compare takes --methods"),
        ("compare --methods", "--methods must be some of normal"),
        ("compare --noise clean", "--method noisy trains with noise"),
        ("analyse . --probes 0", "--probes must be at least 1, got 0"),
        ("analyse . --draws -3", "--draws must be at least 1, got -3"),
        ("analyse . --samples 1", "--samples must be at least 2, got 1"),
        ("analyse . --seed -1", "--seed must be at least 0 and below 2**63, got -1"),
        ("analyse . --step nan", "--step must be a finite number, got nan"),
        ("analyse . --step 1e-9", "--step must be from 1e-5 to 10, got 1e-09"),
        ("evaluate", "evaluate needs a run folder"),
        ("evaluate no/such/run", "no/such/run does not exist; expected a run folder"),
        (f"evaluate . --noise-seed {2**63}", "--noise-seed must be at least 0 and below 2**63"),
        ("evaluate . --draws 0", "--draws must be at least 1, got 0"),
        ("evaluate . --perturb downup:0", "--perturb: cannot read 'downup:0'"),
        ("evaluate . --weights", "--weights must be last, best or both"),
        ("evaluate . --table x.docx", "--table must end in .md, .csv or .tex, got x.docx"),
        (f"evaluate . --table {__file__}/x.md", "is not a folder that can be written to"),
        (f"predict . . --out {__file__}/x.csv", "is not a folder that can be written to"),
        (f"report . --output {__file__}", "is not a folder that can be written to"),
        (f"calibrate . --output {__file__}", "is not a folder that can be written to"),
        (f"renormalise . --output {__file__}", "is not a folder that can be written to"),
        ("export . --format safetensors --output .", ". is the run itself; expected another"),
        (f"export . --output {__file__}/x.onnx", "is not a folder that can be written to"),
    ],
)
def test_an_invalid_command_fails_with_one_line_and_status_2(
    command: str, message: str, stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert message in one_line(capsys)
    assert stages.configs == stages.calls == []


@pytest.mark.parametrize(
    "command",
    ["evaluate . --table t.md", "predict . . --out t.csv", "export . --output t.onnx"],
)
def test_a_folder_where_a_file_would_be_written_is_refused_immediately(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, stages: Stages
) -> None:
    monkeypatch.chdir(tmp_path)
    name = command.split()[-1]
    Path(name).mkdir()
    assert main(command.split()) == 2
    assert f"{name} is a folder; expected a file to write" in one_line(capsys)
    assert stages.calls == []


WITH_DEVICE = (
    "train --data digits",
    "tune net.py:net --mean 0 --std 1 --data digits",
    "compare --data digits",
    "reproduce cifar10 --data digits --epochs 1",
    "evaluate run",
    "evaluate run --attack linf:2/255",
    "analyse run",
    "certify run --sigma 0.1",
    "calibrate run",
    "renormalise run",
    "predict run . --abstain 0.1",
    "demo run --abstain 0.1",
)


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with two runs, of which one has weights; images and models cannot be read."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("def net(): ...")
    for name in ("run", "unfinished"):
        run = RunFolder.create(Config(run=Run(output=".", name=name)), {"size": [1, 8, 8]})
        if name == "run":
            run.save_weights("last", {})
    monkeypatch.delattr("noiseproof.lab.data.datasets._digits")
    monkeypatch.delattr(RunFolder, "model")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("command", WITH_DEVICE)
def test_a_missing_gpu_is_reported_before_images_or_weights_are_read(
    command: str, unreadable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--device", "cuda"]) == 2
    assert "device cuda needs a GPU, but torch sees none here" in one_line(capsys)


@pytest.mark.parametrize(
    "command",
    [
        "evaluate run unfinished",
        "evaluate run unfinished --attack linf:2/255",
        "analyse run unfinished",
        "certify run unfinished --sigma 0.1",
        "predict unfinished . --abstain 0.1",
    ],
)
def test_an_unfinished_run_is_reported_before_images_are_read(
    command: str, unreadable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert "the training in unfinished is not finished (0 of 40 epochs)" in one_line(capsys)


def test_these_are_all_commands_with_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = {command.split()[0] for command in WITH_DEVICE}
    for verb in VERBS:
        assert main([verb, "--help-all"]) == 0
        assert ("--device {auto,cpu,cuda}" in capsys.readouterr().out) == (verb in verbs)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("train --epocs 3", "--epochs INT"),
        ("compare --sseeds 3", "--seeds INT"),
        ("train --lr fast", "--lr"),
        ("train --opt sdg", "sgd"),
        ("train --recipe", "--recipe"),
        ("train --config", "--config"),
        ("train --data", "--data"),
        ("list model", "models"),
    ],
)
def test_a_misspelt_flag_or_value_is_answered_with_what_was_expected(
    command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert hint in err


def test_train_ends_by_saying_where_the_run_is_and_what_is_next(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train"]) == 0
    assert "\n  noiseproof evaluate 'my runs/one'\n" in capsys.readouterr().out


def test_evaluate_hands_its_arguments_on(stages: Stages, tmp_path: Path) -> None:
    command = f"evaluate {tmp_path} . --perturb clean gaussian:8/255 --draws 3 --weights best best"
    assert main([*command.split(), "--noise_seed=7", "--device", "cpu", "--table", "t.md"]) == 0
    assert main(["evaluate", "."]) == 0
    (args, kwargs), (default_args, defaults) = stages.calls
    assert args == ((str(tmp_path), "."),)
    assert kwargs == {
        **{"perturb": ("clean", "gaussian:8/255"), "draws": 3, "weights": ("best",)},
        **{"noise_seed": 7, "suite": None, "calibration": False},
        **{"device": "cpu", "table": "t.md", "baseline": None, "data": None, "class_map": {}},
    }
    assert default_args == ((".",),)
    assert defaults == {
        **{"perturb": (), "draws": None, "weights": ("last", "best"), "noise_seed": 0},
        **{"device": "auto", "table": None, "suite": None, "calibration": False},
        **{"baseline": None, "data": None, "class_map": {}},
    }


def test_a_baseline_is_a_run_folder_and_needs_corruptions(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", ".", "--suite", "c", "--baseline", str(tmp_path)]) == 0
    assert stages.calls[0][1]["baseline"] == str(tmp_path)
    assert main(["evaluate", ".", "--baseline", str(tmp_path)]) == 2
    assert "add --suite c" in capsys.readouterr().err
    assert main(["evaluate", ".", "--suite", "nois"]) == 2
    expected = "--suite must be one of noise, paper, c, sensor, all"
    assert expected in (error := capsys.readouterr().err)
    assert "None" not in error
    assert main(["evaluate", ".", "--suite", "c", "--baseline", "missing"]) == 2
    assert "missing does not exist; expected a run folder" in capsys.readouterr().err


def test_other_images_and_the_names_of_their_classes(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", ".", "--data", str(tmp_path)]
    assert main([*command, "--class-map", "hound=dog", "cup="]) == 0
    assert stages.calls[0][1]["data"] == str(tmp_path)
    assert stages.calls[0][1]["class_map"] == {"hound": "dog", "cup": ""}
    wrong = {
        ("evaluate", ".", "--data", "missing/"): "--data missing/ does not exist",
        (*command, "--class-map", "hound"): "names as in hound=dog, got 'hound'",
        ("evaluate", ".", "--class-map", "hound=dog"): "--data, which is missing",
    }
    for words, message in wrong.items():
        assert main(list(words)) == 2
        assert message in capsys.readouterr().err


def test_predict_hands_its_arguments_on(stages: Stages, tmp_path: Path) -> None:
    stages.result = 1
    assert main(["predict", str(tmp_path), ".", str(tmp_path)]) == 1
    command = f"predict . {tmp_path} --weights last --top 3 --out a.csv --device cpu"
    more = ["--abstain", "0.1", "--tolerance", "--noise-seed", "7"]
    assert main([*command.split(), *more]) == 1
    (args, defaults), (_, kwargs) = stages.calls
    assert args == (str(tmp_path), (".", str(tmp_path)))
    default = {"weights": None, "top": 1, "out": None, "abstain": None, "device": "auto"}
    given = {"weights": "last", "top": 3, "out": "a.csv", "abstain": 0.1, "device": "cpu"}
    assert defaults == {**default, "tolerance": False, "noise_seed": 0}
    assert kwargs == {**given, "tolerance": True, "noise_seed": 7}


def test_certify_hands_its_arguments_on(stages: Stages, tmp_path: Path) -> None:
    assert main(["certify", str(tmp_path), "--sigma", "0.12"]) == 0
    command = f"certify {tmp_path} . --sigma 0.25 --samples 10 --selection 5 --alpha 0.01 --every 9"
    assert main([*command.split(), "--weights", "best"]) == 0
    (args, defaults), (several, kwargs) = stages.calls
    assert args == ((str(tmp_path),),)
    assert defaults == {
        "sigma": 0.12, "samples": 1000, "selection": 100, "alpha": 0.001, "every": None,
        "weights": None, "noise_seed": 0, "device": "auto",
    }  # fmt: skip
    assert several == ((str(tmp_path), "."),)
    changed = {"sigma": 0.25, "samples": 10, "selection": 5, "alpha": 0.01, "every": 9}
    assert kwargs == defaults | changed | {"weights": "best"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sigma 30", "--sigma is in units of pixels in [0, 1]; did you mean 0.118?"),
        ("--sigma 0", "--sigma must be above 0"),
        ("--sigma -1", "--sigma must be above 0, such as 0.12, got -1"),
        ("--sigma 0.1 --alpha 1", "--alpha must be above 0 and below 1, got 1"),
        ("--sigma 0.1 --samples 9", "--samples must be at least 10 for --alpha 0.001"),
        ("--sigma 0.1 --selection 0", "--selection must be at least 1, got 0"),
        ("--sigma 0.1 --every 0", "--every must be at least 1, got 0"),
    ],
)
def test_certify_refuses_what_makes_no_sense(flags, message, stages, capsys) -> None:
    assert main(["certify", ".", *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert not stages.calls


def test_compare_hands_methods_seeds_and_settings_on(stages: Stages) -> None:
    assert main(["compare", "--data", "cifar10", "--recipe", "modern"]) == 0
    assert stages.calls[0] == ((recipe("modern", "cifar10"), Comparison(seeds=1, draws=10)), {})
    stages.result = 1
    command = (
        "compare --methods both normal both --seeds 3 --jobs 2 --draws 4 --epochs 5 --no-report"
    )
    assert main(command.split()) == 1
    (config, comparison), _ = stages.calls[1]
    assert config.optim.epochs == 5
    assert comparison == Comparison(("both", "normal", "both"), 3, 2, draws=4, report=False)


def test_analyse_and_report_hand_their_settings_on(stages: Stages, tmp_path: Path) -> None:
    command = f"analyse {tmp_path} --samples 50 --noise gaussian:0.1 --stages none"
    assert main(command.split()) == 0
    (args, kwargs) = stages.calls[0]
    assert args == ((str(tmp_path),),)
    assert kwargs["samples"] == 50
    assert kwargs["noise"] == ("gaussian:0.1",)
    assert kwargs["stages"] == "none"
    assert kwargs["parts"] == ALL
    assert main(["report", str(tmp_path), "--title", "Ours"]) == 0
    assert stages.calls[1][0] == ((str(tmp_path),), None, "Ours", None)
    assert main(["analyse", str(tmp_path), "--parts", "geometry", "theory"]) == 0
    assert stages.calls[2][1]["parts"] == ("geometry", "theory")


@pytest.mark.parametrize("verb", ["analyse", "report", "evaluate"])
def test_a_missing_run_folder_is_named(verb: str, stages: Stages, capsys: Any) -> None:
    assert main([verb, "no/such/run"]) == 2
    assert "no/such/run does not exist; expected a run folder" in capsys.readouterr().err


def test_an_unknown_experiment_is_refused_with_the_nearest(stages: Stages, capsys: Any) -> None:
    assert main(["reproduce", "cifar"]) == 2
    assert "did you mean 'cifar10'" in capsys.readouterr().err
    for name in ("road", "robust-road"):
        assert main(["reproduce", name]) == 2
        assert f"{name} needs --data FOLDER" in capsys.readouterr().err


def test_list_prints_every_name_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for named in (METHODS, MODELS, DATASETS, AUGMENTATIONS, HELP):
        for name, text in named.items():
            assert [name, text] in lines
    assert {name for name, *_ in lines} >= set(RECIPES)
    assert main(["list", "methods"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(METHODS)


def test_a_diverged_training_exits_with_3(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.error = Diverged("the loss is not finite\nat step 7; lower --lr")
    assert main(["train"]) == 3
    assert one_line(capsys) == "noiseproof: the loss is not finite at step 7; lower --lr\n"


def test_a_stopped_training_says_how_to_resume_it(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.error = KeyboardInterrupt()
    assert main(["train", "--epochs", "3", "--name", "my run"]) == 130
    expected = "to continue: noiseproof train --epochs 3 --name 'my run' --resume\n"
    assert one_line(capsys).endswith(expected)
    assert main(["train", "--resume"]) == 130
    assert one_line(capsys).count("--resume") == 1


def test_a_stopped_evaluation_says_that_the_same_command_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "evaluate", VERBS["evaluate"]._replace(function=stopped))
    assert main(["evaluate", "runs/one"]) == 130
    assert "the same command continues" in one_line(capsys)


def test_an_error_of_the_system_is_one_line_and_a_bug_of_ours_a_traceback(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.error = PermissionError(13, "Permission denied", "runs")
    assert main(["train"]) == 1
    assert "Permission denied: runs; change the permissions, or choose" in one_line(capsys)
    stages.error = OSError(28, "No space left on device", "runs/a/model.safetensors")
    assert main(["train", "--epochs", "3"]) == 1
    assert one_line(capsys) == (
        "noiseproof: No space left on device: runs/a/model.safetensors; make room on that disk; "
        "to continue: noiseproof train --epochs 3 --resume\n"
    )
    stages.error = TypeError("a fault")
    assert main(["train"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_each_rank_reports_an_error_of_its_own_system(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    stages.error = ConnectionError("the connection is lost")
    assert main(["train"]) == 1
    assert capsys.readouterr().err == (
        "noiseproof (rank 1): the connection is lost; to continue, repeat the torchrun command "
        "with --resume\n"
    )
    stages.error = ValueError("the same for all ranks")
    assert main(["train"]) == 2
    assert capsys.readouterr().err == ""


def test_the_traceback_of_a_wrong_setting_is_shown_on_request(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOISEPROOF_DEBUG", "1")
    assert main(["train", "--epochs", "0"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_only_the_first_rank_prints(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train"]) == 0
    assert main(["train", "--epochs", "0"]) == 2
    assert main(["train", "--epocs", "1"]) == 2
    assert main(["list"]) == 0
    assert capsys.readouterr() == ("", "")
    # The first rank of another node prints errors: they may concern that node alone.
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", "--epochs", "0"]) == 2
    assert "--epochs" in one_line(capsys)
    assert main(["compare"]) == 2
    assert "compare runs in one process, got 2" in one_line(capsys)
