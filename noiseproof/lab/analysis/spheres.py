"""The penultimate layer's geometry: how compact classes are, how far apart, and who stays inside.

Centroids are the class means of the training images, in eval mode; the sphere of a class has the
loss's `radius` around its centroid. Methods without that loss choose the scale of their features
freely, so beside distances stands one that has no scale: distance to the own centroid over distance
to the nearest other one.
"""

from __future__ import annotations

import numpy as np
import torch

from noiseproof.geometry import boundary_distances, class_dispersion, class_margin
from noiseproof.lab.analysis.measures import Arrays, Asked, Found, Known, Row, Tick, row
from noiseproof.lab.analysis.subject import Subject
from noiseproof.theory import invisible_variance

__all__ = ["geometry"]


def geometry(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    """Distances of clean and noisy test features to centroids and boundaries, and class figures."""
    classes, radius = len(subject.dataset.classes), subject.run.config.method.radius
    head, centroids = subject.head, subject.centroids
    tick(0.5)
    views = {"clean": subject.test(), "noisy": subject.test(asked.noise[0])}
    arrays: Arrays = {
        "index": views["clean"].places.numpy(),
        "labels": views["clean"].labels.numpy(),
        "radius": np.array(radius),
        "centroids": centroids.numpy(),
    }
    rows: list[Row] = []
    with torch.no_grad():
        for view, found in views.items():
            q, y = found.last, found.labels
            apart = torch.cdist(q, centroids)
            own = apart.gather(1, y[:, None])[:, 0]
            rival = apart.scatter(1, y[:, None], torch.inf).amin(1)
            boundary = boundary_distances(q, y, head).amin(1)
            spread, margin = class_dispersion(q, y, classes), class_margin(q, y, head)
            named = {"centroid": own, "rival": rival, "boundary": boundary}
            named |= {"dispersion": spread, "margin": margin}
            arrays |= {f"{view}.{name}": values.numpy() for name, values in named.items()}
            more = {"data": view, "n": len(y)}
            more |= {"perturbation": asked.noise[0]} if view == "noisy" else {}
            rows += [
                row("share inside the sphere", float((own <= radius).double().mean()),
                    radius=radius, **more),
                row("median distance to the centroid", float(own.median()), **more),
                row("median distance to the nearest boundary", float(boundary.median()), **more),
                row("median distance, own / nearest other centroid", float((own / rival).median()),
                    **more),
                row("share nearest to the own centroid", float((own < rival).double().mean()),
                    **more),
                row("largest class dispersion", float(spread.max()), **more),
                row("smallest class margin", float(margin.min()), **more),
            ]  # fmt: skip
            hidden = invisible_variance(q, y, head)
            rows.append(
                row("share of within-class variance that softmax cannot see", hidden.share,
                    isotropic=hidden.isotropic, dimension=hidden.dimension, **more)
            )  # fmt: skip
    tick(1.0)
    return Found(arrays, rows)
