"""Splits have their share of every class, and depend on seed and purpose."""

from __future__ import annotations

import pytest
import torch

from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import stratified_split


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.99])
def test_a_split_has_its_share_of_every_class(share: float):
    labels = torch.tensor([0] * 2 + [1] * 30 + [2] * 101)[torch.randperm(133)]
    rest, chosen = stratified_split(labels, share, seed=3, purpose=0, classes="abc")
    assert sorted(rest.tolist() + chosen.tolist()) == list(range(133))
    for label, count in enumerate((2, 30, 101)):
        inside = int((labels[chosen] == label).sum())
        assert 1 <= inside <= count - 1
        assert abs(inside - share * count) <= 1


def test_seeds_and_purposes_give_different_splits():
    labels = torch.arange(60) % 3
    drawn = [
        tuple(stratified_split(labels, 0.2, seed, purpose, "abc")[1].tolist())
        for seed in (0, 1)
        for purpose in (0, 1)
    ]
    assert len(set(drawn)) == 4
    assert all(len(chosen) == 12 for chosen in drawn)


def test_a_class_of_one_image_cannot_be_split():
    with pytest.raises(DataError, match=r"class 'b' has 1 image\(s\)"):
        stratified_split(torch.tensor([0, 0, 1]), 0.5, 0, 0, "ab")
