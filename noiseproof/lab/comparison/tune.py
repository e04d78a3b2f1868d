"""A user's trained classifier, trained a few epochs more to be robust, and compared with itself."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from noiseproof.lab.comparison.jobs import Announce, Job
from noiseproof.lab.comparison.slurm import run_on_cluster
from noiseproof.lab.config import Config, Launcher, run_path
from noiseproof.lab.console import print_status, terminal
from noiseproof.lab.data.datasets import Dataset, load_dataset, with_read_size
from noiseproof.lab.device import chosen_device, environment
from noiseproof.lab.evaluation.evaluate import evaluate, evaluate_runs
from noiseproof.lab.evaluation.predictions import predictions
from noiseproof.lab.evaluation.stats import majority_share
from noiseproof.lab.models.classifier import classifier_for, with_input_size
from noiseproof.lab.models.own_head import OtherClasses
from noiseproof.lab.runs import RunFolder, with_recorded_input
from noiseproof.lab.training.session import dataset_info
from noiseproof.lab.training.train import train
from noiseproof.lab.validate import slurm_parameters


@dataclass(frozen=True)
class TuneJob(Job):
    """The training of a user's classifier, and its accuracy before and after."""

    def _work(self, announce: Announce, dataset: Dataset | None) -> None:
        announce("tuning")
        _tune(self.config)


def tune(config: Config, launcher: Launcher = "processes", slurm: Sequence[str] = ()) -> int:
    """Trains the classifier that `config` names, prints its accuracy before and after, and returns
    an exit status; ValueError if its classes do not match those of the data.

    Args:
        config: settings of the training; the model has its own head, and the run a name.
        launcher: "slurm" trains in a job of a cluster, and waits for it.
        slurm: settings of that job, as `noiseproof.lab.validate.slurm_parameters` reads them.
    """
    chosen_device(config.run.device)  # refused before the data is loaded, or a job is queued
    path, cluster = run_path(config), slurm_parameters(launcher, slurm)
    if (path / "config.json").exists():
        if not config.run.resume:
            raise ValueError(
                f"{path} already exists: add --resume to continue it, or choose another --name"
            )
        run = RunFolder.open(path)
        config = with_recorded_input(config, run.config)
        cluster = None if run.finished else cluster
    if cluster is None:
        before, run, dataset = _tune(config)
    else:
        job = TuneJob(replace(config, run=replace(config.run, resume=True)))
        result = run_on_cluster([job], Path(config.run.output), terminal(), cluster)[job.name]
        if result.status != "done":
            print("To continue, repeat the command with --resume.")
            return 3 if result.status == "diverged" else 1
        before, run = (RunFolder.open(p) for p in (_path_before(config), path))
        dataset = run.dataset()
        evaluate_runs([before.path, run.path], device=config.run.device, dataset=dataset)
    paths = [shlex.quote(str(p)) for p in (before.path, run.path, run.weights_path("last"))]
    if dataset.test_from == "split off":
        print(
            f"The test images were split off {config.data.data}. If your model was trained on some "
            "of them, its accuracy before tuning is too high; a folder test/ that it has not seen "
            "gives the true one."
        )
    print(
        f"The weights are in {paths[2]}, by the names of your own network: load them with "
        "safetensors.torch.load_file.\n"
        f"For a report on both:\n  noiseproof report {paths[0]} {paths[1]}"
    )
    return 0


def _tune(config: Config) -> tuple[RunFolder, RunFolder, Dataset]:
    """Trains and evaluates in this process, and prints the table."""
    config = with_input_size(config)
    dataset = load_dataset(config.data)
    config = replace(config, data=with_read_size(config.data, dataset))
    before = _untuned(config, dataset)
    try:
        evaluate(before, ["clean"], device=config.run.device, dataset=dataset)
        _check_classes(before, dataset)
    except ValueError:
        shutil.rmtree(before.path)
        raise
    run = train(config, dataset=dataset)
    evaluate_runs([before.path, run.path], device=config.run.device, dataset=dataset)
    return before, run, dataset


def _path_before(config: Config) -> Path:
    """The run folder of the classifier as it came."""
    path = run_path(config)
    name = path.name.replace("-tuned", "-before")
    return path.with_name(name if name != path.name else f"{name}-before")


def _untuned(config: Config, dataset: Dataset) -> RunFolder:
    """A run folder of the classifier as it came; replaces that of an earlier tuning."""
    path = _path_before(config)
    if (path / "config.json").exists() and "before_tuning" not in RunFolder.open(path).info:
        raise ValueError(f"{path} already exists and is another run; choose another --name")
    settings = replace(config, run=replace(config.run, name=path.name))
    facts = dataset_info(dataset)
    try:
        model = classifier_for(config.model, dataset)
    except OtherClasses as error:
        raise ValueError(f"{error}. {_classes_of(dataset)}") from error
    facts |= {"environment": environment(chosen_device(config.run.device)), "before_tuning": True}
    run = RunFolder.create(settings, facts)
    run.save_weights("last", model.state_dict())
    run.finish(seconds=None)  # nothing was trained
    return run


def _classes_of(dataset: Dataset) -> str:
    shown = ", ".join(dataset.classes[:20]) + (", …" if len(dataset.classes) > 20 else "")
    return f"The classes of {dataset.name}, in order: {shown}"


def _check_classes(run: RunFolder, dataset: Dataset) -> None:
    """Raises ValueError if the predictions for clean test images are at chance, or right except for
    the order of the classes."""
    stored = predictions(run, "clean")
    assert stored is not None
    labels, classes = stored.labels, stored.classes[0]
    accuracy = float((classes == labels).mean())
    if swapped := _swapped_classes(labels, classes, len(dataset.classes)):
        names = dataset.classes
        examples = ", ".join(f"{names[a]} as {names[b]}" for a, b in list(swapped.items())[:3])
        raise ValueError(
            f"the classes of the model seem to be in another order than those of the data: it "
            f"classifies most images of {examples}. {_classes_of(dataset)}. Reorder the rows of "
            "the model's last layer, or rename the folders so that their alphabetical order is "
            "that of the model"
        )
    chance = majority_share(labels)
    if accuracy <= chance + 2 * np.sqrt(chance * (1 - chance) / len(labels)):
        raise ValueError(
            f"the model classifies {accuracy:.1%} of the clean test images correctly, and the most "
            f"frequent class has {chance:.1%}: tune is for models that are accurate without noise. "
            "Its images may have had another normalisation (--mean, --std) or size (--img-size), "
            f"or its classes another order. {_classes_of(dataset)}"
        )
    print_status(run.name, f"{accuracy:.1%} of the clean test images are classified correctly")


def _swapped_classes(
    labels: NDArray[np.integer], classes: NDArray[np.integer], count: int
) -> dict[int, int]:
    """Classes of which most images, and hardly any right, are predicted as one other class, by the
    best one-to-one assignment of predictions to labels.

    >>> _swapped_classes(np.array([0, 0, 1, 1, 2]), np.array([1, 1, 0, 0, 2]), 3)
    {0: 1, 1: 0}
    """
    confusion = np.zeros((count, count))
    np.add.at(confusion, (labels, classes), 1)
    shares = confusion / confusion.sum(1, keepdims=True).clip(min=1)
    rows, columns = linear_sum_assignment(-shares)
    swapped = {
        int(a): int(b)
        for a, b in zip(rows, columns, strict=True)
        if a != b and shares[a, b] > 0.5 and shares[a, a] < 0.2
    }
    return swapped if len(swapped) > 1 else {}  # one alone: most images are predicted as one class
