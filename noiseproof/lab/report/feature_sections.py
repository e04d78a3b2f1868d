"""The report's sections on features: embeddings, separation by stage, penultimate geometry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from noiseproof.lab import figures
from noiseproof.lab.report.figure_files import Plate, Theme
from noiseproof.lab.report.sections import Analyses, Section, arrays, each, percents
from noiseproof.lab.report.summary import listed
from noiseproof.perturb.text import heading

__all__ = ["features", "geometry"]


def features(analyses: Analyses, classes: list[str]) -> Section | None:
    embedded = arrays(analyses, "embedding")
    separated = arrays(analyses, "separation")
    plates: list[Plate] = []
    noisy = each(analyses, "separation", "k-NN accuracy", stage="features", data="noisy")
    score = f" On noisy images, k-NN accuracy in the raw features is: {percents(noisy)}."
    score = score if noisy else ""
    if embedded:
        first = next(iter(embedded.values()))
        labels, noise = first["labels"], heading(str(first["noise"]))
        same = {x: v for x, v in embedded.items() if np.array_equal(v["index"], first["index"])}
        last = {
            x: {"clean": v["features.clean"], "noisy": v["features.noisy"]} for x, v in same.items()
        }
        plates.append(
            Plate(
                "tsne", lambda theme: figures.tsne(last, labels, classes, theme=theme),
                f"t-SNE of penultimate features, clean and noisy, of {listed(list(last))}.{score}",
                f"Penultimate features of {len(labels):,} test images, clean and at {noise}, "
                "embedded together (seeded). Sizes of clusters and gaps between them mean little "
                f"in t-SNE.{score}",
            )
        )  # fmt: skip
        plates += _stages(same, labels, classes, noise)
    if separated and max(len(v["stages"]) for v in separated.values()) > 1:
        plates.append(
            Plate(
                "stage-separation",
                lambda theme: figures.stage_separation(separated, theme=theme),
                f"k-NN accuracy and silhouette at each stage, clean and noisy.{score}",
                "How well classes part at each stage of the network, in the raw features: solid "
                f"lines clean, dashed noisy.{score}",
            )
        )
    if not plates:
        return None
    intro = "Where the network puts images, and whether noise moves them out of their class."
    return Section("features", "Features", intro, plates, [], [])


def _stages(
    embedded: Mapping[str, Any], labels: Any, classes: list[str], noise: str
) -> list[Plate]:
    """The stages of the runs for which they were embedded, clean and noisy."""
    staged = {x: v for x, v in embedded.items() if len(v["stages"]) > 1}
    made = []
    for view, where in (("clean", "clean images"), ("noisy", f"images at {noise}")):
        placed = {
            label: {str(s): values[f"{s}.{view}"] for s in values["stages"]}
            for label, values in staged.items()
        }

        def draw(theme: Theme, placed: Any = placed) -> Any:
            return figures.tsne_stages(placed, labels, classes, theme=theme)

        caption = f"Pooled features of each stage, {where}: where in the network classes part."
        alt = f"t-SNE of the features of each stage, {where}, of {listed(list(placed))}."
        made += [Plate(f"tsne-stages-{view}", draw, alt, caption)] if placed else []
    return made


_SHAPE = (
    ("inside sphere, clean", "share inside the sphere", "clean", True),
    ("inside sphere, noisy", "share inside the sphere", "noisy", True),
    ("own centroid nearest, noisy", "share nearest to the own centroid", "noisy", True),
    ("largest dispersion", "largest class dispersion", "clean", False),
    ("smallest margin", "smallest class margin", "clean", False),
    ("hidden variance", "share of within-class variance that softmax cannot see", "clean", True),
)


def geometry(analyses: Analyses) -> Section | None:
    found = arrays(analyses, "geometry")
    if not found:
        return None
    radii = {float(values["radius"]) for values in found.values()}
    radius = radii.pop() if len(radii) == 1 else None
    near = each(analyses, "geometry", "share nearest to the own centroid", data="noisy")
    inside = each(analyses, "geometry", "share inside the sphere", data="noisy")
    plates = [
        Plate(
            "geometry-histograms",
            lambda theme: figures.geometry_histograms(found, radius=radius, theme=theme),
            f"Distances of features to centroids and boundaries; inside: {percents(inside)}.",
            "Filled: clean, outlined: noisy. Noisy features inside their sphere: "
            f"{percents(inside)}. Methods choose the scale of their features freely, so widths of "
            "different rows do not compare.",
        ),
        Plate(
            "distances",
            lambda theme: figures.distances(found, theme=theme),
            f"Own over nearest other centroid distance; noisy, below 1: {percents(near)}.",
            "Distance to the own centroid over that to the nearest other has no scale, and so can "
            f"be compared. Noisy features nearest to their own: {percents(near)}.",
        ),
    ]
    rows = []
    for place, (label, analysis) in enumerate(analyses.items()):
        row = [{"text": label, "value": place, "label": label}]
        for _, metric, view, share in _SHAPE:
            value = analysis.value("geometry", metric, data=view)
            form = "–" if value is None else f"{100 * value:.1f} %" if share else f"{value:.3g}"
            row.append({"text": form, "value": "" if value is None else value})
        rows.append(row)
    head = ["method", *(title for title, *_ in _SHAPE)]
    sheet = {"title": "Geometry of the penultimate layer", "head": head, "rows": rows, "fold": ""}
    notes = [
        "Hidden variance: the share of within-class variance in directions that no class "
        "probability depends on. Dispersion, margin and sphere are in units of feature space."
    ]
    intro = (
        "How compact classes are in the penultimate layer, how far from the boundaries, and "
        "whether noise leaves them there. Centroids are the class means of the training images"
        + (f"; spheres have radius {radius:g}." if radius is not None else ".")
    )
    return Section("geometry", "Geometry", intro, plates, [sheet], notes)
