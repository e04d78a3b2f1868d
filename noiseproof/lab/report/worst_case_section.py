"""The report's section on the worst case: certified accuracy by radius, and accuracy under attack.

Certificates give a lower limit for the smoothed model, attacks an upper limit for the model itself.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from noiseproof.lab import figures
from noiseproof.lab.evaluation.attacks import attack_rows
from noiseproof.lab.evaluation.certificates import (
    CertificateRow,
    Smoothing,
    certificates,
    certified_radii,
)
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.results import Results
from noiseproof.lab.report.sections import Section, named_percents
from noiseproof.lab.runs import RunFolder
from noiseproof.smoothing import largest_radius


def worst_case_section(results: Results) -> Section | None:
    """The section; None if no run was certified or attacked."""
    runs = {label: results.run(label) for label in results.table.labels}
    attacked = _attack_sentences(runs, results)
    certified = {label: certificates(run, results.weights) for label, run in runs.items()}
    report_figures = [
        _certified_figure(sigma, certified)
        for sigma in sorted({s.sigma for found in certified.values() for s in found})
    ]
    if not (attacked or report_figures):
        return None
    intro = (
        "Robustness to noise is not robustness to an attacker: noise is random, while an attacker "
        "looks for the worst change of an image."
    )
    return Section("worst-case", "Worst case", " ".join([intro, *attacked]), report_figures)


def worst_case_rows(results: Results) -> list[CertificateRow]:
    """All rows that the section shows, for the commands that made them."""
    rows: list[CertificateRow] = []
    for label in results.table.labels:
        run = results.run(label)
        rows += attack_rows(run, results.weights).values()
        rows += [r for found in certificates(run, results.weights).values() for r in found]
    return rows


def _attack_sentences(runs: dict[str, RunFolder], results: Results) -> list[str]:
    """One sentence per attack."""
    rows = {label: attack_rows(run, results.weights) for label, run in runs.items()}
    sentences = []
    for name in dict.fromkeys(name for found in rows.values() for name in found):
        values = {label: found[name]["value"] for label, found in rows.items() if name in found}
        n = next(found[name]["n"] for found in rows.values() if name in found)
        norm, _, epsilon = name.partition(":")
        change = f"each pixel by at most {epsilon}"
        if norm == "l2":
            change = f"the image by at most {epsilon} in L2"
        sentences.append(
            f"Accuracy on {n:,} images under an attack that changes {change}: "
            f"{named_percents(values)}."
        )
    return sentences


def _certified_figure(
    sigma: float, certified: dict[str, dict[Smoothing, list[CertificateRow]]]
) -> ReportFigure:
    """Certified accuracy by radius at one σ; of several settings of a label, the one with the most
    samples. Labels are compared on the images that all of them have."""
    of_label: dict[str, tuple[Smoothing, list[CertificateRow]]] = {}
    for label, found in certified.items():
        same = [(s, rows) for s, rows in found.items() if s.sigma == sigma]
        if same:
            of_label[label] = max(same, key=lambda item: (item[0].samples, len(item[1])))
    shared = set.intersection(*({r["image"] for r in rows} for _, rows in of_label.values()))
    radii = {
        label: certified_radii([r for r in rows if r["image"] in shared])
        for label, (_, rows) in of_label.items()
    }
    settings = next(iter(of_label.values()))[0]
    half = round(largest_radius(sigma, settings.samples, settings.alpha) / 2, 2)
    shares = {label: float(np.mean(r >= half)) for label, r in radii.items()}
    samples = sorted({s.samples for s, _ in of_label.values()})
    alphas = sorted({s.alpha for s, _ in of_label.values()})
    at_half = f"at radius {half:g}, {named_percents(shares)}"
    return ReportFigure(
        f"certified-accuracy-{sigma:g}",
        partial(figures.certified_accuracy, radii),
        f"Certified accuracy by L2 radius, σ {sigma:g}: {at_half}.",
        "A line that stays high to the right is robust to every change of that size: the share of "
        "images that the smoothed model classifies correctly however they are changed within the "
        f"radius; {at_half}. Randomised smoothing with σ {sigma:g}, "
        f"{' or '.join(f'{n:,}' for n in samples)} samples, "
        f"α {' or '.join(f'{a:g}' for a in alphas)}, {len(shared):,} test images.",
    )
