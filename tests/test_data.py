"""Every dataset arrives as disjoint, stratified uint8 splits; what cannot be used is named."""

from __future__ import annotations

import pickle
import shutil
import urllib.error
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.lab import data
from noiseproof.lab.config import Data
from noiseproof.lab.data import DataError, load, stratified
from noiseproof.lab.folder import open_image
from noiseproof.lab.progress import counted

Arrays = dict[str, np.ndarray]


def small_arrays(train: int = 40, test: int = 12, classes: int = 4) -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "train_images": rng.integers(0, 256, (train, 6, 5, 3), dtype=np.uint8),
        "train_labels": np.arange(train) % classes,
        "test_images": rng.integers(0, 256, (test, 6, 5, 3), dtype=np.uint8),
        "test_labels": np.arange(test) % classes,
    }


def write_npz(path: Path, arrays: Arrays) -> str:
    np.savez(path, allow_pickle=False, **arrays)
    return str(path)


def numbered(count: int, first: int = 0) -> list[Image.Image]:
    """Images of 8 x 6 (height x width) that can be told apart by their pixels."""
    return [Image.new("RGB", (6, 8), (i, 2 * i % 256, 7)) for i in range(first, first + count)]


def write_images(folder: Path, images: list[Image.Image]) -> None:
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        image.save(folder / f"{i:03}.png")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two unsplit classes, of 10 and 20 images."""
    root = tmp_path / "photos"
    write_images(root / "ant", numbered(10))
    write_images(root / "bee", numbered(20, first=100))
    return root


def pixels(split: data.Split | None) -> set[bytes]:
    assert split is not None
    assert split.images is not None
    return {image.numpy().tobytes() for image in split.images}


# digits


def test_digits_are_the_1797_images_each_in_one_split():
    from sklearn.datasets import load_digits

    digits = load(Data("digits"))
    parts = [digits.train, digits.validation, digits.test]
    assert [part.count for part in parts if part] == [1131, 126, 540]
    images = torch.cat([part.images for part in parts if part and part.images is not None])
    assert images.dtype == torch.uint8
    found = (images.double() * 16 / 255).round().flatten(1).numpy().astype(int)
    expected = load_digits().data.astype(int)  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(map(tuple, found)) == sorted(map(tuple, expected))


def test_digits_have_one_test_set_whatever_the_split_seed():
    one, other = load(Data("digits")), load(Data("digits", split_seed=5))
    assert one.test.images is not None
    assert other.test.images is not None
    assert torch.equal(one.test.images, other.test.images)
    assert one.fingerprint == other.fingerprint == "9f378170942f7cf3"
    assert pixels(one.validation) != pixels(other.validation)


def test_mean_and_std_are_those_of_the_training_pixels():
    digits = load(Data("digits"))
    assert digits.train.images is not None
    values = digits.train.images.numpy() / 255
    np.testing.assert_allclose(digits.mean[0], values.mean(), rtol=1e-12)
    np.testing.assert_allclose(digits.std[0], values.std(), rtol=1e-12)


def test_no_validation_share_leaves_all_for_training():
    digits = load(Data("digits", val_share=0.0))
    assert digits.validation is None
    assert digits.train.count == 1257


# splits


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.99])
def test_a_split_takes_its_share_of_every_class(share: float):
    labels = torch.tensor([0] * 2 + [1] * 30 + [2] * 101)[torch.randperm(133)]
    rest, taken = stratified(labels, share, seed=3, purpose=0, classes="abc")
    assert sorted(rest.tolist() + taken.tolist()) == list(range(133))
    for label, count in enumerate((2, 30, 101)):
        inside = int((labels[taken] == label).sum())
        assert 1 <= inside <= count - 1
        assert abs(inside - share * count) <= 1


def test_seeds_and_purposes_give_different_splits():
    labels = torch.arange(60) % 3
    drawn = [
        tuple(stratified(labels, 0.2, seed, purpose, "abc")[1].tolist())
        for seed in (0, 1)
        for purpose in (0, 1)
    ]
    assert len(set(drawn)) == 4
    assert all(len(taken) == 12 for taken in drawn)


def test_a_class_of_one_image_cannot_be_split():
    with pytest.raises(DataError, match=r"class 'b' has 1 image\(s\)"):
        stratified(torch.tensor([0, 0, 1]), 0.5, 0, 0, "ab")


# .npz files


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (lambda images: images, (3, 6, 5)),
        (lambda images: images.transpose(0, 3, 1, 2), (3, 6, 5)),
        (lambda images: images[..., 0], (1, 6, 5)),
        (lambda images: images[..., :1], (1, 6, 5)),
    ],
)
def test_npz_images_come_in_any_layout(
    tmp_path: Path, layout: Callable[[np.ndarray], np.ndarray], size: tuple[int, int, int]
):
    arrays = small_arrays()
    stored = {k: layout(v) if k.endswith("images") else v for k, v in arrays.items()}
    loaded = load(Data(write_npz(tmp_path / "mine.npz", stored)))
    assert (loaded.name, loaded.size, loaded.classes) == ("mine", size, ("0", "1", "2", "3"))
    assert loaded.test.images is not None
    assert loaded.test.images.is_contiguous()
    for channel in range(size[0]):
        expected = arrays["test_images"][..., channel]
        np.testing.assert_array_equal(loaded.test.images[:, channel].numpy(), expected)
    assert loaded.test.labels.tolist() == arrays["test_labels"].tolist()


def test_training_validation_and_test_share_no_image(tmp_path: Path):
    loaded = load(Data(write_npz(tmp_path / "a.npz", small_arrays()), val_share=0.25))
    train, validation, test = map(pixels, (loaded.train, loaded.validation, loaded.test))
    assert (len(train), len(validation), len(test)) == (30, 10, 12)
    assert not train & validation
    assert not (train | validation) & test


def test_class_names_are_kept_verbatim(tmp_path: Path):
    names = ["<script>alert(1)</script>", "Ä b", "c/d", ""]
    arrays = small_arrays() | {"classes": np.array(names)}
    assert load(Data(write_npz(tmp_path / "a.npz", arrays))).classes == tuple(names)


def test_the_fingerprint_follows_the_test_set_alone(tmp_path: Path):
    arrays = small_arrays()

    def mark(**changes: np.ndarray) -> str:
        return load(Data(write_npz(tmp_path / "a.npz", arrays | changes))).fingerprint

    assert mark(train_images=255 - arrays["train_images"]) == mark()
    assert mark(test_images=arrays["test_images"].transpose(0, 3, 1, 2)) == mark()
    assert mark(test_images=255 - arrays["test_images"]) != mark()
    assert mark(test_labels=arrays["test_labels"][::-1]) != mark()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.arange(39) % 4}, "40 train_images, but 39 train_labels"),
        ({"test_labels": np.zeros(12)}, "test_labels must be a vector of integers, got float64"),
        ({"test_labels": np.zeros((12, 1), int)}, r"got int64 of shape \(12, 1\)"),
        ({"test_labels": np.full(12, 4)}, r"test_labels must lie in \[0, 4\), got 4 at index 0"),
        ({"train_labels": np.arange(40) % 4 - 1}, "got -1 at index 0"),
        ({"train_labels": np.r_[np.arange(39) % 4, 10**9]}, "got 1000000000 at index 39"),
        ({"train_labels": np.arange(40) % 4 * 2}, r"class 1 \(1\) has no training images"),
        ({"classes": np.array(list("abcde"))}, r"class 4 \(e\) has no training images"),
        ({"test_images": np.zeros((12, 6, 5, 3))}, "test_images must be uint8, got float64"),
        ({"test_images": np.zeros((12, 6, 5, 4), np.uint8)}, "with C 1 or 3, got"),
        ({"test_images": np.zeros((12, 7, 5, 3), np.uint8)}, "images differ in C x H x W"),
        ({"test_images": np.zeros((0, 6, 5, 3), np.uint8)}, "test_images is empty"),
    ],
)
def test_a_wrong_npz_is_named_with_its_fault(tmp_path: Path, changes: Arrays, message: str):
    path = write_npz(tmp_path / "wrong.npz", small_arrays() | changes)
    with pytest.raises(DataError, match=rf"wrong\.npz: .*{message}"):
        load(Data(path))


def test_missing_keys_and_damaged_files_are_named(tmp_path: Path):
    arrays = small_arrays()
    del arrays["test_labels"]
    with pytest.raises(DataError, match=r"a\.npz lacks test_labels; it has train_images"):
        load(Data(write_npz(tmp_path / "a.npz", arrays)))
    whole = (tmp_path / "a.npz").read_bytes()
    for name, content in {"b": b"", "c": b"text", "d": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.npz cannot be read"):
            load(Data(str(tmp_path / f"{name}.npz")))
    np.savez_compressed(tmp_path / "f.npz", allow_pickle=False, **small_arrays())
    packed = bytearray((tmp_path / "f.npz").read_bytes())
    packed[200:260] = bytes(60)
    (tmp_path / "f.npz").write_bytes(packed)
    np.save(tmp_path / "g.npy", np.zeros(3))
    (tmp_path / "g.npy").rename(tmp_path / "g.npz")
    for name in ("f", "g"):
        with pytest.raises(DataError, match=rf"{name}\.npz cannot be read"):
            load(Data(str(tmp_path / f"{name}.npz")))
    one = small_arrays(classes=1)
    with pytest.raises(DataError, match=r"h\.npz must have at least two classes, got 1"):
        load(Data(write_npz(tmp_path / "h.npz", one)))
    with pytest.raises(DataError, match="no such file"):
        load(Data(str(tmp_path / "e.npz")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Data("digts"), "did you mean 'digits'"),
        (Data("no/such/folder"), "no dataset, folder or .npz file"),
        (Data("digits", augment="road"), "for photographs in a folder"),
        (Data("digits", storage="stream"), "only an image folder can be streamed"),
        (Data("digits", img_size=(9, 9)), "digits is 8 x 8"),
        (Data("digits", val_share=1.0), r"val_share must lie in \[0, 1\), got 1.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: Data, message: str):
    with pytest.raises(DataError, match=message):
        load(config)


# cifar10 and svhn


def test_an_npz_in_the_data_folder_stands_for_cifar10(tmp_path: Path):
    write_npz(tmp_path / "cifar10.npz", small_arrays(classes=10))
    loaded = load(Data("cifar10", data_dir=str(tmp_path)))
    assert loaded.name == "cifar10"
    assert loaded.classes[3] == "cat"


def test_cifar10_is_read_from_torchvisions_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a, **k: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(1).integers(0, 256, (20, 3072), dtype=np.uint8)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": rows, "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    loaded = load(Data("cifar10", data_dir=str(tmp_path), download=False))
    assert (loaded.size, loaded.train.count, loaded.test.count) == ((3, 32, 32), 90, 20)
    assert loaded.test.images is not None
    np.testing.assert_array_equal(loaded.test.images.flatten(1).numpy(), rows)


def test_svhn_is_read_from_torchvisions_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from scipy.io import savemat

    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *a, **k: True)
    images = np.random.default_rng(1).integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
    for part in ("train", "test"):
        labels = np.arange(20)[:, None] % 10 + 1  # the files write a zero as 10
        savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": labels})
    loaded = load(Data("svhn", data_dir=str(tmp_path), download=False))
    assert loaded.test.images is not None
    np.testing.assert_array_equal(loaded.test.images.numpy(), images.transpose(3, 2, 0, 1))
    assert loaded.test.labels.tolist() == [(i + 1) % 10 for i in range(20)]


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_without_network_the_folder_and_the_way_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    def unreachable(*args: object, **kwargs: object):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(
        DataError, match=r"could not be downloaded .*no route.*--data-dir"
    ) as caught:
        load(Data(name, data_dir=str(tmp_path)))
    assert str(tmp_path) in str(caught.value)
    assert f"{name}.npz" in str(caught.value)
    with pytest.raises(DataError, match="--download is off"):
        load(Data(name, data_dir=str(tmp_path), download=False))


# image folders


def test_a_folder_of_classes_is_split_by_its_seed(photos: Path):
    loaded = load(Data(str(photos)))
    assert (loaded.name, loaded.classes, loaded.size) == ("photos", ("ant", "bee"), (3, 8, 6))
    assert loaded.test.labels.bincount().tolist() == [2, 4]
    train, validation, test = map(pixels, (loaded.train, loaded.validation, loaded.test))
    assert len(train | validation | test) == 30 == len(train) + len(validation) + len(test)
    again, other = load(Data(str(photos))), load(Data(str(photos), split_seed=1))
    assert pixels(again.test) == test != pixels(other.test)
    assert again.fingerprint == loaded.fingerprint != other.fingerprint


def test_a_folders_fingerprint_travels_with_it(photos: Path):
    mark = load(Data(str(photos))).fingerprint
    moved = photos.parent / "elsewhere"
    shutil.move(photos, moved)
    assert load(Data(f"{moved}/", storage="stream")).fingerprint == mark


def test_val_is_the_test_set_unless_test_stands_beside_it(tmp_path: Path):
    root = tmp_path / "parts"
    for start, part in ((0, "train"), (50, "val")):
        write_images(root / part / "a", numbered(4, start))
        write_images(root / part / "b", numbered(4, start + 100))
    loaded = load(Data(str(root), val_share=0.25))
    own = {np.asarray(i).transpose(2, 0, 1).tobytes() for k in (50, 150) for i in numbered(4, k)}
    assert pixels(loaded.test) == own
    assert (loaded.train.count, len(pixels(loaded.validation) & own)) == (6, 0)
    write_images(root / "test" / "a", numbered(1, 90))
    write_images(root / "test" / "b", numbered(1, 91))
    loaded = load(Data(str(root)))
    assert pixels(loaded.validation) == own
    assert (loaded.train.count, loaded.test.count) == (8, 2)


def test_odd_class_names_and_deeper_folders_are_kept(photos: Path):
    odd = photos / "<b onclick='x'>Ünï & co"
    write_images(odd / "monday", numbered(3, 200))
    write_images(odd / "tuesday", numbered(3, 210))
    (odd / ".DS_Store").write_bytes(b"hidden")
    (photos / "Thumbs.db").write_bytes(b"hidden")
    loaded = load(Data(str(photos), val_share=0.0, test_share=0.5))
    assert loaded.classes == ("<b onclick='x'>Ünï & co", "ant", "bee")
    assert (loaded.train.labels == 0).sum() + (loaded.test.labels == 0).sum() == 6


def test_large_folders_stream_and_small_ones_do_not(photos: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(Data(str(photos))).in_memory
    road = load(Data(str(photos), augment="road"))
    assert road.in_memory
    monkeypatch.setattr(data, "MEMORY_LIMIT", 30 * 3 * 8 * 6 - 1)
    large = load(Data(str(photos)))
    kept = load(Data(str(photos), storage="memory"))
    assert large.train.images is None
    assert large.train.files is not None
    assert len(large.train.files) == large.train.count == kept.train.count
    assert large.mean == kept.mean == road.mean
    assert torch.equal(large.test.labels, kept.test.labels)


def test_statistics_of_a_stream_come_from_a_bounded_sample(
    photos: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data, "STATISTICS_SAMPLE", 5)
    loaded = load(Data(str(photos), storage="stream", val_share=0.0))
    files = loaded.train.files
    assert files is not None
    sample = np.stack([np.asarray(open_image(f, (8, 6))) for f in files[::5]]) / 255
    assert len(sample) == 5
    np.testing.assert_allclose(loaded.mean, sample.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(loaded.std[:2], sample.std((0, 1, 2))[:2], rtol=1e-12)
    assert loaded.std[2] == 1.0  # the blue channel never varies


def test_images_of_two_sizes_need_img_size(photos: Path):
    Image.new("RGB", (9, 4)).save(photos / "bee" / "odd.png")
    with pytest.raises(DataError, match=r"odd\.png is 4 x 9, but .*000\.png is 8 x 6.*--img-size"):
        load(Data(str(photos)))
    assert load(Data(str(photos), img_size=(5, 7))).size == (3, 5, 7)


def test_unreadable_images_are_all_reported_by_name(photos: Path):
    (photos / "ant" / "empty.png").write_bytes(b"")
    (photos / "bee" / "text.jpg").write_text("not an image")
    whole = (photos / "bee" / "000.png").read_bytes()
    (photos / "bee" / "cut.png").write_bytes(whole[: len(whole) // 2])
    for storage in ("memory", "stream"):
        with pytest.raises(DataError) as caught:
            load(Data(str(photos), storage=storage))
        assert "empty.png cannot be read: the file is empty" in str(caught.value)
        assert "text.jpg cannot be read: not an image" in str(caught.value)
    (photos / "ant" / "empty.png").unlink()
    (photos / "bee" / "text.jpg").unlink()
    for storage in ("memory", "stream"):
        with pytest.raises(DataError, match=r"cut\.png cannot be read"):
            load(Data(str(photos), storage=storage))


def test_a_truncated_jpeg_is_found_when_decoded(photos: Path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    path = photos / "bee" / "cut.jpeg"
    Image.fromarray(noise).save(path, quality=95)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"cut\.jpeg cannot be read: .*truncated"):
        load(Data(str(photos), storage="memory"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "ant" / "notes.txt").write_text("x"), r"notes\.txt is not an image"),
        (lambda root: (root / "labels.csv").write_text("x"), r"labels\.csv is not an image"),
        (lambda root: (root / "cow").mkdir(), "class folder .*cow holds no images"),
        (
            lambda root: numbered(1)[0].save(root / "x.png"),
            r"x\.png lies outside the class folders",
        ),
        (lambda root: shutil.rmtree(root / "bee"), "at least two folders.*only 'ant'"),
        (lambda root: (root / "ant" / "up").symlink_to(root / "ant"), "is a link to a folder"),
    ],
)
def test_nothing_in_a_folder_is_skipped_silently(
    photos: Path, change: Callable[[Path], object], message: str
):
    change(photos)
    with pytest.raises(DataError, match=message):
        load(Data(str(photos)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("Train/a", "Train/b", "Valid/a", "Valid/b"), "name them train/ with val/ or test/"),
        (("train/a", "train/b", "val/a"), "val/b is missing: train/ has that class"),
        (("train/a", "train/b", "val/a", "val/b", "val/c"), "val/c is not a class of train/"),
        (("train/a", "train/b", "val/a", "val/b", "more"), "'more' beside train/"),
        (("train/a", "train/b"), "holds train/ alone; expected test/ or val/ beside it"),
        (("train/a", "train/b", "train/test/a", "train/test/b"), "holds train/ alone"),
        (("train/a", "train/b", "valid/a"), "valid would be a class|train would be a class"),
        (("a", "b", "test/a", "test/b"), "test would be a class.*expected train/ with test/"),
        (("a", "b", "Validation"), "Validation would be a class"),
        (("train", "valid"), "train would be a class"),
        (("car", "bus", "train/a", "train/b"), "train would be a class.*another name"),
    ],
)
def test_parts_that_do_not_match_are_refused(tmp_path: Path, parts: tuple[str, ...], message: str):
    for part in parts:
        write_images(tmp_path / part, numbered(2))
    with pytest.raises(DataError, match=message):
        load(Data(str(tmp_path)))


def test_in_parts_a_class_may_be_called_like_a_part(tmp_path: Path):
    for part in ("train/cat", "train/val", "test/cat", "test/val"):
        write_images(tmp_path / part, numbered(4))
    assert load(Data(str(tmp_path))).classes == ("cat", "val")


def test_class_names_are_told_without_what_a_terminal_would_obey(tmp_path: Path):
    for name in ("cat", "dog\x1b[31m"):
        write_images(tmp_path / name, numbered(8))
    assert "\x1b" not in counted(load(Data(str(tmp_path))))


@pytest.mark.parametrize("parts", [("bus", "car", "train"), ("invalid", "valid")])
def test_a_class_may_be_called_like_a_part_where_that_makes_sense(
    tmp_path: Path, parts: tuple[str, ...]
):
    for part in parts:
        write_images(tmp_path / part, numbered(4))
    assert load(Data(str(tmp_path))).classes == parts
    for part in parts:
        write_images(tmp_path / "split" / "train" / part, numbered(4))
        write_images(tmp_path / "split" / "val" / part, numbered(4))
    assert load(Data(str(tmp_path / "split"))).classes == parts


def test_all_bad_files_are_told_in_one_message(photos: Path):
    for name in ("labels.csv", "ant/notes.txt", "bee/deep/list.xml", "bee/movie.mp4"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_text("x")
    (photos / "ant" / "empty.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        load(Data(str(photos)))
    told = str(caught.value)
    assert "empty.png cannot be read: the file is empty" in told
    for name in ("labels.csv", "notes.txt", "movie.mp4"):
        assert name in told
    assert "and 1 more are not images" in told
    shutil.rmtree(photos / "bee")
    (photos / "bee").mkdir()
    (photos / "bee" / "IMG_1.HEIC").write_text("x")
    with pytest.raises(DataError, match=r"bee holds no images; .*IMG_1\.HEIC are not images"):
        load(Data(str(photos)))


def test_images_that_cannot_be_decoded_are_told_together_for_all_parts(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            write_images(tmp_path / part / name, numbered(3))
        path = tmp_path / part / "a" / f"cut-{part}.jpeg"
        Image.fromarray(noise).save(path, quality=95)
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError) as caught:
        load(Data(str(tmp_path), storage="memory"))
    assert [p for p in ("train", "val", "test") if f"cut-{p}.jpeg" not in str(caught.value)] == []


def test_where_the_parts_come_from_is_known_and_told(photos: Path, tmp_path: Path):
    loaded = load(Data(str(photos)))
    assert counted(loaded) == (
        "21 images to train, 3 to validate (split off), 6 to test (split off); classes ant, bee"
    )
    for part in ("train", "val"):
        for name in ("a", "b"):
            write_images(tmp_path / "parts" / part / name, numbered(4))
    parts = str(tmp_path / "parts")
    assert ", 8 to test (val/)" in counted(load(Data(parts, storage="stream")))
    for name in ("a", "b"):
        write_images(tmp_path / "parts" / "test" / name, numbered(2))
    assert "8 to validate (val/), 4 to test (test/)" in counted(load(Data(parts)))
    told = counted(load(Data("digits", val_share=0.0)))
    assert told.endswith("540 to test; classes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more")
    assert "validate" not in told


# conversions


def _grey16() -> Image.Image:
    return Image.fromarray(np.array([[0, 257 * 9, 65535, 128]], dtype=np.uint16))


def _turned() -> Image.Image:
    image = Image.new("RGB", (1, 4))
    for y, value in enumerate((0, 9, 255, 0)):
        image.putpixel((0, 3 - y), (value,) * 3)
    image.getexif()[0x0112] = 6  # stored on its side: rotate by 90 degrees clockwise to show
    return image


def _palette() -> Image.Image:
    image = Image.new("P", (4, 1))
    image.putpalette([0, 0, 0, 9, 9, 9, 255, 255, 255])
    image.putdata([0, 1, 2, 0])
    return image


def _alpha() -> Image.Image:
    values = [[[50, 50, 50, 0], [9, 9, 9, 255], [255, 255, 255, 255], [200, 90, 90, 0]]]
    return Image.fromarray(np.array(values, dtype=np.uint8))


def _grey(mode: str) -> Image.Image:
    return Image.fromarray(np.array([[0, 9, 255, 0]], dtype=np.uint8)).convert(mode)


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (_grey("L"), "a.png"),
        (_grey("LA"), "a.png"),
        (_grey("L"), "a.BMP"),
        (_grey("CMYK"), "a.tif"),
        (_grey16(), "a.png"),
        (_grey16(), "a.tiff"),
        (_palette(), "a.png"),
        (_alpha(), "a.png"),
        (_turned(), "a.png"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.mode,
)
def test_every_kind_of_image_becomes_rgb(tmp_path: Path, image: Image.Image, name: str):
    image.save(tmp_path / name, exif=image.getexif())
    read = open_image(str(tmp_path / name), (1, 4))
    assert read.mode == "RGB"
    assert np.asarray(read)[0].tolist() == [[v] * 3 for v in (0, 9, 255, 0)]


def test_turned_photographs_count_with_their_shown_size(tmp_path: Path):
    write_images(tmp_path / "a", [Image.new("RGB", (4, 1))] * 3)
    write_images(tmp_path / "b", [Image.new("RGB", (4, 1))] * 3)
    turned = _turned()
    turned.save(tmp_path / "b" / "turned.png", exif=turned.getexif())
    assert load(Data(str(tmp_path), val_share=0.0)).size == (3, 1, 4)


def test_floating_point_images_are_refused(tmp_path: Path):
    path = tmp_path / "float.tif"
    Image.fromarray(np.zeros((2, 2), dtype=np.float32)).save(path)
    with pytest.raises(DataError, match=r"float\.tif cannot be read: floating-point"):
        open_image(str(path), (2, 2))


def test_shrinking_averages_instead_of_picking_pixels(tmp_path: Path):
    board = np.indices((32, 32)).sum(0) % 2 * 255  # a chessboard: its mean is grey
    Image.fromarray(board.astype(np.uint8)).save(tmp_path / "board.png")
    small = np.asarray(open_image(str(tmp_path / "board.png"), (4, 4))).astype(int)
    assert abs(small - 127.5).max() < 4
