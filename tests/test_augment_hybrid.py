"""Images with the high frequencies of others."""

import pytest
import torch
from scipy.ndimage import gaussian_filter

from noiseproof import draws
from noiseproof.augment import hybrid
from noiseproof.augment.mixing import partners


def source(count: int, seed: int = 0) -> draws.PerSample:
    return draws.PerSample(draws.keys(seed, torch.arange(count)))


def test_an_image_gets_the_high_frequencies_of_its_partner():
    images = 0.4 + 0.2 * torch.rand(6, 3, 16, 16, dtype=torch.float64)  # nothing to clip
    mixed = hybrid(images, source(6), fraction=1.0)
    low = torch.tensor(gaussian_filter(images.numpy(), (0, 0, 0.5, 0.5), mode="nearest", radius=1))
    partner = partners(draws.uniform((6, 2), torch.empty(0), source(6))[:, 0])
    torch.testing.assert_close(mixed, low + (images - low)[partner], rtol=0, atol=1e-12)
    assert (partner != torch.arange(6)).all()


def test_the_mean_of_an_image_stays():
    images = torch.rand(6, 3, 32, 32) * 0.2 + 0.4
    mixed = hybrid(images, source(6), fraction=1.0)
    torch.testing.assert_close(mixed.mean((2, 3)), images.mean((2, 3)), rtol=0, atol=2e-3)
    assert (mixed - images).abs().amax((1, 2, 3)).min() > 0.01


def test_a_share_of_the_images_changes():
    images = torch.rand(1000, 1, 4, 4)
    changed = (hybrid(images, source(1000)) != images).flatten(1).any(1)
    assert 0.45 < changed.float().mean() < 0.55


def test_bytes_are_rounded_and_clipped():
    images = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    mixed = hybrid(images, source(8), fraction=1.0)
    exact = hybrid(images.double() / 255, source(8), fraction=1.0) * 255
    assert mixed.dtype == torch.uint8
    assert (mixed - exact).abs().max() <= 0.5 + 1e-4


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 3, 8, 8)])
def test_a_single_image_is_its_own_partner(shape):
    image = torch.rand(shape)
    torch.testing.assert_close(hybrid(image, fraction=1.0), image)
