"""Any network as features and head: where the head is, and that nothing else changes."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision.models as tv
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from noiseproof import DiscriminativeLoss, accuracy, curvature, objectives, wrap
from noiseproof.objectives import Batch
from noiseproof.wrapped import Wrapped

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]


def torchvision_vit() -> nn.Module:
    return tv.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=6)


def torchvision_swin() -> nn.Module:
    return tv.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=6)


def torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig

    return tv.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=6)


NETWORKS: dict[str, tuple[Any, str, int]] = {  # builder, path of the head, side of the images
    "resnet18": (lambda: tv.resnet18(num_classes=6), "fc", 32),
    "mobilenet_v3_small": (lambda: tv.mobilenet_v3_small(num_classes=6), "classifier.3", 32),
    "shufflenet_v2": (lambda: tv.shufflenet_v2_x0_5(num_classes=6), "fc", 32),
    "convnext": (torchvision_convnext, "classifier.2", 32),
    "vit": (torchvision_vit, "heads.head", 32),
    "swin": (torchvision_swin, "head", 32),
    **{
        f"timm {name}": (lambda name=name: timm.create_model(name, num_classes=6), path, side)
        for name, path, side in (
            ("test_vit", "head", 160),
            ("test_efficientnet", "classifier", 32),
            ("test_nfnet", "head.fc", 32),
            ("test_mambaout", "head.fc", 32),
            ("test_byobnet", "head.fc", 32),
            ("dla46_c", "fc", 32),  # a convolution
        )
    },
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_head_of_an_architecture_is_found_and_nothing_else_changes(name: str):
    build, path, side = NETWORKS[name]
    torch.manual_seed(0)
    net = build().eval()
    pixels = torch.rand(2, 3, side, side)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    keys = list(net.state_dict())
    with torch.no_grad():
        before = net((pixels - mean) / std)
    model = wrap(net.train(), MEAN, STD)
    assert all(module.training for module in model.modules())
    assert model.head_path == path
    model.eval()
    features = model.features(pixels)
    with torch.no_grad():
        assert torch.equal(model(pixels), before)
        assert torch.allclose(model.head(features), before, atol=1e-5)
    assert features.shape == (2, model.head.weight.shape[1])
    assert list(model.state_dict()) == keys == list(net.state_dict())
    features.sum().backward()
    assert next(net.parameters()).grad is not None


class Convolutional(nn.Module):
    """Ends in a convolution of 1 x 1, applied to pooled channels or before they are pooled."""

    def __init__(self, pool_first: bool = True):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        pool, out = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1)
        self.end = nn.Sequential(*((pool, out) if pool_first else (out, nn.MaxPool2d(8), pool)))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x)).flatten(1)


class Linear(nn.Module):
    """Two hidden layers and a linear head, which is called by a keyword."""

    def __init__(self, inputs: int = 64):
        super().__init__()
        self.out = nn.Linear(8, 5)  # the last layer is not the last module
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(input=self.hidden(x))


@pytest.mark.parametrize(
    ("build", "compiled"), [(Linear, False), (Convolutional, False), (Convolutional, True)]
)
def test_objectives_train_it_compiled_too(build: Any, compiled: bool):
    torch.manual_seed(0)
    model = wrap(build(), [0.3], [0.5], torch.rand(4, 1, 8, 8))
    labels = torch.arange(20) % 5
    images = (labels / 5).view(-1, 1, 1, 1) * torch.rand(20, 1, 8, 8)
    objective = objectives.Discriminative(DiscriminativeLoss(5, 8), "gaussian:0.05")

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.objective = model, objective

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            return self.objective(self.model, Batch(images, labels)).loss

    step: Any = Step()
    if compiled:
        step = torch.compile(step, backend="eager", fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(6 if compiled else 30):
        loss = step(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert step(images[:7], labels[:7]).isfinite()  # the last batch of a loader may be smaller
    assert objective.criterion.seen.all()
    assert (model.head.in_features, model.head.out_features) == (8, 5)
    if not compiled:
        results = accuracy(model, (images, labels), ["clean", "gaussian:0.05"], draws=2)
        assert results["clean"].mean > 0.5
        values = curvature.hessian_probe(model, images[:4], labels[:4])
        assert values.isfinite().all()


@pytest.mark.parametrize("build", [Linear, Convolutional])
def test_copies_pickles_and_parts_of_other_modules(build: Any):
    model = wrap(build(), [0.3], [0.5], torch.rand(4, 1, 8, 8)).eval()
    x = torch.rand(3, 1, 8, 8)
    expected = model.features(x)
    other = wrap(build(), [0.3], [0.5], torch.rand(4, 1, 8, 8)).eval()
    whole = nn.ModuleDict({"model": other})
    whole.load_state_dict({f"model.{k}": v for k, v in model.net.state_dict().items()})
    assert torch.equal(other.features(x), expected)
    assert list(whole.state_dict()) == [f"model.{name}" for name in model.net.state_dict()]
    other.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match='Unexpected key\\(s\\) in state_dict: "x"'):
        model.load_state_dict({**model.state_dict(), "x": torch.zeros(1)})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    for again in (copy.deepcopy(model), pickled, wrap(model.net, [0.3], [0.5], x)):
        assert torch.equal(again.features(x), expected)
    assert model.double().features(x.double()).dtype == torch.float64


def test_a_head_with_tied_weights_is_found():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
            self.out.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.first(x.flatten(1)).relu())

    assert wrap(Tied(), [0.0], [1.0]).head_path == "out"


class Ending(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, end: Any):
        super().__init__()
        self.first, self.fc, self.end = nn.Linear(64, 6), nn.Linear(6, 6), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self, self.first(x.flatten(1)))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda net, z: net.fc(z).softmax(1), "ends in a softmax after fc; expected logits"),
        (lambda net, z: (net.fc(z) + net.first(z.repeat(1, 11)[:, :64])) / 2, "first, fc"),
        (lambda net, z: net.fc(net.fc(z)), "fc runs 2 times per pass"),
        (lambda net, z: normalize(net.fc(z)), r"6 outputs per image: first, fc\); expected"),
        (lambda net, z: linear(z, net.first.weight[:, :6]), "not the output of one linear layer"),
        (lambda net, z: (net.fc(z), z), "must return logits, B x classes, got tuple"),
        (lambda net, z: net.fc(z).sum(1), r"must return logits, B x classes, got \(32,\)"),
    ],
)
def test_other_networks_are_refused_with_a_reason(end: Any, message: str):
    with pytest.raises(ValueError, match=message):
        wrap(Ending(end), [0.0], [1.0])


def test_other_arguments_are_refused():
    net = Linear()
    with pytest.raises(ValueError, match="wrap the network itself, and then compile"):
        wrap(torch.compile(net), [0.0], [1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="model is a DataParallel; wrap the network itself"):
        wrap(nn.DataParallel(net), [0.0], [1.0])
    with pytest.raises(ValueError, match=r"std > 0; got .*1.0, 0.0"):
        wrap(net, [0.0, 0.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(wrap(net, [0.0], [1.0]), [0.0], [1.0])
    with pytest.raises(ValueError, match=r"must be a torch.nn.Module, got str"):
        wrap("resnet18", [0.0], [1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"fails for random images of usual sizes .* as example"):
        wrap(Linear(99), [0.0], [1.0])
    with pytest.raises(
        ValueError, match=r"fails for images of 2 x 1 x 8 x 8 \(RuntimeError: .*\)$"
    ):
        wrap(Linear(99), [0.0], [1.0], torch.zeros(2, 1, 8, 8))
    model = wrap(net, [0.0], [1.0])
    with pytest.raises(ValueError, match=r"floating point in .0, 1., got torch.uint8"):
        model(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="images must be B x 3 x H x W, got"):
        wrap(tv.resnet18(num_classes=2), MEAN, STD)(torch.zeros(1, 2, 8, 8))


def test_a_convolution_applied_at_every_pixel_is_no_head():
    convolution = Convolutional(pool_first=False)
    with pytest.raises(ValueError, match="outputs per image: none"):
        wrap(convolution, [0.0], [1.0], torch.rand(2, 1, 8, 8))
    small = nn.Sequential(nn.Conv2d(1, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = wrap(small, [0.0], [1.0], torch.rand(2, 1, 1, 1))
    with pytest.raises(RuntimeError, match="0 is applied at several places of its input, 1 x 8"):
        model.features(torch.rand(2, 1, 8, 8))


def test_mean_and_std_may_be_tensors_arrays_or_numbers():
    net, x = Linear(), torch.rand(2, 1, 8, 8)
    expected = wrap(net, [0.3], [0.5])(x)
    for mean, std in ((torch.tensor([0.3]), torch.tensor([0.5])), (np.array([0.3]), 0.5)):
        assert torch.equal(wrap(net, mean, std)(x), expected)  # pyright: ignore[reportArgumentType]


def test_grey_images_get_the_channels_of_the_network():
    model = wrap(tv.shufflenet_v2_x0_5(num_classes=3), MEAN, STD).eval()
    x = torch.rand(2, 1, 32, 32)
    assert isinstance(model, Wrapped)
    assert torch.equal(model(x), model(x.expand(-1, 3, -1, -1)))
