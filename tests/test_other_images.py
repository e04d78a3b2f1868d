"""Tests of a run on images that are not its own: folders, arrays, and arrays of corruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from noiseproof.lab.data.images import DataError
from noiseproof.lab.data.other_images import OtherImages, load_other_images
from noiseproof.lab.evaluation.evaluate import evaluate, evaluate_runs
from noiseproof.lab.evaluation.predictions import correct, predictions
from noiseproof.lab.report.results import gather
from noiseproof.perturb import CORRUPTIONS
from noiseproof.perturb.text import CORRUPTION_FAMILIES
from tests import test_evaluate
from tests.test_evaluate import Linear, make_run

digits, linear_models = test_evaluate.digits, test_evaluate.linear_models  # fixtures

SIZE = (1, 8, 8)
CLASSES = tuple("0123456789")
RNG = np.random.default_rng(0)


def load(source: Path | str, **options: Any) -> OtherImages:
    return load_other_images(str(source), **{"classes": CLASSES, "size": SIZE, **options})


def saved(path: Path, images: np.ndarray, labels: np.ndarray, **more: Any) -> Path:
    np.savez(path, images=images, labels=labels, **more)
    return path


def digit_arrays(digits: Any) -> tuple[np.ndarray, np.ndarray]:
    return digits.test.images.numpy()[:, 0], digits.test.labels.numpy()


def digit_run(folder: Path, digits: Any, **options: Any):
    run = make_run(folder, digits, **options)
    run.info["size"] = list(SIZE)
    run.save_config()
    return run


def photographs(folder: Path, names: tuple[str, ...], size: int = 12) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(2):
            array = RNG.integers(0, 256, (size, size, 3)).astype(np.uint8)
            Image.fromarray(array).save(folder / name / f"{i}.png")
    return folder


def corrupted_arrays(folder: Path, count: int = 30, files: tuple[str, ...] = ()) -> Path:
    """Random images under every corruption, in files named like those of CIFAR-10-C."""
    endings = {
        "shot": "_noise",
        "impulse": "_noise",
        "elastic": "_transform",
        "jpeg": "_compression",
    }
    endings |= dict.fromkeys(("defocus", "glass", "motion", "zoom"), "_blur")
    folder.mkdir()
    for stem in files or [n + endings.get(n, "") for n in CORRUPTION_FAMILIES]:
        np.save(folder / f"{stem}.npy", RNG.integers(0, 256, (5 * count, 8, 8, 1)).astype(np.uint8))
    np.save(folder / "labels.npy", np.tile(RNG.integers(0, 10, count), 5).astype(np.uint8))
    return folder


# Images and classes


def test_arrays_are_matched_by_class_names_in_any_order(tmp_path):
    images = RNG.integers(0, 256, (4, 8, 8)).astype(np.uint8)
    path = saved(tmp_path / "a.npz", images, np.array([0, 1, 2, 1]), classes=["7", "3", "9"])
    dataset = load(path).dataset
    assert dataset.test.labels.tolist() == [7, 3, 9, 3]
    assert dataset.classes == CLASSES
    assert np.array_equal(dataset.test.pixels[:, 0], images)
    assert (dataset.name, load(path).path) == ("a", str(path))


def test_arrays_without_names_are_matched_by_number(tmp_path):
    images = RNG.integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", test_images=images, test_labels=np.array([[9], [0], [4]]))
    assert load(tmp_path / "a.npz").dataset.test.labels.tolist() == [9, 0, 4]
    np.savez(tmp_path / "b.npz", test_images=images, test_labels=np.array([9, 0, 10]))
    with pytest.raises(DataError, match=r"in \[0, 10\).*got 10 at index 2"):
        load(tmp_path / "b.npz")


def test_a_folder_is_tested_as_a_whole_and_read_at_the_runs_size(tmp_path):
    folder = photographs(tmp_path / "new", ("dog", "cat", "cup"))
    other = load(folder, classes=("cat", "cup", "dog", "house"), size=(3, 6, 6))
    assert other.dataset.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert other.dataset.test.files is not None
    assert other.dataset.size == (3, 6, 6)
    assert other.dataset.name == "new"
    single = load(photographs(tmp_path / "one", ("dog",)), classes=("cat", "dog"), size=(3, 6, 6))
    assert single.dataset.test.labels.tolist() == [1, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty must contain one folder per class; got none"):
        load(tmp_path / "empty")
    split = tmp_path / "split"
    photographs(split / "train", ("cat", "dog"))
    photographs(split / "test", ("cat", "dog"))
    files = load(split, classes=("cat", "dog"), size=(3, 6, 6)).dataset.test.files
    assert files is not None
    assert {Path(file).parts[-3] for file in files} == {"test"}


def test_classes_of_other_images_may_have_the_same_subfolders(tmp_path):
    photographs(tmp_path / "cat", ("monday", "friday"))
    photographs(tmp_path / "dog", ("monday", "friday"))
    other = load(tmp_path, classes=("cat", "dog"), size=(3, 6, 6))
    assert other.dataset.test.labels.tolist() == [0] * 4 + [1] * 4


def test_a_named_dataset_gives_its_test_images(digits):
    other = load("digits")
    assert other.dataset.test.count == digits.test.count
    assert other.path == "digits"


def test_classes_can_be_mapped_or_left_out(tmp_path):
    folder = photographs(tmp_path / "new", ("hound", "cat", "cup"))
    options = {"classes": ("cat", "dog"), "size": (3, 6, 6)}
    other = load(folder, class_map={"hound": "dog", "cup": ""}, **options)
    assert other.dataset.test.labels.tolist() == [0, 0, 1, 1]
    swapped = load(folder, class_map={"hound": "cat", "cat": "dog", "cup": ""}, **options)
    assert swapped.dataset.fingerprint != other.dataset.fingerprint  # other labels


@pytest.mark.parametrize(
    ("class_map", "message"),
    [
        ({}, r"2 classes that the run does not have: 'cup', 'hound'; the run has 'cat', 'dog'.*"
             r"--class-map cup=CLASS, or leave out its images with --class-map cup="),
        ({"cup": ""}, "a class that the run does not have: 'hound'"),
        ({"huond": "dog"}, r"has no class 'huond' \(did you mean 'hound'\?\); it has 'cat', 'cup'"),
        ({"hound": "dogs"}, r"the run has no class 'dogs' \(did you mean 'dog'\?\)"),
        ({"hound": "", "cat": "", "cup": ""}, "no image .* is left"),
    ],
)  # fmt: skip
def test_unknown_classes_raise_errors_that_say_how_to_map_them(tmp_path, class_map, message):
    folder = photographs(tmp_path / "new", ("hound", "cat", "cup"))
    with pytest.raises(DataError, match=message):
        load(folder, classes=("cat", "dog"), size=(3, 6, 6), class_map=class_map)


def test_a_class_with_a_space_is_quoted_in_the_advice(tmp_path):
    folder = photographs(tmp_path / "new", ("hot dog", "cat"))
    with pytest.raises(DataError, match=r"--class-map 'hot dog'=CLASS, or .*-map 'hot dog'="):
        load(folder, classes=("cat", "dog"), size=(3, 6, 6))


def test_arrays_of_another_size_and_incomplete_files_raise_errors(tmp_path):
    images = RNG.integers(0, 256, (4, 9, 8)).astype(np.uint8)
    saved(tmp_path / "a.npz", images, np.arange(4))
    with pytest.raises(DataError, match="are 1 x 9 x 8, those of the run 1 x 8 x 8; only"):
        load(tmp_path / "a.npz")
    saved(tmp_path / "a.npz", images / 255, np.arange(4))
    with pytest.raises(DataError, match=r"a\.npz: images must be uint8, got float64"):
        load(tmp_path / "a.npz")
    saved(tmp_path / "a.npz", images, np.arange(3))
    with pytest.raises(DataError, match=r"a\.npz: 4 images, but 3 labels"):
        load(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", test_images=images)
    with pytest.raises(DataError, match=r"lacks test_labels; it contains test_images"):
        load(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", images=images)
    with pytest.raises(DataError, match=r"c\.npz lacks labels; it contains images"):
        load(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", x=images, labels=np.arange(4))
    with pytest.raises(DataError, match=r"d\.npz lacks images; it contains x, labels"):
        load(tmp_path / "d.npz")


# Arrays of corruptions


def test_corrupted_arrays_have_a_severity_after_the_other(tmp_path):
    folder = corrupted_arrays(tmp_path / "C")
    np.save(folder / "speckle_noise.npy", np.zeros((150, 8, 8, 1), np.uint8))
    other = load(folder)
    assert list(other.corrupted) == list(CORRUPTIONS)
    assert other.skipped == ("speckle_noise.npy",)
    shot = np.load(folder / "shot_noise.npy")
    assert np.array_equal(other.under("shot:3").test.pixels[:, 0], shot[60:90, ..., 0])
    labels = np.load(folder / "labels.npy")
    assert other.dataset.test.labels.tolist() == labels[:30].tolist()
    np.save(folder / "labels.npy", labels[:30])  # some copies have them once
    assert load(folder).dataset.fingerprint == other.dataset.fingerprint
    shot[0, 0, 0] ^= 1
    np.save(folder / "shot_noise.npy", shot)
    assert load(folder).dataset.fingerprint != other.dataset.fingerprint


def test_corrupted_arrays_that_do_not_fit_raise_errors(tmp_path):
    folder = corrupted_arrays(tmp_path / "C", files=("fog", "snow"))
    assert list(load(folder).corrupted) == [
        f"{n}:{s}" for n in ("snow", "fog") for s in range(1, 6)
    ]
    with pytest.raises(DataError, match="are 1 x 8 x 8, those of the run 3 x 32 x 32"):
        load(folder, size=(3, 32, 32))
    with pytest.raises(DataError, match="no names, so that none can be mapped"):
        load(folder, class_map={"0": "1"})
    with pytest.raises(DataError, match=r"labels of .* must be in \[0, 2\)"):
        load(folder, classes=("a", "b"))
    labels = (folder / "labels.npy").rename(tmp_path / "labels.npy")
    with pytest.raises(DataError, match=r"arrays such as fog.npy, but no labels.npy"):
        load(folder)
    labels.rename(folder / "labels.npy")
    np.save(folder / "fog.npy", np.zeros((149, 8, 8, 1), np.uint8))
    with pytest.raises(DataError, match=r"fog.npy must contain 5 x 30 images.*; got 149"):
        load(folder)
    (folder / "fog.npy").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"fog.npy cannot be read"):
        load(folder)
    for name in ("fog.npy", "snow.npy"):
        (folder / name).unlink()
    with pytest.raises(DataError, match=r"labels.npy, but no array such as fog.npy"):
        load(folder)


# Evaluation


def test_rows_on_other_images_are_never_those_of_the_runs_own(tmp_path, digits):
    run = digit_run(tmp_path, digits)
    (own,) = evaluate(run, ["gaussian:0.3"], draws=1)
    before = predictions(run, "gaussian:0.3")
    images, labels = digit_arrays(digits)
    other = load(saved(tmp_path / "half.npz", images[:270], labels[:270]))
    (row,) = evaluate(run, ["gaussian:0.3"], draws=1, other=other)
    assert (row["n"], row["data"], row["test_data"]) == (270, "half", str(tmp_path / "half.npz"))
    assert row["fingerprint"] != own["fingerprint"]
    assert "test_data" not in own
    after = predictions(run, "gaussian:0.3")
    assert before is not None
    assert after is not None
    assert np.array_equal(after.classes, before.classes)
    theirs = correct(run, "gaussian:0.3", fingerprint=other.dataset.fingerprint)
    assert theirs is not None
    assert theirs.mean() == pytest.approx(row["value"])
    assert np.array_equal(theirs[0], (after.classes == after.labels)[0, :270])  # the same noise
    count = Linear.images
    assert evaluate(run, ["gaussian:0.3"], draws=1, other=other) == [row]
    assert evaluate(run, ["gaussian:0.3"], draws=1) == [own]
    assert Linear.images == count  # nothing is computed again
    assert gather([run]).rows["last"][0]["n"] == 540  # a report is about the run's own images


def test_the_same_images_from_elsewhere_still_count_as_others(tmp_path, digits):
    run = digit_run(tmp_path, digits)
    other = load(saved(tmp_path / "same.npz", *digit_arrays(digits)))
    (own,), (row,) = evaluate(run, ["clean"]), evaluate(run, ["clean"], other=other)
    assert row["value"] == own["value"]
    assert row["fingerprint"] != own["fingerprint"]
    assert len(run.evaluation()) == 2


def test_the_command_tests_on_other_images_and_says_so(tmp_path, digits, capsys):
    run = digit_run(tmp_path, digits)
    images, labels = digit_arrays(digits)
    saved(tmp_path / "half.npz", images[:270], labels[:270])
    evaluate_runs([run.path], ["clean"], data=str(tmp_path / "half.npz"))
    printed = capsys.readouterr().out
    assert "half (other test images)" in printed
    assert "on 270 test images" in printed
    with pytest.raises(ValueError, match="is what digits-both-s0 was trained on"):
        evaluate_runs([run.path], ["clean"], data="digits")
    del run.info["fingerprint"]
    run.save_config()
    with pytest.raises(ValueError, match="does not record which test images are its own"):
        evaluate_runs([run.path], ["clean"], data=str(tmp_path / "half.npz"))


def test_corrupted_arrays_become_one_number_and_fifteen_rows(tmp_path, digits, capsys):
    first = digit_run(tmp_path, digits, name="plain", method="normal", ridge=1e3)
    second = digit_run(tmp_path, digits, name="other")
    folder = corrupted_arrays(tmp_path / "C")
    options: dict[str, Any] = {"data": str(folder), "table": tmp_path / "out.md"}
    evaluate_runs([first.path, second.path], **options)
    rows = second.evaluation()
    assert [row["perturbation"] for row in rows] == list(CORRUPTIONS)
    assert {row["draw"] for row in rows} == {0}
    images = np.load(folder / "fog.npy")[60:90, ..., 0] / 255
    weight = second.model().head.weight.detach().numpy()  # pyright: ignore
    logits = (images.reshape(30, 64) - 0.5) @ weight.T
    truth = np.load(folder / "labels.npy")[:30]
    fog = next(row for row in rows if row["perturbation"] == "fog:3")
    assert fog["value"] == pytest.approx((logits.argmax(1) == truth).mean())
    text = (tmp_path / "out.md").read_text()
    assert "| run | corruptions 1–5 |" in text
    assert "Corruption error (CE), in %, C (other test images)" in text
    assert "Drop" not in text  # there are no clean images
    evaluate_runs([first.path, second.path], **options)
    assert second.evaluation() == rows
    with pytest.raises(ValueError, match="corrupted already and tested as they are; leave out"):
        evaluate_runs([first.path], ["clean"], **options)
