"""Two dimensions to look at: t-SNE of clean and noisy features, fitted together.

One fit for both, since two fits could not be compared: t-SNE's axes mean nothing by themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LIMIT", "Embedding", "embed_together"]

LIMIT = 2000  # samples, each clean and noisy: t-SNE's time grows faster than their number


class Embedding(NamedTuple):
    clean: NDArray[np.float32]  # n x 2
    noisy: NDArray[np.float32]  # n x 2
    divergence: float  # Kullback–Leibler, what t-SNE minimises: lower fits better


def embed_together(
    clean: NDArray[np.floating], noisy: NDArray[np.floating], *, seed: int = 0
) -> Embedding:
    """Places for n clean and n noisy feature vectors, from one t-SNE with perplexity 30.

    Started from the two main directions of the features, so that `seed` matters little; the same
    seed and features give the same places.
    """
    if clean.ndim != 2 or clean.shape != noisy.shape or len(clean) < 2:
        raise ValueError(f"need two arrays n x D, n > 1, got {clean.shape} and {noisy.shape}")
    if len(clean) > LIMIT:
        raise ValueError(f"t-SNE takes at most {LIMIT} samples here, got {len(clean)}")
    points = np.concatenate([clean, noisy]).astype(np.float64)
    if not np.isfinite(points).all():
        raise ValueError("features must be finite numbers, got NaN or infinity")
    # A unit scale: sklearn's first steps depend on the size of the numbers.
    points = (points - points.mean(0)) / max(float(points.std()), 1e-12)

    from sklearn.manifold import TSNE

    fit = TSNE(
        perplexity=min(30.0, (len(points) - 1) / 3),
        init="pca" if points.shape[1] > 1 else "random",
        random_state=seed,
    )
    steps = "max_iter" if "max_iter" in fit.get_params() else "n_iter"  # before scikit-learn 1.5
    fit.set_params(**{steps: 500 if len(points) <= 1500 else 1000})  # few points settle sooner
    places = fit.fit_transform(points).astype(np.float32)
    n = len(clean)
    return Embedding(places[:n], places[n:], float(fit.kl_divergence_))
