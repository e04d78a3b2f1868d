"""Input curvature and feature stability: the bounds on Λ of theorem 6.1, sample by sample.

With noise ε ~ N(0, σ²I) and the ball of radius δ around the clean feature f(x), let

    η     = P(f(x + ε) is in the ball)             feature stability (definition 6.1)
    l_out = E[l(x + ε) | it is not]                loss outside; |l_out − l| is the loss stability
    K     = the largest |logit|,   Λ = Σλ_i² = ‖H‖²_F,   H the Hessian of the loss l at x.

Everything follows from one identity. If l(x + ε) = l + ∇lᵀε + ½εᵀHε exactly, then

    E[(l(x + ε) − l)²] = σ²‖∇l‖² + (σ⁴/4)(2Λ + (tr H)²),                                     (*)

because odd moments of ε vanish and E[(εᵀHε)²] = σ⁴(2Λ + (tr H)²). An upper bound on the left side,
by how much features inside and outside the ball can change the loss, bounds Λ from above; a lower
bound, by the part outside the ball, bounds 2Λ + (tr H)² from below.

The quadratic expansion is an assumption, and cross-entropy is never quadratic. `bound_curvature`
therefore reports the expansion's residual next to the bounds: where it is large, a violated bound
shows that the expansion fails, not that the bound is wrong.

Where a network is piecewise linear, as with ReLU, and x is not on a kink, H = Jᵀ(diag p − ppᵀ)J
with the logits' Jacobian J and the probabilities p. It is positive semidefinite, so tr H = Σ|λ_i|,
and of rank below the number of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.curvature import SampleLoss, krylov_eigenvalues, per_sample
from noiseproof.draws import Source
from noiseproof.geometry import check_samples, features_and_head
from noiseproof.theory.verdict import Cases, Verdict

Number = float | Tensor


def upper_bound(eta: Number, w_norm: Number, delta: Number, k: Number, sigma: float) -> Number:
    """Λ <= (8/σ⁴)(η ‖W‖²_{2,∞} δ² + 4(1 − η)K²), the paper's bound.

    A loss changes by at most twice the largest change of a logit: 2‖W‖δ in the ball, 4K outside.

    Args:
        eta: η, the probability that a noisy feature stays in the ball.
        w_norm: ‖W‖_{2,∞} = max_j ‖W_j‖, over the rows of the head's weight.
        delta: δ, the radius of the ball.
        k: K, the largest |logit|.
        sigma: σ, the standard deviation of the noise.

    >>> upper_bound(eta=1.0, w_norm=2.0, delta=0.5, k=9.0, sigma=1.0)
    8.0
    """
    return 8 / sigma**4 * (eta * (w_norm * delta) ** 2 + 4 * (1 - eta) * k**2)


def sharper_upper_bound(
    eta: Number, gap: Number, delta: Number, k: Number, sigma: float, slope: Number
) -> Number:
    """Λ <= (2/σ⁴)(η gap² δ² + 16(1 − η)K² − σ²‖∇l‖²), under the paper's own assumption.

    The change of the loss is log Σ_j p_j exp(Δz_j − Δz_y), the logarithm of a mean of exponentials,
    so it is between the smallest and the largest Δz_j − Δz_y = (W_j − W_y)ᵀΔq. Its size is then at
    most gap·δ in the ball and 4K outside. Insert that in (*), keep the gradient's term and drop
    (tr H)² >= 0.

    Never above the paper's bound: gap <= 2 max_j ‖W_j‖, and the gradient's term is subtracted. A
    negative value means that the expansion fails here.

    Args:
        eta: η, the probability that a noisy feature stays in the ball.
        gap: max_j ‖W_j − W_y‖.
        delta: δ, the radius of the ball.
        k: K, the largest |logit|.
        sigma: σ, the standard deviation of the noise.
        slope: ‖∇l‖².

    >>> sharper_upper_bound(eta=1.0, gap=2.0, delta=0.5, k=9.0, sigma=1.0, slope=0.25)
    1.5
    """
    inside, outside = eta * (gap * delta) ** 2, 16 * (1 - eta) * k**2
    return 2 / sigma**4 * (inside + outside - sigma**2 * slope)


def lower_bound(
    eta: Number, loss_outside: Number, loss: Number, sigma: float, slope: Number
) -> Number:
    """2Λ + (tr H)² >= (4/σ⁴)((1 − η)(l_out − l)² − σ²‖∇l‖²).

    In (*), E[(l(x + ε) − l)²] is at least its part outside the ball, where a mean of squares is at
    least the square of the mean. The paper has (Σ|λ_i|)² on the left; (tr H)² is not larger, so
    this is the stronger statement. `CurvatureBounds` has both.

    Args:
        eta: η, the probability that a noisy feature stays in the ball.
        loss_outside: l_out; ignored if η = 1, when it is undefined.
        loss: l at x.
        sigma: σ, the standard deviation of the noise.
        slope: ‖∇l‖².

    >>> lower_bound(eta=0.75, loss_outside=5.0, loss=1.0, sigma=1.0, slope=1.0)
    12.0
    >>> lower_bound(eta=1.0, loss_outside=float("nan"), loss=1.0, sigma=1.0, slope=1.0)
    -4.0
    """
    if isinstance(eta, Tensor):
        jump = torch.as_tensor(loss_outside - loss, dtype=eta.dtype, device=eta.device)
        outside = torch.where(eta < 1, (1 - eta) * jump**2, 0.0)
    else:
        outside = (1 - eta) * (loss_outside - loss) ** 2 if eta < 1 else 0.0
    return 4 / sigma**4 * (outside - sigma**2 * slope)


class CurvatureBounds(NamedTuple):
    """One value per sample, B each, in the coordinates u = x / scale."""

    stability: Tensor  # η, the share of draws inside the ball
    loss: Tensor  # l(x)
    loss_outside: Tensor  # l_out; NaN where no draw left the ball
    largest_logit: Tensor  # K, over the clean input and all draws
    slope: Tensor  # ‖∇l‖²
    curvature: Tensor  # Λ
    trace: Tensor  # tr H
    upper: Tensor  # the paper's bound on Λ
    upper_sharp: Tensor
    lower_left: Tensor  # 2Λ + (tr H)²
    lower_right: Tensor  # its lower bound
    residual: Tensor  # of the quadratic expansion, relative; see `bound_curvature`
    holds_upper: Tensor
    holds_upper_sharp: Tensor
    holds_lower: Tensor
    vacuous_upper: Tensor  # upper >= 32 K² / σ⁴, its value at η = 0: the ball does not help
    vacuous_lower: Tensor  # lower_right <= 0
    vacuous_upper_sharp: Tensor  # upper_sharp >= its value at η = 0
    absolute_sum: Tensor  # Σ|λ_i|
    lower_left_paper: Tensor  # 2Λ + (Σ|λ_i|)², the paper's left side of the lower bound
    holds_lower_paper: Tensor

    @property
    def loss_change(self) -> Tensor:
        """|l_out − l|, small if the loss is stable (definition 6.1); NaN as `loss_outside`."""
        return (self.loss_outside - self.loss).abs()

    @property
    def upper_cases(self) -> Cases:
        """The paper's upper bound on each sample."""
        return Cases(self.curvature, self.upper, self.holds_upper, self.vacuous_upper)

    @property
    def upper_sharp_cases(self) -> Cases:
        """The sharper upper bound on each sample."""
        holds, vacuous = self.holds_upper_sharp, self.vacuous_upper_sharp
        return Cases(self.curvature, self.upper_sharp, holds, vacuous)

    @property
    def lower_cases(self) -> Cases:
        """The lower bound on 2Λ + (tr H)² of each sample."""
        return Cases(self.lower_left, self.lower_right, self.holds_lower, self.vacuous_lower)

    @property
    def lower_paper_cases(self) -> Cases:
        """The lower bound on 2Λ + (Σ|λ_i|)² of each sample, the paper's."""
        holds, vacuous = self.holds_lower_paper, self.vacuous_lower
        return Cases(self.lower_left_paper, self.lower_right, holds, vacuous)

    @property
    def verdict_upper(self) -> list[Verdict]:
        return self.upper_cases.verdict

    @property
    def verdict_upper_sharp(self) -> list[Verdict]:
        return self.upper_sharp_cases.verdict

    @property
    def verdict_lower(self) -> list[Verdict]:
        return self.lower_cases.verdict

    @property
    def verdict_lower_paper(self) -> list[Verdict]:
        return self.lower_paper_cases.verdict

    def sentence(self) -> str:
        """A summary of the batch, in words."""
        return (
            f"The paper's upper bound {self.upper_cases.sentence()}. The sharper one "
            f"{self.upper_sharp_cases.sentence()}. The paper's lower bound "
            f"{self.lower_paper_cases.sentence()}. The one with the trace "
            f"{self.lower_cases.sentence()}. All of them assume a quadratic expansion of the loss, "
            f"whose median relative error here is {float(self.residual.median()):.2g} (0 is exact; "
            "1 is no better than a constant)."
        )


