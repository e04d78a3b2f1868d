"""Classifiers: shapes, normalisation, stages, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from noiseproof.lab.config import Model
from noiseproof.lab.models.backbones import _pooled
from noiseproof.lab.models.classifier import Classifier, build_classifier

DIGITS, COLOUR = (1, 8, 8), (3, 64, 64)


def make(
    name: str = "small_cnn",
    size: tuple[int, int, int] = DIGITS,
    weights: str | None = None,
    feature_dim: int = 16,
) -> Classifier:
    torch.manual_seed(0)
    config = Model(model=name, feature_dim=feature_dim, weights=weights)
    mean, std = [0.5] * size[0], [1.0] * size[0]
    model = build_classifier(config, num_classes=5, size=size, mean=mean, std=std)
    assert isinstance(model, Classifier)
    return model


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
@pytest.mark.parametrize("size", [(1, 8, 8), (3, 13, 9)])
def test_logits_are_the_head_of_the_features(name: str, size: tuple[int, int, int]):
    model = make(name, size).eval()
    x = torch.rand(2, *size)
    features = model.features(x)
    assert features.shape == (2, 16)
    torch.testing.assert_close(model(x), features @ model.head.weight.T + model.head.bias)
    assert (features < 0).any()  # no ReLU after the neck


def test_small_cnn_takes_images_of_four_pixels():
    assert make(size=(3, 4, 4))(torch.rand(2, 3, 4, 4)).shape == (2, 5)


def test_resnet18_has_the_known_number_of_parameters():
    model = make("resnet18", (3, 32, 32), feature_dim=128)
    usual = 11_173_962 - (512 * 10 + 10)  # the ten-class network less its classifier
    assert parameters(model.backbone) == usual
    assert parameters(model) == usual + (512 * 128 + 128) + (128 * 5 + 5)


def test_resnet18_keeps_the_resolution_up_to_the_second_block():
    model = make("resnet18", (3, 32, 32))
    seen = []
    for stage in model.backbone.get_submodule("stages").children():
        stage.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape[1:])))
    model(torch.rand(2, 3, 32, 32))
    assert seen == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_normalisation_lives_inside_the_model():
    torch.manual_seed(0)
    config = Model(feature_dim=4)
    shifted = build_classifier(config, num_classes=2, size=DIGITS, mean=[0.3], std=[0.2]).eval()
    plain = build_classifier(config, num_classes=2, size=DIGITS, mean=[0.0], std=[1.0]).eval()
    state = {k: v for k, v in shifted.state_dict().items() if k not in ("mean", "std")}
    plain.load_state_dict(state, strict=False)
    x = torch.rand(3, *DIGITS)
    torch.testing.assert_close(shifted(x), plain((x - 0.3) / 0.2))


def test_a_state_dict_carries_the_whole_model():
    model, other = make().eval(), make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
        model.mean.fill_(0.25)
    other.load_state_dict(model.state_dict())
    x = torch.rand(3, *DIGITS)
    assert torch.equal(model(x), other(x))
    assert model.state_dict()["mean"].shape == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "size", "widths"),
    [
        ("small_cnn", DIGITS, [16, 32, 32, 32]),
        ("resnet18", (3, 16, 16), [64, 128, 256, 512]),
        ("mobilenet_v3_small", COLOUR, [16, 16, 24, 48, 576]),
        ("torchvision:resnet18", COLOUR, [64, 128, 256, 512]),
        ("regnet_y_400mf", COLOUR, [48, 104, 208, 440]),
    ],
)
def test_blocks_are_pooled_stages_and_end_with_the_features(
    name: str, size: tuple[int, int, int], widths: list[int]
):
    model = make(name, size).eval()
    x = torch.rand(2, *size)
    with torch.no_grad():
        blocks = model.blocks(x)
        assert list(blocks) == [*(f"block{i}" for i in range(1, len(widths) + 1)), "features"]
        assert [b.shape for b in blocks.values()] == [(2, w) for w in [*widths, 16]]
        assert torch.equal(blocks["features"], model.features(x))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    assert sum(hooks) == 0


def test_a_block_is_the_mean_over_the_pixels_of_its_stage():
    model = make("mobilenet_v3_small", COLOUR).eval()
    x = torch.rand(2, *COLOUR)
    features = model.backbone.get_submodule("net.features")
    assert isinstance(features, nn.Sequential)
    with torch.no_grad():
        out = features[:4](x - 0.5)
        torch.testing.assert_close(model.blocks(x)["block3"], out.flatten(2).mean(2))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_the_mean_over_pixels_has_the_layout_of_the_pixels(layout):
    pixels = torch.randn(3, 5, 4, 2, dtype=torch.float64).to(memory_format=layout)
    pixels.requires_grad_()
    pooled = _pooled(pixels * 1)  # a leaf would turn its gradient round by itself
    assert torch.allclose(pooled, pixels.mean((2, 3)), atol=1e-15)
    inner = pixels * 1
    inner.register_hook(lambda grad: found.append(grad))
    found: list[torch.Tensor] = []
    _pooled(inner).square().sum().backward()
    assert found[0].is_contiguous(memory_format=layout)
    expected = (2 / 8 * pixels.mean((2, 3)))[..., None, None].expand(-1, -1, 4, 2)
    assert torch.allclose(found[0], expected, atol=1e-15)


def test_blocks_of_a_channels_last_network_have_its_widths():
    model = make("swin_t", COLOUR).eval()
    with torch.no_grad():
        shapes = [b.shape[1] for b in model.blocks(torch.rand(1, *COLOUR)).values()]
    assert shapes == [96, 192, 384, 768, 16]


def test_features_of_views_are_those_of_separate_passes():
    model, other = make(), make()
    clean, noisy = torch.rand(8, *DIGITS), 3 * torch.rand(8, *DIGITS)
    together = model.features_of(clean, noisy)
    apart = (other.features(clean), other.features(noisy))
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a, b)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    mixed = make().features(torch.cat([clean, noisy])).chunk(2)
    assert not torch.allclose(together[0], mixed[0], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "size"), [("small_cnn", DIGITS), ("mobilenet_v3_small", COLOUR), ("resnet18", DIGITS)]
)
def test_the_gradient_reaches_every_parameter(name: str, size: tuple[int, int, int]):
    model = make(name, size)
    x = torch.rand(4, *size, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
def test_the_forward_pass_compiles_without_a_break(name: str):
    model = make(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.rand(2, *DIGITS).to(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(x), make(name)(x))


def test_greyscale_images_enter_a_colour_backbone_as_three_equal_channels():
    model = make("mobilenet_v3_small", (1, 64, 64)).eval()
    x = torch.rand(2, 1, 64, 64)
    with torch.no_grad():
        pooled = model.backbone((x - 0.5).repeat(1, 3, 1, 1))
        torch.testing.assert_close(model.features(x), model.neck(pooled))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet81", r"there is no model 'resnet81' .did you mean 'resnet"),
        ("mobilenet_v3", r"did you mean .*mobilenet_v3"),
        ("timn:resnet50", r"there is no model 'timn:resnet50'"),
        ("zzz", r"there is no model 'zzz'; see `noiseproof list models`"),
    ],
)
def test_an_unknown_name_is_refused_with_similar_ones(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        make(name)


def test_wrong_images_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"must be B x 1 x H x W, got \(2, 3, 8, 8\)"):
        make()(torch.rand(2, 3, 8, 8))
    with pytest.raises(ValueError, match="feature_dim must be at least 1, got 0"):
        make(feature_dim=0)
    with pytest.raises(ValueError, match="takes 1 or 3 channels, got 4"):
        make("mobilenet_v3_small", (4, 64, 64))
    with pytest.raises(ValueError, match="alexnet cannot process 3 x 8 x 8 images"):
        make("alexnet", (3, 8, 8))
    with pytest.raises(ValueError, match="resnet18 has no ImageNet weights"):
        make("resnet18", weights="imagenet")


def test_bytes_are_refused_with_the_conversion():
    model, pixels = make().eval(), torch.zeros(2, *DIGITS, dtype=torch.uint8)
    for ask in (model, model.features, model.blocks):
        with pytest.raises(ValueError, match=r"got torch\.uint8; .*x\.float\(\) / 255"):
            ask(pixels)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixels.float()), model(pixels.float()))
