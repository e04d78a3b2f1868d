"""Every statement of `noiseproof.theory` on one model: measured side, bound, and where it holds.

Features are those of the chosen test samples (and, where a statement is about training data, of the
training images), in eval mode; centroids are the class means of the training images. The curvature
bounds are taken in pixels under unclamped Gaussian noise of the training noise's level.

A row has `value` (what was measured), `bound`, `holds` (the share of samples, classes or pairs for
which the statement holds), `vacuous` (the share of which it says nothing), and a `sentence`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noiseproof import theory
from noiseproof.lab.analysis.differentiable import lacks_second_derivative
from noiseproof.lab.analysis.embed import LIMIT
from noiseproof.lab.analysis.measures import Asked, Found, Known, Row, Tick, row
from noiseproof.lab.analysis.subject import Features, Subject

__all__ = ["BOUNDED", "measure"]

BOUNDED = 64  # samples of the curvature bounds
DRAWS = 64  # noise draws of each
NU = 2.0  # factor of the scaling
BATCH = 64  # training samples of the gradient statement
_NATS = "divergence of two classes, in nats"
_BOUNDS, _PAIRS = 31, 32  # purposes of random numbers


def measure(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    try:
        arrays, rows = _curvature(subject, asked)
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_second_derivative(error):
            raise
        said = f"Cannot be measured: the model has no second derivative ({_first_line(error)})."
        names = ("upper", "sharper upper", "lower")
        arrays, rows = {}, [
            row(f"{name} bound on curvature", None, bound=None, holds=None, vacuous=1.0, n=0,
                sentence=said)
            for name in names
        ]  # fmt: skip
    tick(0.5)
    clean, noisy = subject.test(), subject.test(asked.noise[0])
    views = {"clean": clean, "noisy": noisy}
    rows += _guarantees(subject, clean)
    tick(0.6)
    rows += [_gradient(subject), _scaling(subject), _softmax(subject, clean)]
    rows += _spheres(subject, views, asked)
    tick(0.7)
    pairs, more = _divergence(subject, views, asked)
    tick(1.0)
    return Found({**arrays, **pairs}, rows + more)


def _curvature(subject: Subject, asked: Asked) -> tuple[dict[str, Any], list[Row]]:
    index, radius = subject.chosen(BOUNDED), subject.run.config.method.radius
    parts = [
        theory.bound_curvature(
            subject.twice, x, y, sigma=asked.level, radius=radius, draws=DRAWS,
            generator=subject.source(_BOUNDS, place),
        )
        for x, y, place in subject.batches(subject.dataset.test, index)
    ]  # fmt: skip
    found = theory.CurvatureBounds(
        *(torch.cat(columns).cpu() for columns in zip(*parts, strict=True))
    )
    facts = {"n": len(index), "space": "pixels", "sigma": asked.level, "radius": 2 * radius}
    facts |= {"residual": float(found.residual.median()), "draws": DRAWS}
    sides = {
        "upper bound on curvature": (
            found.curvature, found.upper, found.holds_upper, found.vacuous_upper),
        "sharper upper bound on curvature": (
            found.curvature, found.upper_sharp, found.holds_upper_sharp, found.upper_sharp < 0),
        "lower bound on 2Λ + (tr H)²": (
            found.lower_left, found.lower_right, found.holds_lower, found.vacuous_lower),
    }  # fmt: skip
    rows = []
    for name, (measured, bound, holds, vacuous) in sides.items():
        empty = int(vacuous.sum())
        said = f"Holds for {int(holds.sum())} of {len(index)} samples"
        if name.startswith("lower"):
            said += f"; says nothing for {empty}, where it is not positive." if empty else "."
        elif name.startswith("sharper"):
            said += f"; for {empty} it is negative, so the expansion fails there." if empty else "."
        else:
            said += f"; for {empty} it is no better than the size of the logits." if empty else "."
        rows.append(
            row(name, float(measured.median()), bound=float(bound.median()), of="median",
                holds=_share(holds), vacuous=_share(vacuous), sentence=said, **facts)
        )  # fmt: skip
    rows.append(
        row("feature stability", float(found.stability.mean()), of="mean",
            sentence=found.sentence(), **facts)
    )  # fmt: skip
    arrays = {f"curvature.{name}": values.numpy() for name, values in found._asdict().items()}
    return {"index": index.numpy(), **arrays}, rows


def _guarantees(subject: Subject, clean: Features) -> list[Row]:
    q, y, centroids = clean.last, clean.labels, subject.centroids
    rows = []
    margin = theory.margin_guarantee(q, y, subject.head, centroids)
    positive = int((margin.bound > 0).sum())
    present = margin.bound.isfinite()
    said = (
        f"Margins are guaranteed to be positive for {positive} of {int(present.sum())} classes."
        if positive
        else "Vacuous here: no class is compact enough for its margin to be guaranteed positive."
    )
    rows.append(
        row("class margin", _least(margin.measured), bound=_least(margin.bound),
            of="smallest class", holds=_share(margin.holds),
            vacuous=_share(margin.bound[present] <= 0), n=len(y), sentence=said)
    )  # fmt: skip
    spread = theory.dispersion_guarantee(q, y, centroids)
    said = "No class is wider than twice its radius; the triangle inequality leaves no other way."
    rows.append(
        row("class dispersion", float(spread.measured.max()), bound=float(spread.bound.max()),
            of="largest class", holds=_share(spread.holds), vacuous=0.0, n=len(y), sentence=said)
    )  # fmt: skip
    apart = theory.separation_guarantee(q, y, subject.head, centroids)
    said = (
        f"Proved: the nearest boundary is {apart.distance:.3g} from a centroid, more than twice "
        f"the largest radius, {apart.radius:.3g}."
        if apart.guaranteed
        else f"Vacuous here: the nearest boundary is {apart.distance:.3g} from a centroid, not "
        f"more than twice the largest radius, {apart.radius:.3g}."
    ) + (" Measured, classes are separated." if apart.separated else " Measured, they are not.")
    rows.append(
        row("class separation", apart.within, bound=apart.between, of="farthest within, nearest "
            "between", holds=float(apart.holds), vacuous=float(not apart.guaranteed), n=len(y),
            sentence=said)
    )  # fmt: skip
    return rows


def _gradient(subject: Subject) -> Row:
    train, method = subject.train, subject.run.config.method
    found = theory.margin_gradients(
        train.last[:BATCH], train.labels[:BATCH], subject.head, subject.centroids,
        momentum=method.centroid_momentum, margin=method.margin,
    )  # fmt: skip
    ratio = found.ratio[~found.ratio.isnan()]
    active = len(ratio)
    if not active:
        said = "Says nothing here: every centroid keeps its margin, so both gradients are 0."
    elif found.applies:
        said = f"For all {active} classes with a gradient, momentum multiplies it by 1 − γ."
    else:
        said = (
            f"Its conditions hold for {int(found.conditions.sum())} of {active} classes: the "
            "others meet another rival, or keep their margin, with one of the two centroids."
        )
    met = found.conditions[~found.ratio.isnan()]
    near = (ratio - found.expected).abs() <= 1e-4
    return row(
        "margin gradient with momentum / without",
        float(ratio.median()) if active else None,
        bound=found.expected,
        of="median class",
        holds=_share(near[met]) if bool(met.any()) else None,
        vacuous=1 - _share(met) if active else 1.0,
        n=min(BATCH, len(train.labels)),
        sentence=said,
    )


def _scaling(subject: Subject) -> Row:
    index = subject.chosen(256)
    x, y, _ = next(subject.batches(subject.dataset.test, index))
    try:
        scaled = theory.scale_features(subject.model, NU, x, layer="neck")
    except ValueError as refusal:
        return row("scaling of features", None, bound=NU, holds=None, vacuous=1.0, n=0,
                   sentence=f"Does not apply to this model: {refusal}.")  # fmt: skip
    found = theory.scaling_report(subject.model, scaled, x, y)
    said = (
        f"Multiplying the layer {scaled.layer!r} and the head's bias by {NU:g} multiplies features "
        f"by {found.features_ratio:.4g} and logits by {found.logits_ratio:.4g}, and "
        + ("changes no prediction." if found.same_argmax else "changes predictions, by rounding.")
    )
    holds = float(found.same_argmax and abs(found.features_ratio - NU) < 1e-3)
    return row("scaling of features", found.features_ratio, bound=NU, of="ratio", holds=holds,
               vacuous=0.0, n=len(x), sentence=said)  # fmt: skip


def _softmax(subject: Subject, clean: Features) -> Row:
    null = theory.null_space(subject.head)
    found = theory.invisible_variance(clean.last, clean.labels, subject.head)
    size = subject.head.in_features
    said = (
        f"{null.dimension} of {size} directions of feature space leave every probability as it is; "
        f"{100 * found.share:.3g} % of the within-class variance lies in them."
    )
    return row("directions that softmax cannot see", null.dimension, bound=size - null.rank,
               of="dimension", holds=1.0, vacuous=0.0, share=found.share, n=len(clean.labels),
               isotropic=found.isotropic, sentence=said)  # fmt: skip


def _spheres(subject: Subject, views: dict[str, Features], asked: Asked) -> list[Row]:
    radius, train = subject.run.config.method.radius, subject.train
    classes = [c for c in range(len(subject.centroids)) if bool((train.labels == c).any())]
    bounds = [
        theory.sphere_bound(
            train.last[train.labels == c], subject.centroids[c], radius=radius, rho=radius**2 / 2
        )
        for c in classes
    ]
    worst = max(bounds, key=lambda found: found.bound)
    rows = []
    for view, found in views.items():
        limits = theory.leaving_limits(found.last, found.labels, subject.centroids, radius=radius)
        measured = limits.outside / limits.total.clamp(min=1)
        more = _view(view, asked) | {"n": len(found.labels), "radius": radius, "of": "worst class"}
        if view == "clean":
            rows.append(
                row("leaving the sphere, Rademacher bound", float(measured.max()),
                    bound=worst.bound, holds=_share(measured[classes] <= worst.bound),
                    vacuous=sum(b.vacuous for b in bounds) / len(bounds),
                    sentence=worst.sentence(), **more)
            )  # fmt: skip
        full = int((limits.limit >= 0.999).sum())
        said = (
            f"With 95 % confidence, at most {100 * float(limits.limit.max()):.3g} % of the worst "
            f"class leave the sphere; of the best, {100 * float(limits.limit.min()):.3g} %."
        ) + (f" For {full} classes that says nothing." if full else "")
        rows.append(
            row("leaving the sphere, held-out limit", float(measured.max()),
                bound=float(limits.limit.max()), holds=_share(measured <= limits.limit),
                vacuous=full / len(limits.limit), sentence=said, **more)
        )  # fmt: skip
    return rows


def _divergence(
    subject: Subject, views: dict[str, Features], asked: Asked
) -> tuple[dict[str, Any], list[Row]]:
    radius, classes = subject.run.config.method.radius, len(subject.centroids)
    arrays: dict[str, Any] = {}
    rows: list[Row] = []
    for view, found in views.items():
        bound = theory.divergence_bound(found.last, found.labels, subject.centroids, radius=radius)
        named = subject.stages(None if view == "clean" else asked.noise[0], LIMIT)
        least = int(torch.bincount(named.labels, minlength=classes)[named.labels.unique()].min())
        neighbours = min(15, least - 1)
        for stage, values in named.stages.items():
            more = _view(view, asked) | {"stage": stage, "n": len(named.labels), "radius": radius}
            if neighbours < 1:
                said = "Too few samples of a class for an estimate."
                empty = {"holds": None, "vacuous": float(bound.sharper <= 0), "sentence": said}
                rows.append(row(_NATS, None, bound=bound.sharper, **empty, **more))
                continue
            estimate = theory.estimate_divergence(
                values, named.labels, classes, neighbours=neighbours, limit=200,
                generator=subject.source(_PAIRS, named.places),
            )  # fmt: skip
            upper = torch.triu(torch.ones(classes, classes, dtype=torch.bool), 1)
            known = upper & ~estimate.pairs.isnan()
            told, least_told = estimate.pairs[known], bound.pairs[known].to(estimate.pairs)
            rows.append(
                row(_NATS, estimate.smallest, bound=bound.sharper,
                    of="nearest pair, estimated", mean=estimate.mean, ceiling=estimate.ceiling,
                    paper_bound=bound.bound, holds=_share(told >= least_told),
                    vacuous=_share(least_told <= 0), sentence=bound.sentence(), **more)
            )  # fmt: skip
            arrays[f"divergence.{view}.{stage}"] = estimate.pairs.numpy()
        arrays[f"divergence.{view}.bound"] = bound.pairs.numpy()
    arrays["divergence.most"] = np.array(math.log(2))
    return arrays, rows


def _view(view: str, asked: Asked) -> dict[str, Any]:
    return {"data": view} | ({"perturbation": asked.noise[0]} if view == "noisy" else {})


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _share(holds: Tensor) -> float:
    return float(holds.double().mean()) if len(holds) else 1.0


def _least(values: Tensor) -> float:
    return float(values[values.isfinite()].min())
