"""Random numbers per sample."""

from __future__ import annotations

import pytest
import torch

from noiseproof.draws import PerSample, fold, keys, normal, uniform

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser in plain Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_fold_equals_the_hash_in_unbounded_integers():
    for key in (0, 1, -5, 2**62, -(2**63)):
        for counter in (0, 1, 7, 2**40):
            want = mix((key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK)
            for c in (counter, torch.tensor(counter)):
                assert int(fold(torch.tensor(key), c)) & MASK == want


def test_a_seed_of_any_size_gives_a_key():
    assert len({int(keys(seed, 3)) for seed in (0, 1, 2**64 - 2, -(2**63), 10**30)}) == 5


def test_a_sample_draws_the_same_in_any_batch():
    whole = PerSample(keys(3, 5, torch.arange(10)))
    part = PerSample(keys(3, 5, torch.arange(4, 7)))
    assert torch.equal(whole.normal(2, 3)[4:7], part.normal(2, 3))
    assert torch.equal(whole.uniform(6)[4:7], part.uniform(6))


def test_streams_of_a_sample_and_samples_are_unrelated():
    source = PerSample(keys(0, torch.arange(200)))
    streams = [source.normal(500).flatten(), source.fold(0).normal(500).flatten(),
               source.fold(1).normal(500).flatten()]  # fmt: skip
    correlation = torch.corrcoef(torch.stack(streams))
    assert (correlation - torch.eye(3)).abs().max() < 4 / 100_000**0.5
    between = torch.corrcoef(source.normal(500))
    assert (between - torch.eye(200)).abs().max() < 6 / 500**0.5


def test_moments_and_distribution_are_those_of_the_normal_and_the_uniform():
    source = PerSample(keys(1, torch.arange(1000)))
    z, u = source.normal(1000).double().flatten(), source.uniform(1000).double().flatten()
    n = z.numel()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 5 * (spread / n) ** 0.5
    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    counts = torch.histc(u, 100, 0, 1)
    chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5


@pytest.mark.parametrize("draw", [normal, uniform])
def test_each_kind_of_source_reproduces_its_numbers(draw):
    like = torch.zeros(4, 3, dtype=torch.float64)
    per_sample = PerSample(keys(2, torch.arange(4)))
    assert torch.equal(draw((4, 3), like, per_sample), draw((4, 3), like, per_sample))
    twice = [draw((4, 3), like, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*twice)
    assert draw((4, 3), like).dtype == torch.float64
    assert draw((4, 3), like.bfloat16()).dtype == torch.float32


def test_invalid_keys_batch_sizes_and_sources_raise_errors():
    with pytest.raises(ValueError, match="vector of int64"):
        PerSample(torch.zeros(3))
    with pytest.raises(ValueError, match="3 samples, the batch 4"):
        normal((4, 2), torch.zeros(4, 2), PerSample(keys(0, torch.arange(3))))
    with pytest.raises(ValueError, match=r"source must be None, .* got float$"):
        uniform((4, 3), torch.empty(0), 0.2)  # pyright: ignore[reportArgumentType]
