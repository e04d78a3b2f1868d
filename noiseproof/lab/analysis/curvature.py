"""Input curvature of test samples, and how it relates to robustness.

curvature   Λ of each sample, by finite differences and by Hessian-vector products
steps       how the finite-difference estimate depends on its step
counts      correct predictions out of several noisy copies, against curvature
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noiseproof import curvature as estimates
from noiseproof.lab.analysis.correlation import count_groups, lowest, retained_share, spearman
from noiseproof.lab.analysis.differentiable import lacks_second_derivative
from noiseproof.lab.analysis.store import open_analysis
from noiseproof.lab.analysis.subject import Arrays, Measured, Progress, Subject, row
from noiseproof.perturb import parse
from noiseproof.robustness import perturb_samples

STEPS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STEP_SAMPLES = 64  # samples of the step study
# Below this loss, 1 − p is rounded off in float32 (p is the probability of the true class), and
# curvature with it: estimates are wrong by large factors.
RESOLVED_LOSS = 1e-6
_CURVATURE, _STEPS = 21, 22  # purposes of random numbers


def measure_curvature(subject: Subject, progress: Progress) -> Measured:
    """Curvature, loss and correctness of each test sample."""
    settings, index = subject.settings, subject.test_sample()
    columns: dict[str, list[Tensor]] = defaultdict(list)
    done = 0
    for x, y, positions in subject.batches(subject.dataset.test, index):
        probes = _probes(subject, _CURVATURE, positions)
        by_step = estimates.finite_difference(subject.model, x, y, step=settings.step, **probes)
        progress((done + len(y) / 2) / len(index))
        with torch.no_grad():
            logits = subject.model(x)
        columns["labels"].append(y)
        columns["finite_difference"].append(by_step)
        columns["hessian"].append(_hessian_probe(subject, x, y, probes))
        columns["loss"].append(torch.nn.functional.cross_entropy(logits, y, reduction="none"))
        columns["correct"].append(logits.argmax(1) == y)
        done += len(y)
        progress(done / len(index))
    arrays = {"index": index.numpy(), **{name: _joined(v) for name, v in columns.items()}}
    rows = []
    for estimate in ("finite_difference", "hessian"):
        values = arrays[estimate]
        if np.isnan(values).all():
            continue
        facts = {"estimate": estimate, "space": subject.space}
        facts |= {"probes": settings.probes, "n": len(index)}
        facts |= {"step": settings.step} if estimate == "finite_difference" else {}
        low = lowest(values, 0.9)
        rows += [
            row("median curvature", float(np.median(values)), **facts),
            row("mean curvature", float(values.mean()), **facts),
            row("median curvature of the lowest 90 %", float(np.median(low)), **facts),
            row("mean curvature of the lowest 90 %", float(low.mean()), **facts),
        ]
    return Measured(arrays, rows)


def measure_steps(subject: Subject, progress: Progress) -> Measured:
    """Finite differences with steps from 1e-4 to 0.3, against Hessian-vector products."""
    settings, index = subject.settings, subject.test_sample(STEP_SAMPLES)
    steps = sorted({*STEPS, settings.step})
    by_step, by_hessian, done = [], [], 0
    for x, y, positions in subject.batches(subject.dataset.test, index):
        probes = _probes(subject, _STEPS, positions)
        by_hessian.append(_hessian_probe(subject, x, y, probes))
        difference = partial(estimates.finite_difference, subject.model, x, y, **probes)
        by_step.append(torch.stack([difference(step=step) for step in steps], 1))
        done += len(y)
        progress(done / len(index))
    hessian = _joined(by_hessian)
    table = np.ascontiguousarray(_joined(by_step).T)
    rows = []
    for step, values in zip(steps, table, strict=True):
        positive = (hessian > 0) & (values > 0)
        ratios = values[positive] / hessian[positive]
        rows.append(
            row(
                "median finite difference / Hessian",
                float(np.median(ratios)) if len(ratios) else None,
                step=step,
                means=float(values.mean() / hessian.mean()) if hessian.any() else None,
                moved=step * math.sqrt(math.prod(subject.dataset.size)),  # mean length of a step
                rank_correlation=spearman(values, hessian),
                space=subject.space,
                probes=settings.probes,
                n=len(ratios),
            )
        )
    arrays = {"index": index.numpy(), "steps": np.array(steps), "hessian": hessian}
    return Measured({**arrays, "finite_difference": table}, rows)


@torch.no_grad()
def measure_counts(subject: Subject, progress: Progress) -> Measured:
    """How many noisy copies of each sample are classified correctly, and the correlation of that
    number with curvature."""
    settings, index = subject.settings, subject.test_sample()
    counts = torch.zeros(len(settings.noise), len(index), dtype=torch.int64)
    noises = [parse(text) for text in settings.noise]
    draws = [1 if noise.deterministic else settings.draws for noise in noises]
    done = 0
    for x, y, positions in subject.batches(subject.dataset.test, index):
        for i, noise in enumerate(noises):
            for draw in range(draws[i]):
                noisy = perturb_samples(x, positions, noise, draw, settings.seed)
                correct = subject.model(noisy).argmax(1) == y
                counts[i, done : done + len(y)] += correct.cpu()
        done += len(y)
        progress(done / len(index))
    stored = open_analysis(subject.run, subject.weights).arrays("curvature") or {}
    curvature, rows = stored["finite_difference"], []
    for text, correct, total in zip(settings.noise, counts.numpy(), draws, strict=True):
        facts = {"perturbation": text, "draws": total, "n": len(index), "space": subject.space}
        groups = count_groups(curvature, correct, total)
        (half,) = retained_share(curvature, correct / total, [0.5]).accuracy
        rows += [
            row("accuracy", float((correct / total).mean()), **facts),
            row("accuracy of the lowest 50 %", float(half), **facts),
            row("Pearson r over groups", groups.r_groups, empty=groups.empty, **facts),
            row("Pearson r over samples", groups.r_samples, **facts),
            row("Spearman r over samples", groups.rank_samples, **facts),
            row("slope over groups", groups.slope, intercept=groups.intercept, **facts),
        ]
    arrays: Arrays = {"index": index.numpy(), "counts": counts.numpy()}
    arrays |= {"noise": np.array(settings.noise), "draws": np.array(draws)}
    return Measured(arrays, rows)


def _probes(subject: Subject, purpose: int, positions: Tensor) -> dict[str, Any]:
    """The arguments that all curvature estimators of a batch share."""
    source = subject.source(purpose, positions)
    return {"probes": subject.settings.probes, "scale": subject.scale, "generator": source}


def _hessian_probe(subject: Subject, x: Tensor, y: Tensor, probes: dict[str, Any]) -> Tensor:
    """Curvature by Hessian-vector products; NaN if the model has no second derivative."""
    try:
        return estimates.hessian_probe(subject.smooth_model, x, y, **probes)
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_second_derivative(error):
            raise
        return torch.full_like(y, torch.nan, dtype=x.dtype)


def _joined(batches: list[Tensor]) -> NDArray[Any]:
    return torch.cat(batches).detach().cpu().numpy()
