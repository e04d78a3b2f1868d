"""Mixup and cutmix: partners, shares, masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from noiseproof import draws
from noiseproof.augment import cutmix, mixup
from tests.fixed_draws import FixedDraws

MIXERS = [mixup, cutmix]


def batch(count: int = 40) -> tuple[Tensor, Tensor, draws.PerSample]:
    images = torch.rand(count, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(count), draws.PerSample(draws.keys(5, torch.arange(count)))


@pytest.mark.parametrize("mix", MIXERS)
def test_partners_form_one_circle(mix):
    partners = mix(*batch()).labels.tolist()
    visited = [0]
    while partners[visited[-1]] != 0:
        visited.append(partners[visited[-1]])
    assert sorted(visited) == list(range(40))


def test_mixup_is_the_weighted_mean_of_image_and_partner():
    images, labels, source = batch()
    found, partner, share, unmixed = mixup(images, labels, source)
    for i in range(40):
        s, other = float(share[i]), images[partner[i]]
        torch.testing.assert_close(found[i], s * images[i] + (1 - s) * other)
        assert (s < 1) == (i not in unmixed.tolist())


def test_cutmix_takes_a_rectangle_of_the_partner_and_counts_its_pixels():
    images, labels, source = batch()
    found, partner, share, unmixed = cutmix(images, labels, source)
    for i in range(40):
        own = (found[i] == images[i]).all(0)  # H x W
        other = (found[i] == images[partner[i]]).all(0)
        assert torch.equal(other, ~own)
        assert torch.equal(other, other.any(1, keepdim=True) & other.any(0))
        assert math.isclose(float(share[i]), float(own.float().mean()), abs_tol=1e-6)
        assert not (i in unmixed.tolist() and other.any())


def test_the_rectangle_of_cutmix_is_centred_on_any_pixel_and_cut_off_at_the_edges():
    # Two images; draws: circle, mixed or not, area, row, column. Sides of half the image.
    values = torch.tensor([[0.1, 0.0, 0.25, 0.5, 0.5], [0.2, 0.0, 0.25, 0.0, 0.99]])
    images = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
    found = cutmix(images, torch.tensor([3, 4]), FixedDraws(values), fraction=1)
    expected = images.clone()
    expected[0, :, 2:6, 2:6] = 1
    expected[1, :, :2, 5:] = 0
    assert torch.equal(found.images, expected)
    assert found.labels.tolist() == [4, 3]
    assert found.share.tolist() == [0.75, 1 - 6 / 64]


def test_shares_have_the_distribution_of_torchvision():
    count = 4000
    images, labels = torch.zeros(count, 1, 32, 32), torch.zeros(count, dtype=torch.int64)
    source = draws.PerSample(draws.keys(1, torch.arange(count)))
    torch.manual_seed(0)
    theirs = v2.CutMix(num_classes=2)
    expected = torch.tensor(
        [theirs.make_params([images[:1]])["lam_adjusted"] for _ in range(count)]
    )
    found = cutmix(images, labels, source, fraction=1).share
    assert abs(float(found.mean() - expected.mean())) < 4.5 * math.sqrt(2 / count) * found.std()
    assert abs(float(found.std() / expected.std()) - 1) < 0.06
    uniform = mixup(images, labels, source, fraction=1).share
    assert abs(float(uniform.mean()) - 0.5) < 4.5 / math.sqrt(12 * count)
    assert abs(float(uniform.std()) - 1 / math.sqrt(12)) < 0.01


@pytest.mark.parametrize("mix", MIXERS)
@pytest.mark.parametrize(("fraction", "left"), [(0.0, 40), (0.3, 28), (0.5, 20), (1.0, 0)])
def test_a_fraction_of_the_batch_is_mixed_and_the_rest_is_unchanged(
    mix, fraction: float, left: int
):
    images, labels, source = batch()
    found = mix(images, labels, source, fraction=fraction)
    assert len(set(found.unmixed.tolist())) == left
    assert torch.equal(found.images[found.unmixed], images[found.unmixed])
    assert (found.share[found.unmixed] == 1).all()
    changed = (found.share < 1).sum()  # the smallest rectangles of cutmix contain no pixel
    assert 40 - left - (6 if mix is cutmix else 0) <= changed <= 40 - left


@pytest.mark.parametrize("mix", MIXERS)
def test_every_sample_is_mixed_in_half_of_the_epochs(mix):
    images, labels, _ = batch(10)
    mixed = torch.zeros(10)
    for epoch in range(600):
        found = mix(images, labels, draws.PerSample(draws.keys(0, epoch, torch.arange(10))))
        mixed += 1 - torch.zeros(10).scatter(0, found.unmixed, 1.0)
    assert (mixed / 600 - 0.5).abs().max() < 5 * math.sqrt(0.25 / 600)


@pytest.mark.parametrize("mix", MIXERS)
def test_mixtures_do_not_depend_on_the_order_of_the_batch(mix):
    images, labels, source = batch()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    whole = mix(images, labels, source)
    permuted = mix(images[order], labels[order], draws.PerSample(source.keys[order]))
    for one, other in zip(whole[:3], permuted[:3], strict=True):
        assert torch.equal(one[order], other)
    assert torch.equal(whole.unmixed, order[permuted.unmixed])


@pytest.mark.parametrize("mix", MIXERS)
def test_a_second_view_is_mixed_like_the_first(mix):
    images, labels, source = batch()
    first, second = mix(images, labels, source), mix(images.flip(3), labels, source)
    for one, other in zip(first[1:], second[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mix", MIXERS)
def test_bytes_stay_bytes_and_torchs_generator_is_used_without_a_source(mix):
    images, labels, source = batch()
    pixels = (images * 255).round().to(torch.uint8)
    found, exact = mix(pixels, labels, source), mix(pixels.double() / 255, labels, source)
    assert found.images.dtype == torch.uint8
    assert (found.images / 255 - exact.images).abs().max() < 0.6 / 255
    torch.manual_seed(0)
    one = mix(images, labels)
    torch.manual_seed(0)
    assert torch.equal(one.images, mix(images, labels).images)
    assert not torch.equal(one.images, mix(images, labels).images)


@pytest.mark.parametrize("mix", MIXERS)
def test_mixing_can_be_compiled_whole(mix):
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*batch()), mix(*batch()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mix", MIXERS)
def test_a_single_image_or_missing_labels_are_refused(mix):
    images, labels, _ = batch()
    with pytest.raises(ValueError, match=r"got \(3, 8, 12\) and \(40,\)"):
        mix(images[0], labels)
    with pytest.raises(ValueError, match=r"labels B, got \(40, 3, 8, 12\) and \(7,\)"):
        mix(images, labels[:7])
    with pytest.raises(ValueError, match=r"labels must be a torch.Tensor, got list"):
        mix(images, labels.tolist())


@pytest.mark.parametrize("mix", MIXERS)
def test_what_is_not_an_image_in_its_range_is_refused_as_by_other_augmentations(mix):
    images, labels, _ = batch()
    for wrong, message in (
        (images.numpy(), "must be a torch.Tensor, got ndarray; convert first"),
        ((images * 255).long(), "must be uint8 or floating point, got torch.int64"),
        (images * 255, r"in \[0, 1\], got values from .* divide them by 255"),
        (images * 4 - 2, r"in \[0, 1\], got values from -.* before they are normalised"),
    ):
        with pytest.raises(ValueError, match=message):
            mix(wrong, labels)
