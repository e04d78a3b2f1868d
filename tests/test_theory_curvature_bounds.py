"""The curvature bounds: their algebra by hand, and their measurement where H is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.draws import PerSample, fold, keys
from noiseproof.theory import (
    Cases,
    CurvatureBounds,
    bound_curvature,
    lower_bound,
    sharper_upper_bound,
    upper_bound,
)


class Softmax(nn.Module):
    """A linear softmax model: its features are its inputs, perhaps stretched."""

    def __init__(self, dim: int = 5, classes: int = 4, stretch: float = 1.0):
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.head = nn.Linear(dim, classes).double()
        self.head.weight.data = torch.randn(classes, dim, generator=make, dtype=torch.float64)
        self.head.bias.data = torch.randn(classes, generator=make, dtype=torch.float64)
        self.drop = nn.Dropout(0.9)
        self.stretch = stretch

    def features(self, x: Tensor) -> Tensor:
        return self.drop(self.stretch * x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(count) % 4


def source(count: int = 6) -> PerSample:
    return PerSample(keys(3, torch.arange(count)))


def closed_form(net: Softmax, x: Tensor) -> tuple[Tensor, Tensor]:
    """Λ and tr H of H = Wᵀ(diag p − ppᵀ)W."""
    w = net.head.weight.detach()
    p = net.head(x).softmax(1).detach()
    hessian = w.T @ (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) @ w
    return hessian.square().sum((1, 2)), hessian.diagonal(dim1=1, dim2=2).sum(1)


def test_the_bounds_have_the_values_computed_by_hand():
    assert upper_bound(0.75, 2.0, 0.5, 3.0, sigma=0.5) == pytest.approx(128 * (0.75 + 9.0))
    sharp = sharper_upper_bound(0.75, 2.0, 0.5, 3.0, sigma=0.5, slope=4.0)
    assert sharp == pytest.approx(32 * (0.75 + 36.0 - 1.0))
    assert lower_bound(0.75, 3.0, 1.0, sigma=0.5, slope=4.0) == pytest.approx(64 * (1.0 - 1.0))


def test_the_constants_are_those_of_an_exactly_quadratic_loss():
    # E[(gᵀε + ½εᵀHε)²] by Gauss–Hermite quadrature, which is exact for polynomials.
    sigma = 0.7
    g = torch.tensor([0.3, -1.2], dtype=torch.float64)
    h = torch.tensor([[2.0, 0.5], [0.5, -0.4]], dtype=torch.float64)
    root = math.sqrt(3)  # nodes of the three-point rule for N(0, 1), exact to degree 5
    nodes = {-root: 1 / 6, 0.0: 2 / 3, root: 1 / 6}
    mean = 0.0
    for a, wa in nodes.items():
        for b, wb in nodes.items():
            e = sigma * torch.tensor([a, b], dtype=torch.float64)
            mean += wa * wb * float(g @ e + 0.5 * e @ h @ e) ** 2
    lam, trace, slope = float(h.square().sum()), float(h.trace()), float(g.square().sum())
    # All draws in the ball, each moving the loss by the root of that mean: only (tr H)² is lost.
    sharp = sharper_upper_bound(1.0, math.sqrt(mean), 1.0, 99.0, sigma, slope)
    assert sharp == pytest.approx(lam + trace**2 / 2)
    # All draws out of the ball: nothing is lost.
    assert lower_bound(0.0, math.sqrt(mean), 0.0, sigma, slope) == pytest.approx(2 * lam + trace**2)


def test_the_sharper_bound_is_never_above_the_papers():
    make = torch.Generator().manual_seed(2)
    for _ in range(50):
        w = torch.randn(6, 4, generator=make)
        eta = torch.rand(6, generator=make)
        gap = torch.cdist(w, w).amax(1)
        slope = torch.rand(6, generator=make)
        paper = upper_bound(eta, w.norm(dim=1).max(), 0.8, 2.0, 0.3)
        sharp = sharper_upper_bound(eta, gap, 0.8, 2.0, 0.3, slope)
        assert (torch.as_tensor(sharp) <= torch.as_tensor(paper)).all()


def test_a_loss_change_never_exceeds_what_the_bounds_allow_it():
    # |Δl| <= max_j ‖W_j − W_y‖ ‖Δq‖, the step on which the sharper bound rests.
    net = Softmax()
    x, y = batch(200)
    away = torch.randn(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    before, after = (F.cross_entropy(net.head(v), y, reduction="none") for v in (x, x + away))
    gap = torch.cdist(net.head.weight, net.head.weight).amax(1)[y]
    assert ((after - before).abs() <= gap * away.norm(dim=1)).all()


def test_on_a_linear_model_with_little_noise_all_bounds_hold_and_the_residual_is_small():
    net = Softmax().train()
    x, y = batch()
    lam, trace = closed_form(net, x)
    result = bound_curvature(
        net, x, y, sigma=0.02, radius=0.02, draws=200, curvature=lam, trace=trace,
        generator=source(),
    )  # fmt: skip
    assert (result.residual < 0.02).all()
    assert result.holds_upper.all()
    assert result.holds_upper_sharp.all()
    assert result.holds_lower.all()
    assert (result.upper_sharp < result.upper).all()
    # ‖ε‖² / σ² is chi-squared with 5 degrees of freedom, and the ball has radius 2σ: P(χ² <= 4).
    assert result.stability.mean().item() == pytest.approx(0.4506, abs=0.04)
    slope = (net.head(x).softmax(1) - F.one_hot(y, 4)) @ net.head.weight
    torch.testing.assert_close(result.slope, slope.square().sum(1).detach())
    assert torch.equal(result.curvature, lam)


def test_curvature_and_trace_from_the_draws_converge_to_the_closed_form():
    net = Softmax()
    x, y = batch()
    lam, trace = closed_form(net, x)
    many = {"x": x.repeat(100, 1), "y": y.repeat(100), "generator": source(600)}
    result = bound_curvature(net, **many, sigma=0.1, radius=1.0, draws=20, chunk=600)
    torch.testing.assert_close(result.curvature.view(100, 6).mean(0), lam, rtol=0.1, atol=0)
    away = (result.trace.view(100, 6).mean(0) - trace).abs()
    assert (away < 4 * (2 * lam / 2000).sqrt()).all()  # vᵀHv has variance 2Λ; 2,000 draws each


def test_the_residual_falls_with_the_square_of_the_noise():
    x, y = batch()
    wide, narrow = (
        bound_curvature(Softmax(), x, y, sigma=s, radius=1.0, draws=60, generator=source())
        for s in (0.02, 0.01)
    )
    assert (wide.residual / narrow.residual).median().item() == pytest.approx(4, rel=0.1)


def test_without_a_draw_outside_the_loss_outside_is_undefined_and_its_term_zero():
    x, y = batch()
    result = bound_curvature(Softmax(), x, y, sigma=0.01, radius=5.0, draws=20, generator=source())
    assert (result.stability == 1).all()
    assert result.loss_outside.isnan().all()
    torch.testing.assert_close(result.lower_right, -4 / 0.01**2 * result.slope)
    assert result.vacuous_lower.all()
    assert result.holds_lower.all()
    assert result.verdict_lower == result.verdict_lower_paper == ["vacuous"] * 6
    assert result.loss_change.isnan().all()
    assert "The paper's lower bound is vacuous for all 6 samples." in result.sentence()


def test_the_loss_outside_is_the_mean_over_the_draws_that_left():
    net, (x, y) = Softmax(), batch(1)
    own = source(1)
    result = bound_curvature(net, x, y, sigma=0.5, radius=0.5, draws=40, generator=own)
    outside, largest = [], net.head(x).abs().max().item()
    for draw in range(40):
        noise = 0.5 * PerSample(fold(own.keys, torch.tensor(draw))).normal(5).double()
        logits = net.head(x + noise)
        largest = max(largest, logits.abs().max().item())
        if noise.norm() > 1.0:
            outside.append(F.cross_entropy(logits, y).item())
    assert 0 < len(outside) < 40
    assert result.stability.item() == pytest.approx(1 - len(outside) / 40)
    assert result.loss_outside.item() == pytest.approx(sum(outside) / len(outside))
    change = abs(sum(outside) / len(outside) - F.cross_entropy(net.head(x), y).item())
    assert result.loss_change.item() == pytest.approx(change)
    assert result.largest_logit.item() == pytest.approx(largest)


def test_a_bound_no_better_than_the_logits_allow_is_vacuous():
    x, y = batch()
    result = bound_curvature(Softmax(), x, y, sigma=0.1, radius=50.0, draws=5, generator=source())
    assert result.vacuous_upper.all()
    assert result.verdict_upper == ["vacuous"] * 6
    assert "The paper's upper bound is vacuous for all 6 samples." in result.sentence()
    tight = bound_curvature(Softmax(), x, y, sigma=0.01, radius=0.1, draws=5, generator=source())
    assert not tight.vacuous_upper.any()
    assert not tight.vacuous_upper_sharp.any()


def test_without_a_draw_inside_the_ball_both_upper_bounds_are_vacuous():
    x, y = batch()
    result = bound_curvature(
        Softmax(stretch=100.0), x, y, sigma=1.0, radius=0.01, draws=5, generator=source()
    )
    assert (result.stability == 0).all()
    assert result.verdict_upper == result.verdict_upper_sharp == ["vacuous"] * 6
    for sigma in (0.2, 0.06, 0.15):  # rounding does not matter
        net, many = Softmax(stretch=1000.0).float(), x.float().repeat(20, 1)
        narrow = bound_curvature(net, many, y.repeat(20), sigma=sigma, radius=0.01, draws=2)
        assert narrow.vacuous_upper.all()
        assert narrow.vacuous_upper_sharp.all()


def test_shares_are_of_the_samples_about_which_a_bound_says_something():
    # Four samples: the bound is -1 (vacuous), 2 (holds), 50 and 60 (violated).
    cases = Cases(
        torch.full((4,), 3.0),
        torch.tensor([-1.0, 2.0, 50.0, 60.0]),
        torch.tensor([True, True, False, False]),
        torch.tensor([True, False, False, False]),
    )
    assert cases.verdict == ["vacuous", "holds", "violated", "violated"]
    assert cases.sentence() == "is informative for 3 of 4 samples and holds for 1 of them"
    assert cases._replace(holds=cases.vacuous).sentence() == (
        "is informative for 3 of 4 samples and fails for all 3"
    )
    # A bound that was called vacuous and failed was not vacuous.
    assert cases._replace(vacuous=cases.holds | True).verdict[2:] == ["violated", "violated"]


def test_a_bound_that_is_orders_of_magnitude_away_is_called_loose_with_the_factor():
    x, y = batch()
    result = bound_curvature(Softmax(), x, y, sigma=0.001, radius=0.1, draws=9, generator=source())
    ratio = (result.upper / result.curvature).median().item()
    assert ratio > 1e6
    assert result.upper_cases.factor == pytest.approx(ratio, rel=1e-6)
    assert f"holds for all 6, but is loose by a median factor of {ratio:.3g}" in result.sentence()
    # A lower bound is loose the other way round.
    one, true = torch.ones(1), torch.tensor([True])
    assert Cases(1000 * one, one, true, ~true).factor == pytest.approx(1000)
    assert "loose" not in Cases(99 * one, one, true, ~true).sentence()


class Saddle(nn.Module):
    """Logits (a·u² − b·v², 0): the Hessian of its loss at 0 is that of a saddle."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 2, bias=False).double()
        self.head.weight.data = torch.tensor([[1.0], [0.0]], dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        return (3 * x[:, :1] ** 2 - x[:, 1:] ** 2) / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def test_the_papers_lower_bound_has_the_sum_of_absolute_eigenvalues():
    # With y = 0, l = ln(1 + exp(−z)): H = −½ diag(3, −1) at 0, so Λ = 2.5, tr H = −1, Σ|λ| = 2.
    x, y = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0])
    net = Saddle()
    result = bound_curvature(
        net, x, y, sigma=0.5, radius=0.1, draws=8, generator=source(1),
        curvature=torch.tensor([2.5]), trace=torch.tensor([-1.0]),
    )  # fmt: skip
    assert result.absolute_sum.item() == pytest.approx(2)
    assert result.lower_left.item() == pytest.approx(5 + 1)
    assert result.lower_left_paper.item() == pytest.approx(5 + 4)
    given = bound_curvature(
        net, x, y, sigma=0.5, radius=0.1, draws=8, generator=source(1),
        absolute_sum=torch.tensor([7.0]),
    )  # fmt: skip
    assert given.absolute_sum.item() == 7


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_sample_has_the_same_values_in_any_chunk(chunk: int):
    x, y = batch()
    whole = bound_curvature(Softmax(), x, y, sigma=0.2, radius=0.2, draws=10, generator=source())
    parts = bound_curvature(
        Softmax(), x, y, sigma=0.2, radius=0.2, draws=10, generator=source(), chunk=chunk
    )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_scale_measures_in_the_coordinates_of_a_stretched_input():
    x, y = batch()
    unit = torch.tensor([0.5, 2.0, 1.0, 0.3, 1.5], dtype=torch.float64)

    class Stretched(Softmax):
        def features(self, x: Tensor) -> Tensor:
            return unit * x

    setting = {"sigma": 0.2, "radius": 0.2, "draws": 10, "generator": source()}
    scaled = bound_curvature(Softmax(), x, y, scale=unit, **setting)
    literal = bound_curvature(Stretched(), x / unit, y, **setting)
    for one, other in zip(scaled, literal, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_modes_and_gradients_do_not_change_and_no_grad_does_not_matter():
    net = Softmax().train()
    net.head.eval()
    x, y = batch()

    def measure() -> CurvatureBounds:
        return bound_curvature(net, x, y, sigma=0.2, radius=0.2, draws=4, generator=source())

    expected = measure()
    with torch.no_grad():
        torch.testing.assert_close(measure().curvature, expected.curvature)
    with torch.inference_mode():
        torch.testing.assert_close(measure().curvature, expected.curvature)
    assert (net.training, net.drop.training, net.head.training) == (True, True, False)
    assert all(p.grad is None for p in net.parameters())
    assert not x.requires_grad
    assert not any(value.requires_grad for value in expected)


def test_invalid_arguments_raise_errors_that_name_them():
    x, y = batch()
    with pytest.raises(ValueError, match="sigma must be positive, got 0"):
        bound_curvature(Softmax(), x, y, sigma=0.0, radius=1.0)
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        bound_curvature(Softmax(), x, y, sigma=1.0, radius=1.0, draws=0)
    with pytest.raises(ValueError, match=r"curvature must be 6 values, got \(2,\)"):
        bound_curvature(Softmax(), x, y, sigma=1.0, radius=1.0, curvature=torch.ones(2))
    with pytest.raises(ValueError, match=r"y must be 6 class indices, got shape \(2,\)"):
        bound_curvature(Softmax(), x, y[:2], sigma=1.0, radius=1.0)
