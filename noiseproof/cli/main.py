"""The command line: which verbs there are, and what becomes of their errors.

To add a verb, write its function in `verbs.py` and name it in VERBS.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

from noiseproof import __version__
from noiseproof.cli import verbs
from noiseproof.cli.parsing import has_flag, rank
from noiseproof.cli.verbs import say
from noiseproof.lab.config import did_you_mean
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.interrupt import sigterm_as_interrupt

__all__ = ["VERBS", "Verb", "overview", "run"]


class Verb(NamedTuple):
    help: str
    function: Callable[[list[str]], int]


VERBS: dict[str, Verb] = {
    "train": Verb("train one model into a run folder", verbs.train),
    "evaluate": Verb("test runs under perturbations and print one table", verbs.evaluate),
    "predict": Verb("name the likeliest class of new images", verbs.predict),
    "compare": Verb(
        "train several methods, test them alike, write table and report", verbs.compare
    ),
    "analyse": Verb("measure why: curvature, geometry, bounds, embeddings", verbs.analyse),
    "report": Verb("gather runs into one HTML file", verbs.report),
    "reproduce": Verb(
        "run an experiment of the paper, beside the paper's numbers", verbs.reproduce
    ),
    "list": Verb(
        "methods, models, datasets, perturbations, recipes and experiments", verbs.list_names
    ),
}


def overview() -> str:
    """What `noiseproof --help` prints."""
    lines = "\n".join(f"  {name:<10} {verb.help}" for name, verb in VERBS.items())
    return f"""usage: noiseproof VERB [flags]

Train image classifiers that stay accurate when the input is noisy.

verbs:
{lines}

examples:
  noiseproof compare --data digits
  noiseproof train --data photos/ --method discriminative --noise gaussian:40/255

`noiseproof VERB --help` shows a verb's flags (with --data, the values for that data);
`noiseproof --version` the version. NOISEPROOF_DEBUG=1 shows errors with their traceback."""


def run(argv: list[str]) -> int:
    """Runs one command; every error that a user can mend becomes one line and an exit status."""
    try:
        if not argv or argv[0] in ("-h", "--help"):
            say(overview())
            return 0
        if argv[0] == "--version":
            say(f"noiseproof {__version__}")
            return 0
        if argv[0] not in VERBS:
            expected = ", ".join(VERBS) + did_you_mean(argv[0], VERBS)
            raise ValueError(f"there is no command {argv[0]!r}; expected {expected}")
        with sigterm_as_interrupt():
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
    if isinstance(error, Diverged):
        return 3
    if isinstance(error, ValueError):
        return 2
    return 1 if isinstance(error, OSError) else None


def _how_to_continue(argv: list[str]) -> str:
    """The command that goes on where this one stopped."""
    if argv[:1] == ["train"]:
        again = argv if has_flag(argv, "resume") else [*argv, "--resume"]
        return f"; to continue: noiseproof {shlex.join(again)}"
    if argv[:1] in (["compare"], ["reproduce"]):
        return "; the same command continues, as if with --resume"
    if argv[:1] == ["evaluate"]:
        return "; the same command continues: perturbations that are done are kept"
    return ""


def _complain(text: str) -> None:
    """One line on stderr, once a machine: an error may be that of one node alone."""
    if rank("LOCAL_RANK") == 0:
        print("noiseproof: " + " ".join(text.split()), file=sys.stderr)
