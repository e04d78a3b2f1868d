"""The verbs of the command line, and what becomes of their errors.

A verb is a function from its arguments to an exit status, named in VERBS: to add one, write the
function and name it there. Nothing here imports torch before the settings are known to be right:
the stages are imported inside the verbs.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from noiseproof import __version__
from noiseproof.lab.arguments import (
    CompareArguments,
    EvaluateArguments,
    ListArguments,
    ReproduceArguments,
    TrainArguments,
    has_flag,
    parsed,
    rank,
    settings,
    starting_point,
)
from noiseproof.lab.config import METHODS
from noiseproof.lab.names import DATASETS, MODELS
from noiseproof.lab.validate import validate, validate_perturbations
from noiseproof.perturb.spec import HELP as PERTURBATIONS
from noiseproof.recipes import recipe_help
from noiseproof.recipes.experiments import EXPERIMENTS

__all__ = ["VERBS", "Verb", "overview", "run"]


def train(argv: list[str]) -> int:
    arguments = parsed(TrainArguments, "train", argv, starting_point(TrainArguments, argv))
    config = settings(arguments, argv)
    validate(config)

    from noiseproof.lab.train import train as run_training

    path = shlex.quote(str(run_training(config).path))
    _say(f"The run lies in {path}. To test it under noise:\n  noiseproof evaluate {path}")
    return 0


def evaluate(argv: list[str]) -> int:
    arguments = parsed(EvaluateArguments, "evaluate", argv)
    _alone("evaluate")
    if not arguments.runs:
        raise ValueError("evaluate needs a run folder, such as runs/NAME, got none")
    for path in arguments.runs:
        if not Path(path).is_dir():
            raise ValueError(f"{path}: there is no such run folder")
    _at_least("--draws", arguments.draws, 1)
    _at_least("--noise-seed", arguments.noise_seed, 0)
    validate_perturbations("--perturb", arguments.perturb)
    if not arguments.weights:
        raise ValueError("--weights must be last, best or both, got nothing")
    if arguments.table and not arguments.table.endswith((".md", ".csv", ".tex")):
        raise ValueError(f"--table must end in .md, .csv or .tex, got {arguments.table}")

    from noiseproof.lab.evaluate import evaluate_runs

    evaluate_runs(
        arguments.runs,
        arguments.perturb or None,
        draws=arguments.draws,
        weights=tuple(dict.fromkeys(arguments.weights)),
        noise_seed=arguments.noise_seed,
        device=arguments.device,
        table=arguments.table,
    )
    return 0


def compare(argv: list[str]) -> int:
    arguments = parsed(CompareArguments, "compare", argv, starting_point(CompareArguments, argv))
    _alone("compare")
    config, comparison = settings(arguments, argv), arguments.comparison
    if has_flag(argv, "method"):
        raise ValueError("--method is not used by compare; expected --methods and their names")
    methods = list(dict.fromkeys(comparison.methods))
    if not methods:
        raise ValueError(f"--methods must name some of {', '.join(METHODS)}, got none")
    _at_least("--seeds", comparison.seeds, 1)
    _at_least("--jobs", comparison.jobs, 0)
    _at_least("--draws", comparison.draws, 1)
    for method in methods:
        validate(replace(config, method=replace(config.method, method=method)))

    from noiseproof.lab.compare import compare as run_comparison

    jobs = comparison.jobs or None
    outcome = run_comparison(config, methods, comparison.seeds, jobs, draws=comparison.draws)
    return outcome if isinstance(outcome, int) else 0


def reproduce(argv: list[str]) -> int:
    arguments = parsed(ReproduceArguments, "reproduce", argv)
    _alone("reproduce")
    name = arguments.experiment
    if name not in EXPERIMENTS:
        near = get_close_matches(name, EXPERIMENTS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"no experiment is called {name!r}; expected {', '.join(EXPERIMENTS)}{hint}"
        )
    if name == "road" and arguments.data is None:
        raise ValueError("road needs --data FOLDER, with a folder of photographs a class")
    _at_least("--draws", arguments.draws, 1)
    if arguments.epochs is not None:
        _at_least("--epochs", arguments.epochs, 1)

    from noiseproof.recipes import publish
    from noiseproof.recipes.reproduce import reproduce as run_experiment

    run_experiment(
        name,
        only=arguments.only,
        epochs=arguments.epochs,
        seed=arguments.seed,
        data=arguments.data,
        data_dir=arguments.data_dir,
        output=arguments.output,
        results=arguments.results,
        device=arguments.device,
        draws=arguments.draws,
    )
    _say(publish.section(Path(arguments.results), name))
    _say(f"Records: {shlex.quote(arguments.results)}/{name}")
    return 0


def list_names(argv: list[str]) -> int:
    """Prints the names that a flag accepts, each with a line of help."""
    arguments = parsed(ListArguments, "list", argv)
    sections: dict[str, dict[str, str]] = {
        "methods": METHODS,
        "models": MODELS,
        "datasets": DATASETS,
        "perturbations": PERTURBATIONS,
        "recipes": recipe_help(),
        "experiments": {n: (e.__doc__ or "").strip() for n, e in EXPERIMENTS.items()},
    }
    for title in sections if arguments.what == "all" else [arguments.what]:
        width = max(map(len, sections[title]))
        _say(f"{title}:")
        for name, text in sections[title].items():
            _say(f"  {name:<{width}}  {text}")
    return 0


class Verb(NamedTuple):
    help: str
    function: Callable[[list[str]], int]


VERBS: dict[str, Verb] = {
    "train": Verb("train one model into a run folder", train),
    "evaluate": Verb("test runs under perturbations and print one table", evaluate),
    "compare": Verb("train several methods, test them alike, write the table", compare),
    "reproduce": Verb("run an experiment of the paper, beside the paper's numbers", reproduce),
    "list": Verb("methods, models, datasets, perturbations, recipes and experiments", list_names),
}


def overview() -> str:
    """What `noiseproof --help` prints."""
    verbs = "\n".join(f"  {name:<10} {verb.help}" for name, verb in VERBS.items())
    return f"""usage: noiseproof VERB [flags]

