"""The command line: its commands, and how their errors are reported.

To add a command, write its function in `verbs.py` and list it in VERBS.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

from noiseproof import __version__
from noiseproof.cli import verbs
from noiseproof.cli.parsing import has_flag, rank
from noiseproof.cli.verbs import print_once
from noiseproof.lab.command import running
from noiseproof.lab.config import did_you_mean
from noiseproof.lab.files import describe
from noiseproof.lab.plugins import raised_by
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.interrupt import signals_as_interrupt


class Verb(NamedTuple):
    help: str
    function: Callable[[list[str]], int]


# In the order of use.
VERBS: dict[str, Verb] = {
    "train": Verb("train one model", verbs.train),
    "evaluate": Verb("test trained models under noise and other perturbations", verbs.evaluate),
    "analyse": Verb("measure why models are robust: curvature, geometry, bounds", verbs.analyse),
    "certify": Verb("certify that no small change of an image changes its class", verbs.certify),
    "report": Verb("write one HTML page about trained models", verbs.report),
    "compare": Verb("do all of this for several methods, under the same noise", verbs.compare),
    "calibrate": Verb("divide logits by a fitted temperature, to calibrate probabilities",
                      verbs.calibrate),
    "tune": Verb("make your own trained classifier robust in a few epochs", verbs.tune),
    "renormalise": Verb("estimate batch-norm statistics again, on noisy or new images",
                        verbs.renormalise),
    "predict": Verb("classify new images with a trained model", verbs.predict),
    "export": Verb("write a model for other programs: ONNX, torch.export, safetensors",
                   verbs.export),
    "card": Verb("write a model card with its robustness into run folders", verbs.card),
    "demo": Verb("show models on a local web page, with a slider for the noise",
                 verbs.demo),
    "reproduce": Verb("repeat an experiment of the paper, or one of ours", verbs.reproduce),
    "list": Verb("list methods, models, datasets, augmentations, perturbations, recipes and more",
                 verbs.list_names),
}  # fmt: skip


# After these a command can be repeated.
_INTERRUPTIONS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def overview() -> str:
    """What `noiseproof --help` prints."""
    lines = "\n".join(f"  {name:<11} {verb.help}" for name, verb in VERBS.items())
    return f"""usage: noiseproof COMMAND [flags]

Train image classifiers that stay accurate when the input is noisy.

commands:
{lines}

examples:
  noiseproof compare --data digits
  noiseproof train --data photos/ --method spheres --noise gaussian:0..60/255

`noiseproof COMMAND --help` lists the common flags of a command, --help-all lists all of them.
`noiseproof --version` prints the version. NOISEPROOF_DEBUG=1 prints errors with a traceback.

exit status:
  0    success
  1    the system: a full disk, a file that cannot be written, a process that was killed
  2    an invalid command or setting, or a damaged file
  3    the training diverged
  130  interrupted by Ctrl-C or SIGTERM; a training is saved first"""


def run(argv: list[str]) -> int:
    """Runs one command and returns its exit status; errors that a user can fix become one line.

    The status is 3 for a diverged training, 2 for an invalid setting or a damaged file, 1 for any
    other error, 130 if interrupted.
    """
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print_once(overview())
            return 0
        if argv[0] == "--version":
            print_once(f"noiseproof {__version__}")
            return 0
        if argv[0] not in VERBS:
            expected = ", ".join(VERBS) + did_you_mean(argv[0], VERBS)
            raise ValueError(f"there is no command {argv[0]!r}; expected {expected}")
        processes = int(os.environ.get("WORLD_SIZE") or 1)
        if processes > 1 and argv[0] not in ("train", "list"):
            raise ValueError(
                f"{argv[0]} runs in one process, got {processes}; only train can use several"
            )
        # About images that are then refused by name
        warnings.filterwarnings("ignore", "Image size .* could be decompression bomb")
        with signals_as_interrupt(), running(shlex.join(["noiseproof", *argv])):
            status = VERBS[argv[0]].function(argv[1:])
        sys.stdout.flush()  # raises BrokenPipeError here rather than on exit
        return status
    except SystemExit as stop:  # tyro has printed help or an error
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        _print_error("stopped" + _how_to_continue(argv))
        return 130
    except BrokenPipeError:  # the reader, such as head, has stopped reading
        _discard_unwritable_output()
        return 0
    except (Diverged, ValueError, OSError) as error:
        if os.environ.get("NOISEPROOF_DEBUG") == "1":
            traceback.print_exc()
        elif isinstance(error, OSError):
            interrupted = error.errno in _INTERRUPTIONS or isinstance(error, ConnectionError)
            hint = _how_to_continue(argv) if interrupted else ""
            _print_error(describe(error) + hint, every_rank=True)
        else:
            _print_error(raised_by(error) or str(error))
        _discard_unwritable_output()
        return 3 if isinstance(error, Diverged) else 2 if isinstance(error, ValueError) else 1
    except Exception as error:
        own = raised_by(error)
        if own and os.environ.get("NOISEPROOF_DEBUG") != "1":
            _print_error(own)
        else:  # a bug of ours, which needs its traceback
            traceback.print_exc()
        return 1


def _how_to_continue(argv: list[str]) -> str:
    """How to continue where this command stopped."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it; cluster queues set WORLD_SIZE, too
        return "; to continue, repeat the torchrun command with --resume"
    if argv[:1] in (["train"], ["tune"]):
        again = argv if has_flag(argv, "resume") else [*argv, "--resume"]
        return f"; to continue: noiseproof {shlex.join(again)}"
    if argv[:1] in (["compare"], ["reproduce"], ["evaluate"], ["analyse"], ["certify"]):
        return "; the same command continues where this one stopped"
    return ""


def _print_error(text: str, every_rank: bool = False) -> None:
    """One line on stderr, once per machine, since an error may concern a single node, or by every
    rank that has the error."""
    number = rank("LOCAL_RANK")
    if number == 0 or every_rank:
        name = f"noiseproof (rank {rank()})" if number else "noiseproof"
        print(f"{name}: {' '.join(text.split())}", file=sys.stderr)


def _discard_unwritable_output() -> None:
    """Discards what cannot be written to stdout, which would raise another error on exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
