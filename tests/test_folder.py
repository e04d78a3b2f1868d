"""Folders of images: how they are laid out, read and split, and what of them is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseproof.lab.config import Data
from noiseproof.lab.data import datasets, folder
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.images import DataError, decode
from noiseproof.lab.data.splits import Split
from noiseproof.lab.training.progress import dataset_summary


def numbered(count: int, first: int = 0) -> list[Image.Image]:
    """Images of 8 x 6 (height x width) with different pixels."""
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


def pixels(split: Split | None) -> set[bytes]:
    assert split is not None
    assert split.images is not None
    return {image.numpy().tobytes() for image in split.images}


def test_a_folder_of_classes_is_split_by_its_seed(photos: Path):
    loaded = load_dataset(Data(str(photos)))
    assert (loaded.name, loaded.classes, loaded.size) == ("photos", ("ant", "bee"), (3, 8, 6))
    assert loaded.test.labels.bincount().tolist() == [2, 4]
    train, validation, test = map(pixels, (loaded.train, loaded.validation, loaded.test))
    assert len(train | validation | test) == 30 == len(train) + len(validation) + len(test)
    again, other = load_dataset(Data(str(photos))), load_dataset(Data(str(photos), split_seed=1))
    assert pixels(again.test) == test != pixels(other.test)
    assert again.fingerprint == loaded.fingerprint != other.fingerprint


def test_a_folders_fingerprint_travels_with_it(photos: Path):
    mark = load_dataset(Data(str(photos))).fingerprint
    moved = photos.parent / "elsewhere"
    shutil.move(photos, moved)
    assert load_dataset(Data(f"{moved}/", storage="stream")).fingerprint == mark


def test_val_is_the_test_split_unless_there_is_a_test_folder(tmp_path: Path):
    root = tmp_path / "parts"
    for start, part in ((0, "train"), (50, "val")):
        write_images(root / part / "a", numbered(4, start))
        write_images(root / part / "b", numbered(4, start + 100))
    loaded = load_dataset(Data(str(root), val_share=0.25))
    own = {np.asarray(i).transpose(2, 0, 1).tobytes() for k in (50, 150) for i in numbered(4, k)}
    assert pixels(loaded.test) == own
    assert (loaded.train.count, len(pixels(loaded.validation) & own)) == (6, 0)
    write_images(root / "test" / "a", numbered(1, 90))
    write_images(root / "test" / "b", numbered(1, 91))
    loaded = load_dataset(Data(str(root)))
    assert pixels(loaded.validation) == own
    assert (loaded.train.count, loaded.test.count) == (8, 2)


def test_odd_class_names_and_deeper_folders_are_kept(photos: Path):
    odd = photos / "<b onclick='x'>Ünï & co"
    write_images(odd / "monday", numbered(3, 200))
    write_images(odd / "tuesday", numbered(3, 210))
    (odd / ".DS_Store").write_bytes(b"hidden")
    (photos / "Thumbs.db").write_bytes(b"hidden")
    loaded = load_dataset(Data(str(photos), val_share=0.0, test_share=0.5))
    assert loaded.classes == ("<b onclick='x'>Ünï & co", "ant", "bee")
    assert (loaded.train.labels == 0).sum() + (loaded.test.labels == 0).sum() == 6


def test_large_folders_stream_and_small_ones_do_not(photos: Path, monkeypatch: pytest.MonkeyPatch):
    assert load_dataset(Data(str(photos))).in_memory
    road = load_dataset(Data(str(photos), augment="road"))
    assert road.in_memory
    monkeypatch.setattr(datasets, "MEMORY_LIMIT", 30 * 3 * 8 * 6 - 1)
    large = load_dataset(Data(str(photos)))
    kept = load_dataset(Data(str(photos), storage="memory"))
    assert large.train.images is None
    assert large.train.files is not None
    assert len(large.train.files) == large.train.count == kept.train.count
    assert large.mean == kept.mean == road.mean
    assert torch.equal(large.test.labels, kept.test.labels)


def test_statistics_of_a_stream_come_from_a_bounded_sample(
    photos: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets, "STATISTICS_SAMPLE", 5)
    loaded = load_dataset(Data(str(photos), storage="stream", val_share=0.0))
    files = loaded.train.files
    assert files is not None
    sample = decode(files[::5], (3, 8, 6))[0].numpy() / 255
    assert len(sample) == 5
    np.testing.assert_allclose(loaded.mean, sample.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(loaded.std[:2], sample.std((0, 2, 3))[:2], rtol=1e-12)
    assert loaded.std[2] == 1.0  # the blue channel never varies


def test_images_of_two_sizes_need_img_size(photos: Path):
    Image.new("RGB", (9, 4)).save(photos / "bee" / "odd.png")
    with pytest.raises(DataError, match=r"odd\.png is 4 x 9, but .*000\.png is 8 x 6.*--img-size"):
        load_dataset(Data(str(photos)))
    assert load_dataset(Data(str(photos), img_size=(5, 7))).size == (3, 5, 7)


def test_unreadable_images_are_all_reported_by_name(photos: Path):
    (photos / "ant" / "empty.png").write_bytes(b"")
    (photos / "bee" / "text.jpg").write_text("not an image")
    whole = (photos / "bee" / "000.png").read_bytes()
    (photos / "bee" / "cut.png").write_bytes(whole[: len(whole) // 2])
    for storage in ("memory", "stream"):
        with pytest.raises(DataError) as caught:
            load_dataset(Data(str(photos), storage=storage))
        assert "empty.png cannot be read: the file is empty" in str(caught.value)
        assert "text.jpg cannot be read: not an image" in str(caught.value)
    (photos / "ant" / "empty.png").unlink()
    (photos / "bee" / "text.jpg").unlink()
    for storage in ("memory", "stream"):
        with pytest.raises(DataError, match=r"cut\.png cannot be read"):
            load_dataset(Data(str(photos), storage=storage))


def test_a_truncated_jpeg_is_found_when_decoded(photos: Path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    path = photos / "bee" / "cut.jpeg"
    Image.fromarray(noise).save(path, quality=95)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"cut\.jpeg cannot be read: .*truncated"):
        load_dataset(Data(str(photos), storage="memory"))


@pytest.mark.parametrize("size", [None, (8, 6)])
def test_a_truncated_jpeg_is_found_before_it_is_streamed(photos: Path, size):
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photos / "bee" / "whole.jpeg", quality=95)
    whole = (photos / "bee" / "whole.jpeg").read_bytes()
    (photos / "bee" / "more.jpeg").write_bytes(whole + b"what a camera adds")
    assert folder.list_images(photos, size, verify=True).size == (8, 6)
    (photos / "bee" / "cut.jpeg").write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"cut\.jpeg cannot be read: .*truncated"):
        folder.list_images(photos, size, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "ant" / "film.mov").write_text("x"), r"film\.mov is not an image"),
        (lambda root: (root / "a.nef").write_text("x"), r"a\.nef is not an image.*converting them"),
        (lambda root: (root / "cow").mkdir(), "class folder .*cow contains no images"),
        (
            lambda root: numbered(1)[0].save(root / "x.png"),
            r"x\.png is outside the class folders of .*; expected one folder per class",
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
        load_dataset(Data(str(photos)))


def test_links_are_followed_and_a_folder_visited_once_keeps_its_own_name(photos: Path):
    (photos / "a link").symlink_to(photos / "bee")
    (photos / "notes.txt").write_text("x")
    images, others = folder.walk(photos)
    assert (
        sorted(Path(image).parent.name for image in images)
        == ["a link"] * 20 + ["ant"] * 10 + ["bee"] * 20
    )
    assert others == [str(photos / "notes.txt")]
    (photos / "bee" / "up").symlink_to(photos)
    images, others = folder.walk(photos, once=True)
    assert sorted(Path(image).parent.name for image in images) == ["ant"] * 10 + ["bee"] * 20
    assert others == [str(photos / "notes.txt")]
    with pytest.raises(DataError, match=r"up is a link to a folder that contains it"):
        folder.walk(photos)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("Train/a", "Train/b", "Valid/a", "Valid/b"), "rename them to train/ with val/ or test/"),
        (("train/a", "train/b", "val/a"), "val/b is missing: train/ has that class"),
        (("train/a", "train/b", "val/a", "val/b", "val/c"), "val/c is not a class of train/"),
        (("train/a", "train/b", "val/a", "val/b", "more"), "'more' next to train/"),
        (("train/a", "train/b"), "contains only train/; expected test/ or val/ next to it"),
        (("train/a", "train/b", "train/test/a", "train/test/b"), "contains only train/"),
        (("train/a", "train/b", "valid/a"), "valid would be a class|train would be a class"),
        (("a", "b", "test/a", "test/b"), "test would be a class.*expected train/ with test/"),
        (("a", "b", "Validation"), "Validation would be a class"),
        (("train", "valid"), "train would be a class"),
        (("car", "bus", "train/a", "train/b"), "train would be a class.*another name"),
    ],
)
def test_splits_that_do_not_match_are_refused(tmp_path: Path, parts: tuple[str, ...], message: str):
    for part in parts:
        write_images(tmp_path / part, numbered(2))
    with pytest.raises(DataError, match=message):
        load_dataset(Data(str(tmp_path)))


def test_classes_may_have_the_same_subfolders_where_these_are_groups(tmp_path: Path):
    for name in ("dry", "wet"):
        for day in ("monday", "tuesday", "friday"):
            write_images(tmp_path / name / day, numbered(2))
    with pytest.raises(DataError, match="if they are classes, --group folder keeps"):
        load_dataset(Data(str(tmp_path)))
    data = load_dataset(Data(str(tmp_path), val_share=0.0, group="folder"))
    assert data.classes == ("dry", "wet")
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.test.groups is not None
    assert len(data.test.groups.unique()) == 1


def test_inside_splits_a_class_may_have_the_name_of_a_split(tmp_path: Path):
    for part in ("train/cat", "train/val", "test/cat", "test/val"):
        write_images(tmp_path / part, numbered(4))
    assert load_dataset(Data(str(tmp_path))).classes == ("cat", "val")


def test_class_names_are_printed_without_control_characters(tmp_path: Path):
    for name in ("cat", "dog\x1b[31m"):
        write_images(tmp_path / name, numbered(8))
    assert "\x1b" not in dataset_summary(load_dataset(Data(str(tmp_path))))


@pytest.mark.parametrize("parts", [("bus", "car", "train"), ("invalid", "valid")])
def test_a_class_may_have_the_name_of_a_split_where_that_makes_sense(
    tmp_path: Path, parts: tuple[str, ...]
):
    for part in parts:
        write_images(tmp_path / part, numbered(4))
    assert load_dataset(Data(str(tmp_path))).classes == parts
    for part in parts:
        write_images(tmp_path / "split" / "train" / part, numbered(4))
        write_images(tmp_path / "split" / "val" / part, numbered(4))
    assert load_dataset(Data(str(tmp_path / "split"))).classes == parts


def test_all_bad_files_are_reported_in_one_message(photos: Path):
    for name in ("labels.dat", "ant/notes", "bee/deep/list.x", "bee/movie.mp4"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_text("x")
    (photos / "ant" / "empty.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        load_dataset(Data(str(photos)))
    message = str(caught.value)
    assert "empty.png cannot be read: the file is empty" in message
    for name in ("labels.dat", "notes", "movie.mp4"):
        assert name in message
    assert "and 1 more are not images" in message
    shutil.rmtree(photos / "bee")
    (photos / "bee").mkdir()
    (photos / "bee" / "film.mov").write_text("x")
    with pytest.raises(DataError, match=r"bee contains no images; .*film\.mov are not images"):
        load_dataset(Data(str(photos)))


def test_every_kind_of_unreadable_image_is_reported(photos: Path):
    for i in range(4):
        Image.new("RGB", (1, 1)).save(photos / "ant" / f"dot{i}.png")
    for name, dtype in (("float", np.float32), ("int", np.int32)):
        Image.fromarray(np.full((8, 6), 1e6, dtype)).save(photos / "bee" / f"{name}.tif")
    with pytest.raises(DataError) as caught:
        load_dataset(Data(str(photos), img_size="auto"))
    message = str(caught.value)
    assert "dot2.png cannot be read: it has one pixel; remove it; and 1 more; " in message
    assert "float.tif cannot be read: floating-point pixels have an unknown range" in message
    assert "int.tif cannot be read: 32-bit pixels outside 0..65535" in message


def test_images_that_cannot_be_decoded_are_reported_together_for_all_splits(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            write_images(tmp_path / part / name, numbered(3))
        path = tmp_path / part / "a" / f"cut-{part}.jpeg"
        Image.fromarray(noise).save(path, quality=95)
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError) as caught:
        load_dataset(Data(str(tmp_path), storage="memory"))
    assert [p for p in ("train", "val", "test") if f"cut-{p}.jpeg" not in str(caught.value)] == []


def test_the_origin_of_each_split_is_known_and_printed(photos: Path, tmp_path: Path):
    loaded = load_dataset(Data(str(photos)))
    assert dataset_summary(loaded) == (
        "21 training images, 3 for validation (split off), 6 for testing (split off); "
        "images 8 x 6; classes ant, bee"
    )
    for part in ("train", "val"):
        for name in ("a", "b"):
            write_images(tmp_path / "parts" / part / name, numbered(4))
    parts = str(tmp_path / "parts")
    assert ", 8 for testing (val/)" in dataset_summary(load_dataset(Data(parts, storage="stream")))
    for name in ("a", "b"):
        write_images(tmp_path / "parts" / "test" / name, numbered(2))
    summary = dataset_summary(load_dataset(Data(parts)))
    assert "8 for validation (val/), 4 for testing (test/)" in summary
    summary = dataset_summary(load_dataset(Data("digits", val_share=0.0)))
    assert summary.endswith(
        "none for validation, 540 for testing; classes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    )


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
    values = [[[0, 0, 0, 255], [9, 9, 9, 255], [255, 90, 90, 0], [0, 0, 0, 255]]]
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
    pixels, errors = decode([str(tmp_path / name)], (3, 1, 4))
    assert not errors
    assert pixels.tolist() == [[[[0, 9, 255, 0]]] * 3]


def test_rotated_photographs_have_their_displayed_size(tmp_path: Path):
    write_images(tmp_path / "a", [Image.new("RGB", (4, 1))] * 3)
    write_images(tmp_path / "b", [Image.new("RGB", (4, 1))] * 3)
    turned = _turned()
    turned.save(tmp_path / "b" / "turned.png", exif=turned.getexif())
    assert load_dataset(Data(str(tmp_path), val_share=0.0)).size == (3, 1, 4)


def test_floating_point_images_are_refused(tmp_path: Path):
    path = tmp_path / "float.tif"
    Image.fromarray(np.zeros((2, 2), dtype=np.float32)).save(path)
    _, errors = decode([str(path)], (3, 2, 2))
    assert errors[0].startswith(f"{path} cannot be read: floating-point")


def test_shrinking_averages_instead_of_picking_pixels(tmp_path: Path):
    board = np.indices((32, 32)).sum(0) % 2 * 255  # a chessboard: its mean is grey
    Image.fromarray(board.astype(np.uint8)).save(tmp_path / "board.png")
    small, _ = decode([str(tmp_path / "board.png")], (3, 4, 4))
    assert (small - 127.5).abs().max() < 4
