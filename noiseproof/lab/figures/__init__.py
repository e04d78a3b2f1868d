"""Figures: plain arrays in, `matplotlib.figure.Figure` out; no file is read or written.

Every function takes mappings from a label (a method or a run) to arrays, and a `theme`; the
background is transparent. A notebook displays the figure; `figure.savefig("name.svg")` writes it.
pyplot is not used.
"""

from noiseproof.lab.figures.accuracy import (
    accuracy_curves,
    certified_accuracy,
    confusion,
    corruptions,
    per_class,
    reliability,
    training_curves,
)
from noiseproof.lab.figures.curvature import (
    accuracy_vs_retained_share,
    correct_count_vs_curvature,
    curvature_boxplot,
    curvature_distribution,
    loss_surface,
    step_study,
    theory_bounds,
)
from noiseproof.lab.figures.features import (
    distances,
    geometry_histograms,
    risk_coverage,
    stage_separation,
    tsne,
    tsne_stages,
)
from noiseproof.lab.figures.palette import CLASS_COLOURS, METHOD_COLOURS, METHOD_MARKERS, colour

__all__ = [
    "CLASS_COLOURS",
    "METHOD_COLOURS",
    "METHOD_MARKERS",
    "accuracy_curves",
    "accuracy_vs_retained_share",
    "certified_accuracy",
    "colour",
    "confusion",
    "correct_count_vs_curvature",
    "corruptions",
    "curvature_boxplot",
    "curvature_distribution",
    "distances",
    "geometry_histograms",
    "loss_surface",
    "per_class",
    "reliability",
    "risk_coverage",
    "stage_separation",
    "step_study",
    "theory_bounds",
    "training_curves",
    "tsne",
    "tsne_stages",
]
