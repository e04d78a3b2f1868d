"""The 15 corruptions against plain versions: pixel by pixel where they are deterministic, in
distribution where they are random."""

from __future__ import annotations

import hashlib
import math
import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage, stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from noiseproof import draws
from noiseproof.draws import PerSample, keys
from noiseproof.perturb import CORRUPTIONS, Chain, Corruption, Gaussian, parse
from noiseproof.perturb.corruptions import blur, frost, noise, weather
from noiseproof.perturb.corruptions.constants import constants
from noiseproof.perturb.text import families, heading, ordered, read
from tests import corruptions_reference as reference

NAMES = [text.partition(":")[0] for text in CORRUPTIONS[::5]]
DETERMINISTIC = ["defocus", "zoom", "brightness", "contrast", "pixelate", "jpeg"]
RANDOM = [name for name in NAMES if name not in DETERMINISTIC]
every = pytest.mark.parametrize("name", NAMES)


def source(count: int, seed: int = 0) -> PerSample:
    return PerSample(keys(seed, torch.arange(count)))


@cache
def photograph(side: int) -> NDArray[np.uint8]:
    """A picture with smooth areas, texture and edges, H x W x 3."""
    rng = np.random.default_rng(5)
    smooth = ndimage.gaussian_filter(rng.normal(size=(side, side, 3)), (side / 8, side / 8, 0))
    fine = ndimage.gaussian_filter(rng.normal(size=(side, side, 3)), (1, 1, 0.5))
    picture = 110 + 60 * smooth / smooth.std() + 15 * fine / fine.std()
    picture[side // 4 : side // 2, side // 3 : -side // 4] = [200, 60, 30]
    picture[-side // 5 :, : side // 3] = 250
    return np.clip(picture, 0, 255).astype(np.uint8)


def batch(side: int = 32, count: int = 4, channels: int = 3) -> Tensor:
    """Parts of a picture, B x C x H x W."""
    large = torch.from_numpy(photograph(side + count)).permute(2, 0, 1).float() / 255
    parts = [large[:, i : i + side, i : i + side] for i in range(count)]
    return torch.stack(parts).repeat(1, 2, 1, 1)[:, :channels]


def as_bytes(x: Tensor) -> NDArray[np.float64]:
    """B x H x W x C, from 0 to 255."""
    return (x.double() * 255).round().permute(0, 2, 3, 1).numpy()


def plainly(name: str, image: NDArray[np.uint8], rng: np.random.Generator, severity: int) -> Any:
    arguments = list(constants(name, severity, min(image.shape[:2])))
    more = [frost_pictures()] if name == "frost" else []
    return getattr(reference, name)(image, rng, *arguments, *more)


@cache
def frost_pictures() -> list[NDArray[np.uint8]]:
    """The five files of the original, two of which are the same."""
    parts = frost.pictures().split([h * w for h, w in frost.SIZES], 1)
    sized = zip(parts, frost.SIZES, strict=True)
    four = [part.view(3, h, w).permute(1, 2, 0).numpy() for part, (h, w) in sized]
    return [four[i] for i in (0, 1, 1, 2, 3)]


# Pixel by pixel


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("name", ["defocus", "zoom", "brightness", "contrast", "pixelate"])
@pytest.mark.parametrize("side", [32, 72])
def test_a_deterministic_corruption_is_the_plain_one(name: str, severity: int, side: int):
    x = batch(side, 2)
    got = as_bytes(Corruption(name, severity)(x))
    for image, out in zip(as_bytes(x).astype(np.uint8), got, strict=True):
        difference = np.abs(out - plainly(name, image, np.random.default_rng(0), severity))
        assert difference.max() <= 1
        assert difference.mean() < 0.01


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 47), (96, 96), (100, 75)])
@pytest.mark.parametrize("severity", [1, 3, 5])
def test_jpeg_is_that_of_pillow(severity: int, height: int, width: int):
    x = batch(max(height, width), 2)[:, :, :height, :width]
    got = as_bytes(Corruption("jpeg", severity)(x))
    for image, out in zip(as_bytes(x).astype(np.uint8), got, strict=True):
        difference = np.abs(out - plainly("jpeg", image, np.random.default_rng(0), severity))
        assert difference.mean() < 0.05
        assert (difference > 4).mean() < 0.001


