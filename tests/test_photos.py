"""Photographs: sizes and crops as pretrained weights expect them, odd files, many files, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.models as tv
from PIL import Image

from noiseproof.__main__ import main
from noiseproof.cli.arguments import TrainArguments
from noiseproof.cli.parsing import parse_training
from noiseproof.lab.config import Config, Data, Method, Model, Optim, to_dict
from noiseproof.lab.data import file_facts
from noiseproof.lab.data.datasets import load_dataset, with_read_size
from noiseproof.lab.data.images import DataError, Reading, decode
from noiseproof.lab.models.classifier import build_classifier, with_input_size
from noiseproof.lab.models.pretrained import input_size
from noiseproof.lab.runs import RunFolder, changed_settings
from noiseproof.lab.training import memory
from noiseproof.lab.training.diagnosis import chance_warning


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of six photographs of 60 x 80."""
    root = tmp_path / "photos"
    for label, name in enumerate(("dry", "wet")):
        (root / name).mkdir(parents=True)
        for i in range(6):
            picture(60, 80, 10 * label + i).save(root / name / f"{i}.png")
    return root


def automatic(folder: Path, **settings: Any) -> Data:
    return Data(str(folder), img_size="auto", val_share=0.0, **settings)


# Sizes


@pytest.mark.parametrize("shape", [(300, 401), (401, 300), (20, 33)])
def test_images_are_read_as_torchvisions_weights_were_tested(tmp_path: Path, shape):
    picture(*shape).save(tmp_path / "a.png")
    size, share, interpolation = input_size("resnet50")
    assert (size, interpolation) == ((224, 224), "bilinear")
    ours, _ = decode([str(tmp_path / "a.png")], (3, *size), Reading(share))
    preset = tv.ResNet50_Weights.DEFAULT.transforms()
    mean, std = (torch.tensor(values)[:, None, None] for values in (preset.mean, preset.std))
    theirs = preset(Image.open(tmp_path / "a.png")) * std + mean
    torch.testing.assert_close(ours[0] / 255, theirs, atol=1e-5, rtol=0)


def test_images_are_read_as_timms_weights_were_tested(tmp_path: Path):
    timm = pytest.importorskip("timm")
    picture(300, 401).save(tmp_path / "a.png")
    size, share, interpolation = input_size("timm:tf_efficientnet_lite0")
    assert (size, interpolation) == ((224, 224), "bicubic")
    reading = Reading(share, "bicubic")
    ours, _ = decode([str(tmp_path / "a.png")], (3, *size), reading)
    config = timm.data.resolve_data_config(pretrained_cfg={**vars(
        timm.get_pretrained_cfg("tf_efficientnet_lite0"))})  # fmt: skip
    theirs = timm.data.create_transform(**config)(Image.open(tmp_path / "a.png"))
    torch.testing.assert_close(ours[0] / 255, theirs * 0.5 + 0.5, atol=1e-5, rtol=0)
    assert input_size("timm:vit_base_patch16_clip_384").crop_share is None  # stretched


def test_a_large_jpeg_is_decoded_at_a_lower_resolution_with_nearly_the_same_pixels(tmp_path: Path):
    picture(600, 800).save(tmp_path / "a.jpg", quality=95)
    picture(600, 800).save(tmp_path / "a.png")
    paths = [str(tmp_path / name) for name in ("a.jpg", "a.png")]
    pixels, _ = decode(paths, (3, 64, 64), Reading(0.875))
    assert (pixels[0].int() - pixels[1].int()).abs().max() <= 6


def test_every_torchvision_network_has_an_input_size():
    for name in tv.list_models(module=tv):
        size, share, interpolation = input_size(name)
        weights: Any = tv.get_model_weights(name)
        preset = weights.DEFAULT.transforms()
        assert [round(size[0] / (share or 1))] == list(preset.resize_size)
        assert interpolation in ("bilinear", "bicubic")


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(600, 800)], (168, 224)),
        ([(60, 80)], (60, 80)),  # never enlarged
        ([(500, 500), (60, 80), (90, 100)], (90, 100)),  # the median
        ([(400, 300), (300, 400)], (224, 224)),
    ],
)
def test_without_weights_the_longer_side_has_at_most_224_pixels(tmp_path: Path, shapes, expected):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i, shape in enumerate(shapes * 3):
            Image.new("L", shape[::-1]).save(tmp_path / name / f"{i}.png")
    data = load_dataset(automatic(tmp_path))
    assert data.size == (3, *expected)
    recorded = with_read_size(automatic(tmp_path), data)
    assert (recorded.img_size, recorded.crop_share) == (expected, 1.0)


