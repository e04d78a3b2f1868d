"""The operations of TrivialAugment and AugMix agree with torchvision's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode, v2

from noiseproof.augment.operations import OPERATIONS, ROTATE, apply_operations

# In the units of apply_operations: small, medium and the largest of TrivialAugment, both signs.
MAGNITUDES = {
    "ShearX": (0.033, 0.462, -0.99), "ShearY": (-0.033, -0.462, 0.99),
    "TranslateX": (1, -7, 32), "TranslateY": (-1, 7, -32), "Rotate": (4.5, -58.5, 90, -135),
    "Brightness": (0.033, 0.99, -0.528, -0.99), "Color": (0.033, 0.99, -0.528, -0.99),
    "Contrast": (0.033, 0.99, -0.528, -0.99), "Sharpness": (0.033, 0.99, -0.528, -0.99),
    "Posterize": (8, 7, 5, 2), "Solarize": (255, 246.5, 127.5, 0),
}  # fmt: skip
CASES = [(name, m) for name in OPERATIONS for m in MAGNITUDES.get(name, (0,))]


def smooth(count: int, height: int, width: int) -> Tensor:
    coarse = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    return (interpolate(coarse, (height, width), mode="bicubic") * 200 + 20).to(torch.uint8)


def noise(count: int, height: int, width: int) -> Tensor:
    shape, generator = (count, 3, height, width), torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def ours(images: Tensor, name: str, magnitude: float, interpolation: str = "nearest") -> Tensor:
    count = len(images)
    operation, amount = (
        torch.full((count,), OPERATIONS.index(name)),
        torch.full((count,), magnitude),
    )
    return apply_operations(images, operation, amount.float(), interpolation=interpolation)


def torchvisions(
    images: Tensor, name: str, magnitude: float, interpolation: str = "nearest"
) -> Tensor:
    amount = magnitude / 255 if name == "Solarize" else magnitude
    apply = v2.TrivialAugmentWide()._apply_image_or_video_transform
    mode, fill = InterpolationMode(interpolation), {torch.Tensor: None}
    return torch.stack([apply(image, name, amount, mode, fill) for image in images])  # pyright: ignore


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(("name", "magnitude"), CASES)
def test_bytes_are_those_of_torchvision(name: str, magnitude: float, channels: int):
    for images in (smooth(3, 32, 32), noise(2, 32, 32), smooth(2, 21, 31)):
        images = images[:, :channels]
        expected = torchvisions(images, name, magnitude)
        off = (ours(images, name, magnitude).int() - expected.int()).abs()
        if OPERATIONS.index(name) <= ROTATE:  # ties between two nearest neighbours
            assert (off > 0).float().mean() < 0.003
        else:  # products that are whole numbers but for the last bit, before they are truncated
            assert off.max() <= 1
            assert (off > 0).float().mean() < 0.03


@pytest.mark.parametrize(
    ("name", "magnitude"), [case for case in CASES if 0 < OPERATIONS.index(case[0]) <= ROTATE]
)
def test_interpolated_bytes_are_rounded_as_by_torchvision(name: str, magnitude: float):
    images = smooth(3, 32, 32)
    expected = torchvisions(images, name, magnitude, "bilinear")
    off = (ours(images, name, magnitude, "bilinear").int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.003


@pytest.mark.parametrize("channels", [3, 1])
def test_overexposed_images_are_equalized_as_by_torchvision(channels: int):
    images = (smooth(3, 32, 32)[:, :channels].int() * 2).clamp(max=255).to(torch.uint8)
    assert (images == 255).float().mean() > 0.2
    assert torch.equal(ours(images, "Equalize", 0), torchvisions(images, "Equalize", 0))


@pytest.mark.parametrize(("name", "magnitude"), CASES)
def test_floating_point_images_are_those_of_torchvision(name: str, magnitude: float):
    images = smooth(3, 32, 32).double() / 255
    expected = torchvisions(images, name, magnitude, "bilinear")
    off = (ours(images, name, magnitude, "bilinear") - expected).abs()
    if name == "Posterize":  # torchvision's levels are multiples of 1/2^bits here, ours of bytes
        assert off.max() < 1 / 128
    else:
        assert off.max() < 1e-5


def test_identity_is_exact_in_every_dtype():
    images = torch.rand(2, 3, 9, 9)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(ours(images.to(dtype), "Identity", 0), images.to(dtype))
        assert torch.equal(ours(images.to(dtype), "Rotate", 0), images.to(dtype))


def test_each_image_of_a_batch_takes_its_own_operation():
    images = smooth(len(CASES), 16, 16)
    operation = torch.tensor([OPERATIONS.index(name) for name, _ in CASES])
    magnitude = torch.tensor([float(m) for _, m in CASES])
    together = apply_operations(images, operation, magnitude)
    for i, (name, m) in enumerate(CASES):
        assert torch.equal(together[i : i + 1], ours(images[i : i + 1], name, m))


@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Sharpness"])
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (4, 4)])
def test_small_and_constant_images_are_those_of_torchvision(name: str, size: tuple[int, int]):
    for images in (noise(2, *size), torch.full((2, 3, *size), 77, dtype=torch.uint8)):
        off = ours(images, name, 0.5).int() - torchvisions(images, name, 0.5).int()
        assert off.abs().max() <= 1


def test_two_channels_are_refused():
    with pytest.raises(ValueError, match="must have 1 or 3 channels, got 2"):
        ours(torch.rand(1, 2, 8, 8), "Identity", 0)


def test_values_slightly_out_of_range_are_clamped():
    images = smooth(2, 8, 8).float() / 255 * 1.4 - 0.2  # bicubic resizing overshoots
    for name, magnitude in CASES:
        if OPERATIONS.index(name) > ROTATE and name != "Solarize":
            found = ours(images, name, magnitude)
            assert 0 <= found.min() <= found.max() <= 1
