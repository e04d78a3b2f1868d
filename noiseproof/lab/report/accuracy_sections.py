"""What a report shows without an analysis: accuracy by level and by class, and training curves.

Captions say how to read a figure; the results that they state are computed from the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab import figures
from noiseproof.lab.config import METHODS
from noiseproof.lab.evaluation import severities, tables
from noiseproof.lab.evaluation.tables import Cell, Table
from noiseproof.lab.evaluation.words import listed, names, points
from noiseproof.lab.evaluation.writers import corruption_names
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.results import Results
from noiseproof.perturb.text import families, heading, is_clean, numbers, strength

MATRIX_CLASSES = 20  # above this, the page shows the worst classes and the largest confusions
_FIGURE_CLASSES = 60  # above this, a matrix is unreadable even in a file
_AXES = {  # families with one number that grows from clean: its meaning, and its value for clean
    "Gaussian noise": ("standard deviation of the noise, in pixel units", 0.0),
    "Uniform noise": ("amplitude of the noise, in pixel units", 0.0),
    "Down- and up-sampling": ("factor of down-sampling", 1.0),
}


def label_styles(results: Results) -> dict[str, list[Any]]:
    """The colours of each label in both themes and the shape of its marker, as in the figures."""
    methods = [results.run(label).config.method.method for label in results.groups]
    return {
        "light": [figures.colour(label, "light") for label in results.groups],
        "dark": [figures.colour(label, "dark") for label in results.groups],
        "shapes": [list(METHODS).index(method) for method in methods],
    }


def accuracy_figures(results: Results) -> list[ReportFigure]:
    """Accuracy by level, one figure for each family with at least two levels."""
    by_family = families(results.table.perturbations)
    shown = [name for name, specs in by_family.items() if name in _AXES and len(specs) > 1]
    return [_accuracy_curves(results, name, by_family[name], len(shown) > 1) for name in shown]


def _accuracy_curves(
    results: Results, family: str, specs: list[str], several: bool
) -> ReportFigure:
    table, (axis, clean_level) = results.table, _AXES[family]
    specs = [*(["clean"] if "clean" in table.perturbations else []), *specs]
    levels = {spec: clean_level if spec == "clean" else numbers(spec)[-1] for spec in specs}
    curves: dict[str, dict[str, Any]] = {}
    for label in table.labels:
        cells = {s: table.cells[label, s] for s in specs if (label, s) in table.cells}
        if cells:
            curves[label] = {
                "level": [levels[s] for s in cells],
                "mean": [c.mean for c in cells.values()],
                "std": [_std(c) or 0.0 for c in cells.values()],
            }
    ticks = {levels[s]: strength(s) for s in specs}
    noises = {run.config.method.noise for run in results.runs.values()}
    train_level = numbers(noises.pop())[-1] if _is_level(noises, family) else None
    draw = partial(
        figures.accuracy_curves, curves, level=axis, names=ticks, train_level=train_level
    )
    spans = "; ".join(
        f"{label} from {100 * c['mean'][0]:.1f} % to {100 * c['mean'][-1]:.1f} %"
        for label, c in curves.items()
    )
    return ReportFigure(
        "accuracy-curves" + (f"-{file_name(family)}" if several else ""),
        draw,
        f"Accuracy by level, {family}: {spans}.",
        _accuracy_caption(results, list(curves), specs),
    )


def _accuracy_caption(results: Results, labels: Iterable[str], specs: Sequence[str]) -> str:
    over = "trainings" if results.table.seeds > 1 else "noise draws"
    bands = f"Bands: ± one standard deviation over {over}."
    at_chance = [label for label in labels if label in results.table.at_chance]
    learned = [label for label in labels if label not in at_chance]
    if not learned:
        verb = "is" if len(at_chance) == 1 else "are"
        return f"{names(at_chance)} {verb} at chance, so a flat line means nothing here. {bands}"
    text = "A high, flat line means a robust model"
    text += f", unless it is at chance: {names(at_chance)}" if at_chance else ""
    return f"{text}. {_losses(results, learned, specs[0], specs[-1])}{bands}"


def _losses(results: Results, labels: Iterable[str], start: str, end: str) -> str:
    """Who loses the least and who the most accuracy between two conditions, with a space at the
    end; empty if that is not a significant difference, if an accuracy does not fall, or if the one
    that loses least is less accurate all the same."""
    changes = _changes(results, labels, start, end)
    cells = changes.column(end) if changes else {}
    if len(cells) < 2:
        return ""
    least, most = (choose(cells, key=lambda x: cells[x].mean) for choose in (max, min))
    accuracies = results.table.column(end)
    if cells[least].mean >= 0 or accuracies[least].mean <= accuracies[most].mean:
        return ""
    if cells[most].mark != "":
        return ""
    first, second = points(-cells[least].mean, -cells[most].mean)
    return (
        f"From {heading(start)} to {heading(end)}, {names([least])} loses {first} points and "
        f"{names([most])} significantly more, {second}. "
    )


def _changes(results: Results, labels: Iterable[str], start: str, end: str) -> Table | None:
    """A table of accuracies under `end` minus those of the same trainings under `start`."""
    runs = {key for label in labels for key in results.groups[label]}
    rows = [row for row in results.rows[results.weights] if row["run"] in runs]
    before: dict[str, list[float]] = {}
    for row in rows:
        if row["perturbation"] == start:
            before.setdefault(row["run"], []).append(row["value"])
    changed = [
        {**row, "value": row["value"] - float(np.mean(before[row["run"]]))}
        for row in rows
        if row["perturbation"] == end and row["run"] in before
    ]

    def correct(key: str, weights: str, _: str) -> NDArray[Any] | None:
        first, last = (results.correct(key, weights, spec) for spec in (start, end))
        return None if first is None or last is None else last - first.mean(axis=0)

    return tables.build(changed, by=results.by, correct=correct) if changed else None


def _is_level(noises: set[str], family: str) -> bool:
    """Whether the training noise is one level of this family."""
    return len(noises) == 1 and list(families(noises)) == [family] and ".." not in min(noises)


def _std(cell: Cell) -> float | None:
    return cell.draws_std if cell.seeds_std is None else cell.seeds_std


def corruption_figures(results: Results) -> list[ReportFigure]:
    """Accuracy on clean images and under each corruption; empty if they were not tested."""
    table = results.table
    if not table.corruptions:
        return []
    specs = [spec for spec in table.perturbations if is_clean(spec)] + list(table.corruptions)
    rows = ["clean images" if is_clean(spec) else severities.title(spec) for spec in specs]
    groups = [corruption_names(spec)[0] for spec in specs]
    accuracies = {
        label: [table.cells[label, spec].mean if (label, spec) in table.cells else np.nan
                for spec in specs]
        for label in table.labels
        if (label, severities.ALL) in table.cells
    }  # fmt: skip
    means = [f"{x} {table.percent(table.cells[x, severities.ALL].mean)} %" for x in accuracies]
    draw = partial(figures.corruptions, accuracies, rows, groups)
    alt = f"Accuracy under each of 15 corruptions; mean over all: {listed(means)}."
    caption = f"Mean accuracy over the severities 1 to 5. {hardest_corruptions(table)}"
    return [ReportFigure("corruptions", draw, alt, caption)]


def hardest_corruptions(table: Table) -> str:
    """Under which corruption each label is least accurate."""
    labels_of: dict[str, list[str]] = {}
    for label in table.labels:
        means = {
            s: table.cells[label, s].mean for s in severities.MEANS if (label, s) in table.cells
        }
        if means:
            hardest = severities.title(min(means, key=lambda spec: means[spec]))
            labels_of.setdefault(hardest, []).append(label)
    if len(labels_of) == 1:
        return f"Accuracy is lowest under {next(iter(labels_of))}."
    return (
        f"Accuracy is lowest under {listed(f'{x} for {names(y)}' for x, y in labels_of.items())}."
    )


def training_figures(results: Results) -> list[ReportFigure]:
    """Loss and accuracy by epoch, of the first training of each label."""
    metrics = {label: results.run(label).metrics() for label in results.table.labels}
    metrics = {label: rows for label, rows in metrics.items() if len(rows) > 1}  # else no line
    if not metrics:
        return []
    accuracies = [
        f"`{label}` {100 * rows[-1]['val_accuracy']:.1f} %"
        for label, rows in metrics.items()
        if "val_accuracy" in rows[-1]
    ]
    final = f" Validation accuracy after the last epoch: {listed(accuracies)}."
    final = final if accuracies else ""
    caption = (
        "The losses of different methods have different terms, so only their shapes are comparable."
        + final
    )
    alt = f"Training loss and accuracy by epoch of {names(metrics)}.{final}"
    draw = partial(figures.training_curves, metrics)
    return [ReportFigure("training-curves", draw, alt, caption)]


def class_breakdown(results: Results) -> dict[str, Any] | None:
    """For each condition and label: recall of each class, and the confusion matrix or, above
    `MATRIX_CLASSES` classes, its largest entries. None if there are no predictions."""
    labels, classes = list(results.table.labels), results.classes
    conditions = []
    for spec in results.table.perturbations:
        counts = {label: results.confusion(label, spec) for label in labels}
        counts = {label: matrix for label, matrix in counts.items() if matrix is not None}
        if counts:
            conditions.append(_condition(spec, labels, counts, len(classes)))
    if not conditions:
        return None
    widest = results.table.widest_gap() or "clean"
    specs = [condition["spec"] for condition in conditions]
    truth = results.true_labels(results.weights)
    images = None if truth is None else np.bincount(truth, minlength=len(classes)).tolist()
    return {
        "labels": labels,
        "classes": classes,
        "conditions": conditions,
        "start": specs.index(widest) if widest in specs else 0,
        "label": len(labels) - 1,
        "images": images,  # test images of each class
    }


class WeakClass(NamedTuple):
    """A class with low recall: its name, its recall on clean images if known, that under noise, and
    the class that it is most often taken for, with its share."""

    name: str
    clean: float | None
    noisy: float
    taken_for: str
    share: float


def weak_classes(breakdown: dict[str, Any], label: str, count: int = 5) -> list[WeakClass]:
    """The classes of which a label recognises the fewest images where accuracies differ most, at
    most `count`, fewest first; those without an error are left out.

    Args:
        breakdown: as `class_breakdown` gives it.
        label: the method or run.
        count: how many.
    """
    i = breakdown["labels"].index(label)
    noisy = breakdown["conditions"][breakdown["start"]]
    clean = next((c for c in breakdown["conditions"] if is_clean(c["spec"])), noisy)

    def by_class(condition: dict[str, Any]) -> dict[int, float]:
        pairs = zip(condition["shown"], condition["recall"][i] or (), strict=False)
        return {number: recall for number, recall in pairs if recall is not None}

    recall_of, on_clean, classes = by_class(noisy), by_class(clean), breakdown["classes"]
    weakest = sorted((c for c in recall_of if recall_of[c] < 1), key=lambda c: recall_of[c])[:count]
    taken_for = {}
    for true, predicted, share in noisy["pairs"][i] or ():  # the largest first
        taken_for.setdefault(true, (classes[predicted], share))
    return [
        WeakClass(classes[c], on_clean.get(c), recall_of[c], *taken_for.get(c, ("", 0.0)))
        for c in weakest
    ]


def _condition(
    spec: str, labels: list[str], counts: dict[str, NDArray[np.int64]], count: int
) -> dict[str, Any]:
    recall = {label: recalls(matrix) for label, matrix in counts.items()}
    shown = np.arange(count)
    if count > MATRIX_CLASSES:
        mean = np.mean(list(recall.values()), axis=0)  # NaN for a class without images: last
        shown = np.argsort(mean, kind="stable")[:MATRIX_CLASSES]

    def shown_recalls(label: str) -> list[float | None]:
        of_label = recall[label][shown].tolist()
        return [None if np.isnan(value) else round(value, 4) for value in of_label]

    small = count <= MATRIX_CLASSES
    return {
        "spec": spec,
        "title": heading(spec),
        "shown": shown.tolist(),
        "recall": [shown_recalls(x) if x in recall else None for x in labels],
        "matrix": [counts[x].tolist() if x in counts and small else None for x in labels],
        "pairs": [confusions(counts[x], 10) if x in counts else None for x in labels],
    }


def recalls(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share of each true class that was predicted correctly; NaN for a class without images.

    >>> recalls(np.array([[3, 1], [0, 2]])).tolist()
    [0.75, 1.0]
    """
    total = counts.sum(axis=1)
    return np.where(total > 0, counts.diagonal() / np.maximum(total, 1), np.nan)


