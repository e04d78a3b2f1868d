"""T_ν on small networks, and the models that it does not apply to."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.theory import scale_features, scaling_report


class Net(nn.Module):
    """Images -> body -> neck -> after -> features, and a head."""

    def __init__(
        self,
        body: nn.Sequential,
        neck: nn.Module,
        after: nn.Module | None = None,
        bias: bool = True,
    ):
        super().__init__()
        self.body, self.neck, self.after = body, neck, after or nn.Identity()
        self.head = nn.Linear(6, 3, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        return self.after(self.neck(self.body(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def stem() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )


def net_of(after: nn.Module | None = None) -> Net:
    return Net(stem(), nn.Linear(16, 6), after)


def images() -> tuple[Tensor, Tensor]:
    x = torch.rand(30, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(30) % 3


@pytest.mark.parametrize("nu", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("ending", ["linear", "relu", "conv", "no bias"])
def test_scaling_multiplies_everything_but_the_prediction(nu: float, ending: str):
    torch.manual_seed(1)
    net = {
        "linear": net_of(),
        "relu": net_of(nn.Sequential(nn.ReLU(), nn.Dropout(0.5))),
        "conv": Net(
            nn.Sequential(),
            nn.Conv2d(1, 6, 3),
            nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ),
        "no bias": Net(stem(), nn.Linear(16, 6, bias=False), bias=False),
    }[ending].double()
    x, y = images()
    x = x.double()
    scaled = scale_features(net, nu, x)
    report = scaling_report(net, scaled, x, y)
    assert report.same_argmax
    assert report.logits_ratio == pytest.approx(nu)
    assert report.features_ratio == pytest.approx(nu)
    assert report.margin_ratio.tolist() == pytest.approx([nu] * 3)
    assert report.dispersion_ratio.tolist() == pytest.approx([nu] * 3)
    assert report.step_error < 1e-12
    expected = {f"{scaled.layer}.weight", f"{scaled.layer}.bias", "head.bias"}
    if ending == "no bias":
        expected = {f"{scaled.layer}.weight"}
    assert set(report.moved) == (expected if nu != 1 else set())


def test_the_original_and_its_modes_do_not_change():
    torch.manual_seed(2)
    net = net_of().train()
    net.body[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = images()
    scaled = scale_features(net, 2.0, x)
    scaling_report(net, scaled, x, y)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert net.training
    assert not net.body[1].training
    assert scaled.model.training
    assert next(scaled.model.parameters()).dtype == torch.float32


def test_opposite_scalings_move_the_parameters_in_opposite_directions():
    torch.manual_seed(3)
    net = net_of()
    x, _ = images()
    steps = []
    for nu in (2.5, 1 / 4):
        after = scale_features(net, nu, x).model
        pairs = zip(after.parameters(), net.parameters(), strict=True)
        steps.append(torch.cat([(a - b).detach().flatten() for a, b in pairs]))
    assert float(F.cosine_similarity(steps[0], steps[1], dim=0)) == pytest.approx(-1)
    assert float(steps[0].norm() / steps[1].norm()) == pytest.approx(1.5 / 0.75)


@pytest.mark.parametrize("after", [nn.BatchNorm1d(6), nn.Tanh(), nn.GELU(), nn.LayerNorm(6)])
@pytest.mark.parametrize("nu", [2.0, 1.0 + 1e-12])
def test_layers_that_do_not_scale_raise_an_error_even_for_a_scale_near_one(
    after: nn.Module, nu: float
):
    torch.manual_seed(4)
    if isinstance(after, nn.BatchNorm1d) and after.running_mean is not None:
        after.running_mean.fill_(0.5)  # as after training
    with pytest.raises(ValueError, match="do not scale with the layer 'neck'"):
        scale_features(net_of(after), nu, images()[0])


def test_a_skip_connection_raises_an_error():
    class Skip(Net):
        def features(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :6] + super().features(x)

    torch.manual_seed(5)
    with pytest.raises(ValueError, match="skip connection"):
        scale_features(Skip(stem(), nn.Linear(16, 6)), 2.0, images()[0])


def test_the_layer_may_be_named_and_is_checked():
    torch.manual_seed(6)
    net = net_of()
    x, _ = images()
    assert scale_features(net, 2.0, x, layer=net.neck).layer == "neck"
    assert scale_features(net, 2.0, x, layer="neck").layer == "neck"
    with pytest.raises(ValueError, match=r"do not scale with the layer 'body.0'"):
        scale_features(net, 2.0, x, layer="body.0")
    with pytest.raises(ValueError, match="must be linear or convolutional, got BatchNorm2d"):
        scale_features(net, 2.0, x, layer="body.1")
    with pytest.raises(ValueError, match="is the head"):
        scale_features(net, 2.0, x, layer="head")
    with pytest.raises(ValueError, match="has no layer Linear"):
        scale_features(net, 2.0, x, layer=nn.Linear(16, 6))


def test_a_model_without_a_neck_needs_the_layers_name():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(stem(), nn.Linear(16, 6)), nn.Linear(6, 3)

        def features(self, x: Tensor) -> Tensor:
            return self.body(x)

    torch.manual_seed(7)
    net, (x, _) = Bare(), images()
    with pytest.raises(ValueError, match=r"no layer 'neck'.* layer='body.1' or 'body.0.0'"):
        scale_features(net, 2.0, x)
    assert scale_features(net, 2.0, x, layer="body.1").layer == "body.1"


def test_invalid_arguments_raise_errors():
    net = net_of()
    x, _ = images()
    with pytest.raises(ValueError, match="nu must be a positive number, got -1"):
        scale_features(net, -1.0, x)
    with pytest.raises(ValueError, match="has no features"):
        scale_features(nn.Linear(2, 2), 2.0, x)
