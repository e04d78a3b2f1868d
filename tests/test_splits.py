"""Splits have their share of every class, and depend on seed and purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import Split, StoredSplits, stratified_split, with_groups


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


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_groups_of_several_classes_stay_together(share: float):
    generator = torch.Generator().manual_seed(1)
    groups = torch.randint(40, (800,), generator=generator)
    labels = torch.randint(4, (800,), generator=generator)
    labels[groups < 10] = 0  # some groups are of one class
    whole = Split(torch.arange(800), None, labels, groups)
    rest, chosen = stratified_split(whole, share, seed=3, purpose=0, classes="abcd")
    again = stratified_split(whole, share, seed=3, purpose=0, classes="abcd")[1]
    assert torch.equal(again.pixels, chosen.pixels)
    assert set(rest.groups.tolist()).isdisjoint(chosen.groups.tolist())  # pyright: ignore
    assert sorted(rest.pixels.tolist() + chosen.pixels.tolist()) == list(range(800))
    shares = torch.bincount(chosen.labels) / torch.bincount(labels)
    assert (shares - share).abs().max() < 0.05  # a group is 2.5 % of the images


def test_a_rare_class_in_shared_groups_is_on_both_sides():
    groups = torch.arange(10).repeat_interleave(10)
    labels = torch.arange(100) % 2
    labels[[5, 15]] = 2  # one image in each of two groups
    whole = Split(torch.arange(100), None, labels, groups)
    for seed in range(5):
        rest, chosen = stratified_split(whole, 0.1, seed, 0, "abc")
        assert (rest.labels == 2).sum() == (chosen.labels == 2).sum() == 1
    labels[15] = 1
    with pytest.raises(DataError, match="class 'c' has one image left, too few to choose 10%"):
        stratified_split(whole, 0.1, 0, 0, "abc")
    labels[6] = 2
    with pytest.raises(DataError, match="class 'c' has one group of images left"):
        stratified_split(whole, 0.1, 0, 0, "abc")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (r"^[a-z]+\d", ["car1", "car1", "car2", "cup1"]),
        (r"(\d)_", ["1", "1", "2", "1"]),
        ("folder", ["x", "x", "y", "x"]),
        ("groups.csv", ["one", "one", "two", "one"]),
    ],
)
def test_rules_name_the_group_of_each_file(tmp_path, rule: str, expected: list[str]):
    names = ("car/x/car1_0.jpg", "car/x/car1_1.jpg", "car/y/car2_0.jpg", "cup/x/cup1_0.jpg")
    if rule.endswith(".csv"):
        rule = str(tmp_path / rule)
        lines = [f"./{n},{g}\n" for n, g in zip(names, ("one", "one", "two", "one"), strict=True)]
        Path(rule).write_text("path,group\n" + "".join(lines))
    files = tuple(str(tmp_path / name) for name in names)
    stored = StoredSplits(
        ("car", "cup"), Split(None, files, torch.tensor([0, 0, 0, 1])), None, None
    )
    grouped, notes = with_groups(stored, rule, tmp_path)
    groups = grouped.train.groups
    assert groups is not None
    assert not notes
    same = [[a == b for b in expected] for a in expected]
    assert (groups[:, None] == groups).tolist() == same


def test_paths_of_a_csv_file_without_an_image_are_counted_and_named(tmp_path):
    (tmp_path / "groups.csv").write_text("file,group\na/1.jpg,x\na/2.jpg,x\nb/1.jpg,x\n")
    files = (str(tmp_path / "a" / "1.jpg"),)
    stored = StoredSplits(("a", "b"), Split(None, files, torch.tensor([0])), None, None)
    _, (note,) = with_groups(stored, str(tmp_path / "groups.csv"), tmp_path)
    assert note.endswith(f"groups.csv without an image in {tmp_path}: 2 (a/2.jpg, b/1.jpg)")


@pytest.mark.parametrize("rule", ["z", "folder:2", "groups.csv"])
def test_a_rule_that_fits_no_file_is_refused(tmp_path, rule: str):
    (tmp_path / "groups.csv").write_text("elsewhere/a.jpg,1\n")
    stored = StoredSplits(
        ("a", "b"),
        Split(None, (str(tmp_path / "a" / "s" / "1.jpg"),), torch.tensor([0])),
        None,
        None,
    )
    rule = rule.replace("groups", str(tmp_path / "groups"))
    with pytest.raises(DataError, match=r"gives no group for 1 of 1 images: .*1\.jpg"):
        with_groups(stored, rule, tmp_path)