def test_jpeg_of_grey_images_is_that_of_pillow():
    x = batch(40, 1, channels=1)
    image = as_bytes(x)[0, :, :, 0].astype(np.uint8)
    expected = reference.jpeg(image, np.random.default_rng(0), 58)
    assert np.abs(as_bytes(Corruption("jpeg", 3)(x))[0, :, :, 0] - expected).mean() < 0.05


@pytest.mark.parametrize("radius", [7.5, 8, 8.5, 12])
def test_large_disks_are_smoothed_over_more_pixels(radius: float):
    x = batch(40, 1)
    got = blur.defocus(255 * x, source(1), radius, 2.0)[0].permute(1, 2, 0).numpy()
    image = as_bytes(x)[0].astype(np.uint8)
    difference = np.abs(got - reference.defocus(image, np.random.default_rng(0), radius, 2.0))
    assert difference.max() <= 1
    assert difference.mean() < 0.01


@pytest.mark.parametrize("angle", [-135, -100.5, -45, -20, 0, 30, 45])
@pytest.mark.parametrize(("radius", "sigma"), [(6, 1), (9, 2.5), (13.4, 12)])
def test_motion_blur_is_that_of_imagemagick(angle: float, radius: float, sigma: float):
    x = torch.from_numpy(as_bytes(batch(24, 2))).permute(0, 3, 1, 2).float()
    got = blur.motion_blur(x, torch.tensor([angle, 10.0]), radius, sigma)
    for image, out, a in zip(x, got, (angle, 10), strict=True):
        plain = image.permute(1, 2, 0).byte().numpy()
        expected = reference.motion_blur(plain, a, radius, sigma)
        assert np.abs(out.permute(1, 2, 0).numpy() - expected).max() <= 1
        assert (out.permute(1, 2, 0).numpy() != expected).mean() < 0.001


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_glass_replaces_pixels_as_the_loop_over_pixels_does(shift: int):
    height, width = 17, 23
    u = draws.uniform((2, 2, height, width), torch.empty(0), source(2))
    got = blur._origins(u, shift)
    delta = (u * 2 * shift).floor().int().numpy() - shift
    for b in range(2):
        pixels = np.arange(height * width).reshape(height, width, 1)  # views, as of colours
        for h in range(height - shift, shift, -1):
            for w in range(width - shift, shift, -1):
                there = h + delta[b, 0, h, w], w + delta[b, 1, h, w]
                pixels[h, w], pixels[there] = pixels[there], pixels[h, w]
        assert got[b].tolist() == pixels.flatten().tolist()


# In distribution


