"""Every statement of `noiseproof.theory` on one model: measured value, bound, and verdict.

Features are those of the test samples (for statements about training data, of the training images),
in eval mode; centroids are the class means of the training images. The curvature bounds are in
pixels, under unclamped Gaussian noise of the training noise's level.

A row has `value` (measured), `bound` and a `sentence`. `paper` is the statement's number in the
paper. `cases` counts what it is about (`unit`: samples, classes or pairs of classes), `informative`
those about which it says something, and `held` those of them for which it holds; `verdict` is
"vacuous" if it says nothing about any, else "holds" or "violated". `checked` is True if it could
have failed: it assumes something that was not proved of this model. `factor` is the median factor
between bound and measured value, where it holds. `holds` and `vacuous` are shares of all cases, and
a vacuous case holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noiseproof import theory
from noiseproof.lab.analysis.differentiable import lacks_second_derivative
from noiseproof.lab.analysis.subject import VIEWS, Arrays, Measured, Progress, Row, Subject, row

BOUND_SAMPLES = 64  # samples of the curvature bounds
DRAWS = 64  # noise draws of each
NU = 2.0  # factor of the scaling
CONFIDENCE = 0.95  # of the limits of all classes together
BOUNDS = (
    "upper bound on curvature",
    "sharper upper bound on curvature",
    "lower bound on 2Λ + (Σ|λ|)²",
    "lower bound on 2Λ + (tr H)²",
)
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
        arrays, rows = {}, [row(name, None, verdict=None, checked=True, **empty) for name in BOUNDS]
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
    sigma, radius = subject.settings.level, subject.radius
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
    residual = float(bounds.residual.median())
    facts = {"n": len(index), "space": "pixels", "sigma": sigma, "radius": 2 * radius}
    facts |= {"residual": residual, "draws": DRAWS}
    logits = "it is no better than the size of the logits alone allows"
    sides = (
        (bounds.upper_cases, "theorem 6.1, part 1", logits),
        (bounds.upper_sharp_cases, None, logits),
        (bounds.lower_paper_cases, "theorem 6.1, part 2", "it is not positive"),
        (bounds.lower_cases, None, "it is not positive"),
    )
    rows = []
    for name, (cases, paper, reason) in zip(BOUNDS, sides, strict=True):
        text = f"The bound {cases.sentence()}."
        if not cases.informative.all():
            text += f" Where it is vacuous, {reason}."
        rows += [row(name, float(cases.measured.median()), bound=float(cases.bound.median()),
                     of="median", **_judged(cases, "samples"), checked=True, paper=paper,
                     sentence=text, **facts)]  # fmt: skip
    text = (
        f"On average, {100 * float(bounds.stability.mean()):.3g} % of the noisy features stay "
        f"within a distance of {2 * radius:g} of the clean feature. The bounds on curvature assume "
        f"a quadratic expansion of the loss, whose median relative error here is {residual:.2g} (0 "
        "is exact; 1 is no better than a constant)."
    )
    rows += [row("feature stability", float(bounds.stability.mean()), of="mean",
                 paper="definition 6.1", sentence=text, **facts)]  # fmt: skip
    left = ~bounds.loss_change.isnan()
    change = float(bounds.loss_change[left].median()) if left.any() else None
    text = (
        "No noisy feature left the ball, so there is no loss outside it."
        if change is None
        else f"Some noisy features of {int(left.sum())} of {len(index)} samples leave the ball; "
        f"their mean loss differs from the clean loss by {change:.3g} in the median."
    )
    rows += [row("loss stability", change, of="median |l_out − l|", paper="definition 6.1",
                 sentence=text, **(facts | {"n": int(left.sum())}))]  # fmt: skip
    arrays = {f"curvature.{name}": values.numpy() for name, values in bounds._asdict().items()}
    return Measured({"index": index.numpy(), **arrays}, rows)


def _guarantees(subject: Subject) -> Iterator[Row]:
    clean, centroids = subject.features("clean"), subject.centroids
    q, y = clean.penultimate, clean.labels
    margin = theory.margin_guarantee(q, y, subject.head, centroids)
    positive, present = int(margin.informative.sum()), len(y.unique())
    text = (
        f"A positive margin is guaranteed for {positive} of {present} classes."
        if positive
        else "Vacuous: no class is compact enough to guarantee a positive margin."
    )
    yield row("class margin", _smallest(margin.measured), bound=_smallest(margin.bound),
              of="smallest class", **_judged(margin, "classes"), checked=False,
              paper="proposition 5.2, part 1", n=len(y), sentence=text)  # fmt: skip
    dispersion = theory.dispersion_guarantee(q, y, centroids)
    text = "By the triangle inequality, no class is wider than twice its radius."
    yield row("class dispersion", float(dispersion.measured.max()),
              bound=float(dispersion.bound.max()), of="largest class",
              **_judged(dispersion, "classes"), checked=False, paper="proposition 5.1", n=len(y),
              sentence=text)  # fmt: skip
    separation = theory.separation_guarantee(q, y, subject.head, centroids)
    start, more = ("Proved", "more") if separation.guaranteed else ("Vacuous", "not more")
    text = (
        f"{start}: the nearest boundary is {separation.distance:.3g} away from a centroid, which "
        f"is {more} than twice the largest radius of {separation.radius:.3g}. On these samples, "
        f"the classes {'are' if separation.separated else 'are not'} separated."
    )
    yield row("class separation", separation.within, bound=separation.between,
              of="farthest within, nearest between", holds=float(separation.holds),
              vacuous=float(not separation.guaranteed), cases=1,
              informative=int(separation.guaranteed),
              held=int(separation.guaranteed and separation.separated),
              verdict=separation.verdict, checked=False, paper="proposition 5.2, part 2", n=len(y),
              sentence=text)  # fmt: skip


def _gradient(subject: Subject) -> Row:
    train, method = subject.train_features, subject.run.config.method
    gradients = theory.margin_gradients(
        train.penultimate[:BATCH], train.labels[:BATCH], subject.head, subject.centroids,
        momentum=method.centroid_momentum, margin=subject.margin, margin_hinge=method.margin_hinge,
    )  # fmt: skip
    active = ~gradients.ratio.isnan()
    ratio, conditions = gradients.ratio[active], gradients.conditions[active]
    count, applies = len(ratio), int(conditions.sum())
    held = int(((ratio - gradients.expected).abs() <= 1e-4)[conditions].sum())
    if not count:
        text = "Vacuous: every centroid keeps its margin, so both gradients are 0."
    elif method.margin_hinge == "squared":
        text = "Does not apply: the margin of this run has a squared hinge."
    elif applies == count:
        text = f"For all {count} classes with a gradient, momentum multiplies it by 1 − γ."
    else:
        which = f"{applies} of the {count} classes" if applies else f"none of the {count} classes"
        text = (
            f"Applies to {which} with a gradient. Where it does not apply, the two centroids have "
            "different nearest classes, or only one of them keeps its margin."
        )
    return row(
        "margin gradient with momentum / without",
        float(ratio.median()) if count else None,
        bound=gradients.expected,
        of="median class",
        holds=held / applies if applies else None,
        vacuous=1 - applies / count if count else 1.0,
        cases=count,
        unit="classes",
        informative=applies,
        held=held,
        verdict=_verdict(applies, held),
        checked=False,
        paper="proposition 4.1",
        n=min(BATCH, len(train.labels)),
        sentence=text,
    )


def _scaling(subject: Subject) -> Row:
    index = subject.test_sample(256)
    x, y, _ = next(subject.batches(subject.dataset.test, index))
    facts = {"checked": False, "paper": "proposition 5.3"}
    try:
        scaled = theory.scale_features(subject.model, NU, x, layer="neck")
    except ValueError as refusal:
        return row("scaling of features", None, bound=NU, holds=None, vacuous=1.0,
                   verdict="vacuous", n=0, **facts,
                   sentence=f"Does not apply to this model: {refusal}.")  # fmt: skip
    report = theory.scaling_report(subject.model, scaled, x, y)
    text = (
        f"Multiplying the layer {scaled.layer!r} and the head's bias by {NU:g} multiplies features "
        f"by {report.features_ratio:.4g} and logits by {report.logits_ratio:.4g}, and "
        + ("changes no prediction." if report.same_argmax else "changes predictions by rounding.")
    )
    holds = report.same_argmax and abs(report.features_ratio - NU) < 1e-3
    return row("scaling of features", report.features_ratio, bound=NU, of="ratio",
               holds=float(holds), vacuous=0.0, verdict="holds" if holds else "violated", **facts,
               n=len(x), sentence=text)  # fmt: skip


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
               of="dimension", holds=None, vacuous=0.0, verdict=None, checked=False,
               paper="section 3.2", share=hidden.share, n=len(clean.labels),
               isotropic=hidden.isotropic, sentence=text)  # fmt: skip


def _spheres(subject: Subject) -> Iterator[Row]:
    radius, centroids = subject.radius, subject.centroids
    q, y = subject.train_features.penultimate, subject.train_features.labels
    classes, rho = y.unique().tolist(), radius**2 / 2
    bounds = [theory.sphere_bound(q[y == c], centroids[c], radius=radius, rho=rho) for c in classes]
    worst = max(bounds, key=lambda bound: bound.bound)
    for view in VIEWS:
        features = subject.features(view)
        q, y = features.penultimate, features.labels
        # Bonferroni: each limit fails with probability (1 − CONFIDENCE) / C at most.
        each = 1 - (1 - CONFIDENCE) / len(centroids)
        limits = theory.leaving_limits(q, y, centroids, radius=radius, confidence=each)
        measured = limits.outside / limits.total.clamp(min=1)
        facts = subject.facts(view) | {"n": len(y), "radius": radius, "of": "worst class"}
        facts |= {"unit": "classes", "checked": False}
        if view == "clean":
            useful = [not (bound.vacuous or bound.trivial) for bound in bounds]
            kept = [float(measured[c]) <= b.bound for c, b in zip(classes, bounds, strict=True)]
            held = sum(u and k for u, k in zip(useful, kept, strict=True))
            yield row("leaving the sphere, Rademacher bound", float(measured.max()),
                      bound=worst.bound, holds=sum(kept) / len(kept),
                      vacuous=sum(b.vacuous for b in bounds) / len(bounds), cases=len(bounds),
                      informative=sum(useful), held=held, verdict=_verdict(sum(useful), held),
                      paper="theorem 6.2", sentence=worst.sentence(), **facts)  # fmt: skip
        full = int((limits.limit >= 0.999).sum())
        most, least = (100 * float(limit) for limit in (limits.limit.max(), limits.limit.min()))
        text = (
            f"With {100 * CONFIDENCE:g} % confidence for all {len(centroids)} classes together, at "
            f"most {most:.3g} % of the worst class and {least:.3g} % of the best are outside the "
            "sphere."
        ) + (f" For {full} classes the limit says nothing." if full else "")
        if full == len(centroids):
            text = "Vacuous: the limit of every class is 100 %."
        # A limit is never below what it was computed from: there is nothing to hold.
        yield row("leaving the sphere, held-out limit", float(measured.max()),
                  bound=float(limits.limit.max()), holds=None, vacuous=full / len(centroids),
                  cases=len(centroids), informative=len(centroids) - full,
                  verdict="vacuous" if full == len(centroids) else None, confidence=CONFIDENCE,
                  sentence=text, **facts)  # fmt: skip


def _divergence(subject: Subject) -> Measured:
    radius, classes = subject.radius, len(subject.centroids)
    upper = torch.triu(torch.ones(classes, classes, dtype=torch.bool), 1)
    arrays: Arrays = {}
    rows: list[Row] = []
    for view in VIEWS:
        features = subject.features(view)
        q, y = features.penultimate, features.labels
        bound = theory.divergence_bound(
            q, y, subject.centroids, radius=radius, confidence=CONFIDENCE
        )
        bounded = int((bound.pairs[upper] > 0).sum())
        text = bound.sentence()
        text += f" This holds with {100 * CONFIDENCE:g} % confidence." if bounded else ""
        sample = subject.features(view, stages=True)
        smallest = int(torch.bincount(sample.labels)[sample.labels.unique()].min())
        neighbours = min(15, smallest - 1)
        for stage, values in sample.stages.items():
            facts = subject.facts(view) | {"stage": stage, "n": len(sample.labels)}
            facts |= {"radius": radius, "bound": bound.sharper, "paper_bound": bound.bound}
            facts |= {"cases": int(upper.sum()), "informative": bounded, "unit": "pairs"}
            # Estimates are too low on average, below ln 2 by construction and, before the last
            # stage, of pooled features: they cannot refute a lower bound.
            facts |= {"holds": None, "vacuous": 1 - bounded / max(1, int(upper.sum()))}
            facts |= {"verdict": None if bounded else "vacuous", "checked": False}
            facts |= {"paper": "theorem 6.3", "confidence": CONFIDENCE}
            if neighbours < 1:
                few = f"{text} A class has too few samples for an estimate."
                rows.append(row(_NATS, None, sentence=few, **facts))
                continue
            estimate = theory.estimate_divergence(
                values, sample.labels, classes, neighbours=neighbours, limit=200,
                generator=subject.source(_PAIRS, sample.positions),
            )  # fmt: skip
            pooled = "" if stage == "features" else " from pooled features"
            own = (
                f"{text} The nearest pair is estimated at {estimate.smallest:.3g} nats{pooled}. "
                "Such estimates tend to be too low and cannot exceed "
                f"{estimate.ceiling:.3g}, so they do not test the bound."
            )
            rows += [row(_NATS, estimate.smallest, of="nearest pair, estimated", mean=estimate.mean,
                         ceiling=estimate.ceiling, sentence=own, **facts)]  # fmt: skip
            arrays[f"divergence.{view}.{stage}"] = estimate.pairs.numpy()
        arrays[f"divergence.{view}.bound"] = bound.pairs.numpy()
    arrays["divergence.most"] = np.array(math.log(2))
    return Measured(arrays, rows)


def _judged(cases: theory.Cases, unit: str) -> dict[str, Any]:
    """The facts of a row about all cases of a statement."""
    informative = int(cases.informative.sum())
    held = int((cases.informative & cases.holds).sum())
    return {
        "holds": float(cases.holds.double().mean()),
        "vacuous": 1 - informative / len(cases.holds),
        "cases": len(cases.holds),
        "unit": unit,
        "informative": informative,
        "held": held,
        "verdict": _verdict(informative, held),
        "factor": cases.factor,
    }


def _verdict(informative: int, held: int) -> str:
    return "vacuous" if not informative else "holds" if held == informative else "violated"


def _smallest(values: Tensor) -> float:
    return float(values[values.isfinite()].min())
