"""The report's sections on input curvature and on the loss surface.

A section shows the runs that were analysed. Captions state measured values; which method does
better is computed, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab import figures
from noiseproof.lab.analysis.correlation import count_groups, lowest, retained_share
from noiseproof.lab.analysis.curvature import RESOLVED_LOSS
from noiseproof.lab.evaluation.words import listed, names
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.sections import (
    Analyses,
    Section,
    arrays,
    fact,
    lowest_and_highest,
    named,
    named_percents,
    rounded,
    values,
)
from noiseproof.perturb.text import heading

Curvatures = Mapping[str, NDArray[Any]]


def curvature_section(analyses: Analyses) -> Section | None:
    measured = arrays(analyses, "curvature")
    if not measured:
        return None
    curvatures = {label: content["finite_difference"] for label, content in measured.items()}
    hessian = {x: content["hessian"] for x, content in measured.items() if "hessian" in content}
    hessian = {label: v for label, v in hessian.items() if not np.isnan(v).any()}
    space = str(fact(analyses, "curvature", "space"))
    count = max(len(v) for v in curvatures.values())
    losses = {label: content["loss"] for label, content in measured.items() if "loss" in content}
    report_figures = [_box_plot("curvature-boxplot", curvatures, "curvature Λ", space, losses)]
    estimators = "finite differences"
    if hessian:
        report_figures.append(_between_kinks(curvatures, hessian, space, losses))
        estimators += " and, between the kinks of the network, by Hessian-vector products"
    report_figures.append(
        ReportFigure(
            "curvature-distribution",
            partial(figures.curvature_distribution, curvatures, space=space),
            f"Cumulative distribution of input curvature of {names(curvatures)}.",
            "Share of test samples below each curvature; a line further left means lower "
            "curvature. At the left edge, the curvature is zero to rounding.",
        )
    )
    report_figures += _count_figures(analyses, curvatures, space)
    report_figures += _step_figures(analyses, space)
    intro = (
        "Input curvature Λ is the sum of the squared eigenvalues of the Hessian of the loss with "
        "respect to the image: the larger it is, the faster the gradient changes around the image. "
        f"It was estimated for {count:,} test samples by {estimators}. Coordinates: {space}."
    )
    return Section("curvature", "Curvature", intro, report_figures)


def _lost(losses: Curvatures, labels: Iterable[str], share: float) -> list[str]:
    """The labels for which this share of samples has a loss too small for their curvature."""
    return [x for x in labels if x in losses and np.quantile(losses[x], share) < RESOLVED_LOSS]


def _box_plot(
    name: str, curvatures: Curvatures, quantity: str, space: str, losses: Curvatures
) -> ReportFigure:
    medians = _medians(curvatures)
    means = {label: float(lowest(v, 0.9).mean()) for label, v in curvatures.items()}
    lost, lost_means = (_lost(losses, curvatures, share) for share in (0.5, 0.9))
    stated = {label: median for label, median in medians.items() if label not in lost}
    text = f"; medians of all samples: {named(stated)}" if stated else ""
    return ReportFigure(
        name,
        partial(figures.curvature_boxplot, curvatures, quantity=quantity, space=space),
        f"Box plot of input {quantity} by method{text}.",
        "Boxes show the quartiles of the lowest 90 % of samples, whiskers the 5th and 95th "
        "percentile. The mean of the lowest 90 %, dominated by its high-curvature samples, is "
        f"{lowest_and_highest(means, lost_means)}. The median of all samples is "
        f"{lowest_and_highest(medians, lost)}.",
    )


def _between_kinks(
    curvatures: Curvatures, hessian: Curvatures, space: str, losses: Curvatures
) -> ReportFigure:
    """The box plot of the other estimator, and whether it ranks the same method lowest."""
    figure = _box_plot(
        "curvature-between-kinks", hessian, "curvature Λ between kinks", space, losses
    )
    text = (
        "The same with Hessian-vector products, which measure the smooth piece of the network "
        f"around an image and do not see its kinks. {figure.caption}"
    )
    by_difference = _medians({label: curvatures[label] for label in hessian})
    first, second = (_lowest_label(m) for m in (by_difference, _medians(hessian)))
    if first and second and len(hessian) > 1 and not _lost(losses, hessian, 0.5):
        text += (
            f" Both estimators give `{first}` the lowest median."
            if first == second
            else f" Which method has the lowest median depends on the estimator: `{first}` with "
            f"finite differences, `{second}` with Hessian-vector products."
        )
    return figure._replace(caption=text)


def _lowest_label(numbers: Mapping[str, float]) -> str | None:
    """The label with the lowest number; None if another is the same to two digits."""
    least = rounded(min(numbers.values()))
    labels = [label for label, value in numbers.items() if rounded(value) == least]
    return labels[0] if len(labels) == 1 else None


def _medians(curvatures: Curvatures) -> dict[str, float]:
    return {label: float(np.median(v)) for label, v in curvatures.items()}


def _count_figures(analyses: Analyses, curvatures: Curvatures, space: str) -> list[ReportFigure]:
    retained: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for label, content in arrays(analyses, "counts").items():
        curvature = curvatures[label]
        for text, counts, draws in zip(
            content["noise"], content["counts"], content["draws"], strict=True
        ):
            noise = heading(str(text))
            curve = retained_share(curvature, counts / draws)
            retained.setdefault(noise, {})[label] = curve._asdict()
            group = count_groups(curvature, counts, int(draws))
            groups.setdefault(noise, {})[label] = group._asdict()
    if not retained:
        return []
    noise, curves = next(iter(retained.items()))
    halves = {x: float(np.interp(0.5, c["share"], c["accuracy"])) for x, c in curves.items()}
    overall = {label: float(curve["accuracy"][-1]) for label, curve in curves.items()}
    stated = [_correlations(noise, of_noise) for noise, of_noise in groups.items()]
    correlations = "; ".join(filter(None, stated))
    return [
        ReportFigure(
            "accuracy-vs-retained-share",
            partial(figures.accuracy_vs_retained_share, retained),
            "Accuracy on the samples with the lowest curvature; on the lower half, at "
            f"{noise}: {named_percents(halves)}.",
            "Accuracy under noise on the samples with the lowest curvature. A line that falls to "
            "the right means that high-curvature samples are at risk. Accuracy at "
            f"{noise} on the lower half by curvature: {named_percents(halves)}; on all samples: "
            f"{named_percents(overall)}.",
        ),
        ReportFigure(
            "correct-count-vs-curvature",
            partial(figures.correct_count_vs_curvature, groups, space=space),
            "Mean curvature of the samples that are classified correctly in k noise draws"
            + (f"; {correlations}." if correlations else "."),
            "Mean curvature of samples, grouped by the number of noise draws in which they are "
            "classified correctly"
            + (
                f": {correlations}. A negative r means that high-curvature samples fail more often."
                if correlations
                else "."
            ),
        ),
    ]


def _correlations(noise: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """The correlations at one noise that are not NaN, in words; empty if there are none.

    >>> few, many = {"r_groups": np.nan, "r_samples": -0.5}, {"r_groups": -0.9, "r_samples": -0.4}
    >>> _correlations("σ=0.2", {"both": few})
    "at σ=0.2, Pearson's r is −0.50 over samples"
    >>> _correlations("σ=0.2", {"both": many})
    "at σ=0.2, Pearson's r is −0.90 over groups and −0.40 over samples"
    >>> _correlations("σ=2", {"a": few, "b": many})
    "at σ=2, Pearson's r is −0.90 over groups (only `b`) and between −0.50 and −0.40 over samples"
    """
    parts = []
    for name, what in (("r_groups", "groups"), ("r_samples", "samples")):
        finite = {x: group[name] for x, group in groups.items() if np.isfinite(group[name])}
        if finite:
            some = f" (only {names(finite)})" if len(finite) < len(groups) else ""
            parts.append(f"{_range(list(finite.values()))} over {what}{some}")
    return f"at {noise}, Pearson's r is {listed(parts)}" if parts else ""


def _range(finite: list[float]) -> str:
    """
    >>> _range([-0.5, 0.25]), _range([0.5])
    ('between −0.50 and 0.25', '0.50')
    """
    low, high = (f"{value:.2f}".replace("-", "−") for value in (min(finite), max(finite)))
    return low if low == high else f"between {low} and {high}"


def _step_figures(analyses: Analyses, space: str) -> list[ReportFigure]:
    studies = arrays(analyses, "steps")
    if not studies:
        return []
    used = analyses[next(iter(studies))].settings("steps")["step"]
    ratios = values(analyses, "steps", "median finite difference / Hessian", step=used)
    text = f"At the step used, {used:g}, the median ratio is {named(ratios)}"
    return [
        ReportFigure(
            "step-study",
            partial(figures.step_study, studies, used=used, space=space),
            f"Ratio of two curvature estimates, by step. {text}.",
            "Ratio of two estimates of the same curvature, by the step of the finite differences. "
            "At 1 they agree. Finite differences also measure the kinks of a ReLU network, "
            "Hessian-vector products do not; and a large step leaves the neighbourhood of the "
            f"image. {text}.",
        )
    ]


def surface_section(analyses: Analyses, classes: list[str]) -> Section | None:
    surfaces = arrays(analyses, "surface")
    if len({tuple(content["index"]) for content in surfaces.values()}) != 1:
        return None  # not measured, or on different images
    first = next(iter(surfaces.values()))
    shares = {label: float(np.mean(content["margin"] > 0)) for label, content in surfaces.items()}
    classes_shown = [classes[int(i)] for i in first["label"]]
    correct = f"Share of these planes that is classified correctly: {named_percents(shares)}"
    positions = zip(first["index"], classes_shown, strict=True)
    images = listed([f"{int(i) + 1} ({name})" for i, name in positions])
    figure = ReportFigure(
        "loss-surface",
        partial(figures.loss_surface, surfaces, images=first.get("image"), names=classes_shown),
        f"The negative loss around a few test images. {correct}.",
        f"The negative loss around test images {images}, marked by dots, along the gradient of "
        "each and a random orthogonal direction; one colour scale per row. White lines are "
        f"decision boundaries. {correct}.",
    )
    intro = (
        "The loss on a plane in pixel space through each of a few test images, which were drawn at "
        "random and are the same for all models."
    )
    return Section("surface", "Loss surface", intro, [figure])
