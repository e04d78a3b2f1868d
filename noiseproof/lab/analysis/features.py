"""The geometry of features, clean and noisy: embeddings, class separation, distances to centroids.

embedding   t-SNE of clean and noisy features, fitted together
separation  k-NN accuracy and silhouette of the raw features at each stage
geometry    the penultimate layer: compactness, distance between classes, share inside the sphere

Centroids are the class means of the training images, in eval mode; the sphere of a class has the
loss's `radius` around its centroid. Methods without that loss choose the scale of their features
freely, so distances come with a scale-free ratio: distance to the centroid of a sample's own class
over distance to the nearest other centroid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noiseproof.geometry import boundary_distances, class_dispersion, class_margin
from noiseproof.lab.analysis.subject import VIEWS, Arrays, Measured, Progress, Row, Subject, row
from noiseproof.theory import invisible_variance

NEIGHBOURS = 10


def measure_embedding(subject: Subject, progress: Progress) -> Measured:
    """t-SNE of the penultimate features, or of all stages."""
    seed, noise = subject.settings.seed, subject.noise
    clean, noisy = subject.features("clean", stages=True), subject.features("noisy", stages=True)
    stages = list(clean.stages) if subject.settings.stages else ["features"]
    arrays: Arrays = {"index": clean.positions.numpy(), "labels": clean.labels.numpy()}
    arrays |= {"stages": np.array(stages), "noise": np.array(noise)}
    rows = []
    for i, stage in enumerate(stages):
        pair = clean.stages[stage].numpy(), noisy.stages[stage].numpy()
        clean_points, noisy_points, divergence = embed_together(*pair, seed=seed)
        arrays |= {f"{stage}.clean": clean_points, f"{stage}.noisy": noisy_points}
        facts = {"stage": stage, "perturbation": noise, "n": len(clean.positions)}
        rows.append(row("t-SNE divergence", divergence, seed=seed, **facts))
        progress((i + 1) / len(stages))
    return Measured(arrays, rows)


def measure_separation(subject: Subject, progress: Progress) -> Measured:
    """k-NN accuracy and silhouette of each stage, on clean and on noisy images."""
    stages = list(subject.features("clean", stages=True).stages)
    rows: list[Row] = []
    knn, silhouettes = np.zeros((2, 2, len(stages)))
    for i, view in enumerate(VIEWS):
        features = subject.features(view, stages=True)
        labels = features.labels
        for j, stage in enumerate(stages):
            knn[i, j] = knn_accuracy(features.stages[stage], labels, NEIGHBOURS)
            silhouettes[i, j] = silhouette(features.stages[stage], labels)
            facts = {"stage": stage, **subject.facts(view), "n": len(labels)}
            rows.append(row("k-NN accuracy", knn[i, j], neighbours=NEIGHBOURS, **facts))
            rows.append(row("silhouette", silhouettes[i, j], **facts))
            progress((i * len(stages) + j + 1) / (2 * len(stages)))
    arrays = {"stages": np.array(stages), "views": np.array(VIEWS)}
    return Measured({**arrays, "knn": knn, "silhouette": silhouettes}, rows)


@torch.no_grad()
def measure_geometry(subject: Subject, progress: Progress) -> Measured:
    """Distances of penultimate features to centroids and boundaries, and numbers per class."""
    classes, radius = len(subject.dataset.classes), subject.radius
    head, centroids = subject.head, subject.centroids
    progress(0.5)
    clean = subject.features("clean")
    arrays: Arrays = {
        "index": clean.positions.numpy(),
        "labels": clean.labels.numpy(),
        "radius": np.array(radius),
        "centroids": centroids.numpy(),
    }
    rows: list[Row] = []
    for view in VIEWS:
        features = subject.features(view)
        q, y = features.penultimate, features.labels
        distances = torch.cdist(q, centroids)
        own = distances.gather(1, y[:, None])[:, 0]
        rival = distances.scatter(1, y[:, None], torch.inf).amin(1)
        boundary = boundary_distances(q, y, head).amin(1)
        dispersion, margin = class_dispersion(q, y, classes), class_margin(q, y, head)
        columns = {"centroid": own, "rival": rival, "boundary": boundary}
        columns |= {"dispersion": dispersion, "margin": margin}
        arrays |= {f"{view}.{name}": values.numpy() for name, values in columns.items()}
        hidden = invisible_variance(q, y, head)
        facts = {**subject.facts(view), "n": len(y)}
        rows += [
            row("share inside the sphere", float((own <= radius).double().mean()),
                radius=radius, **facts),
            row("median distance to the centroid", float(own.median()), **facts),
            row("median distance to the nearest boundary", float(boundary.median()), **facts),
            row("median distance, own / nearest other centroid", float((own / rival).median()),
                **facts),
            row("share nearest to the own centroid", float((own < rival).double().mean()),
                **facts),
            row("largest class dispersion", float(dispersion.max()), **facts),
            row("smallest class margin", float(margin.min()), **facts),
            row("share of within-class variance that softmax cannot see", hidden.share,
                isotropic=hidden.isotropic, dimension=hidden.dimension, **facts),
        ]  # fmt: skip
    progress(1.0)
    return Measured(arrays, rows)


def embed_together(
    clean: NDArray[np.floating], noisy: NDArray[np.floating], *, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """t-SNE with perplexity 30 of n clean and n noisy feature vectors, fitted together: the points
    of both, n x 2, and the Kullback–Leibler divergence, which t-SNE minimises.

    Two separate fits could not be compared, since the axes of t-SNE have no meaning. It starts from
    the first two principal components, so that the seed matters little; the same seed and features
    give the same points.

    Args:
        clean: n x D features of clean images.
        noisy: n x D features of the same images under noise.
        seed: of t-SNE.
    """
    from sklearn.manifold import TSNE

    points = np.concatenate([clean, noisy]).astype(np.float64)
    # Scaled to unit variance: the first steps of scikit-learn's t-SNE depend on the scale.
    points = (points - points.mean(0)) / max(float(points.std()), 1e-12)
    tsne: Any = TSNE(  # else pyright infers what fit_transform returns, for 20 s
        perplexity=min(30.0, (len(points) - 1) / 3),
        init="pca" if points.shape[1] > 1 else "random",
        random_state=seed % 2**32,  # scikit-learn refuses more bits
    )
    iterations = "max_iter" if "max_iter" in tsne.get_params() else "n_iter"  # scikit-learn < 1.5
    tsne.set_params(**{iterations: 500 if len(points) <= 1500 else 1000})  # fewer need fewer
    embedded = tsne.fit_transform(points).astype(np.float32)
    return embedded[: len(clean)], embedded[len(clean) :], float(tsne.kl_divergence_)


def knn_accuracy(features: Tensor, labels: Tensor, neighbours: int = 10) -> float:
    """Share of samples whose nearest *other* samples vote for their class (leave-one-out).

    A tie goes to the class of the nearest neighbour among the tied ones. If there are
    fewer than `neighbours` other samples, all of them vote.

    Args:
        features: B x D.
        labels: B, int64.
        neighbours: number of samples that vote.

    >>> points = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    >>> knn_accuracy(points, torch.tensor([0, 0, 1, 1]), 1)
    1.0
    """
    from sklearn.neighbors import NearestNeighbors

    x, y = features.double().numpy(), labels.numpy()  # float64: accurate distances
    k = min(neighbours, len(x) - 1)
    if k < 1:
        raise ValueError(f"needs 1 neighbour and 2 samples, got {neighbours} and {len(x)}")
    # Without arguments, kneighbors() does not count a sample as its own neighbour.
    nearest = NearestNeighbors(n_neighbors=k).fit(x).kneighbors(return_distance=False)
    # One vote each, plus 1/2, 1/4, ... for ties: the nearest outweighs all that follow.
    weights = 1 + 0.5 ** np.arange(1, k + 1)
    votes = np.zeros((len(x), y.max() + 1))
    np.add.at(votes, (np.arange(len(x))[:, None], y[nearest]), weights)
    return float((votes.argmax(1) == y).mean())


def silhouette(features: Tensor, labels: Tensor) -> float:
    """Mean silhouette over the samples, in [-1, 1]; 0 if there are not at least two classes.

    That of a sample is (b − a) / max(a, b), where a is the mean distance to the rest of its
    class and b that to the nearest other class; 0 for a sample that is alone in its class.

    Args:
        features: B x D.
        labels: B, int64.

    >>> round(silhouette(torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0, 0, 1])), 4)
    0.4722
    """
    from sklearn.metrics import silhouette_score

    separable = 1 < len(labels.unique()) < len(labels)
    return float(silhouette_score(features.double().numpy(), labels)) if separable else 0.0
