"""Which operation TrivialAugment draws, and how strong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import TrivialAugmentWide

from noiseproof import draws
from noiseproof.augment import operations, trivial
from noiseproof.augment.trivial import magnitudes

SPACE = TrivialAugmentWide()._augmentation_space(31)


@pytest.mark.parametrize("name", SPACE)
def test_magnitudes_are_those_of_torchvision(name: str):
    expected, signed = SPACE[name]
    if expected.ndim == 0:  # the operation has no magnitude
        return
    strength = (torch.arange(31) + 0.5) / 31
    operation = torch.full((31,), operations.OPERATIONS.index(name))
    for sign, factor in ((0.2, -1), (0.7, 1)):
        found = magnitudes(operation, strength, torch.full((31,), sign))
        wanted = expected * factor if signed else expected.float()
        if name.startswith("Translate"):
            wanted = (wanted + factor * 1e-5).trunc()  # its 16 is 15.999999, moved by 15
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_operations_strengths_and_signs_are_drawn_uniformly(monkeypatch: pytest.MonkeyPatch):
    drawn: list[tuple[Tensor, Tensor]] = []

    def record(images: Tensor, operation: Tensor, magnitude: Tensor) -> Tensor:
        drawn.append((operation, magnitude))
        return images

    monkeypatch.setattr(operations, "apply_operations", record)
    count = 42_000
    source = draws.PerSample(draws.keys(0, torch.arange(count)))
    trivial(torch.zeros(count, 1, 1, 1), source)
    operation, magnitude = drawn[0]
    counts = torch.bincount(operation, minlength=14)
    assert len(counts) == 14
    assert (counts - count / 14).abs().max() < 5 * math.sqrt(count / 14)
    rotations = magnitude[operation == operations.ROTATE]
    strengths = torch.bincount((rotations.abs() / 4.5).round().long(), minlength=31)
    assert len(strengths) == 31
    assert (strengths - counts[5] / 31).abs().max() < 5 * math.sqrt(counts[5] / 31)
    assert abs(float(rotations.sign().mean())) < 5 / math.sqrt(counts[5])


def test_an_image_is_augmented_the_same_in_any_batch():
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).expand(60, -1, -1, -1)
    keys = draws.keys(0, torch.arange(60))
    together = trivial(images, draws.PerSample(keys))
    alone = torch.cat([trivial(images[:1], draws.PerSample(key[None])) for key in keys])
    assert torch.equal(alone, together)
    assert len({image.numpy().tobytes() for image in together}) > 40
