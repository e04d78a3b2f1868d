"""The top of a report: its headline, its opening paragraph and its figures in large type.

Everything is computed from the results; sentences about the table come from `evaluation.words`.
"""

from __future__ import annotations

from typing import NamedTuple

from noiseproof.lab.data.duplicates import recorded_leaks
from noiseproof.lab.evaluation import severities
from noiseproof.lab.evaluation.tables import Table
from noiseproof.lab.evaluation.words import (
    chance_warnings,
    condition,
    listed,
    main_sentences,
    names,
    number_word,
    points,
    training_caveat,
    training_count,
)
from noiseproof.lab.report.decision import Decision
from noiseproof.lab.report.results import Results
from noiseproof.perturb.text import is_clean

_BASELINES = ("both", "normal")  # the usual ways to train, with and without noise


class HeadlineFigure(NamedTuple):
    """A number in large type: what it measures, its value, who has it, and a remark."""

    title: str
    value: str
    who: str
    remark: str


def headline(results: Results, decision: Decision | None) -> str:
    """The answer: what to take or, of a single label, how accurate it is.

    Args:
        results: of the report.
        decision: what to take, if anything can be recommended.
    """
    table = results.table
    if len(table.at_chance) == len(table.labels):
        who = f"{names(table.labels)} is no" if len(table.labels) == 1 else f"No {table.by} is"
        return (
            f"{who} better than always predicting the most frequent class, which gets "
            f"{table.percent(table.majority_share or 0.0)} % of clean images right."
        )
    if len(table.labels) == 1:
        return _one_label(table)
    if decision is None:
        return f"The {table.by}s were not tested under the same noise, so none is recommended."
    return decision.sentences[0]


def _one_label(table: Table) -> str:
    label = table.labels[0]
    means = {spec: table.cells[label, spec].mean for spec in table.perturbations}
    worst = min(means, key=lambda spec: means[spec])
    clean = next((spec for spec in means if is_clean(spec)), None)
    if clean is None or means[worst] == means[clean]:
        return f"{names([label])} has {table.percent(means[worst])} % {condition(worst)}."
    (lost,) = points(means[clean] - means[worst])
    return (
        f"{names([label])} has {table.percent(means[clean])} % on clean images and "
        f"{table.percent(means[worst])} % {condition(worst)}, {lost} points less."
    )


def leaks(results: Results) -> list[str]:
    """What test images share with training images, which makes all numbers look better."""
    return [
        leak if leak.endswith("…") else f"{leak}." for leak in recorded_leaks(results.first.info)
    ]


def paragraph(results: Results) -> list[str]:
    """What was done, the main results, and what they cost."""
    table = results.table
    sentences = [_setting(results), *chance_warnings(table), *main_sentences(table)]
    if len(table.labels) > 1:
        sentences += [*_relative_times(results), *training_caveat(table)]
    return sentences


def accuracy_of(results: Results) -> str:
    """What the accuracies are measured on."""
    if any(run.config.model.head == "own" for run in results.runs.values()):
        return (
            "Accuracy in % on test images that were not used for tuning or selection; whether the "
            "model was trained on them elsewhere is not known here."
        )
    return "Accuracy in % on test images that were not used for training or selection."


def _setting(results: Results) -> str:
    table = results.table
    given = [x for x in table.labels if results.run(x).info.get("before_tuning")]
    trained = [x for x in table.labels if x not in given] or table.labels
    runs = [results.runs[key] for label in trained for key in results.groups[label]]
    epochs = {run.config.optim.epochs for run in runs}
    models = sorted({run.config.model.model for run in runs})
    who = f"{names(trained)} was"
    if len(trained) > 1:
        who = f"{number_word(len(trained)).capitalize()} {table.by}s were"
    seeds = "once" if table.seeds == 1 else f"with {training_count(table)} seeds"
    length = f" for {_counted(min(epochs), 'epoch')}" if len(epochs) == 1 else ""
    draws = f", with {table.draws} draws of each noise" if table.draws > 1 else ""
    corrupted = [c.draws for (_, spec), c in table.cells.items() if spec == severities.ALL]
    if draws and min(corrupted, default=table.draws) < table.draws:
        draws += f" and {number_word(min(corrupted))} of each corruption"
    if given and len(given) == len(table.labels):
        count = _counted(len(results.perturbations), "condition")
        return (
            f"{names(given)} was trained elsewhere, and tested on {table.n:,} images of "
            f"{results.data_name} under {count}{draws}."
        )
    start = f" {names(given)} was trained elsewhere: the model before tuning." if given else ""
    return (
        f"{who} trained {seeds} on {results.data_name} ({' / '.join(models)}{length}, training "
        f"noise {runs[0].config.method.noise}) and tested on the same {table.n:,} images "
        f"under {_counted(len(results.perturbations), 'condition')}{draws}.{start}"
    )