def confusions(counts: NDArray[np.int64], limit: int) -> list[tuple[int, int, float]]:
    """The most frequent confusions: (true class, predicted class, share of the true class).

    >>> confusions(np.array([[3, 1], [0, 2]]), 5)
    [(0, 1, 0.25)]
    """
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(share, 0.0)
    order = np.argsort(-share, axis=None, kind="stable")[:limit]
    rows, columns = np.unravel_index(order, share.shape)
    largest = zip(rows.tolist(), columns.tolist(), share[rows, columns].tolist(), strict=True)
    return [(i, j, round(s, 4)) for i, j, s in largest if s > 0]


def class_figures(results: Results) -> list[ReportFigure]:
    """Files of what the page shows with controls: recall by class, and a matrix for each label."""
    spec, classes = results.table.widest_gap() or results.table.perturbations[0], results.classes
    counts = {x: results.confusion(x, spec) for x in results.table.labels}
    counts = {x: matrix for x, matrix in counts.items() if matrix is not None}
    if not counts or len(classes) > _FIGURE_CLASSES:
        return []
    total = np.stack(list(counts.values())).sum(axis=(0, 2))
    present = np.flatnonzero(total)  # classes with test images
    recall = {label: recalls(matrix)[present] for label, matrix in counts.items()}
    present_names = [classes[i] for i in present]
    condition = heading(spec)
    draw = partial(figures.per_class, recall, present_names)
    report_figures = [ReportFigure("per-class", draw, f"Recall of each class, {condition}.", "")]
    for label, matrix in counts.items():
        draw = partial(figures.confusion, matrix, classes, title=f"{label}, {condition}")
        alt = f"Confusion matrix of {label}, {condition}."
        report_figures.append(ReportFigure(f"confusion-{file_name(label)}", draw, alt, ""))
    return report_figures


def file_name(text: str) -> str:
    """A file name of letters, digits and hyphens.

    >>> file_name("runs/Both s0")
    'runs-both-s0'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
