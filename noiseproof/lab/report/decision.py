"""The decision that a comparison ends with: the run to take, why, and the commands that come next.

`recommendation.json` in the comparison's folder holds it for `predict`, `export` and the like.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import NamedTuple

from noiseproof.lab.command import command_record
from noiseproof.lab.comparison_files import RECOMMENDATION, command_of, is_comparison, runs_of
from noiseproof.lab.evaluation import severities
from noiseproof.lab.evaluation.recommendation import Recommendation, recommend
from noiseproof.lab.files import write_atomically
from noiseproof.lab.report.results import Results
from noiseproof.lab.runs import RunFolder, Weights

SCHEMA = 1


class Decision(NamedTuple):
    """The run to take, and the weights that this was decided for."""

    run: RunFolder
    weights: Weights
    choice: Recommendation

    @property
    def sentences(self) -> list[str]:
        """The answer and its reasons."""
        best = "This holds for the best epoch by validation."
        return [*self.choice.sentences, *([] if self.weights == "last" else [best])]


def decide(results: Results) -> Decision:
    """The run to take of those in `results`, the first training of the recommended label;
    ValueError if none can be recommended."""
    rows, correct = results.rows[results.weights], severities.averaged_correct(results.correct)
    choice = recommend(results.table, severities.averaged(rows), correct)
    return Decision(results.run(choice.label), results.weights, choice)


def save_decision(results: Results, folder: Path) -> Decision | str:
    """Decides, and writes recommendation.json to a comparison's folder if the results are of all
    its runs. If nothing can be recommended, the file and the result say why.

    Args:
        results: of the runs.
        folder: of the comparison, or any other, where nothing is written.
    """
    try:
        decision = decide(results)
    except ValueError as error:
        decision = str(error)
    runs = {run.path.resolve() for run in results.runs.values()}
    if is_comparison(folder) and runs == {path.resolve() for path in runs_of(folder)}:
        facts = {"schema": SCHEMA, **command_record()}
        if isinstance(decision, str):
            facts |= {"run": None, "text": [decision]}
        else:
            facts |= {"run": decision.run.name, "method": decision.run.config.method.method}
            facts |= {"weights": decision.weights, "tied": decision.choice.tied}
            facts |= {"text": decision.sentences}
        write_atomically(folder / RECOMMENDATION, json.dumps(facts, indent=2) + "\n")
    return decision


def next_commands(decision: Decision, folder: Path) -> list[str]:
    """What to do with the decision: use the model, export it and, if that would say more, train
    with more seeds.

    Args:
        decision: what was decided.
        folder: where the report is; a comparison's folder stands for its recommended run.
    """
    compared = is_comparison(folder)
    model = shlex.quote(str(folder if compared else decision.run.path))
    commands = [f"noiseproof predict {model} IMAGES", f"noiseproof export {model}"]
    command = command_of(folder) if compared else None
    if command and decision.choice.seeds:
        commands.append(_with_seeds(command, decision.choice.seeds))
    return commands


def _with_seeds(command: str, seeds: int) -> str:
    """
    >>> _with_seeds("noiseproof compare --seeds 1 --data photos", 3)
    'noiseproof compare --data photos --seeds 3'
    """
    words = shlex.split(command)
    words = [word for word in words if not word.startswith("--seeds=")]
    if "--seeds" in words:
        at = words.index("--seeds")
        del words[at : at + 2]
    return shlex.join([*words, "--seeds", str(seeds)])
