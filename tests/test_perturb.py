"""Perturbations against literal loops over images, known statistics, and their text form."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import interpolate

from noiseproof import draws, perturb
from noiseproof.draws import PerSample, keys
from noiseproof.perturb import (
    Chain,
    Corruption,
    DownUp,
    Exposure,
    Gaussian,
    Identity,
    Occlusion,
    Own,
    Perturbation,
    RandomApply,
    Sensor,
    Stripes,
    Uniform,
    base,
    parse,
)
from noiseproof.perturb.text import CORRUPTIONS, HELP, families, family, heading, read, strength

RANDOM: list[Perturbation] = [
    Gaussian(0.1),
    Gaussian(1),
    Gaussian((0.05, 0.3)),
    Uniform(0.2),
    Uniform(1),
    Occlusion(3, 4),
    Occlusion(17, (2, 3)),  # more patches than fit into one number
    Stripes(2, 3),
    RandomApply(Gaussian((0.05, 0.3)), 0.8),
    Chain(Gaussian(0.1), Occlusion(2, 5), Stripes(1, 2)),
    Chain(DownUp(2), Gaussian(0.1), Gaussian(0.1)),
    Sensor(1600),
    Sensor(electrons=30, read_noise=2),
    Chain(Exposure(-2), Sensor(100)),
]
DETERMINISTIC: list[Perturbation] = [
    Identity(),
    Gaussian(0),
    Uniform(0),
    DownUp(3),
    Exposure(-2),
    Exposure(0),
    Chain(),
    Chain(DownUp(2), Gaussian(0)),
]
EVERY = RANDOM + DETERMINISTIC
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
every = pytest.mark.parametrize("p", EVERY, ids=str)
every_random = pytest.mark.parametrize("p", RANDOM, ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape or (5, 3, 11, 13), generator=seeded(99)).to(dtype)


def sources() -> list[draws.Source]:
    return [seeded(3), PerSample(keys(3, torch.arange(5)))]


# The interface


@every
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_dtype_device_and_range_are_preserved(
    p: Perturbation, dtype: torch.dtype, device: str
):
    x = images(dtype=dtype).to(device)
    y = p(x, seeded())
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.min() >= 0
    assert y.max() <= 1


@every
@pytest.mark.parametrize("kind", [0, 1])
def test_the_input_is_never_written_to(p: Perturbation, kind: int):
    x = images()
    before = x.clone()
    p(x, sources()[kind])
    assert torch.equal(x, before)


@every
@pytest.mark.parametrize("kind", [0, 1])
def test_a_source_reproduces_the_result(p: Perturbation, kind: int):
    assert torch.equal(p(images(), sources()[kind]), p(images(), sources()[kind]))


@every_random
def test_another_seed_gives_another_result(p: Perturbation):
    assert not torch.equal(p(images(), seeded(0)), p(images(), seeded(1)))


@every_random
def test_without_a_generator_the_global_one_is_used(p: Perturbation):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first, second = p(images()), p(images())
        torch.manual_seed(5)
        again = p(images())
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@every_random
@pytest.mark.parametrize("kind", [0, 1])
def test_equal_images_of_a_batch_are_perturbed_differently(p: Perturbation, kind: int):
    y = p(torch.full((5, 3, 32, 33), 0.5), sources()[kind])
    for i in range(5):
        for j in range(i):
            assert not torch.equal(y[i], y[j])


@every
def test_an_image_under_its_key_is_perturbed_the_same_in_any_batch(p: Perturbation):
    x, order = images(), torch.tensor([3, 0])
    whole = p(x, PerSample(keys(7, torch.arange(5))))
    part = p(x[order], PerSample(keys(7, order)))
    torch.testing.assert_close(part, whole[order], rtol=0, atol=1e-6)


@every
def test_deterministic_says_whether_two_draws_agree(p: Perturbation):
    assert p.deterministic == torch.equal(p(images(), seeded(0)), p(images(), seeded(1)))
    assert p.deterministic == (p in DETERMINISTIC)


@every
@pytest.mark.parametrize("shape", [(0, 3, 8, 9), (2, 1, 7, 5), (1, 4, 5, 9)])
def test_any_number_of_images_and_channels_is_accepted(p: Perturbation, shape: tuple[int, ...]):
    assert p(images(*shape), PerSample(keys(0, torch.arange(shape[0])))).shape == shape


# Noise


@pytest.mark.parametrize("kind", [0, 1])
def test_gaussian_noise_has_the_requested_mean_and_std(kind: int):
    x = torch.full((5, 3, 100, 100), 0.5)
    noise = Gaussian(0.05)(x, sources()[kind]) - x  # 10 std from the clamp
    assert abs(noise.mean()) < 5 * 0.05 / math.sqrt(noise.numel())
    assert noise.std() == pytest.approx(0.05, rel=0.01)
    fourth = (noise / 0.05).pow(4).mean().item()
    assert fourth == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("kind", [0, 1])
def test_uniform_noise_fills_its_interval_evenly(kind: int):
    x = torch.full((5, 3, 100, 100), 0.5)
    noise = Uniform(0.2)(x, sources()[kind]) - x
    assert -0.2001 < noise.min() < -0.199
    assert 0.199 < noise.max() < 0.2001
    counts = torch.histc(noise, bins=10, min=-0.2, max=0.2)
    assert (counts / noise.numel() - 0.1).abs().max() < 0.005


@pytest.mark.parametrize("kind", [0, 1])
def test_noise_is_the_drawn_normal_times_std_added_and_clamped(kind: int):
    x = images()
    y = Gaussian(0.3)(x, sources()[kind])
    normal = draws.normal(x.shape, x, sources()[kind])
    for got, image, epsilon in zip(y.flatten(), x.flatten(), normal.flatten(), strict=True):
        expected = min(1.0, max(0.0, image.item() + 0.3 * epsilon.item()))
        assert got.item() == pytest.approx(expected, abs=1e-6)
    assert (y == 0).any()
    assert (y == 1).any()


@pytest.mark.parametrize("kind", [0, 1])
def test_a_range_of_std_draws_one_level_per_image_uniformly(kind: int):
    n = 600
    x = torch.full((n, 1, 40, 40), 0.5)
    source = [seeded(1), PerSample(keys(1, torch.arange(n)))][kind]
    levels = (Gaussian((0.02, 0.08))(x, source) - x).flatten(1).std(1)
    assert 0.018 < levels.min() < 0.022
    assert 0.078 < levels.max() < 0.085
    assert levels.mean() == pytest.approx(0.05, abs=0.003)
    assert levels.std() == pytest.approx(0.06 / math.sqrt(12), rel=0.08)


def test_the_level_of_an_image_is_independent_of_its_first_pixel():
    n = 4000
    x = torch.full((n, 1, 8, 8), 0.5)
    noise = (Gaussian((0.01, 0.08))(x, PerSample(keys(2, torch.arange(n)))) - x).flatten(1)
    level, first = noise[:, 1:].std(1), (noise[:, 0] / noise[:, 1:].std(1)).abs()
    assert abs(torch.corrcoef(torch.stack([level, first]))[0, 1]) < 0.06


def test_pixels_and_channels_get_uncorrelated_noise():
    x = torch.full((2000, 2, 2, 2), 0.5)
    noise = (Gaussian(0.05)(x, PerSample(keys(4, torch.arange(2000)))) - x).flatten(1)
    assert (torch.corrcoef(noise.T) - torch.eye(8)).abs().max() < 0.1


@pytest.mark.parametrize("p", [Gaussian(0.1), Uniform(0.1), DownUp(2)], ids=str)
def test_half_precision_is_rounded_once_after_a_float32_sum(p: Perturbation):
    x = images(dtype=torch.bfloat16)
    expected = p(x.float(), seeded()).to(torch.bfloat16)
    assert torch.equal(p(x, seeded()), expected)


def test_float64_noise_is_drawn_in_float64():
    x = torch.full((1, 1, 4, 4), 0.5, dtype=torch.float64)
    noise = torch.randn(x.shape, dtype=torch.float64, generator=seeded())
    assert torch.equal(Gaussian(0.01)(x, seeded()), x + 0.01 * noise)


# Masks


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    "p", [Occlusion(3, 4), Occlusion(40, (2, 3)), Occlusion(16, (11, 1)), Occlusion(1, (1, 13))]
)
def test_occlusion_equals_painting_patch_by_patch(p: Occlusion, kind: int):
    x = images()
    u = draws.uniform((5, p.patches, 2), x, sources()[kind])
    h, w = p.size if isinstance(p.size, tuple) else (p.size, p.size)
    expected = x.clone()
    for b in range(5):
        for n in range(p.patches):
            top = math.floor(u[b, n, 0].item() * (11 - h + 1))
            left = math.floor(u[b, n, 1].item() * (13 - w + 1))
            expected[b, :, top : top + h, left : left + w] = 0
    assert torch.equal(p(x, sources()[kind]), expected)


@pytest.mark.parametrize("kind", [0, 1])
def test_stripes_equal_painting_stripe_by_stripe(kind: int):
    x = images()
    u = draws.uniform((5, 4), x, sources()[kind])
    expected = x.clone()
    for b in range(5):
        for n in range(4):
            left = math.floor(u[b, n].item() * (13 - 3 + 1))
            expected[b, :, :, left : left + 3] = 0
    assert torch.equal(Stripes(4, 3)(x, sources()[kind]), expected)


def test_every_position_inside_the_image_is_equally_likely():
    n = 6000
    y = Occlusion(1, (3, 4))(torch.ones(n, 1, 5, 6), PerSample(keys(0, torch.arange(n))))
    black = (y == 0).squeeze(1)
    assert (black.sum((1, 2)) == 12).all()
    top = black.any(2).int().argmax(1)
    left = black.any(1).int().argmax(1)
    counts = torch.bincount(top * 3 + left, minlength=9)
    assert len(counts) == 9
    assert (counts / n - 1 / 9).abs().max() < 0.02


def test_the_last_position_is_inside_even_for_the_largest_uniform_number():
    from noiseproof.perturb.masks import _cover

    for dtype in (torch.float32, torch.float64):
        last = torch.nextafter(torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype))
        for size in range(1, 700):
            assert _cover(last, 1, size)[0, -1]


def test_a_patch_as_large_as_the_image_blackens_it():
    assert Occlusion(1, (11, 13))(images()).count_nonzero() == 0
    assert Stripes(1, 13)(images()).count_nonzero() == 0


@pytest.mark.parametrize("size", [12, (12, 1), (1, 14), 100])
def test_a_patch_larger_than_the_image_raises_an_error_with_both_sizes(size: int | tuple[int, int]):
    h, w = size if isinstance(size, tuple) else (size, size)
    with pytest.raises(ValueError, match=f"{h} x {w} .* 11 x 13"):
        Occlusion(1, size)(images())


def test_a_stripe_wider_than_the_image_raises_an_error_with_both_sizes():
    with pytest.raises(ValueError, match=r"width 14 .* 11 x 13"):
        Stripes(1, 14)(images())


# Down-up sampling


def bilinear(row: list[float], size: int) -> list[float]:
    """Resamples one row, pixel centres at half-integers, edges repeated."""
    out = []
    for i in range(size):
        at = max(0.0, (i + 0.5) * len(row) / size - 0.5)
        low = min(int(at), len(row) - 1)
        high = min(low + 1, len(row) - 1)
        out.append(row[low] * (1 - (at - low)) + row[high] * (at - low))
    return out


@pytest.mark.parametrize(("factor", "width", "small"), [(3, 13, 4), (2, 7, 3), (1.5, 9, 6)])
def test_down_up_equals_a_literal_bilinear_resampling(factor: float, width: int, small: int):
    x = images(1, 1, 1, width, dtype=torch.float64)
    expected = bilinear(bilinear(x.flatten().tolist(), small), width)
    assert DownUp(factor)(x).flatten().tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (2, 3, 7, 5), (1, 3, 32, 33), (1, 1, 2, 50)])
@pytest.mark.parametrize("factor", [1, 2, 3, 1.1])
def test_down_up_gives_odd_sizes_back(shape: tuple[int, ...], factor: float):
    assert DownUp(factor)(images(*shape)).shape == shape


def test_down_up_by_more_than_the_image_is_refused():
    DownUp(48)(torch.zeros(1, 3, 30, 48))
    with pytest.raises(ValueError, match=r"downup:100 is larger than .* 30 x 48; .* at most 48"):
        DownUp(100)(torch.zeros(1, 3, 30, 48))


@pytest.mark.parametrize("p", [Stripes(1000, 3), Stripes(20, 12), Occlusion(300, 10)], ids=str)
def test_masks_that_leave_nothing_visible_are_refused(p: Perturbation):
    with pytest.raises(
        ValueError, match=f"{p} leaves less than 1 % of an image of 40 x 48 visible"
    ):
        p(torch.ones(1, 3, 40, 48))
    p(torch.ones(1, 3, 400, 4800))


def test_down_up_by_three_of_a_multiple_of_three_matches_scale_factors():
    x = images(2, 3, 12, 15)
    kinds = {"mode": "bilinear", "align_corners": False}
    expected = interpolate(interpolate(x, scale_factor=1 / 3, **kinds), scale_factor=3, **kinds)
    torch.testing.assert_close(DownUp(3)(x), expected)


def test_down_up_by_one_and_of_a_constant_changes_nothing():
    assert torch.equal(DownUp(1)(images()), images())
    x = torch.full((1, 1, 9, 9), 0.25)
    assert torch.equal(DownUp(4)(x), x)


# Chains


def test_a_chain_applies_its_members_from_left_to_right():
    x = images()
    masked_last = Chain(Gaussian(0.2), Occlusion(1, (11, 13)))(x)
    masked_first = Chain(Occlusion(1, (11, 13)), Gaussian(0.2))(x)
    assert masked_last.count_nonzero() == 0
    assert masked_first.count_nonzero() > 0


def test_members_of_a_chain_consume_a_generator_in_order():
    x, one, by_hand = images(), seeded(), seeded()
    expected = Stripes(1, 2)(Uniform(0.1)(Gaussian(0.1)(x, by_hand), by_hand), by_hand)
    chain = Chain(Gaussian(0.1), Uniform(0.1), Stripes(1, 2))
    assert torch.equal(chain(x, one), expected)


def test_members_of_a_chain_get_streams_of_their_own():
    x, source = images(), PerSample(keys(3, torch.arange(5)))
    expected = Gaussian(0.1)(Gaussian(0.1)(x, source.fold(0)), source.fold(1))
    assert torch.equal(Chain(Gaussian(0.1), Gaussian(0.1))(x, source), expected)


def test_nested_chains_flatten_and_identities_vanish():
    a, b, c = Gaussian(0.1), DownUp(2), Stripes(1, 2)
    assert Chain(a, Chain(b, Chain(c)), Identity()).members == (a, b, c)
    assert Chain(Chain(a, b), c) == Chain(a, b, c)
    assert Chain(a, b) != Chain(b, a)


def test_empty_and_single_chains_equal_their_content():
    a, x, source = Gaussian(0.1), images(), PerSample(keys(3, torch.arange(5)))
    for chain, plain in [(Chain(), Identity()), (Chain(a), a), (Chain(Identity(), a), a)]:
        assert chain == plain
        assert plain == chain
        assert hash(chain) == hash(plain)
        assert str(chain) == str(plain)
        assert torch.equal(chain(x, source), plain(x, source))
    assert Chain() != a
    assert Chain(a) != "gaussian:0.1"


# Values


def test_perturbations_are_immutable_and_can_be_pickled():
    for p in EVERY:
        copy = pickle.loads(pickle.dumps(p))
        assert copy == p
        assert hash(copy) == hash(p)
        assert eval(repr(p), vars(perturb) | {n: getattr(perturb, n) for n in perturb.__all__}) == p
    with pytest.raises(AttributeError):
        Gaussian(0.1).std = 0.2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Chain().members = ()  # type: ignore[misc]


def test_equivalent_arguments_give_equal_perturbations():
    assert Gaussian((0.1, 0.1)) == Gaussian(0.1)
    assert Occlusion(2, (5, 5)) == Occlusion(2, 5)
    assert DownUp(3.0) == DownUp(3)
    assert Gaussian(41 / 255 + 1e-14) == Gaussian(41 / 255)
    assert Gaussian(0.1) != Uniform(0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(-0.1), "std must be finite and at least 0, got -0.1"),
        (lambda: Gaussian(math.nan), "std must be finite"),
        (lambda: Gaussian((0.2, 0.1)), "low <= high, got 0.2 > 0.1"),
        (lambda: Gaussian((-1, 0.1)), "at least 0, got -1.0"),
        (lambda: Gaussian((1, 2, 3)), r"pair \(low, high\), got \(1, 2, 3\)"),  # type: ignore[arg-type]
        (lambda: Gaussian("0.1"), "std must be a number, got '0.1'"),  # type: ignore[arg-type]
        (lambda: Gaussian(40), r"std must be at most 1, .*got 40; did you mean 40/255\?"),
        (lambda: Gaussian((0, 12.5)), r"got 12\.5; did you mean 12\.5/255\?"),
        (lambda: Gaussian(1e30), r"std must be at most 1, .*got 1e30$"),
        (lambda: Uniform(1.01), "amplitude must be at most 1"),
        (lambda: Uniform(-1), "amplitude must be finite and at least 0, got -1.0"),
        (lambda: Uniform(math.inf), "amplitude must be finite"),
        (lambda: Occlusion(0, 3), "patches must be a whole number of at least 1, got 0"),
        (lambda: Occlusion(2, -3), "size must be a whole number of at least 1, got -3"),
        (lambda: Occlusion(2, (3, 0)), "size must be a whole number of at least 1, got 0"),
        (lambda: Occlusion(2, (3, 4, 5)), "pair"),  # type: ignore[arg-type]
        (lambda: Stripes(-1, 3), "count must be"),
        (lambda: Stripes(1, 2.5), "width must be a whole number"),  # type: ignore[arg-type]
        (lambda: DownUp(0.5), "factor must be finite and at least 1, got 0.5"),
        (lambda: DownUp(True), "factor must be a number, got True"),
        (lambda: RandomApply(DownUp(2), 1.0), "share must be a number above 0 and below 1, got 1"),
        (lambda: RandomApply(DownUp(2), math.nan), "share must be a number above 0 and below 1"),
        (lambda: RandomApply(Chain(DownUp(2)), 0.5), r"one such as .*, got Chain\(DownUp"),
        (lambda: RandomApply(Identity(), 0.5), r"got Identity\(\)"),
        (lambda: RandomApply("downup:3", 0.5), "got 'downup:3'"),  # type: ignore[arg-type]
        (lambda: Chain(Identity(), "downup:3"), "perturbations, got 'downup:3'"),  # type: ignore[arg-type]
    ],
)
def test_invalid_values_raise_errors_at_construction(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@every
def test_a_single_image_is_a_batch_of_one(p: Perturbation):
    x = images()[0]
    single = p(x, PerSample(keys(7, torch.arange(1))))
    assert torch.equal(single, p(x[None], PerSample(keys(7, torch.arange(1))))[0])


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 28)])
def test_corruptions_and_functions_take_a_single_image(shape: tuple[int, ...]):
    x = images(*shape)
    texts = [text for text in CORRUPTIONS if text.endswith(":3")]
    texts += ["gaussian:0.1@0.5+fog:1"]
    own = Own("dim", lambda image: image * torch.rand(1))
    assert len(texts) == 16
    for p in (*map(parse, texts), own):
        single = p(x, PerSample(keys(7, torch.arange(1))))
        assert torch.equal(single, p(x[None], PerSample(keys(7, torch.arange(1))))[0]), p


def test_perturbations_stand_in_a_compose_of_torchvision():
    from torchvision.transforms import v2

    torch.manual_seed(0)
    result = v2.Compose([v2.RandomHorizontalFlip(1.0), Gaussian(0.1), DownUp(2)])(images()[0])
    assert result.shape == images()[0].shape
    assert not torch.equal(result, images()[0])


@every
def test_invalid_images_and_generators_raise_errors(p: Perturbation):
    with pytest.raises(ValueError, match=r"torch.uint8.*/ 255"):
        p(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"B x C x H x W, got shape \(8, 8\)"):
        p(torch.zeros(8, 8))
    with pytest.raises(ValueError, match="Tensor, got list"):
        p([0.5])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch.Generator .* got int"):
        p(images(), 3)  # type: ignore[arg-type]


@every
def test_normalised_images_and_bytes_as_floats_raise_errors_with_the_remedy(p: Perturbation):
    x = images()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match=r"got values from -.* before they are normalised"):
            p(((x - 0.5) / 0.25).to(dtype))
    with pytest.raises(ValueError, match=r"\[0, 1\], got values from 0.* divide them by 255"):
        p((255 * x).round())
    with pytest.raises(ValueError, match="got NaN"):
        p(x * float("nan"))
    p(1.2 * x - 0.1)  # as after bicubic upsampling


def test_a_chain_checks_its_images_once(monkeypatch):
    seen = []
    monkeypatch.setattr(base, "check_range_on_cpu", seen.append)
    parse("gaussian:0.1+occlusion:2x3+downup:2")(images())
    assert len(seen) == 1


def test_the_range_is_not_checked_where_values_are_not_available():
    from torch._subclasses.fake_tensor import FakeTensorMode

    p, x = Gaussian(0.1), images() * 3 - 1
    source = PerSample(keys(0, torch.arange(5)))
    assert p(x.to("meta"), PerSample(source.keys.to("meta"))).shape == x.shape
    with FakeTensorMode() as mode:
        assert p(mode.from_tensor(x)).shape == x.shape
    masks = Occlusion(2, 3)  # vmap has no rule for the in-place clamp of noise, and warns
    many = torch.func.vmap(lambda part: masks(part, source))(torch.stack([x, x]))
    assert torch.equal(many[0], masks._apply(x, source))
    torch.compiler.reset()
    compiled = torch.compile(lambda x: p(x, source), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), p._apply(x, source))


@pytest.mark.parametrize("p", [Gaussian((0.1, 0.2)), Occlusion(1, 4), DownUp(2)], ids=str)
def test_a_share_of_the_images_is_perturbed_and_the_others_are_unchanged(p: Perturbation):
    x, source = torch.rand(2000, 1, 6, 6), PerSample(keys(3, torch.arange(2000)))
    found, full = RandomApply(p, 0.8)(x, source), p(x, source.fold(0))
    changed = (found != x).flatten(1).any(1)
    assert torch.equal(found[changed], full[changed])
    assert abs(float(changed.float().mean()) - 0.8) < 5 * math.sqrt(0.16 / 2000)
    alone = RandomApply(p, 0.8)(x[7:8], PerSample(source.keys[7:8]))
    assert torch.equal(alone[0], found[7])


# Text


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("gaussian:40/255", Gaussian(40 / 255), "gaussian:40/255"),
        ("gaussian:0.1", Gaussian(0.1), "gaussian:0.1"),
        ("gaussian:0..0.1", Gaussian((0, 0.1)), "gaussian:0..0.1"),
        ("gaussian:0..40/255", Gaussian((0, 40 / 255)), "gaussian:0..40/255"),
        ("gaussian:.5", Gaussian(0.5), "gaussian:0.5"),
        ("gaussian:80/510", Gaussian(40 / 255), "gaussian:40/255"),
        ("gaussian:51/255", Gaussian(0.2), "gaussian:0.2"),
        ("gaussian:0", Gaussian(0), "gaussian:0"),
        ("uniform:0.06", Uniform(0.06), "uniform:0.06"),
        ("occlusion:20x70", Occlusion(20, 70), "occlusion:20x70"),
        ("occlusion:20x70x50", Occlusion(20, (70, 50)), "occlusion:20x70x50"),
        ("occlusion:20x70x70", Occlusion(20, 70), "occlusion:20x70"),
        ("downup:3", DownUp(3), "downup:3"),
        ("downup:1.5", DownUp(1.5), "downup:1.5"),
        ("stripes:10x6", Stripes(10, 6), "stripes:10x6"),
        ("sensor:ISO 1600", Sensor(1600), "sensor:iso1600"),
        ("sensor:400x2", Sensor(electrons=400, read_noise=2), "sensor:400x2"),
        ("sensor:4e2x1.5x14", Sensor(None, 400, 1.5, 14), "sensor:400x1.5x14"),
        ("sensor:400x2x12", Sensor(electrons=400, read_noise=2), "sensor:400x2"),
        ("exposure:-2", Exposure(-2), "exposure:-2"),
        ("exposure:-1/4@0.5", RandomApply(Exposure(-0.25), 0.5), "exposure:-0.25@0.5"),
        (
            "exposure:-2+sensor:iso800+jpeg:2",
            Chain(Exposure(-2), Sensor(800), Corruption("jpeg", 2)),
            "exposure:-2+sensor:iso800+jpeg:2",
        ),
        ("identity", Identity(), "identity"),
        ("clean", Identity(), "identity"),
        ("clean+downup:3", DownUp(3), "downup:3"),
        ("gaussian:0..0.1@0.8", RandomApply(Gaussian((0, 0.1)), 0.8), "gaussian:0..0.1@0.8"),
        (
            "downup:3@ 1/4+stripes:10x6",
            Chain(RandomApply(DownUp(3), 0.25), Stripes(10, 6)),
            "downup:3@0.25+stripes:10x6",
        ),
        (
            " Gaussian: 40/255 + occlusion:20x70 ",
            Chain(Gaussian(40 / 255), Occlusion(20, 70)),
            "gaussian:40/255+occlusion:20x70",
        ),
    ],
)
def test_text_is_parsed_and_printed(text: str, expected: Perturbation, shown: str):
    assert parse(text) == expected
    assert str(parse(text)) == shown


@pytest.mark.parametrize("k", range(1, 256))
def test_levels_of_k_over_255_round_trip_exactly(k: int):
    text = f"gaussian:{k}/255"
    p = parse(text)
    assert isinstance(p, Gaussian)
    assert p.std == k / 255
    assert str(p) == (text if k % 51 else f"gaussian:{k / 255:g}")
    assert str(Gaussian(k * (1 / 255))) == str(p)  # off by a rounding error


levels = st.one_of(
    st.floats(0, 1), st.floats(0, 1e-300), st.integers(0, 255).map(lambda k: k / 255), st.just(0)
)
counts = st.integers(1, 10**6)
singles = st.one_of(
    st.builds(Gaussian, levels),
    st.builds(lambda a, b: Gaussian((min(a, b), max(a, b))), levels, levels),
    st.builds(Uniform, levels),
    st.builds(Occlusion, counts, st.one_of(counts, st.tuples(counts, counts))),
    st.builds(Stripes, counts, counts),
    st.builds(DownUp, st.one_of(counts, st.floats(1, 1e300))),
    st.builds(Sensor, st.integers(100, 6400)),
    st.builds(
        lambda n, noise, bits: Sensor(None, n, noise, bits),
        st.floats(1, 1e6),
        st.floats(0, 1e4),
        st.integers(1, 16),
    ),
    st.builds(Exposure, st.floats(-10, 10)),
    st.just(Identity()),
)
shared = st.builds(
    RandomApply,
    singles.filter(lambda p: not isinstance(p, Identity)),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
anything = st.recursive(
    singles | shared, lambda inner: st.lists(inner, max_size=4).map(lambda members: Chain(*members))
)


@settings(max_examples=150, deadline=None)
@given(anything)
def test_the_text_of_any_perturbation_parses_back_to_an_equal_one(p: Perturbation):
    read(str(p))
    again = parse(str(p))
    assert again == p
    assert hash(again) == hash(p)
    assert str(again) == str(p)
    assert again.deterministic == p.deterministic


WRONG = {
    "gausian:0.1": "'gausian' in 'gausian:0.1': did you mean 'gaussian:0.1'.*'gaussian:40/255",
    "oclusion:2x3": "did you mean 'occlusion:2x3'",
    "gaussian:0.1+ Jpge: 2": r"unknown perturbation 'jpge' .*: did you mean 'jpeg:2'\?",
    "motion_blur:3": r"did you mean 'motion:3'\?",
    "shot_noise": r"did you mean 'shot'\?",
    "gaussian=0.1": r"did you mean 'gaussian:0.1'\?",
    "gaussian 0.1": r"did you mean 'gaussian:0.1'\?",
    "blur:3": r"did you mean 'defocus', 'glass', 'motion' or 'zoom'\?",
    "gaussian_blur:3": r"did you mean 'defocus', 'glass', 'motion' or 'zoom'\?",
    "15": r"did you mean 'gaussian:15/255'\?",
    "0.1": r"did you mean 'gaussian:0.1'\?",
    "8/255": r"did you mean 'gaussian:8/255'\?",
    "qqq:3": r"'qqq' in 'qqq:3'\. If it is your own, register it.* Known: gaussian, uniform",
    "cleen": "did you mean 'clean'",
    "": "no name in ''",
    "gaussian:0.1+": "no name in",
    "gaussian": "number such as 0.1 or 40/255, got ''",
    "gaussian:big": "got 'big'",
    "gaussian:nan": "got 'nan'",
    "gaussian:1e999": "finite",
    "gaussian:1/0": "'1/0' divides by zero",
    "gaussian:1/2/3": "got '1/2/3'",
    "gaussian:40": r"std must be at most 1, .*got 40; did you mean 40/255\?",
    "gaussian:0..40": r"did you mean 40/255\?",
    "uniform:256/255": "amplitude must be at most 1",
    "gaussian:-0.1": "std must be finite and at least 0, got -0.1",
    "gaussian:0.2..0.1": "low <= high, got 0.2 > 0.1",
    "gaussian:0.1..": "got ''",
    "uniform:-1": "amplitude must be",
    "uniform:0..1": "got '0..1'",
    "occlusion:20": "2 or 3 whole numbers joined by x, got '20'",
    "occlusion:1x2x3x4": "got '1x2x3x4'",
    "occlusion:0x5": "patches must be a whole number of at least 1, got 0",
    "occlusion:2.5x5": "got '2.5x5'",
    "occlusion:5x0": "size must be a whole number of at least 1, got 0",
    "fog:hard": "severity must be a whole number from 1 to 5, got 'hard'",
    "fog:0": "from 1 to 5, got 0",
    "fog:6": "from 1 to 5, got 6",
    "jpeg:300": "severity must be a whole number from 1 to 5, got 300",
    "jpeg:75": "expected a severity from 1 to 5, not a quality, got 75",
    "stripes:10": "expected 2 whole numbers joined by x, got '10'",
    "stripes:10x-6": "width must be .* got -6",
    "downup:0.5": "factor must be finite and at least 1, got 0.5",
    "sensor:1600": "expected iso1600 or electrons x read noise, got '1600'",
    "sensor:iso50": "iso must be a whole number from 100 to 6400, got 50",
    "sensor:isobar": "from 100 to 6400, got 'bar'",
    "sensor:0x2": "electrons must be a number from 1 to 1,000,000, got 0.0",
    "sensor:400x-1": "read noise must be a number from 0 to 10,000, got -1.0",
    "sensor:400x2x99": "bits must be a whole number from 1 to 16, got 99",
    "sensor:1x2x3x4": "got '1x2x3x4'",
    "exposure:-20": "stops must be a number from -10 to 10, got -20.0",
    "exposure:dark": "got 'dark'",
    "identity:3": "no arguments",
    "gaussian:0.1@": "number such as 0.1 or 40/255, got ''",
    "gaussian:0.1@0": "the share after @ must be a number above 0 and below 1, got 0.0",
    "gaussian:0.1@1": "the share after @ must be",
    "gaussian:0.1@0.5@0.5": "got '0.5@0.5'",
    "clean:": "no arguments",
    "clean@0.5": "no arguments",
}


@pytest.mark.parametrize("text", WRONG)
def test_check_and_parse_raise_the_same_error_for_invalid_text(text: str):
    with pytest.raises(ValueError, match=WRONG[text]):
        read(text)
    with pytest.raises(ValueError, match=WRONG[text]):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gaussian:8/255", ("σ=8/255", "Gaussian noise", "8/255")),
        ("Gaussian: 0..0.1", ("σ=0–0.1", "Gaussian noise", "0–0.1")),
        ("uniform:0.06", ("uniform ±0.06", "Uniform noise", "0.06")),
        ("occlusion:20x70x50", ("occlusion 20×70×50", "Occlusion", "20×70×50")),
        ("downup:3+clean", ("down-up 3 + clean", "Down- and up-sampling + clean", "3 + clean")),
        ("gaussian_noise:2", ("gaussian noise 2", "Gaussian noise by severity", "2")),
        ("jpeg:5", ("JPEG 5", "JPEG compression", "5")),
        ("sensor:iso1600", ("sensor ISO 1600", "Sensor noise", "ISO 1600")),
        ("sensor:400x2", ("sensor 400×2", "Sensor noise", "400×2")),
        ("exposure:-2+jpeg:1", ("exposure −2 + JPEG 1", "Exposure + JPEG compression", "−2 + 1")),
        ("six\n:3x", ("six 3x", "Six", "3x")),  # from a newer version, or damaged
    ],
)
def test_the_words_for_a_perturbation(text: str, words: tuple[str, str, str]):
    assert (heading(text), family(text), strength(text)) == words


def test_a_heading_has_printable_characters_only():
    assert heading("fo\x1bg:3\n1") == "fo g 3 1"


def test_each_corruption_has_five_severities_and_the_name_of_the_benchmark():
    grouped = families(CORRUPTIONS)
    assert ", ".join(grouped) == (
        "Gaussian noise by severity, Shot noise, Impulse noise, Defocus blur, Glass blur, "
        "Motion blur, Zoom blur, Snow, Frost, Fog, Brightness, Contrast, Elastic transform, "
        "Pixelation, JPEG compression"
    )
    assert all(len(texts) == 5 for texts in grouped.values())
    assert HELP["gaussian_noise"].startswith("corruption: Gaussian noise, severity 1 to 5: ")


def test_text_must_be_text():
    with pytest.raises(ValueError, match=r"must be text such as .* got 0\.1"):
        parse(0.1)  # type: ignore[arg-type]


def test_every_line_of_help_ends_in_valid_examples():
    for name, line in HELP.items():
        examples = line.rpartition(": ")[2].split(", ")
        assert all(example.partition(":")[0] == name for example in examples)
        for example in examples:
            assert str(parse(example)) == example


def test_check_works_where_torch_cannot_be_imported():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from noiseproof.perturb.text import read, HELP\n"
        "read('gaussian:40/255+occlusion:20x70+stripes:10x6+downup:3+uniform:0.1+clean')\n"
        "try: read('gaussian:-1')\n"
        "except ValueError: print('refused', len(HELP))\n"
    )
    root = Path(perturb.__file__).parents[2]  # importable without being installed
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused 23\n", "")


def test_the_public_names_resolve_and_others_do_not():
    assert all(hasattr(perturb, name) for name in perturb.__all__)
    assert set(perturb.__all__) <= set(dir(perturb))
    with pytest.raises(AttributeError, match="no attribute 'Salt'"):
        perturb.Salt  # type: ignore[attr-defined]


# Compiled, captured, differentiated


COMPILED = ["gaussian:0..0.1+stripes:2x3", "occlusion:17x2x3", "uniform:0.1@0.8", "downup:2+clean"]
COMPILED += ["exposure:-2+sensor:iso1600"]


@pytest.mark.parametrize("text", COMPILED)
def test_compiling_does_not_change_the_result(text: str):
    p = parse(text)

    def noisy(x: Tensor, index: Tensor) -> Tensor:
        return p(x, PerSample(keys(7, index)))

    torch.compiler.reset()
    compiled = torch.compile(noisy, backend="aot_eager", fullgraph=True)
    x, index = images(), torch.arange(5)
    torch.testing.assert_close(compiled(x, index), noisy(x, index))
    assert torch.equal(x, images())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_a_captured_graph_replays_the_eager_result(p: Perturbation):
    x, index = images().cuda(), torch.arange(5, device="cuda")
    eager = p(x, PerSample(keys(7, index)))  # also warms up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = p(x, PerSample(keys(7, index)))
        p(x)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, eager)


def test_gradients_pass_where_a_pixel_is_neither_clamped_nor_masked():
    x = images().requires_grad_()
    y = Chain(Gaussian(0.3), Occlusion(2, 4))(x, seeded())
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, ((y > 0) & (y < 1)).float())
