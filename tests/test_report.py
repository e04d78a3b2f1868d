"""The report: its content comes from the runs, all text is escaped, and it works in a browser."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noiseproof.__main__ import main
from noiseproof.lab import runs as runs_module
from noiseproof.lab.analysis.analyse import analyse
from noiseproof.lab.analysis.store import read
from noiseproof.lab.comparison_files import recommended
from noiseproof.lab.config import METHODS, Config, Data, Method, Model, Optim, Run
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.data.duplicates import Leak
from noiseproof.lab.data.images import DataError
from noiseproof.lab.evaluation.certificates import certificates
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.predictions import predictions
from noiseproof.lab.evaluation.severities import ALL
from noiseproof.lab.evaluation.tolerance import noise_tolerance, tolerance_text
from noiseproof.lab.files import without_checksum
from noiseproof.lab.report import accuracy_sections, decision, gallery, summary
from noiseproof.lab.report.accuracy_sections import weak_classes
from noiseproof.lab.report.calibration_section import calibration_section
from noiseproof.lab.report.decision import decide
from noiseproof.lab.report.figure_files import FigureWriter, darkened
from noiseproof.lab.report.page import analysis_sections, report, report_runs
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.perturb import CORRUPTIONS
from tests.browser import all_of, show

EVIL = ["<script>alert(1)</script>", "<img src=x onerror=alert(2)>"]
LEVELS = ("clean", "gaussian:0.2", "gaussian:0.4", "stripes:2x1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two quick runs on the digits, whose first two classes then get names with markup."""
    folder, runs = tmp_path_factory.mktemp("report"), []
    for method in ("normal", "both"):
        config = Config(
            model=Model(feature_dim=16),
            method=Method(method, noise="gaussian:0.3"),
            optim=Optim(epochs=2, batch_size=32),
            run=Run(output=str(folder), name=f"{method}-s0", device="cpu"),
        )
        run = train(config, progress=False)
        evaluate(run, LEVELS, draws=2, weights=("last", "best"), device="cpu", progress=False)
        stages = method == "both"
        small: dict[str, Any] = {"samples": 40, "probes": 2, "draws": 3, "stages": stages}
        analyse(run, device="cpu", progress=False, **small)
        run.info["classes"][:2] = EVIL
        run.save_config()
        runs.append(run)
    return runs


@pytest.fixture(scope="module")
def page(trained: list[RunFolder]) -> Path:
    return report(trained, trained[0].path.parent / "page")


