"""The parts of an analysis: each looks at a subject and gives arrays and scalar rows.

curvature   input curvature of every chosen test sample, by both estimates
steps       how the finite-difference estimate depends on its step
counts      right answers out of several noisy copies, and how they go with curvature
surface     the negative loss on a plane around a few test inputs
embedding   t-SNE of clean and noisy features, fitted together
separation  k-NN accuracy and silhouette of the raw features at every stage

The penultimate layer's geometry is in `noiseproof.lab.analysis.store.spheres`, the theory in
`noiseproof.lab.analysis.theory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noiseproof import curvature as estimates
from noiseproof.lab.analysis.correlation import count_groups, pearson, ranks, retained_share
from noiseproof.lab.analysis.differentiable import lacks_second_derivative
from noiseproof.lab.analysis.embed import LIMIT, embed_together
from noiseproof.lab.analysis.separation import separation as separate
from noiseproof.lab.analysis.subject import Subject
from noiseproof.lab.analysis.surface import loss_surface
from noiseproof.perturb import parse
from noiseproof.perturb.text import noise_levels

__all__ = ["Asked", "Found", "Known", "estimated", "row", "tail_share"]

Arrays = dict[str, NDArray[Any]]
Row = dict[str, Any]
Known = Mapping[str, Arrays]
Tick = Callable[[float], None]
STEPS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STUDY = 64  # samples of the step study
NEIGHBOURS = 10
SURFACES = 3  # inputs whose surroundings are mapped
EXTENT = 8.0  # of the surface, in standard deviations of the noise
_CURVATURE, _STUDY, _SURFACE = 21, 22, 23  # purposes of random numbers


@dataclass(frozen=True)
class Asked:
    """What an analysis was asked for; each part names those that it depends on."""

    probes: int
    step: float
    draws: int
    noise: tuple[str, ...]  # the first is used wherever one noise is enough
    seed: int
    samples: int | None
    stages: bool

    @property
    def level(self) -> float:
        """The (largest) level of the first noise, in pixels; 0.1 where it has none."""
        return max(noise_levels(self.noise[0]), default=0.1) or 0.1


class Found(NamedTuple):
    arrays: Arrays
    rows: list[Row]


def row(metric: str, value: float | int | bool | None, **more: Any) -> Row:
    """One scalar: its name, value, and whatever tells it from its neighbours."""
    return {"metric": metric, "value": value, **more}


def tail_share(values: NDArray[Any], share: float = 0.9) -> NDArray[Any]:
    """The lowest `share` of the values, ascending."""
    return np.sort(values)[: max(1, round(share * len(values)))]


def curvature(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    index = subject.chosen()
    by_step, by_product, labels, right, losses = [], [], [], [], []
    done = 0
    for x, y, place in subject.batches(subject.dataset.test, index):
        half = (done + len(y) / 2) / len(index)
        one, other = estimated(subject, asked, x, y, place, lambda half=half: tick(half))
        by_step.append(one)
        by_product.append(other)
        with torch.no_grad():
            logits = subject.model(x)
        losses.append(torch.nn.functional.cross_entropy(logits, y, reduction="none"))
        right.append(logits.argmax(1) == y)
        labels.append(y)
        done += len(y)
        tick(done / len(index))
    arrays = {
        "index": index.numpy(),
        "labels": _joined(labels),
        "finite_difference": _joined(by_step),
        "hessian": _joined(by_product),
        "loss": _joined(losses),
        "correct": _joined(right),
    }
    facts = {"space": subject.space, "probes": asked.probes, "n": len(index)}
    rows = []
    for estimate in ("finite_difference", "hessian"):
        values = arrays[estimate]
        if np.isnan(values).all():
            continue
        more = {"estimate": estimate, **facts}
        more |= {"step": asked.step} if estimate == "finite_difference" else {}
        rows += [
            row("median curvature", float(np.median(values)), **more),
            row("mean curvature", float(values.mean()), **more),
            row(
                "median curvature of the lowest 90 %", float(np.median(tail_share(values))), **more
            ),
            row("mean curvature of the lowest 90 %", float(tail_share(values).mean()), **more),
        ]
    return Found(arrays, rows)


def estimated(
    subject: Subject,
    asked: Asked,
    x: Tensor,
    y: Tensor,
    place: Tensor,
    halfway: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Curvature of a batch by gradients some step apart, and by Hessian-vector products."""
    common = {
        "probes": asked.probes,
        "scale": subject.scale,
        "generator": subject.source(_CURVATURE, place),
    }
    by_step = estimates.finite_difference(subject.model, x, y, step=asked.step, **common)
    halfway()
    return by_step, _by_product(subject, x, y, common)


