"""The report's sections on features: embeddings, separation by stage, penultimate geometry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from noiseproof.lab import figures
from noiseproof.lab.evaluation.words import listed, names
from noiseproof.lab.report.figure_files import ReportFigure
from noiseproof.lab.report.sections import Analyses, Section, arrays, named_percents, values
from noiseproof.perturb.text import heading, ordered


def features_section(analyses: Analyses, classes: list[str]) -> Section | None:
    embeddings = arrays(analyses, "embedding")
    separation = arrays(analyses, "separation")
    report_figures: list[ReportFigure] = []
    noisy = values(analyses, "separation", "k-NN accuracy", stage="features", data="noisy")
    knn = f" k-NN accuracy of the raw features on noisy images: {named_percents(noisy)}."
    knn = knn if noisy else ""
    if embeddings:
        first = next(iter(embeddings.values()))
        labels, noise = first["labels"], heading(str(first["noise"]))
        same = {x: v for x, v in embeddings.items() if np.array_equal(v["index"], first["index"])}
        points = {
            x: {"clean": v["features.clean"], "noisy": v["features.noisy"]} for x, v in same.items()
        }
        report_figures.append(
            ReportFigure(
                "tsne",
                partial(figures.tsne, points, labels, classes),
                f"t-SNE of penultimate features, clean and noisy, of {names(points)}.{knn}",
                f"t-SNE of the penultimate features of {len(labels):,} test images, clean and at "
                f"{noise}, fitted together. In t-SNE, the sizes of clusters and the distances "
                f"between them have little meaning.{knn}",
            )
        )
        report_figures += _stage_figures(same, labels, classes, noise)
    if separation and max(len(v["stages"]) for v in separation.values()) > 1:
        report_figures.append(
            ReportFigure(
                "stage-separation",
                partial(figures.stage_separation, separation),
                f"k-NN accuracy and silhouette at each stage, clean and noisy.{knn}",
                "How well the classes are separated at each stage of the network, in the raw "
                f"features: solid lines for clean images, dashed lines for noisy ones.{knn}",
            )
        )
    if not report_figures:
        return None
    intro = (
        "Where the network places images in feature space, and whether noise moves them out of "
        "their class."
    )
    return Section("features", "Features", intro, report_figures)


def _stage_figures(
    embeddings: Mapping[str, Any], labels: Any, classes: list[str], noise: str
) -> list[ReportFigure]:
    """The stages of the labels whose stages were embedded, clean and noisy."""
    staged = {x: v for x, v in embeddings.items() if len(v["stages"]) > 1}
    if not staged:
        return []
    report_figures = []
    for view, images in (("clean", "clean images"), ("noisy", f"images at {noise}")):
        points = {
            label: {str(stage): content[f"{stage}.{view}"] for stage in content["stages"]}
            for label, content in staged.items()
        }

        draw = partial(figures.tsne_stages, points, labels, classes)
        alt = f"t-SNE of the features of each stage, {images}, of {names(points)}."
        caption = f"t-SNE of the pooled features of each stage, {images}: where classes separate."
        report_figures.append(ReportFigure(f"tsne-stages-{view}", draw, alt, caption))
    return report_figures


def geometry_section(analyses: Analyses) -> Section | None:
    geometry = arrays(analyses, "geometry")
    if not geometry:
        return None
    radii = {float(content["radius"]) for content in geometry.values()}
    radius = radii.pop() if len(radii) == 1 else None
    near = values(analyses, "geometry", "share nearest to the own centroid", data="noisy")
    inside = values(analyses, "geometry", "share inside the sphere", data="noisy")
    report_figures = [
        ReportFigure(
            "geometry-histograms",
            partial(figures.geometry_histograms, geometry, radius=radius),
            "Distances of features to centroids and boundaries; noisy features inside their "
            f"sphere: {named_percents(inside)}.",
            "Filled: clean; outlined: noisy. Noisy features inside their sphere: "
            f"{named_percents(inside)}. Every method has its own feature scale, so the widths of "
            "different rows are not comparable.",
        ),
        ReportFigure(
            "distances",
            partial(figures.distances, geometry),
            "Distance to the class centroid over that to the nearest other; noisy features nearest "
            f"to their own centroid: {named_percents(near)}.",
            "The distance to the class centroid divided by that to the nearest other one does "
            "not depend on the feature scale, so methods are comparable. Noisy features nearest to "
            f"their own centroid: {named_percents(near)}.",
        ),
    ]
    intro = (
        "How compact the classes are in the penultimate layer, how far they are from the decision "
        "boundaries, and how far noise moves them. Centroids are the class means of the training "
        "images" + (f"; spheres have radius {radius:g}." if radius is not None else ".")
    )
    return Section("geometry", "Geometry", intro, report_figures)


def abstention_section(analyses: Analyses) -> Section | None:
    abstention = arrays(analyses, "abstention")
    if not abstention:
        return None
    noises = (analyses[label].settings("abstention")["noise"][0] for label in abstention)
    noise = listed(list(dict.fromkeys(map(heading, noises))))
    figure = ReportFigure(
        "risk-coverage",
        partial(figures.risk_coverage, abstention),
        "Share of wrong answers against the share of images answered, of "
        f"{names(abstention)}, on clean and on noisy images ({noise}).",
        "Images are answered from the highest probability of the predicted class down. The lower a "
        "line, the fewer answers are wrong; at 100 % it is the error on all images. Noisy: "
        f"{noise}.",
    )
    intro = (
        "What if the model may decline to answer? A model that knows when it is wrong gives up few "
        "right answers to avoid many wrong ones."
    )
    return Section("abstention", "Abstention", intro, [figure])


def abstention_conditions(analyses: Analyses) -> list[str]:
    """The evaluated conditions under which abstention was measured, in order."""
    rows = [row for a in analyses.values() for row in a.rows("abstention", data="evaluated")]
    return ordered(row["perturbation"] for row in rows)
