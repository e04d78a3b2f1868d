"""Certificates by randomised smoothing (Cohen, Rosenfeld and Kolter, ICML 2019).

The smoothed classifier answers with the class that a model f gives most often under Gaussian noise,

    g(x) = argmax_c P(f(x + σ ε) = c),        ε ~ N(0, I).

If the most frequent class has probability p_A > 1/2, g gives the same class for every image closer
to x than the radius R = σ Φ⁻¹(p_A) in Euclidean distance (their theorem 1 with p_B = 1 − p_A).
Probabilities are estimated: some samples select the class, others give a lower confidence limit on
its probability, so a certificate is wrong with probability at most α.

The noise is Gaussian everywhere: unlike those of `perturb.Gaussian`, noisy pixels are not clipped
to [0, 1], and f sees values outside. A model that was trained on clipped images should clip them
itself, `nn.Sequential(nn.Hardtanh(0, 1), model)`: f may be any function of x + σ ε.
Distances are in pixel units, summed over all pixels and channels.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.draws import PerSample, keys
from noiseproof.modes import evaluating
from noiseproof.perturb.base import check_images, check_range
from noiseproof.robustness import PerturbedClassifier, batch_size_for, predicted_classes
from noiseproof.theory.binomial import lower_limit

__all__ = ["Certificates", "certified_accuracy", "certify", "largest_radius", "radius"]

_SELECTION, _ESTIMATION = 0, 1  # streams of the noise


class Certificates(NamedTuple):
    """What is known about the smoothed classifier at each of B images."""

    classes: Tensor  # int64: its class; -1 where it abstains
    radii: Tensor  # float64: within which it gives that class; 0 where it abstains
    limits: Tensor  # float64: lower confidence limit on the probability of the selected class
    counts: Tensor  # int64: how many of the samples gave the selected class


@torch.no_grad()
def certify(
    model: nn.Module,
    images: Tensor,
    sigma: float,
    *,
    samples: int = 1000,
    selection: int = 100,
    alpha: float = 0.001,
    seed: int = 0,
    index: Tensor | None = None,
    batch_size: int | None = None,
) -> Certificates:
    """Certificates for images, each wrong with probability at most `alpha`.

    The model is used in eval mode, on the device of the images and in the precision of the caller's
    autocast, if any. The noise of a sample is keyed by (seed, index of the image, number of the
    sample), so results do not depend on the batch size, up to the rounding of the model.

    Args:
        model: maps pixels to logits, B x classes; normalisation is part of it.
        images: in [0, 1], B x C x H x W.
        sigma: σ, in pixel units. A model should be trained with Gaussian noise of about this level.
        samples: number of noisy copies of each image that estimate the probability.
        selection: number of other copies that select the class.
        alpha: probability with which a certificate may be wrong.
        seed: of the noise.
        index: of each image in its dataset, int64; by default 0, 1, …
        batch_size: noisy copies per batch; by default as many as keep memory small.

    A linear model keeps its answer up to its decision boundary, here at a distance of 0.2, most of
    which is certified:

    >>> class Bright(nn.Module):
    ...     def forward(self, x):
    ...         return torch.cat([0.5 - x, x - 0.5], 1).flatten(1)
    >>> result = certify(Bright(), torch.full((1, 1, 1, 1), 0.7), 0.1, samples=10_000)
    >>> result.classes.tolist(), [round(r, 3) for r in result.radii.tolist()]
    ([1], [0.19])
    """
    _check(images, sigma, samples, selection, alpha, index, batch_size)
    index = torch.arange(len(images)) if index is None else index
    index = index.to(images.device)
    size = batch_size or batch_size_for(images.shape[1:], images.device)
    classifier = PerturbedClassifier(model, seed)
    noisy = classifier, images, index, sigma
    with evaluating(model):
        selected = _votes(*noisy, _SELECTION, selection, size).argmax(1)
        counts = _votes(*noisy, _ESTIMATION, samples, size).gather(1, selected[:, None])[:, 0]
    limit_of = {k: lower_limit(k, samples, 1 - alpha) for k in set(counts.tolist())}
    limits = [limit_of[k] for k in counts.tolist()]
    radii = torch.tensor([radius(limit, sigma) for limit in limits], dtype=torch.float64)
    classes = torch.where(radii > 0, selected.cpu(), -1)
    return Certificates(classes, radii, torch.tensor(limits, dtype=torch.float64), counts.cpu())


def radius(limit: float, sigma: float) -> float:
    """The radius σ Φ⁻¹(p) that a lower limit p on the probability of a class gives; 0, which
    certifies nothing, if p is at most 1/2.

    Args:
        limit: p, in [0, 1).
        sigma: standard deviation of the noise.

    >>> round(radius(0.8413447, 0.25), 4), radius(0.5, 0.25)
    (0.25, 0.0)
    """
    return sigma * NormalDist().inv_cdf(limit) if limit > 0.5 else 0.0


def largest_radius(sigma: float, samples: int, alpha: float) -> float:
    """The radius if all samples agree, which is the most that this number of samples can certify.

    Args:
        sigma: standard deviation of the noise.
        samples: number of samples that estimate the probability.
        alpha: probability with which a certificate may be wrong.

    >>> round(largest_radius(0.25, 1000, 0.001), 3)
    0.616
    """
    return radius(alpha ** (1 / samples), sigma)


def certified_accuracy(classes: Tensor, radii: Tensor, labels: Tensor, distance: float) -> float:
    """The share of images that are classified correctly with a radius of at least `distance`:
    whoever changes images by less than that cannot lower the accuracy below it.

    Args:
        classes: as in `Certificates`.
        radii: as in `Certificates`.
        labels: true classes.
        distance: in pixel units; 0 gives the accuracy, where abstentions count as wrong.
    """
    return float(((classes == labels) & (radii >= distance)).double().mean())


def _votes(
    classifier: PerturbedClassifier,
    images: Tensor,
    index: Tensor,
    sigma: float,
    stream: int,
    samples: int,
    batch_size: int,
) -> Tensor:
    """How often each class is predicted for each image, B x classes, in so many samples of one
    stream of the noise. Logits that are not finite are no vote."""
    counts = torch.zeros(len(images), 1, dtype=torch.int64, device=images.device)
    total = len(images) * samples
    for start in range(0, total, batch_size):
        pairs = torch.arange(start, min(start + batch_size, total), device=images.device)
        image, sample = pairs // samples, pairs % samples
        with torch.autocast(images.device.type, enabled=False):
            source = PerSample(keys(classifier.seed, stream, index[image], sample))
            noise = source.normal(*images.shape[1:])
            noisy = images[image] + sigma * noise.to(images.dtype)  # not clipped, see above
        predicted = predicted_classes(classifier.checked_logits(noisy))
        if start == 0:  # the last column counts the class -1
            counts = counts.new_zeros(len(images), classifier.num_classes + 1)
        counts.index_put_((image, predicted), torch.ones_like(image), accumulate=True)
    return counts[:, :-1]


def _check(
    images: Tensor,
    sigma: float,
    samples: int,
    selection: int,
    alpha: float,
    index: Tensor | None,
    batch_size: int | None,
) -> None:
    check_images(images)
    check_range(images)
    if len(images) == 0:
        raise ValueError("there are no images to certify")
    if not (math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"sigma must be finite and above 0, got {sigma}")
    for name, value in {
        "samples": samples,
        "selection": selection,
        "batch_size": batch_size,
    }.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), got {alpha}")
    if index is not None and index.shape != images.shape[:1]:
        raise ValueError(
            f"index must have {len(images)} entries, one per image, got {tuple(index.shape)}"
        )
