"""The commands: functions from the words of a command line to an exit status.

Stages are imported inside the functions, so that torch is imported only if the arguments are valid.
Arguments of commands that do not train are named like the parameters of their stage.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO, get_args

from noiseproof.cli.arguments import (
    SUITES,
    AnalyseArguments,
    CalibrateArguments,
    CardArguments,
    CertifyArguments,
    CompareArguments,
    DemoArguments,
    EvaluateArguments,
    ExportArguments,
    ListArguments,
    PartName,
    PredictArguments,
    RenormaliseArguments,
    ReportArguments,
    TrainArguments,
    TuneArguments,
)
from noiseproof.cli.parsing import has_flag, parse, parse_training, rank
from noiseproof.lab.command import running
from noiseproof.lab.comparison_files import is_comparison, recommended, runs_of
from noiseproof.lab.config import AUGMENTATIONS, DATASETS, METHODS, MODELS, did_you_mean, run_name
from noiseproof.lab.deploy.model_folders import folder_for_results, model_folder, refuse_run_folder
from noiseproof.lab.plugins import load_plugins
from noiseproof.lab.recipes import recipe, recipe_help
from noiseproof.lab.validate import (
    read_attack,
    validate,
    validate_analysis,
    validate_apart,
    validate_exists,
    validate_format,
    validate_installed,
    validate_launcher,
    validate_number,
    validate_perturbations,
    validate_writable,
)
from noiseproof.paper.experiments import EXPERIMENTS, ReproduceArguments
from noiseproof.perturb import values
from noiseproof.perturb.text import HELP, REGISTERED, help_line


def train(argv: list[str]) -> int:
    arguments, config = parse_training(TrainArguments, "train", argv)
    load_plugins(arguments.defaults.plugin)
    validate(config)

    from noiseproof.lab.training.train import train as run_training

    with running(_with_recipe("train", argv, arguments)):
        path = shlex.quote(str(run_training(config).path))
    print_once(f"The run is in {path}. To test it under noise:\n  noiseproof evaluate {path}")
    return 0


def tune(argv: list[str]) -> int:
    arguments, config = parse_training(TuneArguments, "tune", argv, default="tune")
    load_plugins(arguments.defaults.plugin)
    network = arguments.network
    validate_launcher(arguments.launcher, arguments.slurm)
    usual = recipe(arguments.defaults.recipe, config.data.data).model.model
    if not network:
        raise ValueError("tune needs a model: a file of weights, or FILE.py:FUNCTION; got none")
    if ".py:" in network:
        load_plugins([network], flag="")
        model = replace(config.model, model=network, head="own", weights=None)
    elif config.model.model == usual and not has_flag(argv, "model"):
        raise ValueError(
            f"tune {network} needs --model NAME, the network whose weights these are: a name of "
            "torchvision's or timm:NAME; or give FILE.py:FUNCTION instead, which returns it"
        )
    elif not Path(network).is_file():
        raise ValueError(f"{network} does not exist; expected a file of weights")
    else:
        model = replace(config.model, weights=os.path.expanduser(network), head="own")
    name = config.run.name or run_name(config).replace(f"-{config.method.method}-", "-tuned-")
    config = replace(config, model=model, run=replace(config.run, name=name))
    validate(config)

    from noiseproof.lab.comparison.tune import tune as run_tuning

    with running(_with_recipe("tune", argv, arguments)):
        return run_tuning(config, arguments.launcher, arguments.slurm)


def evaluate(argv: list[str]) -> int:
    arguments = parse(EvaluateArguments, "evaluate", argv)
    load_plugins(arguments.plugin)
    if arguments.suite is not None and arguments.suite not in SUITES:
        expected = ", ".join(SUITES) + did_you_mean(arguments.suite, SUITES)
        raise ValueError(f"--suite must be one of {expected}, got {arguments.suite}")
    if arguments.data is not None:
        validate_exists(arguments.data)
    elif arguments.baseline is not None and arguments.suite not in ("c", "all"):
        raise ValueError("--baseline is for corruption errors; add --suite c")
    class_map = dict(_pair("--class-map", text) for text in arguments.class_map)
    if class_map and arguments.data is None:
        raise ValueError("--class-map names classes of --data, which is missing")
    if arguments.draws is not None:
        _check_at_least("--draws", arguments.draws, 1)
    validate_number("--noise-seed", arguments.noise_seed, "seed")
    validate_perturbations("--perturb", arguments.perturb)
    if not arguments.weights:
        raise ValueError("--weights must be last, best or both, got nothing")
    if arguments.table and not arguments.table.endswith((".md", ".csv", ".tex")):
        raise ValueError(f"--table must end in .md, .csv or .tex, got {arguments.table}")
    validate_writable("--table", arguments.table)

    for text in arguments.attack:
        read_attack(text)
    if arguments.attack and arguments.data is not None:
        raise ValueError("--attack is for the runs' own test images; leave out --data")
    under_noise = bool(arguments.perturb or arguments.suite or not arguments.attack)
    if not under_noise and (arguments.table or arguments.calibration):
        flag = "--table" if arguments.table else "--calibration"
        raise ValueError(f"{flag} is for tests under noise, not --attack; add --perturb or --suite")
    arguments = replace(arguments, runs=_run_folders("evaluate", arguments.runs))
    if arguments.baseline is not None:
        arguments = replace(arguments, baseline=_run_folder(arguments.baseline, writes=True))
    options = dict(vars(arguments), class_map=class_map)
    del options["plugin"]
    options["weights"] = tuple(dict.fromkeys(arguments.weights))
    runs, attacks = options.pop("runs"), options.pop("attack")
    if attacks:
        from noiseproof.lab.evaluation.attacks import attack_names
        from noiseproof.lab.runs import RunFolder

        for run in map(RunFolder.open, runs):
            attack_names(attacks, run.info["size"])
    if under_noise:
        from noiseproof.lab.evaluation.evaluate import evaluate_runs

        evaluate_runs(runs, **options)
    if attacks:
        from noiseproof.lab.evaluation.attacks import attack_runs

        attack_runs(runs, attacks, weights=options["weights"], device=arguments.device)
    return 0


def predict(argv: list[str]) -> int:
    arguments = parse(PredictArguments, "predict", argv)
    arguments = replace(arguments, run=_run_folder(arguments.run, writes=False))
    if not arguments.images:
        raise ValueError("predict needs images or folders of images after the run, got none")
    for path in arguments.images:
        if not Path(path).exists():
            raise ValueError(f"{path} does not exist; expected an image or a folder of images")
    _check_at_least("--top", arguments.top, 1)
    _check_abstain(arguments.abstain)
    validate_number("--noise-seed", arguments.noise_seed, "seed")
    if arguments.out and not arguments.out.endswith(".csv"):
        raise ValueError(f"--out must end in .csv, got {arguments.out}")
    validate_writable("--out", arguments.out)

    from noiseproof.lab.evaluation.predict import predict_paths

    options = dict(vars(arguments))
    load_plugins(options.pop("plugin"))
    return predict_paths(options.pop("run"), options.pop("images"), **options)


def compare(argv: list[str]) -> int:
    arguments, config = parse_training(CompareArguments, "compare", argv)
    comparison = arguments.comparison
    load_plugins(arguments.defaults.plugin)
    if has_flag(argv, "method"):
        raise ValueError("compare takes --methods followed by their names, got --method")
    if not comparison.methods:
        raise ValueError(f"--methods must be some of {', '.join(METHODS)}, got none")
    _check_at_least("--seeds", comparison.seeds, 1)
    _check_at_least("--jobs", comparison.jobs, 0)
    _check_at_least("--draws", comparison.draws, 1)
    validate_launcher(comparison.launcher, comparison.slurm)
    for method in comparison.methods:
        validate(replace(config, method=replace(config.method, method=method)))
    last = config.run.seed + comparison.seeds - 1
    validate_number("--seed + --seeds - 1, the last seed,", last, "seed")

    from noiseproof.lab.comparison.compare import compare as run_comparison

    with running(_with_recipe("compare", argv, arguments)):
        return run_comparison(config, comparison)


def analyse(argv: list[str]) -> int:
    arguments = parse(AnalyseArguments, "analyse", argv)
    load_plugins(arguments.plugin)
    validate_perturbations("--noise", arguments.noise)
    if not arguments.parts:
        raise ValueError(f"--parts must be some of {', '.join(get_args(PartName))}, got none")
    validate_analysis(vars(arguments), "--")
    arguments = replace(arguments, runs=_run_folders("analyse", arguments.runs))

    from noiseproof.lab.analysis.analyse import analyse_runs

    options = dict(vars(arguments), noise=arguments.noise or None)
    del options["plugin"]
    analyse_runs(options.pop("runs"), **options)
    return 0


def certify(argv: list[str]) -> int:
    arguments = parse(CertifyArguments, "certify", argv)
    if 1 < arguments.sigma <= 255:
        meant = f"{arguments.sigma / 255:.3g}"
        raise ValueError(f"--sigma is in units of pixels in [0, 1]; did you mean {meant}?")
    if not values.number("--sigma", arguments.sigma) > 0:
        raise ValueError(f"--sigma must be above 0, such as 0.12, got {arguments.sigma:g}")
    values.level("--sigma", arguments.sigma)
    if not 0 < arguments.alpha < 1:
        raise ValueError(f"--alpha must be above 0 and below 1, got {arguments.alpha:g}")
    _check_at_least("--selection", arguments.selection, 1)
    least = math.floor(-math.log2(arguments.alpha)) + 1  # all agree: the limit is α^(1/samples)
    if arguments.samples < least:
        raise ValueError(
            f"--samples must be at least {least} for --alpha {arguments.alpha:g}, since fewer can "
            f"certify nothing, got {arguments.samples}"
        )
    if arguments.every is not None:
        _check_at_least("--every", arguments.every, 1)
    validate_number("--noise-seed", arguments.noise_seed, "seed")
    arguments = replace(arguments, runs=_run_folders("certify", arguments.runs))

    from noiseproof.lab.evaluation.certificates import certify_runs

    options = dict(vars(arguments))
    load_plugins(options.pop("plugin"))
    certify_runs(options.pop("runs"), **options)
    return 0


def report(argv: list[str]) -> int:
    arguments = parse(ReportArguments, "report", argv)
    load_plugins(arguments.plugin)
    validate_writable("--output", _inside(arguments.output))
    arguments = replace(arguments, runs=_run_folders("report", arguments.runs))
    baseline = arguments.baseline and _run_folder(arguments.baseline, writes=True)

    from noiseproof.lab.report.page import report_runs

    report_runs(arguments.runs, arguments.output, arguments.title, baseline)
    return 0


def calibrate(argv: list[str]) -> int:
    arguments = parse(CalibrateArguments, "calibrate", argv)
    load_plugins(arguments.plugin)
    validate_perturbations("--noise", arguments.noise)
    if not arguments.noise:
        raise ValueError("--noise must name perturbations, such as clean gaussian:0.1, got nothing")
    validate_writable("--output", _inside(arguments.output))
    arguments = replace(arguments, run=_run_folder(arguments.run, arguments.output is None))

    from noiseproof.lab.evaluation.temperature import calibrate_path

    options = dict(vars(arguments))
    del options["plugin"]
    calibrate_path(options.pop("run"), **options)
    return 0


def renormalise(argv: list[str]) -> int:
    arguments = parse(RenormaliseArguments, "renormalise", argv)
    load_plugins(arguments.plugin)
    validate_perturbations("--noise", arguments.noise)
    if arguments.noise and arguments.images:
        raise ValueError("--noise is for training images, which --images replaces; expected one")
    if arguments.images is not None and not Path(arguments.images).is_dir():
        raise ValueError(f"--images {arguments.images} is not a folder; expected one with images")
    _check_at_least("--batches", arguments.batches, 1)
    validate_writable("--output", _inside(arguments.output))
    arguments = replace(arguments, run=_run_folder(arguments.run, arguments.output is None))

    from noiseproof.lab.training.renormalise import renormalise_path

    options = dict(vars(arguments))
    del options["plugin"]
    renormalise_path(options.pop("run"), **options)
    return 0


def export(argv: list[str]) -> int:
    arguments = parse(ExportArguments, "export", argv)
    shared = arguments.format == "safetensors"
    if arguments.half and not shared:
        raise ValueError(f"--half is for --format safetensors, got {arguments.format}")
    if shared and (arguments.size is not None or arguments.input != "float"):
        raise ValueError("--input and --size are for graphs; noiseproof.load takes any images")
    suffix = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ""}[arguments.format]
    if arguments.output and not arguments.output.endswith(suffix):
        raise ValueError(f"--output must end in {suffix}, got {arguments.output}")
    validate_writable("--output", arguments.output if suffix else _inside(arguments.output))
    validate_format(arguments.format)
    arguments = replace(arguments, run=_run_folder(arguments.run, arguments.output is None))
    if shared and arguments.output:
        refuse_run_folder(arguments.run, arguments.output)

    from noiseproof.lab.deploy.export import export_run

    options = dict(vars(arguments))
    load_plugins(options.pop("plugin"))
    export_run(options.pop("run"), **options)
    return 0


def card(argv: list[str]) -> int:
    arguments = parse(CardArguments, "card", argv)
    load_plugins(arguments.plugin)
    arguments = replace(arguments, runs=_run_folders("card", arguments.runs))

    from noiseproof.lab.deploy.card import write_card

    for path in arguments.runs:
        write_card(path)
    return 0


def demo(argv: list[str]) -> int:
    arguments = parse(DemoArguments, "demo", argv)
    validate_installed("demo", "demo", "gradio")
    load_plugins(arguments.plugin)
    arguments = replace(arguments, runs=_run_folders("demo", arguments.runs, writes=False))
    _check_abstain(arguments.abstain)
    if arguments.port is not None and not 0 < arguments.port < 65536:
        raise ValueError(f"--port must be from 1 to 65535, got {arguments.port}")

    from noiseproof.lab.deploy.demo import demo_runs

    options = dict(vars(arguments))
    del options["plugin"]
    demo_runs(options.pop("runs"), **options)
    return 0


def reproduce(argv: list[str]) -> int:
    arguments = parse(ReproduceArguments, "reproduce", argv)
    name = arguments.experiment
    if name not in EXPERIMENTS:
        expected = ", ".join(EXPERIMENTS) + did_you_mean(name, EXPERIMENTS)
        raise ValueError(f"there is no experiment {name!r}; expected {expected}")
    if "road" in name and arguments.data is None:
        raise ValueError(f"{name} needs --data FOLDER, with one folder of photographs per class")
    for flag, folder in {"--output": arguments.output, "--results": arguments.results}.items():
        validate_apart(flag, folder, arguments.data or name)
    _check_at_least("--draws", arguments.draws, 1)
    _check_at_least("--jobs", arguments.jobs, 1)
    _check_at_least("--seeds", arguments.seeds, 1)
    _check_at_least("--along", arguments.along, 0)
    if arguments.epochs is not None:
        _check_at_least("--epochs", arguments.epochs, 1)
    validate_launcher(arguments.launcher, arguments.slurm)

    from noiseproof.paper import tables
    from noiseproof.paper.reproduce import reproduce as run_experiment

    records, status = run_experiment(arguments)
    if not records:
        print_once("No row was finished, so nothing was recorded.")
        return status
    print_once(tables.section(Path(arguments.results), name))
    print_once(tables.sources(Path(arguments.results), name))
    print_once(f"Records: {shlex.quote(arguments.results)}/{name}")
    return status


def list_names(argv: list[str]) -> int:
    """Prints the names that can be chosen, each with a line of help."""
    arguments = parse(ListArguments, "list", argv)
    load_plugins(arguments.plugin)
    sections: dict[str, dict[str, str]] = {
        "methods": METHODS,
        "models": MODELS,
        "datasets": DATASETS,
        "augmentations": AUGMENTATIONS,
        "perturbations": {name: help_line(name) for name in (*HELP, *REGISTERED)},
        "recipes": recipe_help(),
        "experiments": {n: (e.__doc__ or "").partition("\n")[0] for n, e in EXPERIMENTS.items()},
    }
    for title in sections if arguments.what == "all" else [arguments.what]:
        width = max(map(len, sections[title]))
        print_once(f"{title}:")
        for name, text in sections[title].items():
            print_once(f"  {name:<{width}}  {text}")
    return 0


def _with_recipe(verb: str, argv: list[str], arguments: TrainArguments) -> str:
    """The command line with its recipe by name, since the default recipe may change, and with the
    epochs if they are not the recipe's, since they may depend on the number of images."""
    name, epochs = arguments.defaults.recipe, arguments.optim.epochs
    named = [] if has_flag(argv, "recipe") else ["--recipe", name]
    usual = recipe(name, arguments.data.data).optim.epochs
    if epochs != usual and not has_flag(argv, "epochs"):
        named += ["--epochs", str(epochs)]
    return shlex.join(["noiseproof", verb, *named, *argv])