def _counted(n: int, noun: str) -> str:
    """
    >>> _counted(1, "epoch"), _counted(40, "epoch")
    ('one epoch', '40 epochs')
    """
    return f"{number_word(n)} {noun}{'s' if n != 1 else ''}"


def _relative_times(results: Results) -> list[str]:
    """Training times relative to a baseline; nothing if fewer than two were recorded."""
    seconds = results.training_seconds
    if len(seconds) < 2:
        return []
    base = next((name for name in _BASELINES if name in seconds), next(iter(seconds)))
    times = [f"{duration(seconds[base])} with {names([base])}"]
    times += [
        f"{value / seconds[base]:.1f} × as long with {names([label])}"
        for label, value in seconds.items()
        if label != base
    ]
    return [
        f"One training took {listed(times)} (as measured, on a machine that may have been busy)."
    ]


def headline_figures(results: Results) -> list[HeadlineFigure]:
    """The highest accuracy on clean images, over all corruptions and where accuracies differ most,
    and training time. Titles say why each is shown."""
    table = results.table
    widest = table.widest_gap()
    specs = [spec for spec in table.perturbations if is_clean(spec) or spec == severities.ALL]
    specs += [widest] if widest and widest not in specs else []
    figures = []
    for spec in specs:
        cells = table.column(spec)
        best, close = ([x for x in cells if cells[x].mark == mark] for mark in ("best", "close"))
        title = f"{'Highest accuracy' if len(table.labels) > 1 else 'Accuracy'} {condition(spec)}"
        if spec == widest and any(cell.mark == "" for cell in cells.values()):
            title += ", where accuracies differ most"
        remark = ""
        if best[0] in table.at_chance:
            remark = "at chance"
        elif close:
            remark = f"statistically tied: {names(close)}"
        elif len(cells) > len(best):
            remark = f"lowest: {table.percent(min(cell.mean for cell in cells.values()))} %"
        value = f"{table.percent(cells[best[0]].mean)} %"
        figures.append(HeadlineFigure(title, value, names(best), remark))
    return figures + _time_figure(results, widest or table.perturbations[0])


def _time_figure(results: Results, spec: str) -> list[HeadlineFigure]:
    """The training time of the best label under `spec`, relative to a baseline if there is one."""
    cells, seconds = results.table.column(spec), results.training_seconds
    best = next(label for label, cell in cells.items() if cell.mark == "best")
    if best not in seconds:
        return []
    base = next((name for name in _BASELINES if name in seconds and name != best), None)
    value, remark = duration(seconds[best]), ""
    if base:
        value = f"{seconds[best] / seconds[base]:.1f} ×"
        remark = f"relative to {names([base])}, {duration(seconds[base])}"
    title = f"Training time of the most accurate {condition(spec)}"
    title = title if len(seconds) > 1 else "Training time"
    return [HeadlineFigure(title, value, names([best]), remark)]


def duration(seconds: float) -> str:
    """
    >>> duration(12.34), duration(200), duration(9000)
    ('12.3 s', '3.3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def first_training_note(results: Results) -> str:
    """A note for sections that show one training of each label, if the table has several."""
    if all(len(keys) == 1 for keys in results.groups.values()):
        return ""
    seeds = {results.run(label).config.run.seed for label in results.groups}
    which = f" (seed {min(seeds)})" if len(seeds) == 1 else ""
    return (
        f" Only the first training of each {results.by} is shown here{which}, so numbers may "
        "differ from the means in the table."
    )
