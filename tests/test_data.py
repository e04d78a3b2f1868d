"""Every dataset arrives as disjoint, stratified uint8 splits; what cannot be used is named."""

from __future__ import annotations

import math
import pickle
import re
import urllib.error
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.lab.config import DATASETS, NAMED, Data
from noiseproof.lab.data.counts import TRAINING_IMAGES, training_images
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.splits import Split

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


def pixels(split: Split | None) -> set[bytes]:
    assert split is not None
    assert split.images is not None
    return {image.numpy().tobytes() for image in split.images}


# digits


def test_digits_are_the_1797_images_each_in_one_split():
    from sklearn.datasets import load_digits

    digits = load_dataset(Data("digits"))
    parts = [digits.train, digits.validation, digits.test]
    assert [part.count for part in parts if part] == [1131, 126, 540]
    images = torch.cat([part.images for part in parts if part and part.images is not None])
    assert images.dtype == torch.uint8
    found = (images.double() * 16 / 255).round().flatten(1).numpy().astype(int)
    expected = load_digits().data.astype(int)  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(map(tuple, found)) == sorted(map(tuple, expected))


def test_digits_have_one_test_set_whatever_the_split_seed():
    one, other = load_dataset(Data("digits")), load_dataset(Data("digits", split_seed=5))
    assert one.test.images is not None
    assert other.test.images is not None
    assert torch.equal(one.test.images, other.test.images)
    assert one.fingerprint == other.fingerprint == "9f378170942f7cf3"
    assert pixels(one.validation) != pixels(other.validation)


def test_mean_and_std_are_those_of_the_training_pixels():
    digits = load_dataset(Data("digits"))
    assert digits.train.images is not None
    values = digits.train.images.numpy() / 255
    np.testing.assert_allclose(digits.mean[0], values.mean(), rtol=1e-12)
    np.testing.assert_allclose(digits.std[0], values.std(), rtol=1e-12)


def test_no_validation_share_leaves_all_for_training():
    digits = load_dataset(Data("digits", val_share=0.0))
    assert digits.validation is None
    assert digits.train.count == 1257


# splits