def steps(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    index = subject.chosen(STUDY)
    sizes = sorted({*STEPS, asked.step})
    found: dict[float, list[Tensor]] = {size: [] for size in sizes}
    exact: list[Tensor] = []
    done = 0
    for x, y, place in subject.batches(subject.dataset.test, index):
        common = {
            "probes": asked.probes,
            "scale": subject.scale,
            "generator": subject.source(_STUDY, place),
        }
        exact.append(_by_product(subject, x, y, common))
        for size in sizes:
            value = estimates.finite_difference(subject.model, x, y, step=size, **common)
            found[size].append(value)
        done += len(y)
        tick(done / len(index))
    hessian = _joined(exact)
    table = np.stack([_joined(found[size]) for size in sizes])
    inputs = math.prod(subject.dataset.size)
    rows = []
    for size, values in zip(sizes, table, strict=True):
        has = (hessian > 0) & (values > 0)
        ratio = float(np.median(values[has] / hessian[has])) if has.any() else None
        rows.append(
            row(
                "median finite difference / Hessian",
                ratio,
                step=size,
                means=float(values.mean() / hessian.mean()) if hessian.any() else None,
                moved=size * math.sqrt(inputs),  # mean length of the step, in the same space
                rank_correlation=pearson(ranks(values), ranks(hessian)),
                space=subject.space,
                probes=asked.probes,
                n=int(has.sum()),
            )
        )
    arrays = {"index": index.numpy(), "steps": np.array(sizes), "hessian": hessian}
    return Found({**arrays, "finite_difference": table}, rows)


@torch.no_grad()
def counts(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    index = torch.from_numpy(known["curvature"]["index"])
    total = torch.zeros(len(asked.noise), len(index), dtype=torch.int64)
    parsed = [parse(spec) for spec in asked.noise]
    drawn = [1 if noise.deterministic else asked.draws for noise in parsed]
    done = 0
    for x, y, place in subject.batches(subject.dataset.test, index):
        for i, noise in enumerate(parsed):
            for draw in range(drawn[i]):
                right = subject.model(subject.disturb(x, place, noise, draw)).argmax(1) == y
                total[i, done : done + len(y)] += right.cpu()
        done += len(y)
        tick(done / len(index))
    lam = known["curvature"]["finite_difference"]
    rows, arrays = [], {"index": index.numpy(), "counts": total.numpy()}
    arrays |= {"noise": np.array(asked.noise), "draws": np.array(drawn)}
    for spec, hits, of in zip(asked.noise, total.numpy(), drawn, strict=True):
        more = {"perturbation": spec, "draws": of, "n": len(index), "space": subject.space}
        groups = count_groups(lam, hits, of)
        kept = retained_share(lam, hits / of)
        rows += [
            row("accuracy", float((hits / of).mean()), **more),
            row("accuracy of the lowest 50 %", float(kept.accuracy[9]), **more),
            row("Pearson r over groups", groups.r_groups, empty=groups.empty, **more),
            row("Pearson r over samples", groups.r_samples, **more),
            row("Spearman r over samples", groups.rank_samples, **more),
            row("slope over groups", groups.slope, intercept=groups.intercept, **more),
        ]
    return Found(arrays, rows)


def surface(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    """Around a few inputs, the same for every run, so that one which all runs recognise can be
    shown beside each other."""
    index, extent = subject.chosen(SURFACES), EXTENT * asked.level
    surfaces, images, labels, rows = [], [], [], []
    for x, y, place in subject.batches(subject.dataset.test, index):
        for i in range(len(y)):
            source = subject.source(_SURFACE, place[i : i + 1])
            made = loss_surface(subject.model, x[i], int(y[i]), extent=extent, source=source)
            surfaces.append(made)
            images.append(x[i].cpu().numpy())
            labels.append(int(y[i]))
            middle = made.negative_loss[len(made.distance) // 2, len(made.distance) // 2]
            right = (made.margin > 0).double().mean()
            more = {"space": "pixels", "index": int(place[i]), "extent": extent}
            rows += [
                row("negative loss at the input", float(middle), **more),
                row("lowest negative loss", float(made.negative_loss.min()), **more),
                row("gradient norm", made.gradient_norm, **more),
                row("share of the plane classified rightly", float(right), **more),
            ]
            tick(len(surfaces) / len(index))
    arrays = {
        "distance": surfaces[0].distance.numpy(),
        "negative_loss": np.stack([made.negative_loss.numpy() for made in surfaces]),
        "margin": np.stack([made.margin.numpy() for made in surfaces]),
        "image": np.stack(images),
        "index": index.numpy(),
        "label": np.array(labels),
    }
    return Found(arrays, rows)


def embedding(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    clean = subject.stages(None, LIMIT)
    noisy = subject.stages(asked.noise[0], LIMIT)
    chosen = list(clean.stages) if asked.stages else ["features"]
    arrays: Arrays = {"index": clean.places.numpy(), "labels": clean.labels.numpy()}
    arrays |= {"stages": np.array(chosen), "noise": np.array(asked.noise[0])}
    rows = []
    for i, stage in enumerate(chosen):
        both = clean.stages[stage].numpy(), noisy.stages[stage].numpy()
        placed = embed_together(*both, seed=asked.seed)
        arrays |= {f"{stage}.clean": placed.clean, f"{stage}.noisy": placed.noisy}
        more = {"stage": stage, "perturbation": asked.noise[0], "n": len(clean.places)}
        rows.append(row("t-SNE divergence", placed.divergence, seed=asked.seed, **more))
        tick((i + 1) / len(chosen))
    return Found(arrays, rows)


def separation(subject: Subject, asked: Asked, known: Known, tick: Tick) -> Found:
    views = {"clean": subject.stages(None, LIMIT), "noisy": subject.stages(asked.noise[0], LIMIT)}
    stages = list(views["clean"].stages)
    rows: list[Row] = []
    table = np.zeros((2, 2, len(stages)))
    for i, (view, features) in enumerate(views.items()):
        for j, stage in enumerate(stages):
            found = separate(features.stages[stage], features.labels, NEIGHBOURS)
            table[:, i, j] = found
            more = {"stage": stage, "data": view, "n": len(features.labels)}
            more |= {"perturbation": asked.noise[0]} if view == "noisy" else {}
            rows.append(row("k-NN accuracy", found.knn, neighbours=NEIGHBOURS, **more))
            rows.append(row("silhouette", found.silhouette, **more))
            tick((i * len(stages) + j + 1) / (2 * len(stages)))
    arrays = {"stages": np.array(stages), "views": np.array(list(views))}
    return Found({**arrays, "knn": table[0], "silhouette": table[1]}, rows)


def _by_product(subject: Subject, x: Tensor, y: Tensor, common: dict[str, Any]) -> Tensor:
    """Curvature by Hessian-vector products; NaN for a model that cannot be differentiated twice."""
    try:
        return estimates.hessian_probe(subject.twice, x, y, **common)
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_second_derivative(error):
            raise
        return torch.full_like(y, torch.nan, dtype=x.dtype)


def _joined(parts: list[Tensor]) -> NDArray[Any]:
    return torch.cat(parts).detach().cpu().numpy()
