"""Accuracy and calibration of a trained run under perturbations: one row per perturbation and noise
draw.

The noise of an image is keyed by (noise seed, perturbation, draw, index of the image in the test
set). Every run sees the same noise, whatever the batch size or the device, and two runs can be
compared image by image; predictions are stored for that purpose. Results for the same weights and
the same test images are not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from noiseproof.lab.command import command_record
from noiseproof.lab.console import (
    TimeEstimate,
    approximate_duration,
    print_status,
    progress_bars,
    terminal,
)
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.other_images import OtherImages, load_other_images
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation import severities, stats, tables, writers
from noiseproof.lab.evaluation.calibration import is_calibrated
from noiseproof.lab.evaluation.predictions import Predictor, correct, evaluation_batches
from noiseproof.lab.evaluation.suites import SuiteName
from noiseproof.lab.evaluation.suites import suite as perturbations_of
from noiseproof.lab.runs import EvaluationRow, RunFolder, Weights, open_runs
from noiseproof.perturb import Identity, Perturbation
from noiseproof.perturb.text import CORRUPTIONS, is_clean, noise_levels, steps
from noiseproof.robustness import by_name, check_applicable

SCHEMA = 1
_FEW_DRAWS = 3  # suggested to save time: enough for a mean and a standard deviation


def evaluate(
    run: RunFolder,
    perturbations: Sequence[Perturbation | str],
    *,
    draws: int = 10,
    weights: Sequence[Weights] = ("last",),
    noise_seed: int = 0,
    device: str = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
    dataset: Dataset | None = None,
    calibration: bool = False,
    other: OtherImages | None = None,
) -> list[EvaluationRow]:
    """The rows of `run` for these perturbations; those that do not exist yet are computed.

    Args:
        run: a trained run.
        perturbations: text such as "gaussian:8/255", or objects of `noiseproof.perturb`.
        draws: noise draws per perturbation; a deterministic one has a single draw.
        weights: which weights to evaluate; those that the run does not have are skipped.
        noise_seed: seed of the noise.
        device: "auto", "cpu" or "cuda".
        batch_size: images per batch; by default as many as keep memory small.
        progress: show a progress bar; by default on a terminal, and lines elsewhere.
        dataset: the run's data, if the caller has loaded it already.
        calibration: every row must have calibration. New rows always have it; those of older
            versions do not, and are computed again.
        other: labelled images to test on instead of the run's own. Corrupted arrays are tested as
            they are, under the names of their corruptions, whatever `perturbations` are.
    """
    if not isinstance(run, RunFolder):
        hint = "RunFolder.open(path)"
        if isinstance(run, nn.Module):
            hint = "noiseproof.accuracy evaluates a model of your own"
        raise ValueError(f"evaluate takes a RunFolder, got {type(run).__name__}; {hint}")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    perturbation_of = by_name(perturbations)
    available = run.require(*weights)
    if other is None:
        dataset = run.dataset(dataset)
    else:
        dataset = other.dataset
        if other.corrupted:
            perturbation_of = dict.fromkeys(other.corrupted, Identity())
    torch_device, n = chosen_device(device), dataset.test.count
    draws_of = {name: range(1 if p.deterministic else draws) for name, p in perturbation_of.items()}

    if (damaged := run.drop_damaged_rows()) and progress is not False:
        print_status(run.name, f"damaged lines removed from evaluation.jsonl: {damaged}")
    batches = evaluation_batches(run, dataset, torch_device, batch_size)
    evaluations = [
        _Evaluation(
            run, name, dataset, torch_device, batches, noise_seed, calibration, other and other.path
        )
        for name in available
    ]
    # The best epoch may be the last one: the same weights are evaluated once, then copied.
    originals: dict[str, _Evaluation] = {}
    for evaluation in evaluations:
        originals.setdefault(evaluation.hash, evaluation)
    passes = sum(len(e.missing(*item)) for e in originals.values() for item in draws_of.items())

    rows: list[EvaluationRow] = []
    with progress_bars(progress) as bar:
        total = len(available) * n * sum(map(len, draws_of.values()))
        task = bar.add_task(f"{run.name}: evaluating", total=total)

        def announce(seconds: float) -> None:
            if progress is not False:
                duration = approximate_duration(seconds) + _saving(perturbation_of, draws)
                text = f"{passes} passes over {n:,} test images take {duration}"
                print_status(run.name, text, bar)

        estimate = TimeEstimate(passes * n, announce)

        def on_batch(images: int) -> None:
            bar.advance(task, images)
            estimate.advance(images)

        for evaluation in evaluations:
            original = originals[evaluation.hash]
            for name, perturbation in perturbation_of.items():
                label = f"{run.name}: evaluating, {name}, {evaluation.weights} weights"
                bar.update(task, description=label)
                missing = evaluation.missing(name, draws_of[name])
                if missing and other and other.corrupted:
                    batches = evaluation_batches(run, other.under(name), torch_device, batch_size)
                    evaluation.batches = batches
                if evaluation is original:
                    bar.advance(task, (len(draws_of[name]) - len(missing)) * n)
                    evaluation.compute(name, perturbation, missing, on_batch)
                else:
                    bar.advance(task, len(draws_of[name]) * n)
                    evaluation.copy(original, name, missing)
                rows += [evaluation.rows[name, draw] for draw in draws_of[name]]
    # Rows of an older run name the same images in an older form.
    return [{**row, "fingerprint": dataset.fingerprint} for row in rows]


def _saving(perturbation_of: Mapping[str, Perturbation], draws: int) -> str:
    """How much of the time fewer draws would take; empty if they are few already.

    >>> _saving(by_name(["clean", "gaussian:0.1", "gaussian:0.2"]), 10)
    '; with --draws 3, 33 % of that'
    """
    random = sum(not p.deterministic for p in perturbation_of.values())
    deterministic = len(perturbation_of) - random
    share = (deterministic + random * _FEW_DRAWS) / (deterministic + random * draws)
    return f"; with --draws {_FEW_DRAWS}, {100 * share:.0f} % of that" if share < 1 else ""


@dataclass
class _Evaluation(Predictor):
    """A predictor that stores its predictions and their rows in the run folder.

    Args:
        calibration: rows without calibration count as missing.
        test_data: where the test images are from, if they are not the run's own.
    """

    calibration: bool = False
    test_data: str | None = None

    @cached_property
    def hash(self) -> str:
        """Identifies the weights."""
        return self.run.weights_hash(self.weights)

    @cached_property
    def rows(self) -> dict[tuple[str, int], EvaluationRow]:
        """The rows of evaluation.jsonl that belong to this evaluation, by (perturbation, draw)."""
        facts = {"weights": self.weights, "model": self.hash, "noise_seed": self.noise_seed}
        facts |= {"fingerprint": self.run.fingerprint(self.dataset)}
        rows = [row for row in self.run.evaluation() if facts.items() <= row.items()]
        return {(row["perturbation"], row["draw"]): row for row in rows}

    def missing(self, name: str, draws: Sequence[int]) -> list[int]:
        """The draws without a row, or without the predictions that belong to it."""
        stored = self.stored(name)
        return [d for d in draws if d not in stored or not self._complete(name, d)]

    def _complete(self, name: str, draw: int) -> bool:
        row = self.rows.get((name, draw))
        return row is not None and (is_calibrated(row) or not self.calibration)

    def compute(
        self,
        name: str,
        perturbation: Perturbation,
        draws: Sequence[int],
        on_batch: Callable[[int], object],
    ) -> None:
        """Computes and stores these draws; `on_batch` gets the number of images of each batch."""
        if not draws:
            return
        start = time.perf_counter()
        classes, calibrations = self.predict(perturbation, draws, on_batch)
        seconds = (time.perf_counter() - start) / len(draws)
        labels = self.dataset.test.labels.numpy()
        rows = [
            self._row(name, draw, float((predicted == labels).mean()), seconds) | calibration.row()
            for draw, predicted, calibration in zip(draws, classes, calibrations, strict=True)
        ]
        if stats.is_unbalanced(labels):
            for row, predicted in zip(rows, classes, strict=True):
                scores = stats.class_scores(labels, predicted, self.dataset.classes)
                row["class_scores"] = asdict(scores)
        self._store(name, dict(zip(draws, classes, strict=True)), rows)

    def copy(self, original: _Evaluation, name: str, draws: Sequence[int]) -> None:
        """Stores these draws of the same weights under another name as its own."""
        if draws:
            classes = original.stored(name)
            rows = [{**original.rows[name, draw], "weights": self.weights} for draw in draws]
            self._store(name, {draw: classes[draw] for draw in draws}, rows)

    def _store(
        self, name: str, classes: Mapping[int, NDArray[np.generic]], rows: Sequence[EvaluationRow]
    ) -> None:
        # Predictions first, so that no row is without them; rows remain if predictions are lost.
        self.store(name, classes)
        # A row that adds calibration replaces an older one: the last row of a draw counts.
        new = {(name, r["draw"]): r for r in rows if not self._complete(name, r["draw"])}
        self.run.append_evaluation(new.values())
        self.rows |= new

    def _row(self, name: str, draw: int, accuracy: float, seconds: float) -> EvaluationRow:
        levels = noise_levels(name) if len(steps(name)) == 1 and "@" not in name else ()
        dataset, config = self.dataset, self.run.config
        return {
            "schema": SCHEMA,
            "run": self.run.name,
            "data": dataset.name,
            "fingerprint": self.run.fingerprint(dataset),
            "method": config.method.method,
            "seed": config.run.seed,
            "weights": self.weights,
            "model": self.hash,
            "perturbation": name,
            "level": 0.0 if is_clean(name) else levels[0] if len(levels) == 1 else None,
            "draw": draw,
            "noise_seed": self.noise_seed,
            "metric": "accuracy",
            "value": accuracy,
            "n": dataset.test.count,
            "precision": self.precision,
            "device": self.device.type,
            "seconds": round(seconds, 4),
            **({} if self.test_data is None else {"test_data": self.test_data}),
            **command_record(),
        }


def baseline_label(
    groups: Mapping[str, Sequence[RunFolder]], path: str | Path | None = None
) -> str | None:
    """The label that corruption errors are relative to; None if there is none.

    Args:
        groups: the runs of each label.
        path: of a run of the baseline; by default the label whose method is normal, if there is
            exactly one and others.
    """
    if path is not None:
        folder = Path(path).resolve()
        for label, runs in groups.items():
            if folder in [run.path.resolve() for run in runs]:
                return label
        raise ValueError(f"the baseline must be one of the runs, got {path}")
    normal = [x for x, runs in groups.items() if runs[0].config.method.method == "normal"]
    return normal[0] if len(normal) == 1 < len(groups) else None


def evaluate_runs(
    paths: Sequence[str | Path],
    perturb: Sequence[str] | None = None,
    draws: int | None = None,
    weights: Sequence[Weights] = ("last",),
    noise_seed: int = 0,
    device: str = "auto",
    table: str | Path | None = None,
    suite: SuiteName | None = None,
    calibration: bool = False,
    baseline: str | Path | None = None,
    data: str | None = None,
    class_map: Mapping[str, str] | None = None,
    dataset: Dataset | None = None,
) -> None:
    """Evaluates runs and prints a table for each set of test images.

    Args:
        paths: run folders.
        perturb: perturbations, in addition to those of `suite`.
        draws: noise draws per perturbation; by default 1 for the corruptions of a suite and 10 for
            all others.
        weights: which weights to evaluate, of those that a run has.
        noise_seed: seed of the noise.
        device: "auto", "cpu" or "cuda".
        table: a .md, .csv or .tex file to write all tables to.
        suite: one of `evaluation.suites`; of c, tables show means. By default noise, unless
            `perturb` is given.
        calibration: also show tables of calibration; results of older versions, which have none,
            are computed again.
        baseline: run folder that corruption errors are relative to, which is evaluated as well. By
            default the run whose method is normal, if there is exactly one and others.
        data: labelled images to test on instead of the runs' own, see `data.other_images`.
        class_map: names of classes in `data`, each with the runs' name for it.
        dataset: the runs' data, if they share it and the caller has loaded it already.
    """
    if table is not None and Path(table).suffix not in writers.WRITERS:
        expected = ", ".join(writers.WRITERS)
        raise ValueError(f"the file of a table must end in {expected}, got {Path(table).name}")
    runs = open_runs([*paths, *([] if baseline is None else [baseline])])
    chosen_device(device)  # refused before the data is loaded, which can take a while
    for run in runs:
        run.require(*weights)  # likewise
    names = [run.name for run in runs]
    labelled = {run.name if names.count(run.name) == 1 else str(run.path): run for run in runs}
    tests = _Tests(perturb or (), suite, draws, weights, noise_seed, device, calibration)
    out = terminal()
    loaded: dict[Any, Dataset | OtherImages] = {}
    rows_of: dict[str, list[EvaluationRow]] = {}  # by fingerprint of the test images
    datasets: dict[str, Dataset] = {}
    for label, run in labelled.items():
        key = run.config.data if data is None else (*run.info["classes"], *run.info["size"])
        if key not in loaded:  # one dataset in memory at a time
            loaded = {
                key: run.dataset(dataset) if data is None else _other(run, data, class_map, out)
            }
        images = loaded[key]
        tested = images if isinstance(images, Dataset) else images.dataset
        rows = tests.rows(run, images)
        rows_of.setdefault(tested.fingerprint, []).extend({**row, "run": label} for row in rows)
        datasets[tested.fingerprint] = tested
        for missing in [w for w in weights if not run.has(w)]:
            out.print(f"{label} has no {missing} weights; they are left out.", markup=False)

    base = baseline_label({label: [run] for label, run in labelled.items()}, baseline)
    built = []
    for fingerprint, rows in rows_of.items():
        tested, shown = datasets[fingerprint], " (other test images)" if data is not None else ""
        each = tables.build(
            severities.averaged(rows, keep=by_name(tests.perturb)),
            by="run",
            correct=severities.averaged_correct(tests.correct(labelled, tested)),
            title=f"{tested.name}{shown}",
            majority_share=stats.majority_share(tested.test.labels),
        )
        built.append(tables.with_baseline(each, base) if base else each)
    for each in built:
        writers.show(each, out)
        if calibration:
            writers.show_calibration(each, out)
    if table is not None:
        path = Path(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = writers.written(built, path.suffix, calibration=calibration)
        path.write_text(text, encoding="utf-8")
        out.print(f"Table: {path}", markup=False)
    for run in runs:
        out.print(f"Rows: {run.path / 'evaluation.jsonl'}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Tests:
    """The tests of several runs; arguments as for `evaluate_runs`."""

    perturb: Sequence[str]
    suite: SuiteName | None
    draws: int | None
    weights: Sequence[Weights]
    noise_seed: int
    device: str
    calibration: bool

    def draws_of(self, name: str) -> int:
        """The number of draws of a perturbation."""
        once = name in CORRUPTIONS and self.suite in ("c", "all")
        return self.draws or (1 if once else 10)

    def rows(self, run: RunFolder, images: Dataset | OtherImages) -> list[EvaluationRow]:
        """The rows of a run, on its own images or on others."""
        options: dict[str, Any] = {
            "weights": self.weights,
            "noise_seed": self.noise_seed,
            "device": self.device,
            "calibration": self.calibration,
        }
        options |= {"dataset": images} if isinstance(images, Dataset) else {"other": images}
        if isinstance(images, OtherImages) and images.corrupted:
            if self.perturb or self.suite:
                raise ValueError(
                    f"the images of {images.path} are corrupted already and tested as they are; "
                    "leave out --suite and --perturb"
                )
            return evaluate(run, (), **options)
        suite = self.suite or (None if self.perturb else "noise")
        size = (images if isinstance(images, Dataset) else images.dataset).size
        check_applicable(by_name(self.perturb).values(), size)
        named = perturbations_of(suite, run.config.data.data, size) if suite else []
        by_draws: dict[int, list[str]] = {}
        for name in by_name([*named, *self.perturb]):
            by_draws.setdefault(self.draws_of(name), []).append(name)
        return [
            row
            for draws, texts in by_draws.items()
            for row in evaluate(run, texts, draws=draws, **options)
        ]

    def correct(self, runs: Mapping[str, RunFolder], dataset: Dataset) -> stats.Correct:
        """Looks up the predictions of these tests, by the label of a run."""

        def look_up(label: str, weights: str, name: str) -> NDArray[np.bool_] | None:
            run = runs[label]
            return correct(
                run,
                name,
                weights=cast(Weights, weights),
                noise_seed=self.noise_seed,
                draws=self.draws_of(name),
                fingerprint=run.fingerprint(dataset),
            )

        return look_up


def _other(
    run: RunFolder, data: str, class_map: Mapping[str, str] | None, out: Console
) -> OtherImages:
    """The images to test a run on instead of its own; arguments as for `evaluate_runs`."""
    own = run.config.data.data
    if data == own or Path(data).resolve() == Path(own).resolve():
        raise ValueError(
            f"--data {data} is what {run.name} was trained on; without --data it is tested on the "
            "images of it that were held out"
        )
    if "fingerprint" not in run.info:
        raise ValueError(
            f"{run.path} does not record which test images are its own, so that others could be "
            "mistaken for them; train it again"
        )
    other = load_other_images(
        data,
        classes=run.info["classes"],
        size=tuple(run.info["size"]),
        class_map=class_map,
        config=run.config.data,
    )
    if other.skipped:
        files = ", ".join(other.skipped)
        out.print(f"{data}: left out, not among the 15 corruptions: {files}", markup=False)
    return other
