"""Sensor noise and exposure: means, variances and distributions against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from noiseproof import draws
from noiseproof.draws import PerSample, keys
from noiseproof.perturb import Exposure, Sensor, parse
from noiseproof.perturb.sensor import phone

MANY = 200_000


def source(count: int, seed: int = 0) -> PerSample:
    return PerSample(keys(seed, torch.arange(count)))


def light(pixels: Tensor | float) -> np.ndarray:
    """The transfer function of sRGB, written out."""
    x = np.asarray(pixels, dtype=np.float64)
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def pixel(u: float) -> float:
    return 12.92 * u if u <= 0.0031308 else 1.055 * u ** (1 / 2.4) - 0.055


@pytest.mark.parametrize("mean", [0.0, 0.01, 0.7, 3.0, 9.99, 10.0, 12.5, 47.0, 1234.5, 1e5])
def test_poisson_numbers_have_the_poisson_distribution(mean: float, monkeypatch):
    # At every quantile of the normal distribution once, so that nothing is left to chance.
    quantiles = torch.from_numpy(stats.norm.ppf((np.arange(MANY) + 0.5) / MANY))
    monkeypatch.setattr(draws, "normal", lambda shape, like, source: quantiles.to(like.dtype))
    for dtype in (torch.float32, torch.float64):
        counts = np.sort(draws.poisson(torch.full((MANY,), mean, dtype=dtype)).numpy())
        assert (counts == counts.round()).all()
        n = np.unique(counts)
        ours = np.searchsorted(counts, n, side="right") / MANY
        assert abs(ours - stats.poisson(mean).cdf(n)).max() < 1e-4 if mean else (counts == 0).all()


def test_poisson_numbers_belong_to_their_sample():
    means = torch.linspace(0, 30, 6 * 50).view(6, 50)
    together = draws.poisson(means, source(6))
    assert torch.equal(
        together[4:5], draws.poisson(means[4:5], PerSample(keys(0, torch.arange(4, 5))))
    )
    assert not torch.equal(together, draws.poisson(means, source(6, seed=1)))


@pytest.mark.parametrize("u", [0.1, 0.4, 0.7])
@pytest.mark.parametrize(
    "text", ["sensor:400x2", "sensor:2000x40", "sensor:300x3x6", "sensor:iso400", "sensor:iso3200"]
)
def test_mean_and_variance_of_the_light_follow_the_formula(text: str, u: float):
    p = parse(text)
    assert isinstance(p, Sensor)
    if p.iso is not None:
        white, noise, steps = *phone(p.iso), 959
    else:
        assert p.electrons is not None
        assert p.read_noise is not None
        white, noise, steps = p.electrons, p.read_noise, 2**p.bits - 1
    x = torch.full((50, 1, 80, 50), pixel(u), dtype=torch.float64)
    measured = light(p(x, source(50)))
    expected = u / white + (noise / white) ** 2 + 1 / (12 * steps**2)
    n = measured.size
    assert measured.mean() == pytest.approx(u, abs=5 * math.sqrt(expected / n))
    assert measured.var() == pytest.approx(expected, rel=5 * math.sqrt(2.2 / n))
    assert np.allclose(measured * steps, (measured * steps).round(), atol=1e-6)


def test_signal_dark_and_saturated():
    black, white = torch.zeros(4, 3, 40, 40), torch.ones(4, 3, 40, 40)
    assert torch.equal(Sensor(electrons=100, read_noise=0)(black, source(4)), black)
    noisy = light(Sensor(electrons=100, read_noise=5)(black, source(4)))
    assert (noisy == 0).mean() == pytest.approx(0.5, abs=0.02)  # below black is black
    assert noisy[noisy > 0].mean() == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.03)
    bright = Sensor(electrons=100, read_noise=0)(white, source(4))
    assert (bright == 1).float().mean().item() == pytest.approx(stats.poisson(100).sf(99), abs=0.03)


def test_channels_and_pixels_are_independent():
    x = torch.full((1, 3, 100, 100), 0.5)
    channels = Sensor(1600)(x, source(1))[0].flatten(1)
    correlation = torch.corrcoef(channels)
    assert (correlation - torch.eye(3)).abs().max() < 0.05
    assert abs(torch.corrcoef(torch.stack([channels[0, :-1], channels[0, 1:]]))[0, 1]) < 0.05


def test_the_phone_has_the_measured_gain_and_read_noise():
    for iso, noise in ((100, 0.6926457), (6400, 14.30362)):
        electrons, read_noise = phone(iso)
        gain = 959 / electrons  # DN per electron
        assert gain == pytest.approx(0.001366021 * iso)
        assert gain * read_noise == pytest.approx(noise, rel=1e-6)
    # The authors' line for ISO 640 to 6400, log σ = 0.85187 log K + 0.67991, is a fit to all.
    for iso in (640, 1600, 3200, 6400):
        electrons, read_noise = phone(iso)
        gain = 959 / electrons
        assert gain * read_noise == pytest.approx(
            math.exp(0.85187 * math.log(gain) + 0.67991), rel=0.15
        )


def test_a_higher_iso_is_noisier():
    x = torch.full((4, 3, 30, 30), 0.5)
    spread = [Sensor(iso)(x, source(4)).std().item() for iso in (100, 200, 400, 800, 1600, 6400)]
    assert spread == sorted(spread)


@pytest.mark.parametrize("stops", [-4, -1, -0.5, 0.5, 2])
def test_exposure_scales_light_and_clips_it(stops: float):
    x = torch.linspace(0, 1, 301).double().view(1, 1, 1, -1)
    measured = light(Exposure(stops)(x))
    assert np.allclose(measured, np.minimum(1, light(x) * 2.0**stops), atol=1e-7)


def test_more_light_may_have_a_sign():
    assert str(parse("exposure:+2")) == "exposure:2"
    assert str(parse("exposure:+0.5+sensor:iso400")) == "exposure:0.5+sensor:iso400"


def test_opposite_exposures_cancel_where_nothing_is_clipped():
    x = torch.linspace(0, 1, 301).double().view(1, 1, 1, -1)
    torch.testing.assert_close(parse("exposure:-3+exposure:3")(x), x, atol=1e-7, rtol=0)


def test_a_camera_in_low_light_compresses_after_the_noise():
    x = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = parse("exposure:-2+sensor:iso1600+jpeg:2")(x, source(3))
    dark = Exposure(-2)(x)
    noisy = Sensor(1600)(dark, source(3).fold(1))
    assert torch.equal(whole, parse("jpeg:2")(noisy))
    assert torch.equal((whole * 255).round() / 255, whole)
    # The darker image is relatively noisier: fewer electrons.
    bright_noise = (light(Sensor(1600)(x, source(3))) - light(x)).std() / light(x).mean()
    assert (light(noisy) - light(dark)).std() / light(dark).mean() > 1.5 * bright_noise


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected iso or electrons, got None and None"),
        ({"iso": 100, "electrons": 5}, "expected iso or electrons, got 100 and 5"),
        ({"iso": 100, "read_noise": 5}, "iso determines read_noise"),
        ({"iso": 100, "bits": 8}, "give electrons instead"),
        ({"iso": 100.5}, "from 100 to 6400"),
        ({"iso": True}, "from 100 to 6400, got True"),
        ({"electrons": 5}, "read_noise must be a number from 0 to 10,000, got None"),
        ({"electrons": math.nan, "read_noise": 1}, "electrons must be a number"),
        ({"electrons": 5, "read_noise": 1, "bits": 0}, "bits must be a whole number from 1 to 16"),
    ],
)
def test_invalid_sensors_raise_errors(arguments, message: str):
    with pytest.raises(ValueError, match=message):
        Sensor(**arguments)
