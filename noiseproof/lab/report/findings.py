"""The figures of a report that need no analysis: accuracy against level, classes, training.

Captions say what to see; where they state a result, it is computed here from the rows.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from noiseproof.lab import figures
from noiseproof.lab.config import METHODS
from noiseproof.lab.evaluation.tables import Cell
from noiseproof.lab.report.accuracy_sections import recalls
from noiseproof.lab.report.figure_files import Plate, Theme
from noiseproof.lab.report.results import Results
from noiseproof.lab.report.summary import listed
from noiseproof.perturb.text import families, heading, numbers, strength

__all__ = ["accuracy", "classes", "looks", "training"]

_AXES = {  # families with one number that grows from clean: its meaning, and where clean stands
    "Gaussian noise": ("standard deviation of the noise, in pixel units", 0.0),
    "Uniform noise": ("amplitude of the noise, in pixel units", 0.0),
    "Down- and up-sampling": ("factor of down-sampling", 1.0),
}
_MOST_CLASSES = 60  # beyond it a matrix cannot be read


def looks(results: Results) -> dict[str, list[Any]]:
    """Colours of every label in both themes and the shape of its mark, as the figures have them."""
    labels = list(results.groups)
    return {
        "light": [figures.colour(label, "light") for label in labels],
        "dark": [figures.colour(label, "dark") for label in labels],
        "shapes": [list(METHODS).index(results.method(label)) for label in labels],
    }


def accuracy(results: Results) -> list[Plate]:
    """Accuracy against the level, a figure for each family that has two levels or more."""
    found = families(results.table.perturbations)
    drawn = [name for name, specs in found.items() if name in _AXES and len(specs) > 1]
    return [_curves(results, name, found[name], len(drawn) > 1) for name in drawn]


def _curves(results: Results, family: str, specs: list[str], several: bool) -> Plate:
    table, (axis, zero) = results.table, _AXES[family]
    specs = [*(["clean"] if "clean" in table.perturbations else []), *specs]
    levels = {spec: zero if spec == "clean" else numbers(spec)[-1] for spec in specs}
    curves: dict[str, dict[str, Any]] = {}
    for label in table.labels:
        cells = {s: table.cells[label, s] for s in specs if (label, s) in table.cells}
        if cells:
            curves[label] = {
                "level": [levels[s] for s in cells],
                "mean": [c.mean for c in cells.values()],
                "std": [_spread(c) or 0.0 for c in cells.values()],
            }
    names = {levels[s]: strength(s) for s in specs}
    trained = {run.config.method.noise for run in results.runs.values()}
    train_level = numbers(trained.pop())[-1] if _marks(trained, family) else None

    def draw(theme: Theme) -> Any:
        return figures.accuracy_curves(
            curves, level=axis, names=names, train_level=train_level, theme=theme
        )

    name = "accuracy-curves" + (f"-{safe(family)}" if several else "")
    return Plate(name, draw, f"Accuracy against level, {family}: {_spoken(curves)}.",
                 _curves_caption(results, curves, specs))  # fmt: skip


def _curves_caption(results: Results, curves: dict[str, Any], specs: list[str]) -> str:
    over = "trainings" if results.table.seeds > 1 else "noise draws"
    bands = f"Bands: ± one standard deviation over {over}."
    blind = [x for x in curves if x in results.table.guessing]  # as flat as they are useless
    lost = {x: 100 * (c["mean"][0] - c["mean"][-1]) for x, c in curves.items() if x not in blind}
    if not lost:
        said = "did no better than a guess, so that flat lines say nothing here"
        return f"{listed(blind)} {said}. {bands}"
    but = f", except where it is no better than a guess: {listed(blind)}" if blind else ""
    ends = f"From {heading(specs[0])} to {heading(specs[-1])}"
    words = f"{ends}, {listed([f'{x} loses {points:.1f}' for x, points in lost.items()])} points."
    if len(lost) > 2:
        order = sorted(lost, key=lambda x: lost[x])
        words = (
            f"{ends}, {order[0]} loses least, {lost[order[0]]:.1f} points, "
            f"and {order[-1]} most, {lost[order[-1]]:.1f}."
        )
    return f"A flat line is a robust model{but}. {words} {bands}"


def _spoken(curves: dict[str, Any]) -> str:
    spans = [
        f"{label} from {100 * c['mean'][0]:.1f} % to {100 * c['mean'][-1]:.1f} %"
        for label, c in curves.items()
    ]
    return "; ".join(spans)


def _marks(trained: set[str], family: str) -> bool:
    """Whether the training noise is one point of this family's axis."""
    return len(trained) == 1 and list(families(trained)) == [family] and ".." not in min(trained)


def _spread(cell: Cell) -> float | None:
    return cell.draws_std if cell.seeds_std is None else cell.seeds_std


def classes(results: Results) -> list[Plate]:
    """Figures of what the page shows as controls: recall by class, and a matrix a label."""
    spec, names = results.telling() or results.table.perturbations[0], results.classes
    known = {x: results.confusion(x, spec) for x in results.table.labels}
    counts = {x: c for x, c in known.items() if c is not None}
    if not counts or len(names) > _MOST_CLASSES:
        return []
    shares = {label: recalls(c) for label, c in counts.items()}
    total = np.stack(list(counts.values())).sum(axis=(0, 2))
    present = np.flatnonzero(total)  # classes with test images
    kept = [names[i] for i in present]
    where = heading(spec)

    def draw_classes(theme: Theme) -> Any:
        return figures.per_class({x: s[present] for x, s in shares.items()}, kept, theme=theme)

    made = [Plate("per-class", draw_classes, f"Recall of each class, {where}.", "")]
    for label, matrix in counts.items():

        def draw(theme: Theme, matrix: Any = matrix, label: str = label) -> Any:
            title = f"{label}, {where}"
            return figures.confusion(matrix, names, title=title, theme=theme)

        made.append(Plate(f"confusion-{safe(label)}", draw, f"Confusion of {label}, {where}.", ""))
    return made


def training(results: Results) -> list[Plate]:
    """Loss and accuracy by epoch; of several trainings, the first."""
    metrics = {label: results.run(label).metrics() for label in results.table.labels}
    metrics = {label: rows for label, rows in metrics.items() if len(rows) > 1}  # a line has two
    if not metrics:
        return []

    def draw(theme: Theme) -> Any:
        return figures.training_curves(metrics, theme=theme)

    ends = {x: rows[-1] for x, rows in metrics.items()}
    reached = [
        f"{x} {100 * r['val_accuracy']:.1f} %" for x, r in ends.items() if "val_accuracy" in r
    ]
    final = f" Validation accuracy after the last epoch: {listed(reached)}." if reached else ""
    caption = (
        "Losses of different methods have different terms, so that their heights cannot be "
        "compared; that they settle can." + final
    )
    alt = f"Training loss and accuracy by epoch of {listed(list(metrics))}.{final}"
    return [Plate("training-curves", draw, alt, caption)]


def safe(text: str) -> str:
    """A file name of letters, digits and hyphens.

    >>> safe("runs/Both s0")
    'runs-both-s0'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