def test_the_first_line_says_how_images_are_resized(photos: Path):
    config = Config(automatic(photos), Model("resnet50", weights="imagenet"))
    data = with_input_size(config).data
    assert load_dataset(replace(data, img_size=(48, 48))).resized == (
        "images 48 x 48 (resized and cropped, from 60 x 80)"
    )
    assert load_dataset(replace(data, img_size=(60, 80))).resized == (
        "images 60 x 80 (resized and cropped, from 60 x 80, all enlarged)"  # before the crop
    )
    assert load_dataset(automatic(photos)).resized == "images 60 x 80"
    stretched = load_dataset(Data(str(photos), img_size=(9, 9)))
    assert stretched.resized == "images 9 x 9 (stretched, from 60 x 80)"
    picture(80, 60).save(photos / "wet" / "upright.png")
    assert load_dataset(automatic(photos)).resized == (
        "images 60 x 80 (resized and cropped, from 60 x 80 to 80 x 60, 1 enlarged)"
    )
    (photos / "wet" / "upright.png").unlink()
    picture(20, 90).save(photos / "wet" / "low.png")
    assert load_dataset(automatic(photos)).resized == (
        "images 60 x 80 (resized and cropped, from 20 x 90 to 60 x 80, 1 enlarged)"
    )


def test_commands_leave_the_size_to_the_weights_and_native_keeps_it():
    def parsed(*words: str) -> Config:
        return parse_training(TrainArguments, "train", ["--data", "photos/", *words])[1]

    assert parsed().data.img_size == "auto"
    assert with_input_size(parsed()).data.img_size == (224, 224)
    assert parsed("--img-size", "native").data.img_size is None
    chosen = parsed("--img-size", "96", "64").data
    assert (chosen.img_size, chosen.crop_share) == ((96, 64), None)