def features(images: NDArray[Any]) -> NDArray[np.float64]:
    """Statistics of each image, N x F: brightness, histogram, gradients, spectrum, symmetry."""
    x = images.astype(np.float64)
    grey = x.mean(3)
    spectrum = np.abs(np.fft.fft2(grey - grey.mean((1, 2), keepdims=True))) ** 2
    frequency = np.hypot(*np.meshgrid(*(np.fft.fftfreq(n) for n in grey.shape[1:])))
    bands = [(0.0, 0.1), (0.1, 0.25), (0.25, 0.5)]
    return np.stack(
        [
            x.mean((1, 2, 3)),
            x.std((1, 2, 3)),
            *np.quantile(x, [0.02, 0.25, 0.5, 0.75, 0.98], axis=(1, 2, 3)),
            np.abs(np.diff(x, axis=1)).mean((1, 2, 3)),
            np.abs(np.diff(x, axis=2)).mean((1, 2, 3)),
            np.abs(x[:, 1:, 1:] - x[:, :-1, :-1]).mean((1, 2, 3)),
            np.abs(x[:, 1:, :-1] - x[:, :-1, 1:]).mean((1, 2, 3)),
            np.abs(x - x[:, ::-1, ::-1]).mean((1, 2, 3)),
            x[..., 0].mean((1, 2)) - x[..., 2].mean((1, 2)),
            x[:, :, : x.shape[2] // 2].mean((1, 2, 3)) - x[:, :, x.shape[2] // 2 :].mean((1, 2, 3)),
            *(np.log(spectrum[:, (frequency >= a) & (frequency < b)].sum(1)) for a, b in bands),
        ],
        1,
    )


def check_same_distribution(ours: NDArray[Any], theirs: NDArray[Any]) -> None:
    """Kolmogorov–Smirnov on each feature, and each pixel's mean and spread over the draws."""
    for one, two in zip(features(ours).T, features(theirs).T, strict=True):
        if np.ptp(np.concatenate([one, two])) > 1e-6:
            _, p = stats.ks_2samp(one, two)
            assert float(p) > 1e-4  # pyright: ignore[reportArgumentType]
    for moment in (1, 2):
        one, two = (images.astype(np.float64) ** moment for images in (ours, theirs))
        pooled = np.concatenate([one, two]).var(0)
        error = np.sqrt(pooled * (1 / len(one) + 1 / len(two)))
        z = (one.mean(0) - two.mean(0))[error > 0] / error[error > 0]
        assert np.abs(z).mean() < 1.2  # 0.8 for a normal distribution; channels share their draws
        assert np.abs(z).max() < 7


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("name", RANDOM)
def test_a_random_corruption_has_the_distribution_of_the_plain_one(name: str, severity: int):
    count = 40 if name == "glass" else 100
    image, rng = photograph(32), np.random.default_rng(severity)
    theirs = np.stack([plainly(name, image, rng, severity) for _ in range(count)])
    x = torch.from_numpy(image).permute(2, 0, 1).expand(6 * count, -1, -1, -1).float() / 255
    check_same_distribution(as_bytes(Corruption(name, severity)(x, source(6 * count))), theirs)


@pytest.mark.parametrize("name", ["shot", "motion", "snow", "frost", "elastic"])
def test_large_images_have_the_distribution_of_the_plain_one(name: str):
    count, image, rng = 40, photograph(112), np.random.default_rng(0)
    theirs = np.stack([plainly(name, image, rng, 3) for _ in range(count)])
    x = torch.from_numpy(image).permute(2, 0, 1).expand(count, -1, -1, -1).float() / 255
    check_same_distribution(as_bytes(Corruption(name, 3)(x, source(count))), theirs)


@pytest.mark.parametrize(("side", "severity"), [(66, 1), (80, 2), (88, 5)])
def test_flakes_of_snow_are_not_smaller_than_a_pixel(side: int, severity: int):
    count, image, rng = 40, photograph(side), np.random.default_rng(0)
    assert constants("snow", severity, side)[2] < 1
    theirs = np.stack([plainly("snow", image, rng, severity) for _ in range(count)])
    x = torch.from_numpy(image).permute(2, 0, 1).expand(count, -1, -1, -1).float() / 255
    check_same_distribution(as_bytes(Corruption("snow", severity)(x, source(count))), theirs)


@pytest.mark.parametrize("photons", [3, 50, 500])
def test_shot_noise_has_the_probabilities_of_the_poisson_distribution(photons: int):
    for value in (0, 40, 255):
        counts = noise.shot(torch.full((200, 1, 20, 20), float(value)), source(200), photons)
        counts = (counts * photons / 255).round().flatten().numpy()
        expected = stats.poisson(value / 255 * photons)
        for n in range(0, photons, max(1, photons // 10)):
            p = expected.cdf(n)
            assert abs((counts <= n).mean() - p) <= 5 * math.sqrt(p * (1 - p) / counts.size) + 1e-9


def test_there_are_no_photons_where_the_uniform_number_is_zero(monkeypatch):
    monkeypatch.setattr(draws, "uniform", lambda shape, *_: torch.zeros(shape))
    assert not noise.shot(torch.arange(256.0).view(1, 1, 16, 16), source(1), 3).any()


def test_the_clouds_of_fog_fill_the_range_and_decay_with_scale():
    clouds = weather.plasma(draws.uniform((50, 64, 64), torch.empty(0), source(50)), 2.0)
    assert clouds.flatten(1).amin(1).eq(0).all()
    assert clouds.flatten(1).amax(1).eq(1).all()
    near, far = ((clouds - clouds.roll(k, 2)).abs().mean() for k in (1, 16))
    assert far > 2 * near


def test_fog_over_a_uniform_image_is_nowhere_brighter_than_the_image():
    y = Corruption("fog", 4)(torch.full((5, 3, 32, 32), 60 / 255), source(5)) * 255
    assert y.round().amax((1, 2, 3)).tolist() == [60] * 5
    assert y.round().amin((1, 2, 3)).tolist() == [60 * 60 // (60 + 255)] * 5


# The interface


@every
@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_shape_and_dtype_remain_and_results_are_bytes(name: str, severity: int, dtype: torch.dtype):
    x = batch(11).to(dtype)
    before = x.clone()
    y = Corruption(name, severity)(x, source(4))
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert torch.equal(x, before)
    assert y.min() >= 0
    assert y.max() <= 1
    levels = y.double() * 255
    assert (levels - levels.round()).abs().max() < (1 if dtype == torch.bfloat16 else 1e-4)


@every
@pytest.mark.parametrize("shape", [(0, 3, 8, 9), (2, 1, 7, 5), (1, 4, 5, 9), (2, 3, 1, 1)])
def test_any_number_of_images_channels_and_pixels_is_accepted(name: str, shape: tuple[int, ...]):
    y = Corruption(name, 5)(torch.rand(shape), source(shape[0]))
    assert y.shape == shape
    assert y.isfinite().all()


@every
def test_photographs_of_any_shape_are_accepted(name: str):
    x = batch(90, 2)[:, :, :70]
    y = Corruption(name, 4)(x, source(2))
    assert y.shape == x.shape
    assert 0.02 < (y - x).abs().mean() < 0.6


@pytest.mark.parametrize(
    ("text", "sides", "unchanged"),
    [("defocus:1", (64, 65, 74, 75), (65, 74)), ("zoom:1", (8, 9), (8,)), ("zoom:2", (8,), ())],
)
def test_some_sizes_stay_as_they_are_as_the_page_on_corruptions_says(text, sides, unchanged):
    batches = {side: batch(side, 1) for side in sides}
    assert tuple(s for s, x in batches.items() if torch.equal(parse(text)(x), x)) == unchanged


@every
def test_an_image_under_its_key_is_corrupted_the_same_in_any_batch(name: str):
    brightness = torch.linspace(0.4, 1, 5).view(5, 1, 1, 1)
    x, order = brightness * batch(16, 5), torch.tensor([3, 0])
    whole = Corruption(name, 3)(x, PerSample(keys(7, torch.arange(5))))
    part = Corruption(name, 3)(x[order], PerSample(keys(7, order)))
    assert torch.equal(part, whole[order])


@every
def test_the_layout_of_the_images_in_memory_does_not_matter(name: str):
    x = batch(16)
    for other in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        assert torch.equal(Corruption(name, 3)(other, source(4)), Corruption(name, 3)(x, source(4)))


@every
@pytest.mark.parametrize("side", [16, 80])
def test_on_a_gpu_every_tensor_is_made_there(name: str, side: int):
    frost.pictures()  # which are stored
    with FakeTensorMode(allow_non_fake_inputs=True):  # devices as on a GPU, without one
        x, index = torch.empty(2, 3, side, side, device="cuda"), torch.arange(2, device="cuda")
        y = Corruption(name, 3)(x, PerSample(keys(0, index)))
    assert (y.device, y.shape) == (x.device, x.shape)


@every
def test_deterministic_says_whether_two_draws_agree(name: str):
    p, x = Corruption(name, 3), batch(16)
    assert p.deterministic == (name in DETERMINISTIC)
    assert torch.equal(p(x, source(4, 1)), p(x, source(4, 1)))
    assert torch.equal(p(x, source(4, 1)), p(x, source(4, 2))) == p.deterministic
    same = p(x[:1].expand(2, -1, -1, -1), source(2))
    assert torch.equal(same[0], same[1]) == p.deterministic


@every
def test_a_generator_of_torch_is_a_source_too(name: str):
    p, x = Corruption(name, 2), batch(16)
    one, two = (p(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)


@every
def test_severity_orders_the_distance_from_the_image(name: str):
    x = batch(32, 8)
    distances = [(Corruption(name, s)(x, source(8)) - x).abs().mean().item() for s in (1, 5)]
    # In CIFAR-10-C the affine map of elastic weakens as its displacements grow.
    assert distances[0] < distances[1] or name == "elastic"


@pytest.mark.long
@every
def test_compiling_does_not_change_the_result(name: str):
    p, x = Corruption(name, 3), batch(16)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, i: p(x, PerSample(keys(7, i))), backend="aot_eager")
    expected = p(x, PerSample(keys(7, torch.arange(4))))
    torch.testing.assert_close(compiled(x, torch.arange(4)), expected)


@pytest.mark.parametrize("part", [-0.4, 0.4])
def test_the_input_is_rounded_to_the_nearest_level(part: float):
    levels = torch.arange(256).view(4, 1, 8, 8)
    y = Corruption("zoom", 1)((levels + part) / 255)  # leaves images of 8 x 8 as they are
    assert torch.equal((y * 255).round().long(), levels)


# Values and text


def test_there_are_75_texts_and_each_parses_to_its_corruption():
    assert len(CORRUPTIONS) == len(set(CORRUPTIONS)) == 75
    for text in CORRUPTIONS:
        p = parse(text)
        assert isinstance(p, Corruption)
        assert (str(p), f"{p.name}:{p.severity}") == (text, text)
        assert pickle.loads(pickle.dumps(p)) == p
    assert read("fog:3+gaussian:0.1") == [("fog", (3,)), ("gaussian", (0.1,))]
    assert parse("Fog: 3 + jpeg:1") == Chain(Corruption("fog", 3), Corruption("jpeg", 1))


def test_corruptions_chain_with_other_perturbations():
    x = batch(16)
    chain = parse("gaussian:0.1+jpeg:3")
    assert isinstance(chain, Chain)
    assert not chain.deterministic
    noisy = Gaussian(0.1)(x, source(4).fold(0))
    assert torch.equal(chain(x, source(4)), Corruption("jpeg", 3)(noisy, source(4).fold(1)))


@pytest.mark.parametrize("text", ["fog:6", "fog:0", "fog:2.5", "fog:-1", "fog:", "fog", "fog:3x2"])
def test_severities_that_make_no_sense_raise_errors(text: str):
    body = text.partition(":")[2]
    got = body if body.lstrip("-").isdigit() else repr(body)
    expected = f"severity must be a whole number from 1 to 5, got {got} .*fog:3"
    with pytest.raises(ValueError, match=expected):
        read(text)
    with pytest.raises(ValueError, match=expected):
        parse(text)


def test_invalid_values_raise_errors_at_construction():
    with pytest.raises(ValueError, match=r"from 1 to 5, got 6"):
        Corruption("fog", 6)
    with pytest.raises(ValueError, match=r"from 1 to 5, got 2\.5"):
        Corruption("fog", 2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"name must be one of .*; did you mean 'motion'\?"):
        Corruption("moton", 1)
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'zzz'$"):
        Corruption("zzz", 1)


def test_headings_and_families_name_the_corruption():
    assert [heading(t) for t in ("fog:3", "gaussian_noise:1", "jpeg:5")] == [
        "fog 3", "gaussian noise 1", "JPEG 5",
    ]  # fmt: skip
    grouped = families([*reversed(CORRUPTIONS), "gaussian:0.1"])
    assert list(grouped)[:2] == ["JPEG compression", "Pixelation"]
    assert len(grouped) == 16  # gaussian_noise is not of one family with gaussian
    assert ordered(["fog:3", "clean", "fog:1"]) == ["clean", "fog:1", "fog:3"]


def test_no_constant_has_changed_since_all_were_compared_with_the_original():
    """They agreed with both files of hendrycks/robustness, commit 8190fe3."""
    table = [constants(name, i, side) for name in NAMES for i in range(1, 6) for side in (32, 224)]
    assert hashlib.sha256(repr(table).encode()).hexdigest()[:16] == "04404618eac29230"


def test_constants_depend_on_the_shorter_side():
    assert constants("defocus", 5, 64) == (1.5, 0.1)
    assert constants("defocus", 5, 65) == (10 * 65 / 224, 0.5)
    assert constants("defocus", 5, 224) == (10, 0.5)
    assert constants("gaussian_noise", 5, 448) == (0.38,)
