"""The paper's tables from records, and the published pages."""

from __future__ import annotations

import itertools
import json
import re
from math import sqrt
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest

from noiseproof.lab.evaluation.certificates import certified_radii
from noiseproof.lab.evaluation.stats import compare_trainings
from noiseproof.paper import tables
from noiseproof.paper.experiments import EXPERIMENTS
from noiseproof.perturb import CORRUPTIONS
from tools import publish

ROOT = Path(__file__).resolve().parents[1]
SUITE = EXPERIMENTS["cifar10"]().suite


def record(row: str, seed: int, value: float, **more) -> dict:
    """A record with the same accuracy in every column."""
    return {
        "row": row,
        "seed": seed,
        "epochs": 200,
        "shortened": False,
        "seconds": 90.0,
        "jobs": 3,
        "engine": "graph",
        "precision": "bf16",
        "environment": {"device": "a GPU", "torch": "2.11", "commit": "abc"},
        "accuracy": {spec: {"mean": value, "std": None, "draws": [value]} for spec in SUITE},
        **more,
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    looks = [
        {"epoch": e, "accuracy": dict.fromkeys(SUITE, v)}
        for e, v in ((100, 91.0), (160, 92.0), (180, 92.5), (200, 92.25))
    ]
    made = [record("normal", 0, 92.0), record("normal", 1, 94.0), record("both", 0, 91.0)]
    made += [record("discriminative-code", 0, 90.0, along=looks)]
    for i, one in enumerate(made):
        (folder / f"{i}.json").write_text(json.dumps(one))
    return tmp_path


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_measured_table_has_means_and_a_spread_only_over_several_trainings(results: Path):
    found = tables.read_records(results, "cifar10")
    lines = tables.measured(EXPERIMENTS["cifar10"](), found, digits=1)
    by_row = {cells(line)[0]: cells(line)[1:] for line in lines[2:]}
    assert by_row["`normal`"] == ["2", *["93.0 ± 1.4"] * len(SUITE)]
    assert by_row["`both`"] == ["1", *["91.0"] * len(SUITE)]
    assert by_row["`noisy`"] == ["0", *["not run"] * len(SUITE)]
    assert list(by_row) == ["`normal`", "`noisy`", "`both`", "`stability`", "`discriminative`",
                            "`discriminative-code`"]  # fmt: skip
    some = tables.measured(EXPERIMENTS["cifar10"](), found, ["clean"], missing=False)
    assert [cells(line) for line in some[2:]] == [
        ["`normal`", "2", "93.00 ± 1.41"],
        ["`both`", "1", "91.00"],
        ["`discriminative-code`", "1", "90.00"],
    ]


def test_corruptions_are_averaged_over_severities_and_calibration_is_in_percent():
    experiment = EXPERIMENTS["robust-cifar10"]()

    def training(row: str, fog: float, ece: float) -> tables.Record:
        means = dict.fromkeys((*experiment.suite, *CORRUPTIONS), 80.0) | {"fog:3": fog}
        accuracy = {spec: {"mean": mean} for spec, mean in means.items()}
        return {"row": row, "accuracy": accuracy, "calibration": {"clean": {"ece": ece}}}

    found = [training("both", 50.0, 0.02), training("both", 65.0, 0.04)]
    lines = tables.measured(experiment, found, [tables.MEAN_CORRUPTION, tables.ECE])
    assert cells(lines[0])[2:] == ["mean of 75 corruptions", "calibration error, clean"]
    # 80 − 30/75 and 80 − 15/75
    assert [cells(line) for line in lines[2:]] == [
        ["`both`", "2", "79.70 ± 0.14", "3.00 ± 1.41"],
    ]
    fog = [f"fog:{severity}" for severity in range(1, 6)]
    found.append({"row": "noisy", "accuracy": {"fog:3": {"mean": 60.0}}})  # the others are missing
    lines = tables.by_condition(experiment, found, {"fog": fog, "fog:3": ["fog:3"]})
    assert [cells(line) for line in lines] == [
        ["", "`both`"],
        ["---", "---"],
        ["trainings", "2"],
        ["fog", "75.5 ± 2.1"],  # (4 · 80 + 50) / 5 and (4 · 80 + 65) / 5
        ["fog:3", "57.5 ± 10.6"],
    ]
    del found[2]
    del found[1]["accuracy"]["fog:3"]  # a training without all cells has no mean
    (line,) = tables.measured(experiment, found, [tables.MEAN_CORRUPTION])[2:]
    assert cells(line) == ["`both`", "2", "79.60"]


def test_gains_are_bold_beyond_two_standard_errors():
    def trainings(*values: float) -> list[tables.Record]:
        return [{"accuracy": {"clean": {"mean": value}}} for value in values]

    near, far = trainings(81.0, 83.0), trainings(86.0, 88.0)  # each mean has a standard error of 1
    pairs = {"up": (far, near), "same": (near, near), "down": (near, far)}
    lines = tables.gains(pairs, ["clean", "gaussian:0.1"])
    assert [cells(line) for line in lines[2:]] == [
        ["up", "**+5.00 ± 1.41**", "–"],
        ["same", "+0.00 ± 1.41", "–"],
        ["down", "**−5.00 ± 1.41**", "–"],
    ]


def test_differences_are_to_the_papers_rows_alone(results: Path):
    found = tables.read_records(results, "cifar10")
    lines = tables.differences(EXPERIMENTS["cifar10"](), found, ["clean", "gaussian:20/255"])
    assert [cells(line) for line in lines[2:]] == [
        ["`normal`", "2", "+0.3", "+42.7"],  # 93 − 92.73, 93 − 50.32
        ["`both`", "1", "−0.5", "+2.0"],
    ]


def test_a_section_names_the_command_and_what_is_not_run(tmp_path: Path):
    text = tables.section(tmp_path, "cifar10")
    assert "`noiseproof reproduce cifar10`" in text
    assert "| `normal` | 0 | not run |" in text
    assert "Measured minus paper" not in text
    assert "| `stability-paired` |" not in text
    assert "`discriminative-code`, `stability-paired`, `discriminative-paired`, " in text
    assert "`discriminative-renormalised-mixed`." in text
    assert "`noiseproof reproduce road --data FOLDER`" in tables.section(tmp_path, "road")
    assert tables.sources(tmp_path, "road") == ""


def test_a_section_says_which_rows_have_other_numbers_of_epochs(results: Path):
    assert "Epochs" not in tables.section(results, "cifar10")  # all have 200
    for row in ("noisy", "both"):
        file = results / "cifar10" / f"{row}.json"
        file.write_text(json.dumps(record(row, 5, 90.0, epochs=100)))
    (results / "cifar10" / "2.json").unlink()
    expected = "Epochs, for the same number of views: 200 (`normal`, `discriminative-code`), "
    assert f"{expected}100 (`noisy`, `both`)." in tables.section(results, "cifar10")


def test_sources_say_how_trainings_were_made_and_what_choosing_the_epoch_is_worth(results: Path):
    text = tables.sources(results, "cifar10")
    assert "| `both` | 0 | 200 | 1.5 | 3 | graph, bf16 | a GPU | 2.11 | abc |" in text
    (line,) = [ln for ln in text.splitlines() if "100 epochs" in ln]
    # The best on clean images is epoch 180; epochs 160 to 200 are in the last third.
    cell = "+0.25, 92.00 to 92.50"
    assert cells(line) == ["`discriminative-code`", "0", "100 epochs", "180", *[cell] * len(SUITE)]


def test_a_range_is_printed_only_where_there_are_two_values(results: Path):
    file = results / "cifar10" / "3.json"
    one = json.loads(file.read_text())
    one["along"] = one["along"][0:1] + one["along"][-1:]
    file.write_text(json.dumps(one))
    (line,) = [ln for ln in tables.sources(results, "cifar10").splitlines() if "100 epochs" in ln]
    assert set(cells(line)[4:]) == {"0"}


def test_tables_are_filled_into_the_summary_from_whole_trainings(results: Path):
    short = record("normal", 0, 50.0, shortened=True)
    (results / "cifar10" / "short.json").write_text(json.dumps(short))
    text = "# Results\n\n[[cifar10: clean]]\n\n[[cifar10 - paper: clean]]\n"
    (results / "summary.md").write_text(text)
    page = publish.pages(results)["results.md"]
    assert "[[" not in page
    assert "| `normal` | 2 | 93.0\u00a0±\u00a01.4 |\n" in page  # never broken at the ±
    assert "| `normal` | 2 | +0.3 |\n" in page


def test_the_published_pages_are_what_the_records_give():
    pages = publish.pages(ROOT / "results")
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, f"run python -m tools.publish: {name}"
    below = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs/results").glob("*.md")}
    assert below == set(pages) - {"results.md"}


def test_the_candidates_of_the_recipe_differ_in_the_table():
    page = (ROOT / "docs/results/robust.md").read_text()
    lines = page.partition("## How it was chosen")[2].splitlines()
    settings = [tuple(cells(line)[:4]) for line in lines if line.startswith("| `")]
    assert len(settings) == len(set(settings)) == 18


def test_the_table_of_the_readme_is_what_the_records_give():
    columns = ["clean", "gaussian:8/255", "gaussian:16/255", "gaussian:20/255"]
    measured: dict[tuple[str, str], list[str]] = {}
    for name in ("cifar10", "robust-cifar10"):
        records = tables.whole(tables.read_records(ROOT / "results", name))
        lines = tables.measured(EXPERIMENTS[name](), records, columns, digits=1, missing=False)
        for row, *values in map(cells, lines[2:]):
            measured[name, row] = values
    readme = (ROOT / "README.md").read_text().replace("**", "")
    lines = [line for line in readme.splitlines() if re.match(r"\| `\w+`.* \| \d+ \| \d+ \|", line)]
    assert len(lines) == 8
    for title, _, *values in map(cells, lines):
        name = "robust-cifar10" if "--recipe robust" in title else "cifar10"
        row = re.findall("`\\w+`", title)[0]
        if "--batch-norm together" in title:
            row = row[:-1] + "-together`"
        assert values == measured[name, row], title


def p_value(name: str, spec: str, *rows: str) -> float:
    """Of the difference between two of the five methods, over trainings."""
    records = tables.whole(tables.read_records(ROOT / "results", name))
    first, second = ([r["accuracy"][spec]["mean"] for r in records if r["row"] == x] for x in rows)
    comparison = compare_trainings(first, second, groups=5)
    assert comparison is not None
    return comparison[1]


def test_the_p_values_of_the_notes_are_what_the_records_give():
    lines = (ROOT / "results/cifar10/notes.md").read_text().splitlines()
    rival, count = "", 0
    for line in lines:
        if match := re.match(r"\| `discriminative` − `(\w+)`", line):
            rival = match[1]
        elif line.startswith("| p |"):
            expected = [p_value("cifar10", spec, "discriminative", rival) for spec in SUITE]
            assert [float(p) for p in cells(line)[1:]] == pytest.approx(expected, rel=0.05), rival
            count += 1
    assert count == 4
    text = " ".join((ROOT / "results/modern-30/notes.md").read_text().split())
    (printed,) = re.findall(r"five methods: p = ([\d., and]+) from clean", text)
    expected = [p_value("modern-30", spec, "both", "discriminative") for spec in SUITE]
    assert [float(p) for p in re.findall(r"[\d.]+", printed)] == pytest.approx(expected, rel=0.06)
    assert p_value("modern-30", "clean", "normal", "both") == pytest.approx(0.17, abs=0.005)


def test_what_spheres_gains_in_the_notes_is_what_the_records_give():
    records = tables.whole(tables.read_records(ROOT / "results", "robust-cifar10"))
    specs = ("clean", *(f"gaussian:{s}" for s in ("8/255", "16/255", "20/255", "0.1")))
    gains, errors, ps = [], [], []
    for column in [[spec] for spec in specs] + [list(CORRUPTIONS)]:
        ours, theirs = (
            [fmean(r["accuracy"][c]["mean"] for c in column) for r in records if r["row"] == row]
            for row in ("spheres", "both")
        )
        gains.append(fmean(ours) - fmean(theirs))
        errors.append(gains[-1] / sqrt(variance(ours) / len(ours) + variance(theirs) / len(theirs)))
        comparison = compare_trainings(ours, theirs, groups=2)
        assert comparison is not None
        ps.append(comparison[1])
    notes = " ".join((ROOT / "results/robust-cifar10/notes.md").read_text().split())
    few = " ".join((ROOT / "results/few-images/notes.md").read_text().split())
    assert f"above `both` by {min(gains):.2f} to {max(gains):.2f} points" in notes
    assert f"{min(gains):.2f} to {max(gains):.2f}, by {min(errors):.1f} to {max(errors):.1f}" in few
    assert f"p = {min(ps):.2f} to {max(ps):.2f}" in notes


def test_a_training_outside_a_checkout_has_no_commit(tmp_path: Path):
    machine = {"device": "a CPU", "torch": "2.11", "commit": None}
    (tmp_path / "cifar10").mkdir()
    text = json.dumps(record("normal", 0, 92.0, environment=machine))
    (tmp_path / "cifar10" / "0.json").write_text(text)
    assert "| 2.11 | – |" in tables.sources(tmp_path, "cifar10")


def test_the_certified_accuracies_of_the_notes_are_what_the_rows_give():
    folder = ROOT / "results/certified-cifar10"
    lines = (folder / "notes.md").read_text().splitlines()
    heads = next(line for line in lines if line.startswith("| | samples"))
    distances = [float(cell) for cell in heads.strip("| ").split("|")[1:]]
    files = sorted((folder / "certificates").glob("*.jsonl"))
    assert files
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        row, _, kind = file.stem.partition("-s0")
        name = f"`{row}`" + kind.replace("-", ", ") + " |"
        (cells,) = (line.strip("| ").split(" | ") for line in lines if name in line)
        assert cells[0].startswith(f"σ = {rows[0]['sigma']}")
        assert int(cells[1].replace(",", "")) == rows[0]["samples"]
        shares = [100 * (certified_radii(rows) >= r).mean() for r in distances]
        assert cells[2:] == [f"{share:.1f}" for share in shares]


HALF = 0.0501  # of the last digit of a number with one


def quoted(page: str, pattern: str) -> list[float]:
    """The numbers in the one sentence of a page that matches, where each # is a number."""
    text = " ".join((ROOT / page).read_text().split())
    (found,) = re.findall(pattern.replace("#", r"([\d.]+\d|\d)"), text)
    return [float(number) for number in found]


def stored(path: str) -> dict:
    return json.loads((ROOT / "results" / path).read_text())


def losses(accuracy: dict[str, float]) -> list[float]:
    return [accuracy["clean"] - accuracy[f"gaussian:{level}/255"] for level in (16, 20)]


def test_what_is_quoted_of_the_authors_code_is_in_its_records():
    notes = "results/cifar10/notes.md"
    steps = stored("cifar10/authors/steps-normal.json")
    assert f"{steps['steps']} steps of the authors' public" in (ROOT / notes).read_text()
    assert {value for name, value in steps.items() if "difference" in name} == {0.0}

    record = stored("cifar10/authors/normal-20-epochs.json")
    end = record["tests"][-1]["accuracy"]
    pattern = (
        "After # epochs instead of 200, .* `normal` has # on clean images, # at 16/255 and # at "
    )
    found = quoted(notes, pattern + "20/255: it loses # and # points under noise")
    values = [end[spec] for spec in ("clean", "gaussian:16/255", "gaussian:20/255")]
    assert found == pytest.approx([record["epochs"], *values, *losses(end)], abs=HALF)
    experiment = EXPERIMENTS["cifar10"]()
    records = tables.read_records(ROOT / "results", "cifar10")
    ours = [r["accuracy"] for r in tables.whole(records) if r["row"] == "normal"]
    means = {spec: sum(a[spec]["mean"] for a in ours) / len(ours) for spec in experiment.suite}
    papers = dict(zip(experiment.suite, experiment.paper["normal"], strict=True))
    found = quoted(notes, "The paper's 200 epochs lose # and #, ours # and #")
    assert found == pytest.approx([*losses(papers), *losses(means)], abs=HALF)
    (short,) = (r for r in records if r["row"] == "normal" and r["shortened"])
    assert short["epochs"] == record["epochs"]
    end = {spec: draws["mean"] for spec, draws in short["accuracy"].items()}
    found = quoted(notes, "Our code, with the same schedule, has #, # and #: it loses # and #")
    values = [end[spec] for spec in ("clean", "gaussian:16/255", "gaussian:20/255")]
    assert found == pytest.approx([*values, *losses(end)], abs=HALF)
    other = record["tests"][14]["accuracy"]
    found = quoted(notes, "of theirs, which has # and # after epoch 15")
    assert found == pytest.approx([other["gaussian:16/255"], other["gaussian:20/255"]], abs=HALF)


def test_what_is_quoted_of_the_authors_code_on_svhn_is_in_its_record_and_log():
    notes = "results/svhn/notes.md"
    record = stored("svhn/authors/stability-5-epochs.json")
    clean = [test["clean"] for test in record["tests"]]
    assert len(clean) == 5
    found = quoted(
        notes, "noise of # it has # to # % on clean test images after each of five epochs"
    )
    assert found == pytest.approx([record["noise"], min(clean), max(clean)], abs=HALF)
    log = (ROOT / "results/svhn/authors/stability-5-epochs.txt").read_text()
    accuracies = [float(number) for number in re.findall(r"Train Accuracy: ([\d.]+)%", log)]
    distances = [float(number) for number in re.findall(r"loss_stab: ([\d.]+)", log)]
    pattern = "training accuracy of # to # % and a distance that fell from # to about #"
    *found, end = quoted(notes, pattern)
    assert found == pytest.approx([min(accuracies), max(accuracies), distances[0]], abs=HALF)
    assert end == pytest.approx(sum(distances[-12:]) / 12, abs=0.005)  # of the fifth epoch


def means(name: str, row: str, spec: str) -> list[float]:
    """The accuracy of each training of a row."""
    records = tables.whole(tables.read_records(ROOT / "results", name))
    return [r["accuracy"][spec]["mean"] for r in records if r["row"] == row]


def test_what_the_summary_quotes_is_what_the_records_give():
    page = "results/summary.md"
    text = " ".join((ROOT / page).read_text().split())
    near = {}
    for name in ("cifar10", "svhn"):
        experiment = EXPERIMENTS[name]()
        values = experiment.paper.items()
        expected = [(m, *c) for m, p in values for c in zip(experiment.suite, p, strict=True)]
        gaps = [abs(fmean(means(name, row, spec)) - value) for row, spec, value in expected]
        assert len(gaps) == 30
        near[name] = sum(gap <= 1 for gap in gaps)
    found = quoted(page, "# of 30 cells on CIFAR-10, # of 30 on SVHN and all five of the ablation")
    assert found == list(near.values())

    masks = [s for s in EXPERIMENTS["road"]().suite if "x" in s and "gaussian" not in s]
    assert len(masks) == 4
    leads = {}
    for name in ("road", "road-efficientnet"):
        pairs = [[fmean(means(name, m, s)) for m in ("discriminative", "both")] for s in masks]
        leads[name] = sorted(a - b for a, b in pairs)
    pattern = "put the loss # to # points above `both`. .* put it between # below and # above"
    one, three = leads["road"], leads["road-efficientnet"]
    assert quoted(page, pattern) == [round(x) for x in (one[0], one[-1], -three[0], three[-1])]
    spreads = [np.ptp(means("road-efficientnet", "discriminative", spec)) for spec in masks]
    assert f"trainings of `discriminative` differ by up to {max(spreads):.0f} points" in text

    terms = stored("ablation/ablation-compact0-margin1-norm0.001-s0.json")["last_epoch"]
    notes = (ROOT / "results/ablation/notes.md").read_text()
    assert f"features end {terms['compact'] ** 0.5:.1f} outside the sphere" in notes


def test_what_is_quoted_of_abstention_is_in_its_records():
    page = "docs/calibration.md"
    lines = (ROOT / page).read_text().splitlines()

    def table(head: str) -> list[list[float]]:
        start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} | condition"))
        rows = itertools.takewhile(bool, lines[start + 2 :])
        return [[float(cell) for cell in cells(row)[2:]] for row in rows]

    def percent(rows: list[dict], metric: str, **facts: object) -> float:
        facts["metric"] = metric
        (value,) = (row["value"] for row in rows if all(row.get(k) == facts[k] for k in facts))
        return 100 * value

    auroc, scores = "AUROC of right against wrong answers", ("probability", "centroid", "boundary")
    text = (ROOT / "results/cifar10/batch-norm/figures/numbers.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    conditions = ("clean", "gaussian:16/255", "gaussian:20/255")
    expected = [
        [percent(rows, auroc, run=f"cifar10-{run}", perturbation=spec, score=s) for s in scores]
        for run in ("discriminative-s3", "discriminative-together-s0")
        for spec in conditions
    ]
    assert table("`discriminative`") == [pytest.approx(row, abs=HALF) for row in expected]

    record = stored("robust-cifar10/abstention/spheres-s2.json")
    rows, views, scores = record["rows"], ("clean", "noisy"), (*scores, "all three")
    ranked = [[percent(rows, auroc, data=view, score=s) for s in scores] for view in views]
    risks = [
        [percent(rows, "risk", data=view, score=s, coverage=0.9) for s in scores] for view in views
    ]
    found = table("`spheres`, robust recipe")
    assert found == [pytest.approx(row, abs=HALF) for row in (*ranked, *risks)]
    found = quoted(page, "the probability is # to # points ahead of the distance")
    assert found == pytest.approx(sorted(row[0] - row[1] for row in ranked), abs=HALF)
    found = quoted(page, "Without abstention # and # % of the answers are wrong")
    all_answers = [percent(rows, "risk", data=view, coverage=1.0) for view in views]
    assert found == pytest.approx(all_answers, abs=HALF)
    errors = [[round(18 * risk) for risk in row] for row in risks]  # of 1,800 answers
    found = quoted(
        page, "leave # to # errors in 1,800 answers on clean images, and # to # at 16/255"
    )
    assert found == [choose(row) for row in errors for choose in (min, max)]
    pattern = "slightly ahead: # against # on clean images, # against # at 16/255"
    found = quoted("results/few-images/notes.md", pattern)
    assert found == pytest.approx([value for row in ranked for value in row[:2]], abs=HALF)


def test_what_is_quoted_of_few_images_is_in_the_records_of_the_search():
    rows, notes = stored("search/few-images.json")["rows"], "results/few-images/notes.md"

    def gain(longer: str, shorter: str, column: str = "clean") -> float:
        first, second = (
            [{**rows[f"{n}-s{k}"]["accuracy"], **rows[f"{n}-s{k}"]}[column] for k in range(3)]
            for n in (longer, shorter)
        )
        return fmean(first) - fmean(second)

    found = quoted(notes, "gain # points with 1,000 images, and 200 gain # with 5,000")
    expected = [gain("1000-e400", "1000-e100"), gain("5000-e200", "5000-e100")]
    assert found == pytest.approx(expected, abs=HALF)
    columns = ("clean", "gaussian:16/255", "corruptions")
    found = quoted(notes, "gain # points on clean images, # at 16/255 and # under corruptions;")
    expected = [gain("1000-e400-spheres0.3", "1000-e400", column) for column in columns]
    assert found == pytest.approx(expected, abs=HALF)