def test_recorded_runs_read_images_as_they_did(tmp_path: Path, photos: Path):
    old = Config(Data(str(photos), val_share=0.0))
    content = {"schema": 1, "config": to_dict(old), "info": {}}
    for name in ("crop_share", "interpolation", "background"):
        del content["config"]["data"][name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    recorded = RunFolder.open(tmp_path).config
    assert Reading.of(recorded.data) == Reading(None, "bilinear", "black")
    # The same command as before continues it, though the default size is another one now.
    assert not changed_settings(recorded, replace(old, data=automatic(photos)))
    changed = changed_settings(recorded, replace(old, data=replace(old.data, img_size=(9, 9))))
    assert len(changed) == 1


def test_without_pretrained_weights_the_learning_rate_is_that_of_training_from_scratch():
    def parsed(*words: str) -> Config:
        return parse_training(TrainArguments, "train", ["--data", "photos/", *words])[1]

    assert (parsed().model.weights, parsed().optim.lr) == ("imagenet", 1e-4)
    for words in (["--weights", "none"], ["--weights=None"], ["--model", "resnet18"]):
        config = parsed(*words)
        assert (config.model.weights, config.optim.lr) == (None, 1e-3)
    assert parsed("--weights", "none", "--lr", "0.01").optim.lr == 0.01
    assert parsed("--weights", "none", "--recipe", "modern").optim.lr == 0.05


def test_at_chance_the_advice_names_a_learning_rate():
    labels = torch.tensor([0, 1] * 50)
    train = SimpleNamespace(labels=labels, count=10_000)
    data: Any = SimpleNamespace(classes=("a", "b"), train=train)
    metrics = {"epoch": 3, "train_accuracy": 0.5, "ce": 0.693}
    scratch = Config(method=Method("normal"), optim=Optim(opt="adam", lr=1e-4))
    assert "Try a higher --lr, such as 0.001 (now 0.0001)" in str(
        chance_warning(scratch, data, metrics)
    )
    tuned = replace(scratch, model=Model(weights="imagenet"), optim=Optim(opt="adam", lr=0.05))
    assert "a lower --lr, such as 0.0001" in str(chance_warning(tuned, data, metrics))
    assert chance_warning(scratch, data, {**metrics, "epoch": 4}) is None  # it is said once


# Odd files


def test_odd_files_are_read_or_named(photos: Path):
    for name in ("README.md", "dry/labels.csv", ".DS_Store", "wet/.DS_Store", "LICENSE"):
        (photos / name).write_text("x")
    picture(60, 80).save(
        photos / "dry" / "a.gif", save_all=True, append_images=[picture(60, 80, 1)]
    )
    picture(60, 80).save(photos / "dry" / "b.webp")
    picture(60, 80).convert("L").save(photos / "dry" / "c.tif")
    half = picture(60, 80).convert("RGBA")
    half.putalpha(0)
    half.save(photos / "wet" / "clear.png")
    sensor = np.random.default_rng(0).integers(0, 4096, (60, 80), dtype=np.uint16)
    Image.fromarray(sensor).save(photos / "wet" / "sensor.tiff")
    Image.fromarray(sensor).save(photos / "wet" / "sensor.png")
    notes = "\n".join(load_dataset(automatic(photos)).notes)
    assert "LICENSE, " in notes
    assert "README.md" in notes
    assert "which are not images" in notes
    assert "images with transparency: 1, composited on white" in notes
    assert "several frames or pages: 1, of which the first is used" in notes
    assert "16-bit images: 2, reduced to 8 bits" in notes
    assert "values up to 4,09" in notes
    assert ".DS_Store" not in notes
    pixels, _ = decode([str(photos / "wet" / "clear.png")], (3, 6, 8))
    assert pixels.min() == 255
    pixels, _ = decode([str(photos / "wet" / "clear.png")], (3, 6, 8), Reading(background="black"))
    assert pixels.max() == 0


def test_heic_and_single_pixels_are_refused_with_advice(photos: Path):
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
    (photos / "dry" / "IMG_1.HEIC").write_bytes(heic)
    (photos / "wet" / "IMG_2.jpg").write_bytes(heic)  # as some phones and servers name it
    Image.new("RGB", (1, 1)).save(photos / "wet" / "dot.png")
    with pytest.raises(DataError) as caught:
        load_dataset(automatic(photos))
    assert str(caught.value).count("it is HEIC: install pillow-heif to read it, or convert") == 2
    assert "dot.png cannot be read: it has one pixel; remove it" in str(caught.value)


# Many files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder; a handful of files count as many."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_facts, "_MANY", 4)
    monkeypatch.setattr(file_facts, "_CHUNK", 5)
    return tmp_path / "cache"


def test_many_files_are_measured_once(photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    streamed = automatic(photos, storage="stream", test_share=0.5)
    monkeypatch.setattr(file_facts, "_RECENT", 10**15)
    small = load_dataset(streamed)
    assert not list(cache.rglob("*.npy"))  # files as new as these may still change
    monkeypatch.setattr(file_facts, "_RECENT", 0)
    first = load_dataset(streamed)
    assert len(list(cache.rglob("*.npy"))) == 1
    measured = []
    original = file_facts._in_chunks

    def counted(what: str, function: Any, paths: Any, positions: Any) -> Any:
        measured.append((what, [Path(paths[i]).name for i in positions]))
        return original(what, function, paths, positions)

    monkeypatch.setattr(file_facts, "_in_chunks", counted)
    again = load_dataset(streamed)
    assert again.fingerprint == first.fingerprint == small.fingerprint
    assert again.size == first.size == small.size
    assert {what for what, names in measured if names} == {"listing"}
    measured.clear()
    picture(60, 80, 99).save(photos / "wet" / "3.png")
    load_dataset(streamed)
    assert ("checking", ["3.png"]) in measured
    next(cache.rglob("*.npy")).write_bytes(b"damaged")
    assert load_dataset(streamed).size == first.size


def test_unreadable_files_among_many_are_named(photos: Path, cache: Path):
    (photos / "wet" / "bad.png").write_bytes(b"x")
    (photos / "wet" / "gone.png").symlink_to(photos / "nowhere.png")
    with pytest.raises(DataError, match=r"bad\.png cannot be read: not an image; .*gone\.png"):
        load_dataset(automatic(photos))


# Before a training


def test_memory_for_activations_is_what_the_network_keeps():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3, padding=1)
    )
    expected = 4 * 10 * 12 * (3 + 4)  # the inputs of both convolutions; the ReLU keeps its output
    assert memory.saved_for_backward(model, (3, 10, 12)) == expected


def test_a_training_that_does_not_fit_is_refused_with_the_flags_to_change(
    photos: Path, monkeypatch: pytest.MonkeyPatch
):
    config = Config(automatic(photos), Model("small_cnn"))
    data = load_dataset(config.data)
    model = build_classifier(
        config.model, num_classes=2, size=data.size, mean=data.mean, std=data.std
    )
    assert memory.require_memory(config, data, model, device="cpu") is not None
    monkeypatch.setattr(memory, "free_memory", lambda: 10**6)
    flags = r"--batch-size \(now 64\) or --img-size \(now 60 80;.*--jobs"
    with pytest.raises(ValueError, match=rf"2 trainings .* and 0\.0 GB are free: .*{flags}"):
        memory.require_memory(config, data, model, device="cpu", jobs=2)


def test_a_comparison_without_its_weights_fails_once_before_anything_is_trained(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    command = ["compare", "--data", str(photos), "--output", str(tmp_path / "runs")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("could not be downloaded") == 1
    assert "--weights FILE" in error
    assert not list((tmp_path / "runs").rglob("config.json"))
