"""Splits have their share of every class, and depend on seed and purpose."""

from __future__ import annotations

import pytest
import torch

from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import Split, stratified_split


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.99])
def test_a_split_has_its_share_of_every_class(share: float):
    labels = torch.tensor([0] * 2 + [1] * 30 + [2] * 101)[torch.randperm(133)]
    whole = Split(torch.arange(133), None, labels)
    rest, chosen = stratified_split(whole, share, seed=3, purpose=0, classes="abc")
    assert sorted(rest.pixels.tolist() + chosen.pixels.tolist()) == list(range(133))
    assert torch.equal(labels[chosen.pixels], chosen.labels)
    for label, count in enumerate((2, 30, 101)):
        inside = int((chosen.labels == label).sum())
        assert 1 <= inside <= count - 1
        assert abs(inside - share * count) <= 1


def test_seeds_and_purposes_give_different_splits():
    whole = Split(torch.arange(60), None, torch.arange(60) % 3)
    drawn = [
        tuple(stratified_split(whole, 0.2, seed, purpose, "abc")[1].pixels.tolist())
        for seed in (0, 1)
        for purpose in (0, 1)
    ]
    assert len(set(drawn)) == 4
    assert all(len(chosen) == 12 for chosen in drawn)


def test_a_class_of_one_image_cannot_be_split():
    with pytest.raises(DataError, match=r"class 'b' has one image left"):
        stratified_split(Split(None, ("a.png",) * 3, torch.tensor([0, 0, 1])), 0.5, 0, 0, "ab")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_groups_stay_together(share: float):
    sizes = torch.tensor([4, 5, 6, 3, 4, 9, 2, 5, 5, 5, 1, 1])
    whole_groups = torch.arange(12).repeat_interleave(sizes)[torch.randperm(50)]
    labels = torch.tensor([0, 1, 2] * 4)[whole_groups]
    whole = Split(torch.arange(50), None, labels, whole_groups * 7)
    rest, chosen = stratified_split(whole, share, seed=3, purpose=0, classes="abc")
    assert rest.groups is not None
    assert chosen.groups is not None
    assert not set(rest.groups.tolist()) & set(chosen.groups.tolist())
    assert sorted(rest.pixels.tolist() + chosen.pixels.tolist()) == list(range(50))
    for label in range(3):
        inside, count = int((chosen.labels == label).sum()), int((labels == label).sum())
        largest = int(sizes[label::3].max())
        assert min(share * count, count - largest) - 1 <= inside <= share * count + largest
        assert 1 <= inside < count


def test_groups_of_one_image_each_are_split_as_images_are():
    labels = torch.arange(60) % 3
    for share in (0.1, 0.3):
        plain = stratified_split(Split(torch.arange(60), None, labels), share, 0, 0, "abc")[1]
        whole = Split(torch.arange(60), None, labels, torch.arange(60))
        grouped = stratified_split(whole, share, 0, 0, "abc")[1]
        assert grouped.pixels.tolist() == plain.pixels.tolist()


def test_a_class_of_one_group_cannot_be_split():
    whole = Split(torch.arange(6), None, torch.arange(6) // 3, torch.tensor([0, 1, 2, 3, 3, 3]))
    with pytest.raises(DataError, match=r"class 'b' has one group of images left"):
        stratified_split(whole, 0.5, 0, 0, "ab")