def test_what_a_class_is_too_small_for_is_said(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{i}.png")
    with pytest.raises(DataError, match=r"has one image left.*for validation; --val-share 0"):
        load_dataset(Data(str(tmp_path)))
    assert load_dataset(Data(str(tmp_path), val_share=0)).train.count == 2
    (tmp_path / "a" / "0.png").unlink()
    with pytest.raises(DataError, match=r"class 'a' has one image left.*for testing"):
        load_dataset(Data(str(tmp_path), val_share=0))


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
    loaded = load_dataset(Data(write_npz(tmp_path / "mine.npz", stored)))
    assert (loaded.name, loaded.size, loaded.classes) == ("mine", size, ("0", "1", "2", "3"))
    assert loaded.test.images is not None
    assert loaded.test.images.is_contiguous()
    for channel in range(size[0]):
        expected = arrays["test_images"][..., channel]
        np.testing.assert_array_equal(loaded.test.images[:, channel].numpy(), expected)
    assert loaded.test.labels.tolist() == arrays["test_labels"].tolist()


def test_a_share_of_the_training_images_leaves_validation_and_test_images_alone():
    whole, tenth = (load_dataset(Data(train_share=share)) for share in (1.0, 0.1))
    assert whole.validation is not None
    assert tenth.validation is not None
    assert torch.equal(whole.validation.pixels, tenth.validation.pixels)
    assert whole.fingerprint == tenth.fingerprint
    assert tenth.train.count == math.ceil(whole.train.count / 10)
    assert set(tenth.train.labels.tolist()) == set(range(10))
    known = {tuple(image.flatten().tolist()) for image in whole.train.pixels}
    assert all(tuple(image.flatten().tolist()) in known for image in tenth.train.pixels)


def test_training_validation_and_test_share_no_image(tmp_path: Path):
    loaded = load_dataset(Data(write_npz(tmp_path / "a.npz", small_arrays()), val_share=0.25))
    train, validation, test = map(pixels, (loaded.train, loaded.validation, loaded.test))
    assert (len(train), len(validation), len(test)) == (30, 10, 12)
    assert not train & validation
    assert not (train | validation) & test


def test_class_names_are_kept_verbatim(tmp_path: Path):
    names = ["<script>alert(1)</script>", "Ä b", "c/d", ""]
    arrays = small_arrays() | {"classes": np.array(names)}
    assert load_dataset(Data(write_npz(tmp_path / "a.npz", arrays))).classes == tuple(names)
    arrays["classes"] = np.array([name.encode() for name in names])
    assert load_dataset(Data(write_npz(tmp_path / "b.npz", arrays))).classes == tuple(names)


def test_the_fingerprint_follows_the_test_set_alone(tmp_path: Path):
    arrays = small_arrays()

    def mark(**changes: np.ndarray) -> str:
        return load_dataset(Data(write_npz(tmp_path / "a.npz", arrays | changes))).fingerprint

    assert mark(train_images=255 - arrays["train_images"]) == mark()
    assert mark(test_images=arrays["test_images"].transpose(0, 3, 1, 2)) == mark()
    assert mark(test_images=255 - arrays["test_images"]) != mark()
    assert mark(test_labels=arrays["test_labels"][::-1]) != mark()


def test_validation_images_of_an_npz_are_the_validation_set(tmp_path: Path):
    arrays = small_arrays()
    own = {"val_images": arrays["test_images"][:3], "val_labels": arrays["test_labels"][:3, None]}
    plain = load_dataset(Data(write_npz(tmp_path / "a.npz", arrays), val_share=0))
    loaded = load_dataset(Data(write_npz(tmp_path / "b.npz", arrays | own), val_share=0.25))
    assert loaded.validation is not None
    assert loaded.validation.images is not None
    assert plain.test.images is not None
    assert torch.equal(loaded.validation.images, plain.test.images[:3])
    assert torch.equal(loaded.validation.labels, plain.test.labels[:3])
    assert loaded.train.count == plain.train.count  # nothing is split off besides
    assert loaded.validation_from == "val_images"
    del own["val_labels"]
    with pytest.raises(DataError, match="lacks val_labels"):
        load_dataset(Data(write_npz(tmp_path / "c.npz", arrays | own)))


def test_validation_images_are_split_off_in_whole_groups(tmp_path: Path):
    groups = np.arange(40) % 8  # ten of one class, in two groups of five
    path = write_npz(tmp_path / "a.npz", small_arrays() | {"train_groups": groups})
    loaded = load_dataset(Data(path, val_share=0.1))
    assert loaded.validation is not None
    assert loaded.validation.groups is not None
    assert loaded.train.groups is not None
    kept, held_out = set(loaded.train.groups.tolist()), set(loaded.validation.groups.tolist())
    assert (len(kept), len(held_out), len(kept | held_out)) == (4, 4, 8)
    assert (loaded.train.count, loaded.validation.count) == (20, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.arange(39) % 4}, "40 train_images, but 39 train_labels"),
        ({"test_labels": np.zeros(12)}, "test_labels must be a vector of integers, got float64"),
        ({"test_labels": np.zeros((12, 2), int)}, r"got int64 of shape \(12, 2\)"),
        ({"test_labels": np.full(12, 4)}, r"test_labels must be in \[0, 4\), got 4 at index 0"),
        ({"train_labels": np.arange(40) % 4 - 1}, "got -1 at index 0"),
        ({"train_labels": np.r_[np.arange(39) % 4, 10**9]}, "got 1000000000 at index 39"),
        ({"train_labels": np.arange(40) % 4 * 2}, r"class 1 \(1\) has no training images"),
        ({"train_groups": np.arange(39)}, "40 train_images, but 39 train_groups"),
        ({"train_groups": np.zeros(40)}, "train_groups must be a vector of integers, got float64"),
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
        load_dataset(Data(path))


