"""Images, folders and names from strangers: bombs are refused, links do not lead out, and no name
acts as markup, as a path or as a formula."""

from __future__ import annotations

import csv
import json
import os
import struct
import time
import warnings
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from noiseproof.__main__ import main
from noiseproof.lab import files
from noiseproof.lab.config import Data
from noiseproof.lab.data import images
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.folder import walk
from noiseproof.lab.data.images import DataError, decode
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.writers import spreadsheet_text
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.report.page import report
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits
from tests.test_figures import drawings

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
NAMES = [
    MARKUP, "\"'`--><!-- ]]>", "$\\frac{", "=cmd|' /C calc'!A0", "a\nb\x1b[31m", "-rf", "x" * 300,
    "{{ 7 * 7 }}", "_under", "c/d",
]  # fmt: skip


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "flat", Flat)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, shade in (("ant", 60), ("bee", 190)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (shade, i, i)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


# images


def claimed(width: int, height: int, text: bytes = b"") -> bytes:
    """A PNG of a few bytes that claims any size, with a compressed text."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    texts = chunk(b"zTXt", b"x\0\0" + zlib.compress(text))
    pixels = chunk(b"IDAT", zlib.compress(bytes(3 * width + 1) * height if width < 99 else b""))
    parts = (chunk(b"IHDR", header), texts, pixels, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000)])
@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_images_of_more_than_89_megapixels_are_refused(photos: Path, size, storage):
    (photos / "bee" / "bomb.png").write_bytes(claimed(*size))
    with pytest.raises(DataError, match=r"bomb\.png cannot be read: it has more than 89 megapix"):
        load_dataset(Data(str(photos), storage=storage, img_size=(8, 8)))


def test_large_images_are_decoded_few_at_a_time(photos: Path, monkeypatch: pytest.MonkeyPatch):
    """One of 88 megapixels takes more than a gigabyte, and a machine may have 32 threads."""
    active, most, rgb = [0], [0], images.rgb

    def counted(image: Image.Image, background: str) -> Image.Image:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.02)
        active[0] -= 1
        return rgb(image, background)

    monkeypatch.setattr(images, "rgb", counted)
    monkeypatch.setattr(images, "_AT_A_TIME", 3 * 8 * 8)
    paths = [str(path) for path in photos.rglob("*.png")]
    for size in ((3, 8, 8), (3, 4, 4)):
        assert not decode(paths, size, threads=8)[1]
    assert most[0] <= 3
    monkeypatch.setattr(images, "_AT_A_TIME", 1)  # less than one image needs
    assert not decode(paths[:2], (3, 8, 8), threads=8)[1]


def test_text_in_an_image_does_not_unfold_without_bound(tmp_path: Path):
    (tmp_path / "small.png").write_bytes(claimed(8, 8, text=bytes(1000)))
    (tmp_path / "bomb.png").write_bytes(claimed(8, 8, text=bytes(1 << 22)))
    _, errors = decode([str(tmp_path / name) for name in ("small.png", "bomb.png")], (3, 8, 8))
    assert list(errors) == [1]
    assert "bomb.png cannot be read: Decompressed data too large" in errors[1]


def test_a_refused_image_is_one_line_of_the_command(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (photos / "bee" / "bomb.png").write_bytes(claimed(10_000, 10_000))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert main(["train", "--data", str(photos), "--output", str(tmp_path / "runs")]) == 2
    assert not warned  # Pillow's own warning
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "reduce its size" in error


def test_no_image_runs_another_program_or_waits_for_one(tmp_path: Path):
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "script.png").write_bytes(script)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    _, errors = decode(paths, (3, 8, 8))
    assert [error.partition(": ")[2] for error in errors.values()] == [
        "not a regular file", "not an image", "not a regular file",
    ]  # fmt: skip


def test_an_archive_that_unpacks_to_much_more_than_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "_UNPACKED", 1 << 20)
    images, labels = np.zeros((2000, 32, 32), np.uint8), np.arange(2000) % 2
    arrays: Any = {f"{part}_images": images for part in ("train", "test")}
    arrays |= {f"{part}_labels": labels for part in ("train", "test")}
    np.savez_compressed(tmp_path / "bomb.npz", **arrays)
    with pytest.raises(DataError, match=r"bomb\.npz cannot be read: it would unpack to 0.0 GB"):
        load_dataset(Data(str(tmp_path / "bomb.npz")))
    np.savez(tmp_path / "whole.npz", **arrays)
    assert load_dataset(Data(str(tmp_path / "whole.npz"))).test.count == 2000


# links


def test_a_link_out_of_the_folder_is_refused_unless_it_is_asked_for(photos: Path, tmp_path: Path):
    elsewhere = tmp_path / "private"
    elsewhere.mkdir()
    Image.new("RGB", (8, 8)).save(elsewhere / "secret.png")
    for link, target in (
        (photos / "bee" / "link.png", elsewhere / "secret.png"),
        (photos / "bee" / "more", elsewhere),
        (photos / "cow", elsewhere),
        (photos / "bee" / "up.png", Path("../../private/secret.png")),
        (photos / "bee" / "gone.png", Path("/nowhere/secret.png")),
    ):
        link.symlink_to(target)
        with pytest.raises(DataError) as caught:
            load_dataset(Data(str(photos)))
        assert f"{link} is a link to " in str(caught.value)
        assert (
            f"outside {photos}; replace it by a copy, or allow such links with --follow-links"
            in (str(caught.value))
        )
        link.unlink()
    (photos / "bee" / "link.png").symlink_to(elsewhere / "secret.png")
    followed = load_dataset(Data(str(photos), follow_links=True, test_share=0.5))
    assert (followed.train.labels == 1).sum() + (followed.test.labels == 1).sum() >= 9


def test_the_folder_may_be_a_link_and_so_may_what_stays_inside_it(photos: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(photos)
    (photos / "bee" / "again.png").symlink_to(photos / "bee" / "1.png")
    assert load_dataset(Data(str(tmp_path / "link"), val_share=0.0)).train.count == 16


def test_a_run_from_before_links_were_refused_still_follows_them(photos: Path, tmp_path: Path):
    os.rename(photos / "bee", tmp_path / "bees")
    (photos / "bee").symlink_to(tmp_path / "bees")
    config = digits(tmp_path, epochs=1, batch_size=4, lr=0.01)
    data = Data(str(photos), follow_links=True)
    run = train(replace(config, data=data), progress=False)
    content = json.loads((run.path / "config.json").read_text())
    del content["crc32"], content["config"]["data"]["follow_links"]
    (run.path / "config.json").write_text(json.dumps(content))
    assert RunFolder.open(run.path).dataset().fingerprint == run.info["fingerprint"]


def test_loops_and_webs_of_links_end_with_an_error(photos: Path):
    (photos / "bee" / "loop").symlink_to(photos / "bee" / "loop")
    with pytest.raises(DataError, match=r"bee/loop cannot be followed \(Too many levels"):
        load_dataset(Data(str(photos)))
    (photos / "bee" / "loop").unlink()
    for i in range(12):  # 4096 ways through them
        (photos / "bee" / f"d{i}").mkdir()
        for name in "ab":
            (photos / "bee" / f"d{i}" / name).symlink_to(photos / "bee" / f"d{i + 1}")
    (photos / "bee" / "d12").mkdir()
    with pytest.raises(DataError, match="by more than 100 names"):
        load_dataset(Data(str(photos)))
    assert len(walk(photos, once=True)[0]) == 20


# names


class _Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose classes, name, data and recorded facts are hostile text."""
    folder = tmp_path_factory.mktemp("named")
    rng = np.random.default_rng(0)
    labels = np.arange(60) % len(NAMES)
    images = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    arrays: Any = {f"{part}_images": images for part in ("train", "test")}
    arrays |= {f"{part}_labels": labels for part in ("train", "test")}
    path = folder / "<b onclick=alert(3)>$x.npz"
    np.savez(path, classes=np.array(NAMES), **arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        config = digits(folder, epochs=2, batch_size=10, name="=<img src=x onerror=alert(4)>$y")
        run = train(replace(config, data=Data(str(path))), progress=False)
        evaluate(run, ["clean", "gaussian:0.3"], draws=2, device="cpu", progress=False)
    for facts in (run.info, run.info["environment"]):
        facts |= {name: MARKUP for name, value in facts.items() if isinstance(value, str)
                  if name not in ("fingerprint", "precision", "metrics_checksum")}  # fmt: skip
    run.save_config()
    return RunFolder.open(run.path)


def test_no_name_in_a_report_is_markup(named: RunFolder, tmp_path: Path):
    page = report([named], tmp_path, title=MARKUP)
    elements = _Elements(page.read_text(encoding="utf-8")).found
    assert [attrs.get("type") for tag, attrs in elements if tag == "script"] == [
        "application/json", None,
    ]  # fmt: skip
    assert {tag for tag, _ in elements}.isdisjoint({"iframe", "object", "embed", "form", "base"})
    for tag, attrs in elements:
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        for name in ("src", "href"):
            assert (attrs.get(name) or "#").startswith(("data:", "#")), (tag, attrs)
    figures = list((tmp_path / "figures").glob("*.svg"))
    assert figures
    for figure in figures:
        kinds = {node.tag.rpartition("}")[2] for node in ElementTree.parse(figure).iter()}
        assert "script" not in kinds
        assert "foreignObject" not in kinds
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert written == {"report.html", "report.md", "report.csv", "report.tex", "figures"}
    assert "<img" not in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", drawings())
def test_no_name_of_a_run_breaks_a_figure(name: str):
    """Matplotlib reads $ as mathematics, hides names with _ and warns of a layout that fails."""
    labels = ("$\\frac{$", "_b\x1b\n" + "x" * 200)
    figure = drawings(labels, tuple(NAMES[:3]))[name]("light")
    figure.draw_without_rendering()


def test_names_cannot_control_a_terminal_or_a_spreadsheet(
    named: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("=1+1.png", "@x\x1b[31m\n.png"):
        Image.new("L", (8, 8)).save(name)
    images = ["=1+1.png", "@x\x1b[31m\n.png"]
    assert main(["predict", str(named.path), *images, "--top", "10", "--out", "out.csv"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.count("\n") == 3
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {Path(row["file"]) for row in rows} == {Path(name) for name in images}
    assert {row["class"] for row in rows} == {spreadsheet_text(name) for name in NAMES}
    assert not [cell for row in rows for cell in row.values() if cell[0] in "=@+-"]
    assert main(["evaluate", str(named.path), "--perturb", "clean", "--table", "table.csv"]) == 0
    assert "\n'=<img" in Path("table.csv").read_text()


@pytest.mark.parametrize("name", ["..", "../../evil", "a/../../b", "..\\x"])
def test_a_class_name_that_leads_out_of_a_folder_is_refused(name: str, tmp_path: Path):
    images, labels = np.zeros((8, 8, 8), np.uint8), np.arange(8) % 2
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, test_images=images,
             test_labels=labels, classes=np.array(["cat", name]))  # fmt: skip
    with pytest.raises(DataError, match=r"a\.npz: a class is named '.*', which leads out of"):
        load_dataset(Data(str(tmp_path / "a.npz")))