@pytest.fixture(scope="module")
def bare(trained: list[RunFolder], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One of the runs without its analysis: a report on it is fast."""
    copy = tmp_path_factory.mktemp("bare") / "normal-s0"
    shutil.copytree(trained[0].path, copy, ignore=shutil.ignore_patterns("analysis"))
    return RunFolder.open(copy)


def _embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_a_report_is_one_small_file_that_fetches_nothing(page: Path):
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 8e6
    markup = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    markup = re.sub(r"&lt;.*?&gt;", "", markup)  # names of classes
    outside = re.findall(r"""(?:src|href)=["']?(?!data:|#)([^"'\s>]+)""", markup)
    assert outside == []
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in html.unescape(text)


@pytest.mark.usefixtures("undrawn")
def test_images_in_two_splits_are_a_warning_on_the_first_page(bare: RunFolder, tmp_path: Path):
    leak = Leak("near-duplicates", "test", 1, 20, [("test/a.png", "train/b.png")])
    copy = RunFolder.open(shutil.copytree(bare.path, tmp_path / "normal-s0"))
    copy.info["leaks"] = [leak._asdict()]
    text = report([copy], tmp_path).read_text(encoding="utf-8")
    assert f"<b>Warning:</b> {leak}." in text.partition('<section id="results">')[0]
    assert "Warning:" not in report([bare], tmp_path / "other").read_text(encoding="utf-8")


def test_a_comparison_records_why_nothing_is_recommended(
    bare: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise ValueError("none is better")

    monkeypatch.setattr(decision, "recommend", refuse)
    copy = RunFolder.open(shutil.copytree(bare.path, tmp_path / "normal-s0"))
    (tmp_path / "comparison.json").write_text('{"runs": [{"run": "normal-s0"}]}')
    assert decision.save_decision(gather([copy]), tmp_path) == "none is better"
    with pytest.raises(ValueError, match=r"recommends no run: none is better\. To use one anyway"):
        recommended(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_about_the_weights_that_are_recommended(
    trained: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs_module, "ENOUGH_TO_CHOOSE", 1)
    results = gather(trained)
    assert results.weights == "best" == decide(results).weights
    text = report(trained, tmp_path).read_text(encoding="utf-8")
    captions = re.findall("<(?:caption|summary)>(digits, .*?)<", text)
    best, last = "of the best epoch by validation", "after the last epoch"
    assert captions == [f"digits, weights {name}" for name in (best, last, last)]
    shown = _embedded(text)["gallery"]
    pixels = trained[0].dataset().test.pixels[shown["index"]].float() / 255
    for m, run in enumerate(trained):
        expected = run.model("best")(pixels).softmax(1).amax(1).tolist()
        found = [of_image[m][1] for of_image in shown["levels"][0]["predictions"]]
        assert found == pytest.approx(expected, abs=1e-3)


def test_the_weights_of_a_report_are_those_analysed_and_certified(
    bare: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs_module, "ENOUGH_TO_CHOOSE", 1)
    copy = RunFolder.open(shutil.copytree(bare.path, tmp_path / "normal-s0"))
    words = [str(copy.path), "--device", "cpu", "--samples", "20"]
    assert main(["analyse", *words, "--parts", "geometry"]) == 0
    assert main(["certify", *words, "--sigma", "0.2", "--every", "100"]) == 0
    weights = gather([copy]).weights
    assert weights == "best"
    assert [read(copy, "last"), certificates(copy, "last")] == [None, {}]
    assert read(copy, weights)
    assert certificates(copy, weights)


def test_a_report_is_about_weights_that_all_runs_were_tested_with(
    trained: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs_module, "ENOUGH_TO_CHOOSE", 1)
    other = RunFolder.open(shutil.copytree(trained[1].path, tmp_path / "both-s0"))
    rows = [json.dumps(row) for row in other.evaluation() if row["weights"] == "last"]
    (other.path / "evaluation.jsonl").write_text("\n".join(rows) + "\n")
    results = gather([trained[0], other])
    assert results.weights == "last" == decide(results).weights
    assert list(results.table.labels) == ["normal", "both"]


def test_tables_and_figures_lie_beside_the_page(page: Path):
    for suffix in (".md", ".csv", ".tex"):
        assert "both" in page.with_name(f"report{suffix}").read_text(encoding="utf-8")
    drawn = {path.stem for path in page.parent.glob("figures/*.svg")}
    assert drawn == {path.stem for path in page.parent.glob("figures/*.png")}
    shown = re.findall(r'<figure class="[^"]*" id="figure-([^"]+)"', page.read_text("utf-8"))
    with_controls = {"per-class", "confusion-normal", "confusion-both"}
    assert drawn == {*shown, *with_controls}
    assert drawn - with_controls == {
        "accuracy-curves", "training-curves", "curvature-boxplot", "curvature-distribution",
        "curvature-between-kinks", "step-study", "loss-surface",
        "accuracy-vs-retained-share", "correct-count-vs-curvature",
        "tsne", "tsne-stages-clean", "tsne-stages-noisy", "stage-separation",
        "geometry-histograms", "distances", "reliability", "risk-coverage", "theory-bounds",
    }  # fmt: skip


def test_every_figure_has_alt_text_and_a_caption(page: Path):
    text = page.read_text(encoding="utf-8")
    images = re.findall(r"<img ([^>]*)>", text)
    assert images
    assert all(re.search(r'alt="[^"]{20,}"', image) for image in images)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.S)
    assert 2 * len(captions) == len(images)
    assert all(len(caption) > 20 for caption in captions)


def test_the_weakest_classes_are_those_of_the_lowest_recall():
    recall = [[1.0, 0.9, 0.5], [0.7, None, 0.6]]
    noisy = {"spec": "gaussian:0.2", "shown": [2, 0, 1], "recall": recall}
    noisy["pairs"] = [[(1, 0, 0.3), (1, 2, 0.2)], []]
    clean = {"spec": "clean", "shown": [0, 1, 2], "recall": [[0.9, 0.8, 1.0], None], "pairs": []}
    breakdown = {"labels": ["a", "b"], "classes": ["x", "y", "z"], "conditions": [clean, noisy]}
    weakest = weak_classes({**breakdown, "start": 1}, "a")
    assert weakest == [("y", 0.8, 0.5, "x", 0.3), ("x", 0.9, 0.9, "", 0.0)]
    assert [weak.name for weak in weak_classes({**breakdown, "start": 1}, "b")] == ["y", "z"]


def test_a_class_named_as_markup_is_text(page: Path):
    text = page.read_text(encoding="utf-8")
    assert not [name for name in EVIL if name in text]
    assert text.count("<script") == 2  # the data and the program
    assert _embedded(text)["gallery"]["classes"][:2] == EVIL
    assert _embedded(text)["breakdown"]["classes"][:2] == EVIL


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_is_not_analysed_has_no_such_sections(bare: RunFolder, tmp_path: Path):
    text = report([bare], tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'<section id="([^"]+)"', text) == [
        "results", "weakest", "gallery", "setting", "classes", "calibration", "training", "made",
    ]  # fmt: skip


@pytest.mark.usefixtures("undrawn")
def test_abstention_names_its_noise_and_shows_what_was_measured(
    trained: list[RunFolder], tmp_path: Path
):
    copies = []
    for run in trained:
        folder = tmp_path / run.name
        shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("analysis"))
        copies.append(RunFolder.open(folder))
    evaluate(copies[0], ["stripes:3x1"], draws=1, device="cpu", progress=False)
    for run in copies:
        analyse(run, device="cpu", progress=False, parts=["abstention"], noise="gaussian:0.25")
    section = report(copies, tmp_path).read_text().partition('<section id="abstention"')[2]
    assert "Noisy: σ=0.25." in section.replace("\xa0", " ")
    assert section.count("<small>stripes 2×1</small>") == 2
    assert section.count("<small>stripes 3×1</small>") == 1  # the other run was not tested


@pytest.mark.parametrize("name", ["surface.npz", "analysis.json"])
def test_a_damaged_analysis_is_an_error_and_not_a_report_without_it(
    trained: list[RunFolder], tmp_path: Path, name: str
):
    copy = shutil.copytree(trained[0].path, tmp_path / "normal-s0")
    path = copy / "analysis" / name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=rf"{name} is .*damaged.*`noiseproof analyse .*normal-s0 "):
        analysis_sections(gather([RunFolder.open(copy)]))


def test_a_darkened_figure_has_the_colours_of_a_dark_one(trained: list[RunFolder]):
    results = gather(trained)
    shown = [figure for section in analysis_sections(results) for figure in section.figures]
    shown += accuracy_sections.accuracy_figures(results)

    def colours(svg: bytes) -> set[str]:
        return set(re.findall(rb"(?:fill|stroke): (#\w{6})", svg))

    for figure in shown:
        if figure.name not in ("accuracy-curves", "geometry-histograms", "step-study"):
            continue
        light, dark = _svg(figure.draw(theme="light")), _svg(figure.draw(theme="dark"))
        assert colours(darkened(light)) == colours(dark) != colours(light), figure.name


def _svg(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="svg")
    return out.getvalue()


def test_a_large_figure_is_embedded_as_a_bitmap(trained: list[RunFolder], tmp_path: Path):
    (figure,) = accuracy_sections.accuracy_figures(gather(trained))
    large = FigureWriter(tmp_path, budget=1000).embed(figure)
    assert large["light"].startswith("data:image/png;base64,")
    assert large["dark"].startswith("data:image/png;base64,")
    assert large["dark"] != large["light"]
    small = FigureWriter(tmp_path, budget=8_000_000).embed(figure)
    assert small["light"].startswith("data:image/svg+xml;base64,")


@pytest.mark.usefixtures("undrawn")
def test_a_title_and_a_path_as_markup_are_text(bare: RunFolder, tmp_path: Path):
    made = report([bare], tmp_path / "<b>&out", title="<i>mine</i>")
    text = made.read_text(encoding="utf-8")
    assert "<i>mine" not in text
    assert "&lt;i&gt;mine&lt;/i&gt;" in text
    assert "<b>&out" not in text


def test_the_gallery_shows_what_was_evaluated(page: Path, trained: list[RunFolder]):
    shown = _embedded(page.read_text(encoding="utf-8"))["gallery"]
    assert shown["labels"] == ["normal", "both"]
    assert [f["title"] for f in shown["families"]] == ["Gaussian noise", "Stripes"]
    for level in shown["levels"]:
        for m, run in enumerate(trained):
            known = predictions(run, level["spec"])
            assert known is not None
            first = known.classes[known.draws.tolist().index(0)]
            predicted = [of_image[m][0] for of_image in level["predictions"]]
            assert predicted == first[shown["index"]].tolist()
            assert shown["truth"] == known.labels[shown["index"]].tolist()
            assert all(0.1 <= of_image[m][1] <= 1 for of_image in level["predictions"])
    clean, noisy = shown["levels"][0]["images"], shown["levels"][2]["images"]
    assert len(set(clean + noisy)) == 2 * len(clean)
    pixels = trained[0].dataset().test.pixels[shown["index"]].float() / 255
    for m, run in enumerate(trained):
        levels = noise_tolerance(run.model(), pixels).tolist()
        assert [of_image[m] for of_image in shown["tolerance"]] == list(map(tolerance_text, levels))


@pytest.mark.usefixtures("undrawn")
def test_a_few_test_images_are_all_shown(tmp_path: Path):
    labels = np.arange(12) % 2
    images = np.full((12, 8, 8), 90, np.uint8) * (1 + labels[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "few.npz", train_images=images, train_labels=labels,
             test_images=images[:3], test_labels=labels[:3])  # fmt: skip
    settings = Run(output=str(tmp_path), name="few", device="cpu")
    few = Data(str(tmp_path / "few.npz"))
    run = train(Config(data=few, optim=Optim(epochs=1), run=settings), progress=False)
    evaluate(run, ["clean", "gaussian:0.1"], draws=2, device="cpu", progress=False)
    text = report([run], tmp_path).read_text(encoding="utf-8")
    assert sorted(_embedded(text)["gallery"]["index"]) == [0, 1, 2]


def test_the_breakdown_agrees_with_the_accuracy(page: Path, trained: list[RunFolder]):
    classes = _embedded(page.read_text(encoding="utf-8"))["breakdown"]
    accuracy = {
        (row["method"], row["perturbation"]): row["value"]
        for run in trained
        for row in run.evaluation()
        if row["weights"] == "last" and row["perturbation"] in ("clean",)
    }
    for condition in classes["conditions"]:
        for m, label in enumerate(classes["labels"]):
            matrix = np.array(condition["matrix"][m])
            draws = 1 if condition["spec"] == "clean" else 2
            assert matrix.sum() == draws * sum(classes["images"])
            if condition["spec"] == "clean":
                assert matrix.trace() / matrix.sum() == pytest.approx(accuracy[label, "clean"])
            expected = (matrix.diagonal() / matrix.sum(axis=1)).round(4)
            assert condition["recall"][m] == pytest.approx(expected.tolist())


def test_many_classes_are_shown_by_their_worst_and_their_confusions():
    counts = np.diag(np.arange(1, 31)) * 2
    counts[:, 0] += 1
    condition = accuracy_sections._condition("clean", ["a"], {"a": counts}, 30)
    assert condition["matrix"] == [None]
    assert condition["shown"] == list(range(1, 21))  # class 0 has a recall of 1
    assert condition["pairs"][0][0] == (1, 0, 0.2)


def test_runs_on_other_images_are_refused(trained: list[RunFolder], tmp_path: Path):
    other = RunFolder(trained[1].path, trained[1].config, {**trained[1].info, "fingerprint": "x"})
    other.path = tmp_path
    with pytest.raises(ValueError, match="must share their test images: normal-s0 has"):
        gather([trained[0], other])


def test_a_run_without_evaluation_is_refused_with_the_command(tmp_path: Path):
    config = Config(run=Run(output=str(tmp_path), name="bare"))
    run = RunFolder.create(config, {"classes": ["a", "b"], "fingerprint": "f"})
    with pytest.raises(ValueError, match=r"is not finished \(0 of 40 epochs\)"):
        report_runs([tmp_path / "bare"], tmp_path)
    run.save_weights("last", {"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"run `noiseproof evaluate .*bare` first"):
        report_runs([tmp_path / "bare"], tmp_path)
    with pytest.raises(ValueError, match="at least one run folder, got none"):
        report_runs([])


def test_runs_that_differ_in_more_than_the_seed_are_not_pooled(trained: list[RunFolder]):
    normal, both = trained
    method = dataclasses.replace(both.config.method, radius=1.0)
    other = RunFolder(both.path, dataclasses.replace(both.config, method=method), both.info)
    pooled = gather([both])
    assert (pooled.by, pooled.groups) == ("method", {"both": ["both-s0"]})
    other.path = both.path.parent / ".." / both.path.parent.name / both.path.name
    assert gather([both, other]).by == "method"  # one folder by two names is one run
    assert [normal.name, both.name] == list(gather([both, normal]).runs)


@pytest.mark.usefixtures("undrawn")
def test_runs_are_named_by_what_tells_them_apart(trained: list[RunFolder], tmp_path: Path):
    normal, both = trained
    runs = []
    for run, name, radius in (
        (normal, "digits-normal-s0", 0.5),
        (both, "digits-both-s0", 0.5),
        (both, "digits-both-wide-s0", 1.0),
    ):
        shutil.copytree(run.path, tmp_path / name, ignore=shutil.ignore_patterns("analysis"))
        method = dataclasses.replace(run.config.method, radius=radius)
        runs.append(
            RunFolder(tmp_path / name, dataclasses.replace(run.config, method=method), run.info)
        )
    found = gather(runs)
    assert found.by == "run"
    assert found.table.labels == ("normal", "both", "both-wide")
    styles = accuracy_sections.label_styles(found)
    for theme in ("light", "dark"):
        assert len(set(styles[theme])) == 3
    text = report(runs, tmp_path).read_text(encoding="utf-8")
    assert "digits-both-wide-s0" in text  # in full in the section on how it was made
    assert re.findall(r"^\.s(\d) ", text, re.MULTILINE) == [str(i) for i in range(len(METHODS))]


@pytest.mark.usefixtures("undrawn")
def test_a_report_without_its_data_says_so(
    bare: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def gone(config: Data) -> Dataset:
        raise DataError("photos is not there")

    monkeypatch.setattr(gallery, "load_dataset", gone)
    text = report([bare], tmp_path).read_text(encoding="utf-8")
    assert "The test images cannot be shown: photos is not there." in text


def test_images_are_chosen_by_class_and_position():
    labels = torch.tensor([1, 0, 0, 1, 2, 0])
    assert gallery.choose(labels, 4).tolist() == [1, 0, 4, 2]
    assert gallery.choose(torch.arange(100), 4).tolist() == [0, 25, 50, 75]
    assert gallery.choose(labels, 9).tolist() == [1, 0, 4, 2, 3, 5]


def test_photographs_are_embedded_small():
    large = gallery.image_uri(torch.rand(3, 400, 500, generator=torch.Generator().manual_seed(0)))
    assert large.startswith("data:image/jpeg;base64,")
    assert len(large) < 30_000
    assert gallery.image_uri(torch.zeros(1, 8, 8)).startswith("data:image/png;base64,")


def test_the_reliability_diagram_has_the_bins_of_all_draws(trained: list[RunFolder], page: Path):
    section = calibration_section(gather(trained))
    assert section is not None
    (figure,) = section.figures
    clean, *noisy = figure.draw(theme="light").axes
    assert clean.get_title("left") == "clean"
    assert 1 <= len(noisy) <= 2
    for run, line in zip(trained, noisy[-1].lines[1:], strict=True):
        spec = {"σ=0.2": "gaussian:0.2", "σ=0.4": "gaussian:0.4"}.get(
            noisy[-1].get_title("left"), "stripes:2x1"
        )
        rows = [r for r in run.evaluation() if r["perturbation"] == spec and r["weights"] == "last"]
        assert len(rows) == 2
        images, correct = (np.sum([r["bins"][k] for r in rows], 0) for k in ("images", "correct"))
        shown = images >= 20
        assert np.allclose(line.get_ydata(), correct[shown] / images[shown])
    table = gather(trained).table
    cell = table.cells["both", "clean"]
    text = re.sub(r"<[^>]*>", " ", page.read_text("utf-8").split('id="calibration"')[1])
    assert f"both {table.percent(cell.calibration['ece'] or 0)} " in " ".join(text.split())


@pytest.mark.usefixtures("undrawn")
def test_where_one_of_several_trainings_is_shown_the_section_says_so(
    trained: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    empty = {"caption": "", "width": 0}
    monkeypatch.setattr(FigureWriter, "embed", lambda *_: empty)  # drawing them takes time
    assert summary.first_training_note(gather(trained)) == ""
    again = []
    for run in trained:  # the same model, called a second training
        shutil.copytree(run.path, tmp_path / run.name.replace("s0", "s1"))
        text = (tmp_path / run.name.replace("s0", "s1") / "config.json").read_text()
        text = json.dumps(without_checksum(json.loads(text)))
        changed = text.replace('"seed": 0', '"seed": 1').replace(run.name, f"{run.name[:-1]}1")
        (tmp_path / run.name.replace("s0", "s1") / "config.json").write_text(changed)
        again.append(RunFolder.open(tmp_path / run.name.replace("s0", "s1")))
    results = gather([*trained, *again])
    assert {len(keys) for keys in results.groups.values()} == {2}
    note = summary.first_training_note(results)
    assert "(seed 0)" in note
    sections = analysis_sections(results)
    assert len(sections) == 6
    assert all(section.intro.endswith(note) for section in sections)
    shown = report([*trained, *again], tmp_path / "page").read_text(encoding="utf-8")
    parts = re.split(r'<section id="', html.unescape(shown))
    telling = [part.partition('"')[0] for part in parts if note.strip() in part]
    assert telling == ["gallery", *(section.anchor for section in sections), "training"]


@pytest.fixture(scope="module")
def corrupted(
    trained: list[RunFolder], tmp_path_factory: pytest.TempPathFactory
) -> list[RunFolder]:
    """The runs without their analyses, with made-up rows of all corruptions."""
    runs = []
    for run in trained:
        copy = tmp_path_factory.mktemp("corrupted") / run.name
        shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("analysis"))
        runs.append(RunFolder.open(copy))
        clean = next(r for r in run.evaluation() if r["perturbation"] == "clean")
        better = 0.1 * (run.config.method.method == "both")
        rows = [
            {**clean, "perturbation": name, "value": 0.5 + better - 0.2 * name.startswith("fog")}
            for name in CORRUPTIONS
        ]
        runs[-1].append_evaluation(rows)
    return runs


@pytest.mark.usefixtures("undrawn")
def test_a_report_condenses_corruptions_to_one_number_and_fifteen_rows(
    corrupted: list[RunFolder], tmp_path: Path
):
    text = report(corrupted, tmp_path).read_text()
    results = gather(corrupted)
    assert results.table.columns == (*LEVELS, ALL)
    assert len(results.perturbations) == len(LEVELS) + 75
    head, section = text[: text.index('id="corruptions"')], text[text.index('id="corruptions"') :]
    assert "corruptions 1–5" in head
    assert "of CIFAR-10-C and ImageNet-C" in section
    assert "made from these test images with the same constants" in section
    assert "gaussian noise 1" not in head  # no column of a single severity
    mean = 0.5 - 0.2 / 15
    assert f"<code>normal</code>\xa0{100 * mean:.1f}\xa0%" in section
    assert section.count('<td data-value="10">fog <small>weather</small></td>') == 3
    tables = (tmp_path / "report.md").read_text()
    assert "| weather | fog | 100.0 | 85.7 |" in tables  # (1 - 0.4) / (1 - 0.3)
    assert "Accuracy is lowest under fog." in section
    assert "draws of each noise and one of each corruption." in text
    levels = [level["spec"] for level in _embedded(text)["gallery"]["levels"]]
    assert levels == [*LEVELS, *(n for n in CORRUPTIONS if n[-1] in "135")]
    assert len(_embedded(text)["gallery"]["index"]) == 8
    accuracy = next(x for x in _embedded(text)["gallery"]["levels"] if x["spec"] == "fog:3")
    assert accuracy["accuracy"] == pytest.approx([0.3, 0.4])


@pytest.mark.usefixtures("undrawn")
def test_a_perturbation_that_is_not_registered_does_not_break_a_report(
    bare: RunFolder, tmp_path: Path
):
    copy = tmp_path / "normal-s0"
    shutil.copytree(bare.path, copy)
    run = RunFolder.open(copy)
    clean = next(row for row in run.evaluation() if row["perturbation"] == "clean")
    run.append_evaluation([{**clean, "perturbation": "rain:0.3", "value": 0.25}])
    text = report([run], tmp_path / "page").read_text()
    assert "rain 0.3" in text
    assert "rain:0.3" not in [level["spec"] for level in _embedded(text)["gallery"]["levels"]]


def test_the_baseline_of_a_report_can_be_chosen(corrupted: list[RunFolder], tmp_path: Path):
    table = gather(corrupted, corrupted[1].path).table
    assert table.baseline == {"normal": "both", "both": "both"}
    with pytest.raises(ValueError, match="must be one of the runs"):
        gather(corrupted, tmp_path)


def test_the_recommendation_counts_corruptions_as_one_condition(corrupted: list[RunFolder]):
    results = gather(corrupted)
    assert "averaged over four noise conditions" in decide(results).sentences[0]
    assert [f.title for f in summary.headline_figures(results)][:2] == [
        "Highest accuracy on clean images",
        "Highest accuracy on average over all corruptions",
    ]


# In a real browser


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page, freshly loaded at 1280 px in the light theme, with empty storage."""
    show(browser, width=1280)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(page.as_uri())
    deadline = time.monotonic() + 30  # on a busy machine the script may run after `get` returns
    while not all_of(browser, "#confusion td") and time.monotonic() < deadline:
        time.sleep(0.05)
    yield browser
    browser.execute_script("try { localStorage.clear() } catch {}")
    browser.get("about:blank")  # a second visit to the same address can return before it loads


def _slide(browser: Any, level: int) -> None:
    browser.execute_script(
        "const s = document.getElementById('level'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        level,
    )


def test_nothing_is_written_to_the_console_and_no_request_leaves_the_page(opened: Any):
    _slide(opened, 1)
    assert opened.get_log("browser") == []
    events = [json.loads(e["message"])["message"] for e in opened.get_log("performance")]
    sent = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert sent  # the page itself: the log works
    assert [url for url in sent if not url.startswith(("file:", "data:"))] == []
    assert {url for url in sent if url.startswith("file:")} == {opened.current_url}
    fetched = opened.execute_script("return performance.getEntriesByType('resource').length")
    assert fetched == 0 or all(url.startswith(("file:", "data:")) for url in sent)


def test_every_image_is_drawn(opened: Any):
    broken = "e => e.complete && e.naturalWidth > 0"
    drawn = all_of(opened, "img", broken)
    assert len(drawn) > 10
    assert all(drawn)


def test_the_slider_changes_images_and_predictions(opened: Any):
    def state() -> tuple[str, list[str], list[str], list[str]]:
        title = all_of(opened, "#level-name")[0]
        images = all_of(opened, ".card img", "e => e.src")
        return title, images, all_of(opened, ".card li"), all_of(opened, "#scores li")

    _slide(opened, 0)
    clean = state()
    _slide(opened, 2)
    noisy = state()
    assert (clean[0], noisy[0]) == ("clean", "σ=0.4")
    assert len(clean[1]) == 8
    assert all(a != b for a, b in zip(clean[1], noisy[1], strict=True))
    assert clean[2] != noisy[2]
    assert clean[3] != noisy[3]
    _slide(opened, 0)
    assert state() == clean


def test_long_names_of_classes_leave_images_their_size_and_tables_on_a_phone(opened: Any):
    lengthen = "e => (e.textContent = 'x'.repeat(60), 1)"
    all_of(opened, ".card header b", lengthen)
    width = "e => e.getBoundingClientRect().width"
    assert set(all_of(opened, ".pixelated .card img", width)) == {96}
    show(opened, width=390)
    all_of(opened, ".card .says", lengthen)
    lines = "e => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight)"
    assert set(map(round, all_of(opened, ".card .name", lines))) == {1}  # not norma-l
    assert all_of(opened, "#weakest td:first-child", lengthen)
    assert all_of(opened, "#weakest .scroll", "e => e.scrollWidth <= e.clientWidth") == [True]


def test_another_family_of_perturbations_can_be_chosen(opened: Any):
    opened.execute_script(
        "const f = document.getElementById('family'); f.value = 1;"
        "f.dispatchEvent(new Event('change'))"
    )
    assert all_of(opened, "#level-name") == ["stripes 2×1"]
    assert all_of(opened, "#level", "e => e.max") == ["1"]


def test_a_click_on_a_header_sorts_the_table_both_ways(opened: Any):
    def column() -> list[float]:
        cells = "#results table tbody tr td:nth-child(3)"
        return all_of(opened, cells, "e => Number(e.dataset.value)")[:2]

    button = opened.find_elements("css selector", "#results table th button")[2]
    button.click()
    assert column() == sorted(column(), reverse=True)
    assert all_of(opened, "#results th[aria-sort=descending]") == ["σ=0.2"]
    button.click()
    assert column() == sorted(column())
    assert column()[0] != column()[1]
    button = opened.find_elements("css selector", "#results table th button")[0]
    button.click()
    assert all_of(opened, "#results table tbody tr th")[:2] == ["normal", "both"]


def test_the_confusion_follows_the_selectors(opened: Any):
    before = all_of(opened, "#confusion td")
    opened.execute_script(
        "const s = document.getElementById('subject'); s.value = 0;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert all_of(opened, "#confused-label")[0].startswith("normal, ")
    assert len(before) == 100
    assert before != all_of(opened, "#confusion td")
    assert len(all_of(opened, "#recall .dot")) == 20


def test_both_colour_schemes_render_and_the_button_switches(opened: Any):
    look = "return getComputedStyle(document.body).backgroundColor"
    shown = "e => getComputedStyle(e).display"
    light = opened.execute_script(look)
    assert set(all_of(opened, "figure .on-light", shown)) == {"block"}
    assert set(all_of(opened, "figure .on-dark", shown)) == {"none"}
    show(opened, scheme="dark")
    dark = opened.execute_script(look)
    assert dark != light
    assert set(all_of(opened, "figure .on-dark", shown)) == {"block"}
    assert set(all_of(opened, "figure .on-light", shown)) == {"none"}
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == light
    assert set(all_of(opened, "figure .on-light", shown)) == {"block"}
    show(opened, scheme="light")
    opened.find_element("id", "theme").click()
    assert opened.execute_script(look) == dark
    assert set(all_of(opened, "figure .on-dark", shown)) == {"block"}


def test_a_class_named_as_markup_shows_as_text(opened: Any):
    assert EVIL[0] in all_of(opened, ".card header b")
    assert EVIL[1] in all_of(opened, "#confusion th")
    assert len(all_of(opened, "script")) == 2
    assert all_of(opened, "img[src='x']") == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_does_not_scroll_sideways(opened: Any, width: int):
    show(opened, width=width)
    root = "return document.documentElement"
    assert opened.execute_script(f"{root}.scrollWidth") == opened.execute_script(
        f"{root}.clientWidth"  # the window less its scroll bar
    )


def test_why_is_folded_and_opens_where_a_link_leads_into_it(opened: Any):
    shown = "e => e.checkVisibility({contentVisibilityAuto: true})"
    assert all_of(opened, "#results table, #weakest table, #cards", shown) == [True] * 3
    assert all_of(opened, "#geometry", shown) == [False]
    opened.execute_script("location.hash = 'geometry'")
    deadline = time.monotonic() + 10
    while not all_of(opened, "#geometry", shown)[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all_of(opened, "#geometry", shown) == [True]


def test_a_phone_gets_figures_that_fit(opened: Any):
    show(opened, width=390)
    opened.execute_script("document.getElementById('why').open = true")
    widths = all_of(
        opened, "figure .on-light img", "e => [e.width, e.closest('.view').scrollWidth]"
    )
    assert len(widths) > 5
    assert all(0 < shown <= 340 and view <= 340 for shown, view in widths)


def test_on_a_phone_the_captions_of_wide_tables_stay_in_view(opened: Any):
    show(opened, width=390)
    opened.execute_script("document.getElementById('why').open = true")
    opened.execute_script("document.querySelectorAll('.scroll').forEach(e => e.scrollLeft = 999)")
    rectangle = "e => { const r = e.getBoundingClientRect(); return [r.left, r.right]; }"
    edges = all_of(opened, ".scroll caption", rectangle)
    assert len(edges) > 3
    assert all(left >= 0 and right <= 390 for left, right in edges)


def test_on_a_phone_long_names_of_conditions_leave_numbers_in_view(opened: Any):
    show(opened, width=390)
    opened.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    name = "exposure −2 + sensor ISO 1600 + JPEG 3"
    assert all_of(opened, "#abstention small", f"e => (e.textContent = '{name}', 1)")
    widths = all_of(
        opened,
        "#abstention td:first-child",
        "e => e.offsetWidth / e.closest('.scroll').clientWidth",
    )
    assert max(widths) < 0.5


def test_the_printed_page_is_light_and_whole(opened: Any):
    show(opened, scheme="dark")
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    look = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    shown = set(all_of(opened, "figure .on-light", "e => getComputedStyle(e).display"))
    hidden = set(all_of(opened, "#theme", "e => getComputedStyle(e).display"))
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert look == "rgb(253, 253, 251)"
    assert (shown, hidden) == ({"block"}, {"none"})


BROKEN_WORDS = """e => {
  const walker = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), broken = [];
  for (let node; (node = walker.nextNode()); )
    for (const word of node.data.matchAll(/[\\p{L}\\d.+]+/gu)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  return broken;
}"""


def test_words_numbers_and_names_are_not_broken_in_print(opened: Any):
    show(opened, width=718)  # of A4
    opened.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    lines = all_of(opened, ".results .mean", "e => e.getClientRects().length")
    names = all_of(opened, ".results tbody th", "e => getComputedStyle(e).whiteSpace")
    broken = all_of(opened, "table:not(.plain, .matrix) :is(th, td)", BROKEN_WORDS)
    right = max(all_of(opened, "table", "e => e.getBoundingClientRect().right"))
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert set(lines) == {1}
    assert set(names) == {"nowrap"}
    assert [word for cell in broken for word in cell] == []
    assert right <= 718
