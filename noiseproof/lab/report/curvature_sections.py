"""The sections of a report that show an analysis, and of them curvature and the loss surface.

Each section is there only where the runs were analysed, and shows the runs that were. Captions
state what was measured; which method looks better in a figure is never written beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noiseproof.lab import figures
from noiseproof.lab.analysis.correlation import count_groups, retained_share
from noiseproof.lab.figures.curvature import lowest
from noiseproof.lab.report import feature_sections as layers
from noiseproof.lab.report import theory_section as proofs
from noiseproof.lab.report.figure_files import Plate, Theme
from noiseproof.lab.report.results import Results
from noiseproof.lab.report.sections import (
    Analyses,
    Section,
    arrays,
    each,
    extremes,
    fact,
    known,
    percents,
    spoken,
)
from noiseproof.lab.report.summary import first_alone, listed
from noiseproof.perturb.text import heading

__all__ = ["sections"]

Curvatures = Mapping[str, NDArray[Any]]


def sections(results: Results) -> list[Section]:
    analyses = known(results)
    made = [
        _curvature(analyses),
        _surface(analyses, results.classes),
        layers.features(analyses, results.classes),
        layers.geometry(analyses),
        proofs.theory(analyses),
    ]
    first = first_alone(results)
    return [s._replace(intro=s.intro + first) for s in made if s is not None]


def _curvature(analyses: Analyses) -> Section | None:
    found = arrays(analyses, "curvature")
    if not found:
        return None
    bends = {label: values["finite_difference"] for label, values in found.items()}
    twice = {label: values["hessian"] for label, values in found.items() if "hessian" in values}
    smooth = {label: values for label, values in twice.items() if not np.isnan(values).any()}
    space = str(fact(analyses, "curvature", "space"))
    n = max(len(values) for values in bends.values())
    plates = [
        _boxes("curvature-boxplot", bends, "curvature Λ", space),
        Plate(
            "curvature-distribution",
            lambda theme: figures.curvature_distribution(bends, space=space, theme=theme),
            f"Cumulative distribution of input curvature of {listed(list(bends))}.",
            "The share of test samples below each curvature; a line further left is a flatter "
            "model. What lies on the left edge is flat to rounding.",
        ),
    ]
    estimates = "finite differences"
    if smooth:
        plates.insert(1, _between_kinks(bends, smooth, space))
        estimates += ", and between the kinks of the network by Hessian-vector products"
    plates += _counts(analyses, bends, space) + _steps(analyses, space)
    intro = (
        "Input curvature Λ is the sum of the squared eigenvalues of the Hessian of the loss: how "
        f"sharply the loss bends around an image. It was estimated for {n:,} test samples by "
        f"{estimates}; coordinates: {space}."
    )
    return Section("curvature", "Curvature", intro, plates, [], [])


def _boxes(name: str, bends: Curvatures, quantity: str, space: str) -> Plate:
    medians = _medians(bends)
    means = {label: float(lowest(values, 0.9).mean()) for label, values in bends.items()}
    return Plate(
        name,
        lambda theme: figures.curvature_boxplot(bends, quantity=quantity, space=space, theme=theme),
        f"Box plot of input {quantity} by method; medians of all samples: {spoken(medians)}.",
        "Boxes hold the middle half of the lowest 90 % of samples, whiskers reach from 5 % to "
        f"95 %. The mean of these 90 %, which the most bent make, is {extremes(means)}; "
        f"the median of all samples is {extremes(medians)}.",
    )


def _between_kinks(bends: Curvatures, smooth: Curvatures, space: str) -> Plate:
    """The boxes of the other estimate, and whether it finds the same method flattest."""
    plate = _boxes("curvature-between-kinks", smooth, "curvature Λ between kinks", space)
    said = "The same by Hessian-vector products, which see the smooth piece of the network that an "
    said += f"image lies in, and none of its kinks. {plate.caption}"
    if len(smooth) > 1:
        by_step = _medians({label: bends[label] for label in smooth})
        flattest = [min(x, key=lambda label: x[label]) for x in (by_step, _medians(smooth))]
        if flattest[0] == flattest[1]:
            said += f" By the median, {flattest[0]} is the flattest for either estimate."
        else:
            said += f" Which method is flattest by the median hangs on the estimate: {flattest[0]} "
            said += f"by finite differences, {flattest[1]} between kinks."
    return plate._replace(caption=said)


def _medians(bends: Curvatures) -> dict[str, float]:
    return {label: float(np.median(values)) for label, values in bends.items()}


def _counts(analyses: Analyses, bends: Mapping[str, Any], space: str) -> list[Plate]:
    found = arrays(analyses, "counts")
    kept: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for label, values in found.items():
        for spec, hits, draws in zip(
            values["noise"], values["counts"], values["draws"], strict=True
        ):
            title = heading(str(spec))
            kept.setdefault(title, {})[label] = retained_share(bends[label], hits / draws)._asdict()
            groups.setdefault(title, {})[label] = count_groups(
                bends[label], hits, int(draws)
            )._asdict()
    if not kept:
        return []
    noise, first = next(iter(kept.items()))
    halves = {x: float(np.interp(0.5, r["share"], r["accuracy"])) for x, r in first.items()}
    every = {x: float(r["accuracy"][-1]) for x, r in first.items()}
    r_groups = {title: [g["r_groups"] for g in row.values()] for title, row in groups.items()}
    r_samples = {title: [g["r_samples"] for g in row.values()] for title, row in groups.items()}
    said = "; ".join(
        f"at {title}, Pearson's r is {_between(r_groups[title])} over groups and "
        f"{_between(r_samples[title])} over samples"
        for title in groups
    )
    return [
        Plate(
            "accuracy-vs-retained-share",
            lambda theme: figures.accuracy_vs_retained_share(kept, theme=theme),
            f"Accuracy on the samples of lowest curvature; at {noise}, half: {percents(halves)}.",
            "Accuracy under noise on the flattest samples alone: a line that falls to the right "
            f"means that curvature tells which images are at risk. At {noise}, the flattest half "
            f"has {percents(halves)}; all have {percents(every)}.",
        ),
        Plate(
            "correct-count-vs-curvature",
            lambda theme: figures.correct_count_vs_curvature(groups, space=space, theme=theme),
            f"Mean curvature of the samples recognised k times of the noise draws; {said}.",
            "Samples grouped by how many noisy copies were recognised, and their mean curvature: "
            f"{said}. Negative: bent samples fail more often.",
        ),
    ]


def _between(values: list[float]) -> str:
    """
    >>> _between([-0.5, 0.25]), _between([0.5]), _between([float("nan")])
    ('between -0.50 and 0.25', '0.50', 'undefined')
    """
    finite = [v for v in values if np.isfinite(v)]
    if not finite:
        return "undefined"
    low, high = f"{min(finite):.2f}", f"{max(finite):.2f}"
    return low if low == high else f"between {low} and {high}"


def _steps(analyses: Analyses, space: str) -> list[Plate]:
    found = arrays(analyses, "steps")
    if not found:
        return []
    used = next(iter(analyses[x] for x in found)).settings("steps")["step"]
    metric = "median finite difference / Hessian"
    ratios = each({x: analyses[x] for x in found}, "steps", metric, step=used)

    def draw(theme: Theme) -> Any:
        return figures.step_study(found, used=used, space=space, theme=theme)

    said = f"At the step used here, {used:g}, their median ratio is: {spoken(ratios)}"
    return [
        Plate(
            "step-study", draw, f"Curvature estimates against the step. {said}.",
            "Two estimates of the same curvature. On 1 they agree; finite differences also see the "
            "kinks of a ReLU network, Hessian-vector products do not, and a large step leaves the "
            f"neighbourhood of the image. {said}.",
        )
    ]  # fmt: skip


def _surface(analyses: Analyses, classes: list[str]) -> Section | None:
    mapped = arrays(analyses, "surface")
    if len({tuple(values["index"]) for values in mapped.values()}) != 1:
        return None  # nothing, or inputs that cannot be laid side by side
    first = next(iter(mapped.values()))
    shares = {label: float(np.mean(values["margin"] > 0)) for label, values in mapped.items()}
    names = [classes[int(i)] for i in first["label"]]

    def draw(theme: Theme) -> Any:
        return figures.loss_surface(mapped, images=first.get("image"), names=names, theme=theme)

    said = f"The share of these planes that is classified rightly: {percents(shares)}"
    which = zip(first["index"], names, strict=True)
    places = listed([f"{int(i) + 1} ({name})" for i, name in which])
    plate = Plate(
        "loss-surface", draw, f"The negative loss around a few test images. {said}.",
        f"The negative loss around test images {places}, the dots, along each one's gradient and a "
        f"random direction across; one scale a row. White lines part right from wrong. {said}.",
    )  # fmt: skip
    intro = "A few images, drawn at random and the same for all, and a plane around each in pixels."
    return Section("surface", "The loss around images", intro, [plate], [], [])
