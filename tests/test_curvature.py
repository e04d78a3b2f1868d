"""Input curvature against Hessians that are computed independently."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof import curvature
from noiseproof.draws import PerSample, fold, keys
from noiseproof.modes import without_tf32

SHAPE = (2, 3, 2)  # C x H x W
CLASSES = 4

Measure = Callable[..., Tensor]


def source(count: int, seed: int = 3) -> PerSample:
    return PerSample(keys(seed, torch.arange(count)))


def normals(of: PerSample, probe: int, *shape: int) -> Tensor:
    """The directions of one probe, drawn without the package's loop: B x `shape`."""
    return PerSample(fold(of.keys, torch.tensor(probe))).normal(*shape).double()


@pytest.fixture
def net() -> nn.Module:
    """A smooth network: it has a Hessian everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(10, 7),
        nn.Softplus(),
        nn.Linear(7, 4),
    ).double()


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (6,), generator=generator)


def hessian(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of one sample's loss, by torch.autograd.functional."""

    def loss(flat: Tensor) -> Tensor:
        return F.cross_entropy(net(flat.view(1, *x.shape)), y[None])

    result = torch.autograd.functional.hessian(loss, x.flatten())
    assert isinstance(result, Tensor)
    return result


def frobenius(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([hessian(net, *pair).square().sum() for pair in zip(x, y, strict=True)])


def test_exact_equals_the_squared_entries_of_the_hessian_of_each_sample(net, data):
    torch.testing.assert_close(curvature.exact(net, *data), frobenius(net, *data))


def test_exact_equals_the_sum_of_squared_eigenvalues(net, data):
    x, y = data
    eigenvalues = torch.linalg.eigvalsh(hessian(net, x[2], y[2]))
    torch.testing.assert_close(
        curvature.exact(net, x, y)[2], eigenvalues.square().sum(), rtol=1e-9, atol=0
    )


def test_a_linear_softmax_model_has_its_closed_form():
    torch.manual_seed(2)
    net = nn.Linear(5, 3).double()
    x, y = torch.randn(4, 5).double(), torch.tensor([0, 1, 2, 1])
    expected = []
    for row in x:
        p = net(row).softmax(0).detach()
        h = net.weight.T @ (torch.diag(p) - torch.outer(p, p)) @ net.weight
        expected.append(h.detach().square().sum())
    torch.testing.assert_close(curvature.exact(net, x, y), torch.stack(expected))


def fine_difference(*args, **options) -> Tensor:
    return curvature.finite_difference(*args, step=1e-5, **options)


@pytest.mark.parametrize("measure", [curvature.hessian_probe, fine_difference])
def test_probes_converge_to_the_exact_value_at_the_monte_carlo_rate(net, data, measure: Measure):
    exact = curvature.exact(net, *data)
    value = exact
    for probes in (25, 400):
        value = measure(net, *data, probes=probes, generator=source(6))
        # Var‖Hε‖² = 2‖H²‖_F² ≤ 2Λ²: four standard deviations.
        assert ((value / exact - 1).abs() < 4 * (2 / probes) ** 0.5).all()
    assert not torch.equal(value, exact)


def test_the_probe_average_is_that_of_the_products_with_the_hessian(net, data):
    x, y = data
    of = source(6)
    value = curvature.hessian_probe(net, x, y, probes=3, generator=of)
    eps = torch.stack([normals(of, probe, *SHAPE).flatten(1) for probe in range(3)])
    for i in range(6):
        product = eps[:, i] @ hessian(net, x[i], y[i])
        torch.testing.assert_close(value[i], product.square().sum(1).mean())


def test_finite_differences_approach_the_products_linearly_in_the_step(net, data):
    goal = curvature.hessian_probe(net, *data, probes=5, generator=source(6))

    def error(step: float) -> float:
        value = curvature.finite_difference(net, *data, probes=5, step=step, generator=source(6))
        return float((value - goal).abs().sum() / goal.sum())

    coarse, fine = error(1e-3), error(1e-4)
    assert fine < 1e-3
    assert coarse / fine == pytest.approx(10, rel=0.2)


def test_the_trace_estimator_converges_with_the_variance_of_random_signs(net, data):
    x, y = data
    value = curvature.trace(net, x, y, probes=300, generator=source(6))
    for i in range(6):
        h = hessian(net, x[i], y[i])
        variance = 2 * (h.square().sum() - h.diagonal().square().sum()) / 300
        assert (value[i] - h.trace()).abs() < 4 * variance.sqrt()


def test_trace_of_a_diagonal_hessian_needs_one_probe():
    class Separate(nn.Module):
        """Two classes whose logits are (2x₁, 0): one curved direction of three."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[:, 1] * 2, torch.zeros_like(x[:, 1])], 1)

    x, y = torch.zeros(1, 3).double(), torch.tensor([1])
    value = curvature.trace(Separate(), x, y, probes=1, scale=3.0)
    torch.testing.assert_close(value, torch.tensor([9.0]).double())  # s² a² / 4


def test_at_a_kink_finite_differences_see_the_jump_and_second_derivatives_do_not():
    a, step, probes = 3.0, 1e-3, 400
    net = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)
    ).double()
    net.load_state_dict({"0.weight": torch.ones(1, 1), "2.weight": torch.tensor([[a], [0.0]])})
    # logits (a·relu(x), 0), label 0; the first x is left of the kink but within reach of a step.
    x, y = torch.tensor([[-0.5 * step], [1.0]]).double(), torch.zeros(2, dtype=torch.int64)
    of = source(2)

    almost_everywhere = curvature.exact(net, x, y)
    inside = (a**2 * torch.sigmoid(torch.tensor(a)) * torch.sigmoid(torch.tensor(-a))) ** 2
    torch.testing.assert_close(
        almost_everywhere, torch.tensor([0.0, float(inside)]).double(), rtol=1e-6, atol=0
    )
    assert float(curvature.hessian_probe(net, x, y, probes=5, generator=of)[0]) == 0

    value = curvature.finite_difference(net, x, y, probes=probes, step=step, generator=of)
    eps = torch.cat([normals(of, probe, 1) for probe in range(probes)], 1)  # (2, probes)
    there = x + step * eps
    slope = torch.where(there > 0, -a * torch.sigmoid(-a * there), 0.0)
    expected = (slope[0] / step).square().mean()
    torch.testing.assert_close(value[0], expected)
    # A jump of a/2 is crossed with probability P(ε > 1/2) = 0.3085.
    assert float(value[0]) == pytest.approx(0.3085 * (a / 2 / step) ** 2, rel=0.25)
    assert float(value[1]) == pytest.approx(float(inside), rel=0.4)  # far from it: no difference


MEASURES = {
    "finite": lambda *a, **k: curvature.finite_difference(*a, probes=3, **k),
    "probe": lambda *a, **k: curvature.hessian_probe(*a, probes=3, **k),
    "trace": lambda *a, **k: curvature.trace(*a, probes=3, **k),
    "exact": lambda *a, generator=None, **k: curvature.exact(*a, **k),
}
every = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES.keys())


@every
def test_a_sample_has_the_same_value_in_any_batch_and_chunk(net, data, measure: Measure):
    x, y = data
    whole = measure(net, x, y, generator=source(6))
    for chunk in (1, 4):
        split = measure(net, x, y, generator=source(6), chunk=chunk)
        torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)
    alone = measure(net, x[4:5], y[4:5], generator=PerSample(source(6).keys[4:5]))
    torch.testing.assert_close(alone, whole[4:5], rtol=1e-9, atol=1e-12)


@every
def test_no_forward_pass_sees_more_than_a_chunk(net, data, measure: Measure):
    seen, done = [], []
    net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    measure(net, *data, chunk=4, progress=done.append)
    assert set(seen) == {4, 2}
    assert done == [4, 6]


def test_large_images_run_in_smaller_chunks_by_default():
    net = nn.Sequential(nn.AdaptiveAvgPool1d(2))
    seen = []
    net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    curvature.finite_difference(net, torch.zeros(4, 2**21), torch.tensor([0, 1, 0, 1]), probes=1)
    assert max(seen) == 3


@every
def test_modes_statistics_gradients_and_inputs_do_not_change(data, measure: Measure):
    net = nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).double()
    net.train()
    net[3].eval()
    net[5].weight.requires_grad_(False)
    net[0].weight.grad = torch.full_like(net[0].weight, 7.0)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = data[0].clone().requires_grad_(), data[1]

    value = measure(net, x, y, generator=source(6))
    again = measure(net.eval(), x, y, generator=source(6))
    torch.testing.assert_close(value, again)  # measured in eval mode

    net.train()
    net[3].eval()
    with pytest.raises(ValueError, match="logits"):
        measure(nn.Sequential(net, nn.Unflatten(1, (2, 2))), x, y)
    assert [module.training for module in net] == [True, True, True, False, True, True]
    measure(net, x, y)
    assert net.training
    assert [module.training for module in net] == [True, True, True, False, True, True]
    for name, now in net.state_dict().items():
        assert torch.equal(now, before[name]), name
    assert [p.requires_grad for p in net[5].parameters()] == [False, True]
    assert torch.equal(net[0].weight.grad, torch.full_like(net[0].weight, 7.0))  # type: ignore
    assert all(p.grad is None for name, p in net.named_parameters() if name != "0.weight")
    assert x.grad is None
    assert torch.equal(x.detach(), data[0])


@every
def test_no_graph_is_kept_and_a_callers_no_grad_does_not_matter(net, data, measure: Measure):
    value = measure(net, *data, generator=source(6))
    assert not value.requires_grad
    assert value.grad_fn is None
    with torch.no_grad():
        torch.testing.assert_close(measure(net, *data, generator=source(6)), value)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        x, y, scale = data[0].clone(), data[1].clone(), torch.ones(2, 1, 1).double()
        inside = measure(net, x, y, generator=source(6), scale=scale)
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(inside, value)


@every
def test_autocast_is_off_inside(net, data, measure: Measure):
    net, x = net.float(), data[0].float()
    value = measure(net, x, data[1], generator=source(6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = measure(net, x, data[1], generator=source(6))
    assert torch.equal(cast, value)
    assert value.dtype == torch.float32


@pytest.mark.parametrize(("name", "power"), [("exact", 4), ("probe", 4), ("trace", 2)])
def test_a_scalar_scale_multiplies_by_its_power(net, data, name: str, power: int):
    measure = MEASURES[name]
    value = measure(net, *data, generator=source(6))
    scaled = measure(net, *data, generator=source(6), scale=0.25)
    torch.testing.assert_close(scaled, value * 0.25**power, rtol=1e-9, atol=1e-15)


@every
def test_a_scale_per_channel_equals_the_reparametrised_model(net, data, measure: Measure):
    x, y = data
    std = torch.tensor([0.25, 3.0]).double().view(2, 1, 1)

    class InCoordinates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, u: Tensor) -> Tensor:
            return self.net(u * std)

    value = measure(net, x, y, generator=source(6), scale=std)
    literal = measure(InCoordinates(), x / std, y, generator=source(6))
    torch.testing.assert_close(value, literal, rtol=1e-6, atol=1e-9)


def test_a_torch_generator_reproduces_the_directions(net, data):
    def once(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return curvature.hessian_probe(net, *data, probes=2, generator=generator)

    assert torch.equal(once(5), once(5))
    assert not torch.equal(once(5), once(6))


@every
def test_a_model_that_ignores_its_input_is_flat(data, measure: Measure):
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.arange(4.0).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.bias.expand(len(x), 4)

    assert torch.equal(measure(Constant(), *data), torch.zeros(6).double())


@every
def test_an_empty_batch_gives_an_empty_vector(net, measure: Measure):
    empty = measure(net, torch.zeros(0, *SHAPE).double(), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)


def test_attention_is_differentiated_twice():
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # B x tokens x 4
            q = x[:, None]
            return F.scaled_dot_product_attention(q, q, q)[:, 0].mean(1)

    torch.manual_seed(4)
    net, x, y = Attention(), torch.randn(2, 3, 4).double(), torch.tensor([1, 2])
    difference = curvature.finite_difference(net, x, y, probes=4, step=1e-6, generator=source(2))
    probe = curvature.hessian_probe(net, x, y, probes=4, generator=source(2))
    torch.testing.assert_close(probe, difference, rtol=1e-4, atol=0)
    assert (probe > 0).all()


def test_tf32_settings_are_restored():
    matmul = torch.backends.cuda.matmul
    conv = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    before = conv.fp32_precision, matmul.fp32_precision
    with without_tf32():
        assert (conv.fp32_precision, matmul.fp32_precision) == ("ieee", "ieee")
    assert (conv.fp32_precision, matmul.fp32_precision) == before


X, Y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X, Y, {"probes": 0}, "probes must be at least 1, got 0"),
        (X, Y, {"step": 0.0}, "step must be a positive number, got 0.0"),
        (X, Y, {"step": float("nan")}, "step must be a positive number, got nan"),
        (X, Y[:2], {}, r"3 class indices, got shape \(2,\)"),
        (X, Y[:, None], {}, r"3 class indices, got shape \(3, 1\)"),
        (X, Y.float(), {}, "class indices, got .* torch.float32"),
        (X.long(), Y, {}, "float32 or float64, got .* torch.int64"),
        (X.half(), Y, {}, "float32 or float64, got .* torch.float16"),
        (X[0], Y[:2], {}, r"batch of inputs, .* got shape \(2,\)"),
        (X, Y, {"scale": -1.0}, "scale must be a positive number, got -1.0"),
        (X, Y, {"scale": torch.ones(3)}, r"one input, \(2,\), got shape \(3,\)"),
        (X, Y, {"scale": torch.ones(3, 2)}, r"one input, \(2,\), got shape \(3, 2\)"),
        (X, Y, {"chunk": 0}, "chunk must be at least 1, got 0"),
        (X, Y, {"generator": source(4)}, "keys for 4 samples, x has 3"),
    ],
)
def test_invalid_arguments_raise_errors_that_name_them(x, y, options, message: str):
    with pytest.raises(ValueError, match=message):
        curvature.finite_difference(nn.Linear(2, 2), x, y, **options)


def test_a_model_without_gradients_raises_an_error():
    class Detached(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).detach()

    with pytest.raises(ValueError, match="no gradient"):
        curvature.exact(Detached(2, 2), X, Y)


# The sum of absolute eigenvalues


def test_the_absolute_sum_is_that_of_all_eigenvalues_of_either_sign(net, data):
    x, y = data
    values = torch.stack(
        [torch.linalg.eigvalsh(hessian(net, *one)) for one in zip(x, y, strict=True)]
    )
    assert (values < -1e-3).any()
    assert (values > 1e-3).any()
    total = curvature.absolute_sum(net, x, y, generator=source(6))
    torch.testing.assert_close(total, values.abs().sum(1), rtol=1e-6, atol=0)
    # With fewer products it is smaller, but has the largest.
    few = curvature.absolute_sum(net, x, y, products=4, generator=source(6))
    assert (few < total).all()
    assert (few > 0.5 * total).all()


def test_between_the_kinks_of_a_relu_network_the_absolute_sum_is_the_trace():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    x, y = torch.randn(8, 40), torch.arange(8) % 5
    total = curvature.absolute_sum(net, x, y, products=6, generator=source(8))  # rank 4
    traces = torch.stack([hessian(net, *one).trace() for one in zip(x, y, strict=True)])
    torch.testing.assert_close(total, traces, rtol=1e-4, atol=0)


def test_a_flat_loss_has_an_absolute_sum_of_zero():
    net = nn.Linear(3, 2)
    net.weight.data.zero_()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert curvature.absolute_sum(net, x, torch.tensor([0, 1])).tolist() == [0, 0]
    with pytest.raises(ValueError, match="products must be at least 1, got 0"):
        curvature.absolute_sum(net, x, torch.tensor([0, 1]), products=0)
