"""Every statement of `noiseproof.theory` on one model: measured value, bound, and where it holds.

Features are those of the test samples (for statements about training data, of the training images),
in eval mode; centroids are the class means of the training images. The curvature bounds are in
pixels, under unclamped Gaussian noise of the training noise's level.

A row has `value` (measured), `bound`, `holds` (the share of samples, classes or pairs for which the
statement holds), `vacuous` (the share about which it says nothing), and a `sentence`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from noiseproof import theory
from noiseproof.lab.analysis.differentiable import lacks_second_derivative
from noiseproof.lab.analysis.subject import VIEWS, Arrays, Measured, Progress, Row, Subject, row

BOUND_SAMPLES = 64  # samples of the curvature bounds
DRAWS = 64  # noise draws of each
NU = 2.0  # factor of the scaling
BATCH = 64  # training samples of the gradient statement
_NATS = "divergence of two classes, in nats"
_BOUNDS, _PAIRS = 31, 32  # purposes of random numbers


def measure_theory(subject: Subject, progress: Progress) -> Measured:
    """The rows of all statements, and the arrays that the report draws."""
    try:
        arrays, rows = _curvature(subject)
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_second_derivative(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        text = f"Cannot be measured: the model has no second derivative ({reason})."
        empty = {"bound": None, "holds": None, "vacuous": 1.0, "n": 0, "sentence": text}
        names = ("upper", "sharper upper", "lower")
        arrays, rows = {}, [row(f"{name} bound on curvature", None, **empty) for name in names]
    progress(0.5)
    rows += _guarantees(subject)
    progress(0.6)
    rows += [_gradient(subject), _scaling(subject), _softmax(subject), *_spheres(subject)]
    progress(0.7)
    divergence_arrays, divergence_rows = _divergence(subject)
    progress(1.0)
    return Measured({**arrays, **divergence_arrays}, rows + divergence_rows)


def _curvature(subject: Subject) -> Measured:
    index = subject.test_sample(BOUND_SAMPLES)
    sigma, radius = subject.settings.level, subject.run.config.method.radius
    batches = [
        theory.bound_curvature(
            subject.smooth_model, x, y, sigma=sigma, radius=radius, draws=DRAWS,
            generator=subject.source(_BOUNDS, positions),
        )
        for x, y, positions in subject.batches(subject.dataset.test, index)
    ]  # fmt: skip
    bounds = theory.CurvatureBounds(
        *(torch.cat(columns).cpu() for columns in zip(*batches, strict=True))
    )
    facts = {"n": len(index), "space": "pixels", "sigma": sigma, "radius": 2 * radius}
    facts |= {"residual": float(bounds.residual.median()), "draws": DRAWS}
    sides = {
        "upper bound on curvature": (
            bounds.curvature, bounds.upper, bounds.holds_upper, bounds.vacuous_upper,
            "it is no better than the size of the logits"),
        "sharper upper bound on curvature": (
            bounds.curvature, bounds.upper_sharp, bounds.holds_upper_sharp, bounds.upper_sharp < 0,
            "it is negative, so the expansion fails"),
        "lower bound on 2Λ + (tr H)²": (
            bounds.lower_left, bounds.lower_right, bounds.holds_lower, bounds.vacuous_lower,
            "it is not positive and says nothing"),
    }  # fmt: skip
    rows = []
    for name, (measured, bound, holds, vacuous, reason) in sides.items():
        count = int(vacuous.sum())
        text = f"Holds for {int(holds.sum())} of {len(index)} samples"
        text += f"; for {count} {reason}." if count else "."
        rows += [row(name, float(measured.median()), bound=float(bound.median()), of="median",
                     holds=_share(holds), vacuous=_share(vacuous), sentence=text,
                     **facts)]  # fmt: skip
    rows += [row("feature stability", float(bounds.stability.mean()), of="mean",
                 sentence=bounds.sentence(), **facts)]  # fmt: skip
    arrays = {f"curvature.{name}": values.numpy() for name, values in bounds._asdict().items()}
    return Measured({"index": index.numpy(), **arrays}, rows)


def _guarantees(subject: Subject) -> Iterator[Row]:
    clean, centroids = subject.features("clean"), subject.centroids
    q, y = clean.penultimate, clean.labels
    margin = theory.margin_guarantee(q, y, subject.head, centroids)
    positive = int((margin.bound > 0).sum())
    present = margin.bound.isfinite()
    text = (
        f"A positive margin is guaranteed for {positive} of {int(present.sum())} classes."
        if positive
        else "Vacuous here: no class is compact enough to guarantee a positive margin."
    )
    yield row("class margin", _smallest(margin.measured), bound=_smallest(margin.bound),
              of="smallest class", holds=_share(margin.holds),
              vacuous=_share(margin.bound[present] <= 0), n=len(y), sentence=text)  # fmt: skip
    dispersion = theory.dispersion_guarantee(q, y, centroids)
    text = "No class is wider than twice its radius, by the triangle inequality."
    yield row("class dispersion", float(dispersion.measured.max()),
              bound=float(dispersion.bound.max()), of="largest class",
              holds=_share(dispersion.holds), vacuous=0.0, n=len(y), sentence=text)  # fmt: skip
    separation = theory.separation_guarantee(q, y, subject.head, centroids)
    verdict, more = ("Proved", "more") if separation.guaranteed else ("Vacuous here", "not more")
    text = (
        f"{verdict}: the nearest boundary is {separation.distance:.3g} from a centroid, {more} "
        f"than twice the largest radius, {separation.radius:.3g}. On these samples, the classes "
        f"{'are' if separation.separated else 'are not'} separated."
    )
    yield row("class separation", separation.within, bound=separation.between,
              of="farthest within, nearest between", holds=float(separation.holds),
              vacuous=float(not separation.guaranteed), n=len(y), sentence=text)  # fmt: skip


def _gradient(subject: Subject) -> Row:
    train, method = subject.train_features, subject.run.config.method
    gradients = theory.margin_gradients(
        train.penultimate[:BATCH], train.labels[:BATCH], subject.head, subject.centroids,
        momentum=method.centroid_momentum, margin=method.margin,
    )  # fmt: skip
    active = ~gradients.ratio.isnan()
    ratio, conditions = gradients.ratio[active], gradients.conditions[active]
    count = len(ratio)
    if not count:
        text = "Says nothing here: every centroid keeps its margin, so both gradients are 0."
    elif gradients.applies:
        text = f"For all {count} classes with a gradient, momentum multiplies it by 1 − γ."
    else:
        text = (
            f"Its conditions hold for {int(gradients.conditions.sum())} of {count} classes: the "
            "others have another nearest class, or keep their margin, with one of the centroids."
        )
    as_expected = (ratio - gradients.expected).abs() <= 1e-4
    return row(
        "margin gradient with momentum / without",
        float(ratio.median()) if count else None,
        bound=gradients.expected,
        of="median class",
        holds=_share(as_expected[conditions]) if bool(conditions.any()) else None,
        vacuous=1 - _share(conditions) if count else 1.0,
        n=min(BATCH, len(train.labels)),
        sentence=text,
    )


def _scaling(subject: Subject) -> Row:
    index = subject.test_sample(256)
    x, y, _ = next(subject.batches(subject.dataset.test, index))
    try:
        scaled = theory.scale_features(subject.model, NU, x, layer="neck")
    except ValueError as refusal:
        return row("scaling of features", None, bound=NU, holds=None, vacuous=1.0, n=0,
                   sentence=f"Does not apply to this model: {refusal}.")  # fmt: skip
    report = theory.scaling_report(subject.model, scaled, x, y)
    text = (
        f"Multiplying the layer {scaled.layer!r} and the head's bias by {NU:g} multiplies features "
        f"by {report.features_ratio:.4g} and logits by {report.logits_ratio:.4g}, and "
        + ("changes no prediction." if report.same_argmax else "changes predictions by rounding.")
    )
    holds = float(report.same_argmax and abs(report.features_ratio - NU) < 1e-3)
    return row("scaling of features", report.features_ratio, bound=NU, of="ratio", holds=holds,
               vacuous=0.0, n=len(x), sentence=text)  # fmt: skip


def _softmax(subject: Subject) -> Row:
    clean = subject.features("clean")
    null = theory.null_space(subject.head)
    hidden = theory.invisible_variance(clean.penultimate, clean.labels, subject.head)
    size = subject.head.in_features
    text = (
        f"No probability depends on {null.dimension} of {size} directions of feature space; they "
        f"hold {100 * hidden.share:.3g} % of the within-class variance."
    )
    return row("directions that softmax cannot see", null.dimension, bound=size - null.rank,
               of="dimension", holds=1.0, vacuous=0.0, share=hidden.share, n=len(clean.labels),
               isotropic=hidden.isotropic, sentence=text)  # fmt: skip


def _spheres(subject: Subject) -> Iterator[Row]:
    radius, centroids = subject.run.config.method.radius, subject.centroids
    q, y = subject.train_features.penultimate, subject.train_features.labels
    classes, rho = y.unique().tolist(), radius**2 / 2
    bounds = [theory.sphere_bound(q[y == c], centroids[c], radius=radius, rho=rho) for c in classes]
    worst = max(bounds, key=lambda bound: bound.bound)
    for view in VIEWS:
        features = subject.features(view)
        q, y = features.penultimate, features.labels
        limits = theory.leaving_limits(q, y, centroids, radius=radius)
        measured = limits.outside / limits.total.clamp(min=1)
        facts = subject.facts(view) | {"n": len(y), "radius": radius, "of": "worst class"}
        if view == "clean":
            yield row("leaving the sphere, Rademacher bound", float(measured.max()),
                      bound=worst.bound, holds=_share(measured[classes] <= worst.bound),
                      vacuous=sum(b.vacuous for b in bounds) / len(bounds),
                      sentence=worst.sentence(), **facts)  # fmt: skip
        full = int((limits.limit >= 0.999).sum())
        text = (
            f"With 95 % confidence, at most {100 * float(limits.limit.max()):.3g} % of the worst "
            f"class and {100 * float(limits.limit.min()):.3g} % of the best are outside the sphere."
        ) + (f" For {full} classes the limit says nothing." if full else "")
        yield row("leaving the sphere, held-out limit", float(measured.max()),
                  bound=float(limits.limit.max()), holds=_share(measured <= limits.limit),
                  vacuous=full / len(limits.limit), sentence=text, **facts)  # fmt: skip


def _divergence(subject: Subject) -> Measured:
    radius, classes = subject.run.config.method.radius, len(subject.centroids)
    upper = torch.triu(torch.ones(classes, classes, dtype=torch.bool), 1)
    arrays: Arrays = {}
    rows: list[Row] = []
    for view in VIEWS:
        features = subject.features(view)
        q, y = features.penultimate, features.labels
        bound = theory.divergence_bound(q, y, subject.centroids, radius=radius)
        sample = subject.features(view, stages=True)
        smallest = int(torch.bincount(sample.labels)[sample.labels.unique()].min())
        neighbours = min(15, smallest - 1)
        for stage, values in sample.stages.items():
            facts = subject.facts(view) | {"stage": stage, "n": len(sample.labels)}
            facts |= {"radius": radius, "bound": bound.sharper}
            if neighbours < 1:
                text = "A class has too few samples for an estimate."
                empty = {"holds": None, "vacuous": float(bound.sharper <= 0), "sentence": text}
                rows.append(row(_NATS, None, **empty, **facts))
                continue
            estimate = theory.estimate_divergence(
                values, sample.labels, classes, neighbours=neighbours, limit=200,
                generator=subject.source(_PAIRS, sample.positions),
            )  # fmt: skip
            estimated = upper & ~estimate.pairs.isnan()
            pairs, bounds = estimate.pairs[estimated], bound.pairs[estimated].to(estimate.pairs)
            rows += [row(_NATS, estimate.smallest, of="nearest pair, estimated", mean=estimate.mean,
                         ceiling=estimate.ceiling, paper_bound=bound.bound,
                         holds=_share(pairs >= bounds), vacuous=_share(bounds <= 0),
                         sentence=bound.sentence(), **facts)]  # fmt: skip
            arrays[f"divergence.{view}.{stage}"] = estimate.pairs.numpy()
        arrays[f"divergence.{view}.bound"] = bound.pairs.numpy()
    arrays["divergence.most"] = np.array(math.log(2))
    return Measured(arrays, rows)


def _share(holds: Tensor) -> float:
    return float(holds.double().mean()) if len(holds) else 1.0


def _smallest(values: Tensor) -> float:
    return float(values[values.isfinite()].min())