def bound_curvature(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    sigma: float,
    radius: float,
    draws: int = 64,
    curvature: Tensor | None = None,
    trace: Tensor | None = None,
    absolute_sum: Tensor | None = None,
    scale: float | Tensor | None = None,
    generator: Source = None,
    chunk: int = 64,
) -> CurvatureBounds:
    """Both sides of the bounds for each sample, and the residual of the expansion.

    Assumes that the quadratic expansion is exact over the noise. η, l_out, K and, unless given, Λ
    and tr H are Monte Carlo estimates from the same `draws`; (tr H)² is overestimated by
    2Λ / draws. η = 1 means that no draw left the ball, not that none can. On ReLU networks H is the
    Hessian almost everywhere. Σ|λ_i|, unless given, is that of `curvature.absolute_sum`. The
    residual is

        sqrt(E[(l(x + ε) − l − ∇lᵀε − ½εᵀHε)²] / E[(l(x + ε) − l)²]),

    0 for an exact expansion and above 1 for one that is worse than none.

    Args:
        model: a network with `features(x)` and a linear `head`.
        x: inputs, B x ..., floating point.
        y: class indices, B.
        sigma: standard deviation of the noise, in the coordinates u = x / scale; never clamped.
        radius: δ_v; the ball around the clean feature has radius δ = 2 δ_v.
        draws: noise draws per sample; each costs a forward pass and a Hessian-vector product.
        curvature: Λ in the same coordinates, B, if there is a better estimate.
        trace: tr H, likewise.
        absolute_sum: Σ|λ_i|, likewise.
        scale: a number, or a tensor that broadcasts to one input, such as the std per channel.
        generator: a `PerSample` source makes a sample's values independent of its batch.
        chunk: samples in memory at a time.
    """
    for name, value in (("sigma", sigma), ("radius", radius)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    if len(x) == 0:
        raise ValueError("x must hold at least one input, got none")
    better = {"curvature": curvature, "trace": trace, "absolute_sum": absolute_sum}
    for name, given in better.items():
        if given is not None and given.shape != y.shape:
            raise ValueError(f"{name} must be {len(y)} values, got {tuple(given.shape)}")
    features, head = features_and_head(model)
    columns = per_sample(
        lambda loss: _observe(loss, features, head, sigma, 2 * radius, draws),
        *(model, x, y, scale, generator, chunk),
        forward=lambda inputs: head(features(inputs)),
    )
    eta, loss, outside, k, slope, *estimates, residual = columns.unbind(1)
    lam, tr, total = (
        estimate if given is None else given.detach().to(estimate)
        for estimate, given in zip(estimates, better.values(), strict=True)
    )

    weight = head.weight.detach().to(x.dtype)
    w_norm = torch.linalg.vector_norm(weight, dim=1).max()
    gap = torch.cdist(weight, weight).amax(1)[y.to(weight.device).long()]
    upper = torch.as_tensor(upper_bound(eta, w_norm, 2 * radius, k, sigma))
    sharp = torch.as_tensor(sharper_upper_bound(eta, gap, 2 * radius, k, sigma, slope))
    right = torch.as_tensor(lower_bound(eta, outside, loss, sigma, slope))
    left, left_paper = 2 * lam + tr**2, 2 * lam + total**2
    return CurvatureBounds(
        stability=eta,
        loss=loss,
        loss_outside=outside,
        largest_logit=k,
        slope=slope,
        curvature=lam,
        trace=tr,
        upper=upper,
        upper_sharp=sharp,
        lower_left=left,
        lower_right=right,
        residual=residual,
        holds_upper=lam <= upper,
        holds_upper_sharp=lam <= sharp,
        holds_lower=left >= right,
        # The bounds are linear in η. Their slope decides, since their values differ by rounding.
        vacuous_upper=(eta == 0) | (w_norm * 2 * radius >= 2 * k),
        vacuous_lower=right <= 0,
        vacuous_upper_sharp=(eta == 0) | (gap * 2 * radius >= 4 * k),
        absolute_sum=total,
        lower_left_paper=left_paper,
        holds_lower_paper=left_paper >= right,
    )


def _observe(
    at: SampleLoss,
    features: Callable[[Tensor], Tensor],
    head: nn.Linear,
    sigma: float,
    delta: float,
    draws: int,
) -> Tensor:
    """η, l, l_out, K, ‖∇l‖², Λ, tr H, Σ|λ| and the residual of one chunk, stacked: B x 9."""
    x, y, unit = at.x.detach(), at.y, at.scale
    with torch.no_grad():
        clean = features(x)
        check_samples(clean, y, head.out_features)
        logits = head(clean)
        loss, k = F.cross_entropy(logits, y, reduction="none"), logits.abs().amax(1)
    gradient = at.gradient().flatten(1)
    v = x
    inside, outside, lam, trace, unexplained, change = (torch.zeros_like(loss) for _ in range(6))
    for v, product in at.products(at.normals(draws)):
        with torch.no_grad():
            noisy = features(x + unit * (sigma * v))
            logits = head(noisy)
            rise = F.cross_entropy(logits, y, reduction="none") - loss
            k = torch.maximum(k, logits.abs().amax(1))
            stays = torch.linalg.vector_norm(noisy - clean, dim=1) <= delta
            inside += stays
            outside += torch.where(stays, 0.0, rise)
            quadratic = (v * product).flatten(1).sum(1)  # vᵀHv
            lam += product.flatten(1).square().sum(1)
            trace += quadratic
            linear = sigma * (gradient * v.flatten(1)).sum(1)
            unexplained += (rise - linear - 0.5 * sigma**2 * quadratic).square()
            change += rise.square()
    residual = torch.where(unexplained > 0, (unexplained / change).sqrt(), 0.0)
    # Without a draw outside this is 0 / 0: NaN, since l_out is undefined.
    loss_outside = loss + outside / (draws - inside)
    slope = gradient.square().sum(1)
    absolute = krylov_eigenvalues(at, v).abs().sum(1)  # started by the last draw
    estimates = [lam / draws, trace / draws, absolute.to(lam)]
    return torch.stack([inside / draws, loss, loss_outside, k, slope, *estimates, residual], 1)