def _run_folders(verb: str, paths: tuple[str, ...], writes: bool = True) -> tuple[str, ...]:
    """The run folders that `paths` name, of a comparison all its runs; `writes` as for
    `_run_folder`."""
    if not paths:
        raise ValueError(f"{verb} needs a run folder, such as runs/NAME, got none")
    runs = (runs_of(x) if is_comparison(x) else [_run_folder(x, writes)] for x in paths)
    return tuple(str(run) for of_path in runs for run in of_path)


def _run_folder(path: str, writes: bool) -> str:
    """The run folder that `path` names, of a comparison the one that it recommends, which is said
    on standard error. If the command `writes` there, a model that is given by its name is copied
    first."""
    if not is_comparison(path):
        folder = folder_for_results(path) if writes else model_folder(path)
        if writes and not Path(path).is_dir():
            print_once(f"The results of {path} go to {folder}.", file=sys.stderr)
        return folder
    run, sentences = recommended(path)
    print_once(f"{path} recommends {run.name}. {sentences[0]}", file=sys.stderr)
    return str(run)


def _inside(folder: str | None) -> str | None:
    """Any file in the folder."""
    return folder and os.path.join(folder, "config.json")


def _pair(flag: str, text: str) -> tuple[str, str]:
    """The two sides of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{flag} takes names as in hound=dog, got {text!r}")
    return name, value


def _check_abstain(share: float | None) -> None:
    if share is not None and not 0 < share < 1:
        raise ValueError(f"--abstain must be above 0 and below 1, got {share:g}")


def _check_at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{flag} must be at least {least}, got {value}")


def print_once(text: str, file: TextIO | None = None) -> None:
    """Prints on rank 0 only."""
    if rank() == 0:
        print(text, file=file)