Train image classifiers that stay accurate when the input is noisy.

verbs:
{verbs}

examples:
  noiseproof compare --data digits
  noiseproof train --data photos/ --method discriminative --noise gaussian:40/255

`noiseproof VERB --help` shows a verb's flags (with --data, the values for that data);
`noiseproof --version` the version. NOISEPROOF_DEBUG=1 shows errors with their traceback."""


def run(argv: list[str]) -> int:
    """Runs one command; every error that a user can mend becomes one line and an exit status."""
    try:
        if not argv or argv[0] in ("-h", "--help"):
            _say(overview())
            return 0
        if argv[0] == "--version":
            _say(f"noiseproof {__version__}")
            return 0
        if argv[0] not in VERBS:
            near = get_close_matches(argv[0], VERBS, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"no verb is called {argv[0]!r}; expected {', '.join(VERBS)}{hint}")
        status = VERBS[argv[0]].function(argv[1:])
        sys.stdout.flush()  # so that a closed pipe is met here, and not on the way out
        return status
    except SystemExit as stop:  # tyro has printed help or what was wrong
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        _complain("stopped" + _how_to_continue(argv))
        return 130
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        known = _status(error)
        if known is None or os.environ.get("NOISEPROOF_DEBUG") == "1":
            traceback.print_exc()
            return known or 1
        _complain(str(error))
        return known


def _status(error: Exception) -> int | None:
    """3 for a diverged training, 2 for a wrong setting, 1 for the system's refusal; None for a
    fault of ours, which is shown whole."""
    training = sys.modules.get("noiseproof.lab.train")  # not imported: it cannot have raised
    if training is not None and isinstance(error, training.Diverged):
        return 3
    if isinstance(error, ValueError):
        return 2
    return 1 if isinstance(error, OSError) else None


def _how_to_continue(argv: list[str]) -> str:
    """The command that goes on where this one stopped."""
    if argv[:1] == ["train"]:
        again = argv if has_flag(argv, "resume") else [*argv, "--resume"]
        return f"; to continue: noiseproof {shlex.join(again)}"
    if argv[:1] == ["compare"]:
        return "; the same command continues, as if with --resume"
    return ""


def _alone(verb: str) -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(f"{verb} runs as one process; of the verbs, only train runs in several")


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{flag} must be at least {least}, got {value}")


def _say(text: str) -> None:
    if rank() == 0:
        print(text)


def _complain(text: str) -> None:
    """One line on stderr, once a machine: an error may be that of one node alone."""
    if rank("LOCAL_RANK") == 0:
        print("noiseproof: " + " ".join(text.split()), file=sys.stderr)
