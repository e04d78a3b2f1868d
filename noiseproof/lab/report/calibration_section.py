"""The report's section on calibration: reliability diagrams, and what a temperature changed."""

from __future__ import annotations

from functools import partial

import numpy as np

from noiseproof.lab import figures
from noiseproof.lab.evaluation import severities
from noiseproof.lab.evaluation.tables import Table
from noiseproof.lab.evaluation.words import listed, names
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.results import Results
from noiseproof.lab.report.sections import Section, named_percents
from noiseproof.perturb.text import heading, is_clean

_FEWEST = 20  # images of a bin that is drawn

Sums = dict[str, list[float]]


def calibration_section(results: Results) -> Section | None:
    """The section; None if no row has calibration."""
    specs = _conditions(results.table)
    if not specs:
        return None
    bins = {spec: _bins(results, spec) for spec in specs}
    errors = {s: f"{heading(s)}: {named_percents(_errors(results.table, s))}" for s in specs}
    figure = ReportFigure(
        "reliability",
        partial(figures.reliability, {heading(s): b for s, b in bins.items()}, fewest=_FEWEST),
        "Share of right answers by their probability. Expected calibration error, "
        f"{'; '.join(errors.values())}.",
        "On the dashed line, answers with a probability of 80 % are right in 80 % of cases; below "
        "it, a model is more confident than accurate. Expected calibration error, "
        f"{errors[specs[-1]]}. Bins of fewer than {_FEWEST} images are left out.",
    )
    intro = (
        "Are the probabilities of the models right? Noise can make a model wrong without making it "
        "less confident."
    )
    return Section(
        "calibration", "Calibration", " ".join([intro, *_temperatures(results)]), [figure]
    )


def _conditions(table: Table) -> list[str]:
    """Clean images, the condition whose accuracies differ most, and that with the highest mean
    calibration error."""
    tested = [spec for spec in table.perturbations if _errors(table, spec)]
    noisy = [spec for spec in tested if not is_clean(spec)]
    worst = sorted(noisy, key=lambda spec: np.mean(list(_errors(table, spec).values())))[-1:]
    widest = [spec for spec in noisy if spec == table.widest_gap()]
    return list(dict.fromkeys([s for s in tested if is_clean(s)] + widest + worst))


def _errors(table: Table, spec: str) -> dict[str, float]:
    """The expected calibration error of each label that has it."""
    scores = {label: cell.calibration.get("ece") for label, cell in table.column(spec).items()}
    return {label: score for label, score in scores.items() if score is not None}


def _bins(results: Results, spec: str) -> dict[str, Sums]:
    """The bins of each label, summed over trainings, draws and the severities of a corruption."""
    found: dict[str, Sums] = {}
    wanted = set(severities.members(spec))
    rows = [row for row in results.rows[results.weights] if row["perturbation"] in wanted]
    for label in _errors(results.table, spec):
        own = [row["bins"] for row in rows if row["run"] in results.groups[label]]
        found[label] = {
            name: np.sum([bins[name] for bins in own], axis=0).tolist() for name in own[0]
        }
    return found


def _temperatures(results: Results) -> list[str]:
    """For each calibrated run next to the one that it was made from: where its calibration error is
    lower, and where it is higher."""
    table, weights = results.table, results.weights
    label_of = {results.run(label).weights_hash(weights): label for label in table.labels}
    sentences = []
    for label in table.labels:
        facts = results.run(label).info.get("calibrated", {})
        fitted = facts.get("weights", {}).get(weights)
        original = label_of.get(fitted["hash"]) if fitted else None
        if original is None:
            continue
        changes: dict[bool, list[str]] = {True: [], False: []}
        for spec in table.columns:
            errors = _errors(table, spec)
            if label in errors and original in errors:
                before, after = (table.percent(errors[x]) for x in (original, label))
                change = f"{heading(spec)} ({before} to {after} %)"
                changes[errors[label] < errors[original]].append(change)
        noise = listed([heading(spec) for spec in facts["noise"]])
        results_of = {"lower": changes[True], "not lower": changes[False]}
        outcome = [f"{word} for {listed(texts)}" for word, texts in results_of.items() if texts]
        sentences.append(
            f"{names([label])} is {names([original])} with its logits divided by "
            f"{fitted['temperature']:.2f}, which was fitted on {facts['images']:,} validation "
            f"images ({noise}). The calibration error is {', and '.join(outcome)}."
        )
    return sentences
