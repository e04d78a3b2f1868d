"""AugMix against a literal loop over images, chains and operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from noiseproof import draws
from noiseproof.augment import augmix, operations
from noiseproof.augment.augmix import magnitudes
from noiseproof.augment.operations import OPERATIONS, apply_operations
from tests.fixed_draws import FixedDraws

NAMES = [
    "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Posterize", "Solarize",
    "AutoContrast", "Equalize",
]  # fmt: skip


def paper(name: str, level: float, height: int, width: int) -> float:
    """The magnitude of an operation as the authors' code computes it (augmentations.py)."""
    if name in ("ShearX", "ShearY"):
        return level * 0.3 / 10
    if name == "Rotate":
        return int(level * 30 / 10)
    if name in ("TranslateX", "TranslateY"):
        return int(level * (width if name[-1] == "X" else height) / 3 / 10)
    if name == "Posterize":
        return 4 - int(level * 4 / 10)
    return 256 - int(level * 256 / 10) if name == "Solarize" else 0


@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_are_those_of_the_paper(name: str):
    for level in (0.13, 1.21, 2.57, 2.99):
        operation, size = torch.tensor([OPERATIONS.index(name)] * 2), torch.Size((64, 90))
        found = magnitudes(operation, torch.full((2,), level), torch.tensor([0.2, 0.7]), size)
        expected = paper(name, level, *size)
        signs = (-1, 1) if name in NAMES[:5] else (1, 1)
        if name in NAMES[:7]:  # the others have none
            torch.testing.assert_close(found, torch.tensor([s * expected for s in signs]).float())


def mixture(image: Tensor, u: list[float]) -> Tensor:
    """One image, by the paper's algorithm 1; `u` are its 34 random numbers."""
    exponentials = [-math.log(1 - v) for v in u[1:4]]
    mixed = torch.zeros_like(image)
    for chain in range(3):
        augmented = image
        for step in range(1 + int(3 * u[4 + chain])):
            operation, strength, sign = u[7 + 9 * chain + 3 * step :][:3]
            name = NAMES[int(9 * operation)]
            amount = paper(name, 0.1 + strength * 2.9, *image.shape[1:])
            amount = -amount if name in NAMES[:5] and sign < 0.5 else amount
            number = torch.tensor([OPERATIONS.index(name)])
            augmented = apply_operations(
                augmented[None], number, torch.tensor([float(amount)]), interpolation="bilinear"
            )[0]
        mixed += exponentials[chain] / sum(exponentials) * augmented
    return u[0] * image + (1 - u[0]) * mixed


@pytest.mark.parametrize("channels", [1, 3])
def test_mixtures_are_those_of_a_literal_loop(channels: int):
    generator = torch.Generator().manual_seed(channels)
    images = torch.rand(30, channels, 10, 14, generator=generator)
    values = torch.rand(30, 34, generator=generator)
    found = augmix(images, FixedDraws(values))
    expected = [mixture(image, u) for image, u in zip(images, values.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=2e-5)
    pixels = (images * 255).round().to(torch.uint8)
    exact = augmix(pixels.float() / 255, FixedDraws(values))
    assert (augmix(pixels, FixedDraws(values)) / 255 - exact).abs().max() < 0.51 / 255


def test_chains_have_one_to_three_of_nine_operations(monkeypatch: pytest.MonkeyPatch):
    drawn: list[Tensor] = []

    def record(images: Tensor, operation: Tensor, *_: Tensor, interpolation: str) -> Tensor:
        drawn.append(operation)
        return images

    monkeypatch.setattr(operations, "apply_operations", record)
    count = 6000
    augmix(torch.zeros(count, 1, 1, 1), draws.PerSample(draws.keys(0, torch.arange(count))))
    for step, operation in enumerate(drawn):
        idle = operation == 0
        assert abs(float(idle.float().mean()) - step / 3) < 5 * math.sqrt(2 / 9 / (3 * count))
        counts = torch.bincount(operation[~idle], minlength=14)
        drawn_names = {OPERATIONS[i] for i in counts.nonzero().flatten().tolist()}
        assert drawn_names == set(NAMES)
        each = float(counts.sum()) / 9
        assert (counts[counts > 0] - each).abs().max() < 5 * math.sqrt(each)


def test_weights_are_dirichlet_and_the_share_of_the_image_is_uniform(
    monkeypatch: pytest.MonkeyPatch,
):
    def first_chain_white(images: Tensor, *_: Tensor, interpolation: str) -> Tensor:
        return (torch.arange(len(images)) % 3 == 0).float()[:, None, None, None]

    monkeypatch.setattr(operations, "apply_operations", first_chain_white)
    count = 20_000
    black = torch.zeros(count, 1, 1, 1)
    weight = augmix(black, draws.PerSample(draws.keys(0, torch.arange(count)))).flatten()
    # (1 − m) w: E = 1/2 · 1/3; E of the square = 1/3 · 1/6
    assert abs(float(weight.mean()) - 1 / 6) < 5 * float(weight.std()) / math.sqrt(count)
    assert abs(float(weight.square().mean()) - 1 / 18) < 0.002
