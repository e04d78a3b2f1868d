"""Erased rectangles have torchvision's distribution; cutout's squares may reach over the edge."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.transforms import RandomErasing

from noiseproof import draws
from noiseproof.augment import cutout, erase
from tests.fixed_draws import FixedDraws


def source(count: int) -> draws.PerSample:
    return draws.PerSample(draws.keys(0, torch.arange(count)))


@pytest.mark.parametrize("size", [(32, 32), (12, 40)])  # in the second, half of the attempts fail
def test_rectangles_have_the_distribution_of_torchvision(size: tuple[int, int]):
    count, (height, width) = 3000, size
    erased = erase(torch.ones(count, 1, *size), source(count), probability=0.7)[:, 0] == 0
    rows, columns = erased.any(2), erased.any(1)
    assert torch.equal(erased, rows[:, :, None] & columns[:, None])  # one rectangle
    touched = erased.any((1, 2)).float()
    assert abs(float(touched.mean()) - 0.7) < 5 * math.sqrt(0.21 / count)
    found = torch.stack(
        [rows.sum(1), columns.sum(1), rows.int().argmax(1), columns.int().argmax(1)]
    )
    found = found[:, touched.bool()].double()  # height, width, top, left

    torch.manual_seed(0)
    blank = torch.ones(1, *size)
    params = [
        RandomErasing.get_params(blank, (0.02, 0.33), (0.3, 3.3), [0.0]) for _ in range(count)
    ]
    expected = torch.tensor([(h, w, i, j) for i, j, h, w, _ in params], dtype=torch.float64).T
    error = (found.var(1) / found.shape[1] + expected.var(1) / count).sqrt()
    assert ((found.mean(1) - expected.mean(1)).abs() < 4.5 * error).all()
    assert ((found.std(1) / expected.std(1) - 1).abs() < 0.08).all()
    shares = [(sides[0] * sides[1] / (height * width)) for sides in (found, expected)]
    for edge in (torch.amin, torch.amax):
        assert abs(float(edge(shares[0]) - edge(shares[1]))) < 0.01
    assert (found[0] < height).all()
    assert (found[1] < width).all()


def test_an_image_for_which_no_rectangle_fits_is_unchanged():
    images = torch.ones(50, 1, 1, 9)  # one row: a rectangle must be lower than the image
    rows = (erase(images, source(50), probability=1) == 0).sum((1, 2, 3))
    assert (rows == 0).all()


def test_erased_pixels_are_black_and_others_unchanged():
    images = torch.randint(1, 256, (40, 3, 20, 24), dtype=torch.uint8)
    for augment in (erase, cutout):
        found = augment(images, source(40))
        black = (found == 0).all(1, keepdim=True)
        assert torch.equal(found, torch.where(black, 0, images))
    assert torch.equal(erase(images, source(40), probability=0), images)


@pytest.mark.parametrize(
    ("place", "rows", "columns"),
    [
        ((0.0, 0.0), (0, 4), (0, 4)),
        ((0.5, 0.5), (4, 12), (6, 14)),
        ((0.99, 0.99), (11, 16), (15, 20)),
    ],
)
def test_cutout_blackens_a_square_around_any_pixel(
    place: tuple[float, float], rows: tuple[int, int], columns: tuple[int, int]
):
    expected = torch.ones(1, 1, 16, 20)
    expected[..., slice(*rows), slice(*columns)] = 0
    assert torch.equal(
        cutout(torch.ones(1, 1, 16, 20), FixedDraws(torch.tensor([place]))), expected
    )


def test_the_side_of_the_square_is_a_share_of_the_shorter_side():
    middle = FixedDraws(torch.tensor([[0.5, 0.5]]))
    assert int((cutout(torch.ones(1, 1, 32, 40), middle) == 0).sum()) == 16 * 16
    assert int((cutout(torch.ones(1, 1, 32, 40), middle, share=0.25) == 0).sum()) == 8 * 8
    assert int((cutout(torch.ones(1, 1, 6, 9), middle) == 0).sum()) == 3 * 3