def test_missing_keys_and_damaged_files_are_named(tmp_path: Path):
    arrays = small_arrays()
    del arrays["test_labels"]
    with pytest.raises(DataError, match=r"a\.npz lacks test_labels; it contains train_images"):
        load_dataset(Data(write_npz(tmp_path / "a.npz", arrays)))
    whole = (tmp_path / "a.npz").read_bytes()
    for name, content in {"b": b"", "c": b"text", "d": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.npz cannot be read"):
            load_dataset(Data(str(tmp_path / f"{name}.npz")))
    np.savez_compressed(tmp_path / "f.npz", allow_pickle=False, **small_arrays())
    packed = bytearray((tmp_path / "f.npz").read_bytes())
    packed[200:260] = bytes(60)
    (tmp_path / "f.npz").write_bytes(packed)
    np.save(tmp_path / "g.npy", np.zeros(3))
    (tmp_path / "g.npy").rename(tmp_path / "g.npz")
    for name in ("f", "g"):
        with pytest.raises(DataError, match=rf"{name}\.npz cannot be read"):
            load_dataset(Data(str(tmp_path / f"{name}.npz")))
    one = small_arrays(classes=1)
    with pytest.raises(DataError, match=r"h\.npz must have at least two classes, got 1"):
        load_dataset(Data(write_npz(tmp_path / "h.npz", one)))
    with pytest.raises(DataError, match="no such file"):
        load_dataset(Data(str(tmp_path / "e.npz")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Data("digts"), "did you mean 'digits'"),
        (Data("no/such/folder"), "no dataset, folder or .npz file"),
        (Data("digits", augment="road"), "for photographs in a folder"),
        (Data("digits", augment="road+trivial"), "for photographs in a folder"),
        (Data("digits", storage="stream"), "only an image folder can be streamed"),
        (Data("digits", img_size=(9, 9)), "digits is 8 x 8"),
        (Data("digits", val_share=1.0), r"val_share must be in \[0, 1\), got 1.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: Data, message: str):
    with pytest.raises(DataError, match=message):
        load_dataset(config)


# the number of training images, before they are read


@pytest.mark.parametrize(("val_share", "train_share"), [(0, 1), (0.1, 0.33), (0.25, 1)])
@pytest.mark.parametrize("own_validation", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_images_are_counted_as_they_will_be_split(
    val_share: float, train_share: float, own_validation: bool, named: bool, tmp_path: Path
):
    arrays = small_arrays(train=203, classes=10)
    if own_validation:
        arrays |= {"val_images": arrays["test_images"], "val_labels": arrays["test_labels"]}
    path = write_npz(tmp_path / "cifar10.npz", arrays)
    config = Data("cifar10" if named else path, str(tmp_path), False, val_share, train_share)
    assert training_images(config) == load_dataset(config).train.count


def test_labels_with_a_newer_header_are_counted(tmp_path: Path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("train_labels.npy", "w") as file:
        np.lib.format.write_array(file, np.zeros(50, int), version=(2, 0))
    assert training_images(Data(str(path), val_share=0)) == 50


def test_no_images_are_read_to_count_them(tmp_path: Path):
    path = write_npz(tmp_path / "a.npz", small_arrays())
    assert training_images(Data(path)) == 36
    content = Path(path).read_bytes()
    images = small_arrays()["train_images"].tobytes()
    assert images in content
    Path(path).write_bytes(content.replace(images, bytes(len(images))))  # a wrong checksum
    assert training_images(Data(path)) == 36


def test_data_that_cannot_be_counted_have_no_number(tmp_path: Path):
    for name in ("digits", str(tmp_path), "no/such.npz", "~nobody/a.npz"):
        assert training_images(Data(name)) is None
    path = tmp_path / "a.npz"
    write_npz(path, small_arrays())
    for share in (1.0, 7.0, math.nan, math.inf):  # which validation refuses
        assert training_images(Data(str(path), val_share=share)) is None
    content = path.read_bytes()
    for damaged in (b"", b"no archive", content[:-9], content.replace(b"NUMPY", b"NUMPX")):
        path.write_bytes(damaged)
        assert training_images(Data(str(path))) is None
    for labels in (np.array(3), np.array([], int)):
        write_npz(path, small_arrays() | {"train_labels": labels})
        assert training_images(Data(str(path))) is None
    write_npz(path, {"train_images": small_arrays()["train_images"]})
    assert training_images(Data(str(path))) is None


def test_the_counts_of_named_datasets_add_up():
    tested = {"cifar10": 10_000, "cifar100": 10_000, "svhn": 26_032, "fashion_mnist": 10_000,
              "gtsrb": 12_630, "imagenette": 3_925, "eurosat": 5_400}  # fmt: skip
    assert {*tested, "digits"} == set(NAMED)
    for name, count in tested.items():
        assert DATASETS[name].startswith(f"{TRAINING_IMAGES[name] + count:,} ")


# cifar10 and svhn


def test_an_npz_in_the_data_folder_stands_for_cifar10(tmp_path: Path):
    write_npz(tmp_path / "cifar10.npz", small_arrays(classes=10))
    loaded = load_dataset(Data("cifar10", data_dir=str(tmp_path)))
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
    loaded = load_dataset(Data("cifar10", data_dir=str(tmp_path), download=False))
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
    loaded = load_dataset(Data("svhn", data_dir=str(tmp_path), download=False))
    assert loaded.test.images is not None
    np.testing.assert_array_equal(loaded.test.images.numpy(), images.transpose(3, 2, 0, 1))
    assert loaded.test.labels.tolist() == [(i + 1) % 10 for i in range(20)]


@pytest.mark.parametrize("name", NAMED[1:])
def test_without_network_the_folder_and_the_way_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
):
    def unreachable(*args: object, **kwargs: object):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(
        DataError, match=r"could not be downloaded .*no route.*--data-dir"
    ) as caught:
        load_dataset(Data(name, data_dir=str(tmp_path)))
    assert str(tmp_path) in str(caught.value)
    assert f"{name}.npz" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert re.search(rf"{name}: downloading about \d+ MB to {tmp_path}", capsys.readouterr().err)
    with pytest.raises(DataError, match="--download is off"):
        load_dataset(Data(name, data_dir=str(tmp_path), download=False))


def test_an_npz_file_of_python_objects_is_refused_in_plain_words(tmp_path: Path):
    names = ("train_images", "train_labels", "test_images", "test_labels")
    arrays: Any = {name: np.array([{}], dtype=object) for name in names}
    np.savez(tmp_path / "o.npz", **arrays)
    with pytest.raises(ValueError, match="holds Python objects, which could run any code"):
        load_dataset(Data(str(tmp_path / "o.npz")))
