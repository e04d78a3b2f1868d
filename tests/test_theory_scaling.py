"""T_ν on real small networks, and the models that it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.theory import scale_features, scaling_report


class Net(nn.Module):
    """Any body that maps images to features, and a head."""

    def __init__(self, *body: nn.Module, width: int = 6, bias: bool = True):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(width, 3, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def stem() -> tuple[nn.Module, ...]:
    return nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()


def images() -> tuple[Tensor, Tensor]:
    x = torch.rand(30, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(30) % 3


@pytest.mark.parametrize("nu", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("ending", ["linear", "relu", "conv", "no bias"])
def test_scaling_multiplies_everything_but_the_prediction(nu: float, ending: str):
    torch.manual_seed(1)
    net = {
        "linear": Net(*stem(), nn.Linear(16, 6)),
        "relu": Net(*stem(), nn.Linear(16, 6), nn.ReLU(), nn.Dropout(0.5)),
        "conv": Net(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "no bias": Net(*stem(), nn.Linear(16, 6, bias=False), bias=False),
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


def test_the_original_and_the_modes_of_its_parts_are_left_alone():
    torch.manual_seed(2)
    net = Net(*stem(), nn.Linear(16, 6)).train()
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
    net = Net(*stem(), nn.Linear(16, 6))
    x, _ = images()
    steps = []
    for nu in (2.5, 1 / 4):
        after = scale_features(net, nu, x).model
        pairs = zip(after.parameters(), net.parameters(), strict=True)
        steps.append(torch.cat([(a - b).detach().flatten() for a, b in pairs]))
    assert float(F.cosine_similarity(steps[0], steps[1], dim=0)) == pytest.approx(-1)
    assert float(steps[0].norm() / steps[1].norm()) == pytest.approx(1.5 / 0.75)


@pytest.mark.parametrize(
    ("last", "name"),
    [
        (nn.BatchNorm1d(6), "BatchNorm1d"),
        (nn.Tanh(), "Tanh"),
        (nn.GELU(), "GELU"),
        (nn.LayerNorm(6), "LayerNorm"),
    ],
)
def test_what_does_not_scale_is_refused_by_name(last: nn.Module, name: str):
    net = Net(*stem(), nn.Linear(16, 6), last)
    with pytest.raises(ValueError, match=rf"{name} \(body.6\) comes after the last linear"):
        scale_features(net, 2.0, images()[0])


def test_a_hidden_function_is_refused_even_for_a_scale_near_one():
    class Hidden(Net):
        def features(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x))

    torch.manual_seed(4)
    net = Hidden(*stem(), nn.Linear(16, 6))
    with pytest.raises(ValueError, match=r"do not scale with the layer 'body.5'"):
        scale_features(net, 1.0 + 1e-12, images()[0])


def test_a_skip_connection_is_refused():
    class Skip(Net):
        def features(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :6] + self.body(x)

    torch.manual_seed(5)
    with pytest.raises(ValueError, match="skip connection"):
        scale_features(Skip(*stem(), nn.Linear(16, 6)), 2.0, images()[0])


def test_the_layer_may_be_named_and_is_checked():
    torch.manual_seed(6)
    net = Net(*stem(), nn.Linear(16, 6))
    x, _ = images()
    assert scale_features(net, 2.0, x, layer=net.body[5]).layer == "body.5"
    assert scale_features(net, 2.0, x, layer="body.5").layer == "body.5"
    with pytest.raises(ValueError, match=r"do not scale with the layer 'body.0'"):
        scale_features(net, 2.0, x, layer="body.0")
    with pytest.raises(ValueError, match="must be linear or convolutional, got BatchNorm2d"):
        scale_features(net, 2.0, x, layer="body.1")
    with pytest.raises(ValueError, match="is the head"):
        scale_features(net, 2.0, x, layer="head")
    with pytest.raises(ValueError, match="has no layer"):
        scale_features(net, 2.0, x, layer=nn.Linear(16, 6))


def test_bad_arguments_are_refused():
    net = Net(*stem(), nn.Linear(16, 6))
    x, _ = images()
    with pytest.raises(ValueError, match="nu must be a positive number, got -1"):
        scale_features(net, -1.0, x)
    with pytest.raises(ValueError, match="has no features"):
        scale_features(nn.Linear(2, 2), 2.0, x)
