"""Analysis: known answers of its pure functions, and whole analyses of a tiny digits run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from noiseproof import draws, theory
from noiseproof.lab.analysis import analyse as verb
from noiseproof.lab.analysis import curvature, features, surface
from noiseproof.lab.analysis import theory as theory_part
from noiseproof.lab.analysis.analyse import ALL, analyse, analyse_runs, noises_of
from noiseproof.lab.analysis.correlation import count_groups, retained_share, spearman
from noiseproof.lab.analysis.differentiable import lacks_second_derivative, twice_differentiable
from noiseproof.lab.analysis.store import read
from noiseproof.lab.analysis.subject import Features, Measured, Settings, Subject
from noiseproof.lab.comparison.compare import compare
from noiseproof.lab.config import Comparison, Config, Method, MethodName, Model, Optim, Run
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.evaluation.evaluate import correct, evaluate
from noiseproof.lab.files import without_checksum
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.theory import generalisation
from tests.flat import Flat
from tests.flat import digits as small_digits

SMALL = {"samples": 60, "probes": 2, "draws": 3, "device": "cpu", "progress": False}


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset(Config().data)


def trained(folder: Path, method: MethodName = "discriminative") -> RunFolder:
    config = Config(
        model=Model(feature_dim=16),
        method=Method(method=method),
        optim=Optim(epochs=1, batch_size=128),
        run=Run(output=str(folder), name=method, device="cpu", engine="eager"),
    )
    return train(config, progress=False)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs")).path


@pytest.fixture(scope="session")
def whole(made: Path, digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with every part analysed; tests only read it."""
    path = shutil.copytree(made, tmp_path_factory.mktemp("whole") / "discriminative")
    run = RunFolder.open(path)
    analyse(run, stages=True, dataset=digits, **SMALL)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunFolder:
    """A copy that a test may change."""
    return RunFolder.open(shutil.copytree(made, tmp_path / "discriminative"))


# Relations


def test_the_retained_share_keeps_the_samples_of_lowest_curvature():
    curvature, accuracy = [5.0, 1.0, 3.0, 2.0, 4.0], [0.0, 1.0, 0.6, 0.8, 0.2]
    found = retained_share(curvature, accuracy, [0.2, 0.4, 0.6, 1.0])
    np.testing.assert_allclose(found.accuracy, [1.0, 0.9, 0.8, 0.52])
    assert found.n.tolist() == [1, 2, 3, 5]


def test_the_retained_share_of_everything_is_the_accuracy_and_nan_is_refused():
    rng = np.random.default_rng(0)
    curvature, accuracy = rng.random(101), rng.random(101)
    assert retained_share(curvature, accuracy).accuracy[-1] == pytest.approx(accuracy.mean())
    with pytest.raises(ValueError, match="finite"):
        retained_share([math.nan, 1.0], [0.0, 1.0])


def test_groups_by_count_hold_means_and_say_which_are_empty():
    rng = np.random.default_rng(1)
    counts = rng.choice([0, 2, 3, 4, 10], 200)
    curvature = rng.random(200)
    found = count_groups(curvature, counts, 10)
    assert found.empty == [1, 5, 6, 7, 8, 9]
    for k in range(11):
        inside = curvature[counts == k]
        assert found.n[k] == len(inside)
        if len(inside):
            assert found.mean[k] == pytest.approx(inside.mean())
        else:
            assert math.isnan(found.mean[k])
    has = [0, 2, 3, 4, 10]
    slope, intercept = np.polyfit(has, found.mean[has], 1)
    assert (found.slope, found.intercept) == pytest.approx((slope, intercept))
    assert found.r_groups == pytest.approx(np.corrcoef(has, found.mean[has])[0, 1])
    assert found.r_samples == pytest.approx(np.corrcoef(counts, curvature)[0, 1])


def test_fewer_than_five_groups_have_no_correlation():
    curvature, counts = [5.0, 4.0, 3.0, 2.0, 1.0], [0, 1, 2, 3, 3]
    assert math.isnan(count_groups(curvature, counts, 4).r_groups)
    assert math.isnan(count_groups(curvature, [0, 0, 1, 1, 1], 1).r_groups)  # one draw
    counts[-1] = 4
    assert count_groups(curvature, counts, 4).r_groups == pytest.approx(-1)


def test_below_the_resolved_loss_curvature_in_float32_is_rounding_and_above_it_is_not():
    # Two classes with logits (z, 0): the loss is about exp(-z), and rounded off in 1 - p.
    model = nn.Linear(4, 3)
    model.weight.data = torch.tensor([[1.0, 0, 1, 0], [0, 1.0, 0, 0], [0, 0, 0, 1.0]])
    model.bias.data.zero_()
    x, y = torch.zeros(20, 4), torch.zeros(20, dtype=torch.int64)
    x[:, 0] = torch.linspace(8, 20, 20)
    exact = nn.Linear(4, 3).double()
    exact.load_state_dict(model.state_dict())
    loss = F.cross_entropy(exact(x.double()), y, reduction="none")
    single = curvature.estimates.exact(model, x, y)
    error = (single / curvature.estimates.exact(exact, x.double(), y) - 1).abs()
    assert (error[loss > 10 * curvature.RESOLVED_LOSS] < 0.05).all()
    assert (error[loss < curvature.RESOLVED_LOSS / 10] > 0.1).all()


def test_one_group_alone_has_no_line_and_no_correlation():
    found = count_groups([1.0, 2.0], [4, 4], 10)
    assert found.mean[4] == 1.5
    assert math.isnan(found.slope)
    assert math.isnan(found.r_groups)


def test_counts_outside_the_draws_are_refused():
    with pytest.raises(ValueError, match=r"whole numbers in \[0, 3\]"):
        count_groups([1.0, 2.0], [1, 4], 3)


def test_rank_correlation_is_that_of_scipy_and_undefined_without_variation_or_with_nan():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 5, 60), rng.random(60)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y)[0])
    for constant in (1.0, math.nan):
        assert math.isnan(spearman(x, np.full(60, constant)))


# Separation and embedding


def blobs(distance: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(90) % 3
    return torch.randn(90, 4, generator=generator) + distance * F.one_hot(labels, 4), labels


def test_separable_classes_have_perfect_neighbours_and_mixed_ones_are_at_chance():
    assert features.knn_accuracy(*blobs(50.0)) == 1.0
    assert 0.1 < features.knn_accuracy(*blobs(0.0)) < 0.6


def test_a_sample_is_not_its_own_neighbour():
    points, labels = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0, 1, 1])
    assert features.knn_accuracy(points, labels, 1) == pytest.approx(1 / 3)


def test_neighbours_vote_as_in_a_loop_over_samples():
    x, y = blobs(1.5)
    correct = 0
    for i in range(len(x)):
        distances = torch.linalg.vector_norm(x - x[i], dim=1)
        distances[i] = torch.inf
        near = y[distances.argsort()[:7]].tolist()
        most = max(near.count(c) for c in near)
        winner = next(c for c in near if near.count(c) == most)  # a tie goes to the nearest
        correct += winner == y[i]
    assert 0.3 < correct / len(x) < 1
    assert features.knn_accuracy(x, y, 7) == pytest.approx(correct / len(x))


def test_the_silhouette_is_that_of_a_loop_over_samples_and_0_for_one_class():
    x, y = blobs(1.5)
    distances = torch.cdist(x.double(), x.double())
    scores = []
    for i in range(len(x)):
        means = {c: distances[i, y == c].mean() for c in range(3)}
        own = int(y[i])
        a = means.pop(own) * 30 / 29  # without the sample itself
        b = min(means.values())
        scores.append(float((b - a) / max(a, b)))
    assert features.silhouette(x, y) == pytest.approx(np.mean(scores))
    assert features.silhouette(x, torch.zeros(90, dtype=torch.int64)) == 0.0


def test_clean_and_noisy_points_that_are_equal_land_together():
    x, _ = blobs(8.0)
    x = x[:40]
    clean, noisy, _ = features.embed_together(x.numpy(), x.numpy() + 1e-6, seed=3)
    seed = 2**32 + 3  # scikit-learn takes 32 bits
    again = features.embed_together(x.numpy(), x.numpy() + 1e-6, seed=seed)
    np.testing.assert_array_equal(clean, again[0])
    size = np.ptp(clean, axis=0).max()
    assert np.median(np.linalg.norm(clean - noisy, axis=1)) < 0.05 * size


# Surface


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def test_the_middle_of_the_surface_is_the_input_and_its_slope_the_gradient():
    model, x = small_model(), torch.rand(3, 2, 2)
    found = surface.loss_surface(model, x, 1, extent=1e-2)
    middle = surface.POINTS // 2
    loss = F.cross_entropy(model(x[None]), torch.tensor([1]))
    assert float(found.negative_loss[middle, middle]) == pytest.approx(-loss.item(), abs=1e-6)
    along = (found.negative_loss[middle, -1] - found.negative_loss[middle, 0]) / 2e-2
    across = (found.negative_loss[-1, middle] - found.negative_loss[0, middle]) / 2e-2
    assert float(along) == pytest.approx(-found.gradient_norm, rel=1e-2)
    assert abs(float(across)) < 1e-2 * found.gradient_norm
    logits = model(x[None])[0].detach()
    others = max(float(logits[0]), float(logits[2]))
    assert float(found.margin[middle, middle]) == pytest.approx(float(logits[1]) - others, abs=1e-5)


@pytest.mark.parametrize("gradient", [torch.randn(3, 5, 5), torch.zeros(3, 5, 5)])
def test_the_two_directions_are_orthonormal(gradient: Tensor):
    source = draws.PerSample(draws.keys(1, torch.arange(1)))
    along, across = surface.directions(gradient.double(), source)
    flat = torch.stack([along.flatten(), across.flatten()])
    torch.testing.assert_close(flat @ flat.T, torch.eye(2, dtype=torch.float64))
    if gradient.any():
        same = F.cosine_similarity(along.flatten(), gradient.double().flatten(), dim=0)
        assert float(same) == pytest.approx(1.0)


# The subject


def test_samples_are_the_same_for_every_run_and_smaller_ones_lie_in_larger(run, digits):
    few = Subject(run, digits, settings=Settings(samples=30)).test_sample()
    more = Subject(run, digits, settings=Settings(samples=200)).test_sample()
    assert len(few) == 30
    assert set(few.tolist()) < set(more.tolist())
    assert few.tolist() == sorted(few.tolist())
    other = Subject(run, digits, settings=Settings(samples=30, seed=1)).test_sample()
    assert set(other.tolist()) != set(few.tolist())


def test_centroids_are_the_class_means_of_training_features(run, digits):
    subject = Subject(run, digits)
    x = digits.train.images.float() / 255
    with torch.no_grad():
        features = run.model().features(x)
    expected = torch.stack([features[digits.train.labels == c].mean(0) for c in range(10)])
    torch.testing.assert_close(subject.centroids, expected, atol=1e-4, rtol=1e-4)


def test_a_training_noise_gives_gaussian_and_uniform_noise_of_its_level():
    assert noises_of("gaussian:0.06") == ("gaussian:0.06", "uniform:0.06")
    assert noises_of("gaussian:0..0.1") == ("gaussian:0.1", "uniform:0.1")
    assert noises_of("gaussian:40/255+occlusion:1x3") == ("gaussian:40/255", "uniform:40/255")
    assert noises_of("downup:2") == ("downup:2",)
    assert noises_of("identity") == ("gaussian:0.1", "uniform:0.1")


# Whole analyses


def test_counts_are_those_that_evaluate_finds(run, digits):
    found = analyse(run, parts=["counts"], dataset=digits, **SMALL)
    arrays = found.arrays("counts")
    assert arrays is not None
    evaluate(run, ["gaussian:0.2", "uniform:0.2"], draws=3, device="cpu", dataset=digits)
    for spec, counts in zip(arrays["noise"], arrays["counts"], strict=True):
        known = correct(run, str(spec))
        assert known is not None
        np.testing.assert_array_equal(counts, known[:, arrays["index"]].sum(0))


def test_curvature_is_in_normalised_coordinates_and_independent_of_the_sample_size(run, digits):
    from noiseproof.curvature import finite_difference

    few = analyse(run, parts=["curvature"], dataset=digits, **SMALL).arrays("curvature")
    more = analyse(run, parts=["curvature"], dataset=digits, **{**SMALL, "samples": 80})
    assert "normalised" in more.rows("curvature")[0]["space"]
    arrays = more.arrays("curvature")
    assert few is not None
    assert arrays is not None
    kept = np.isin(arrays["index"], few["index"])
    np.testing.assert_allclose(
        arrays["finite_difference"][kept], few["finite_difference"], rtol=1e-3, atol=1e-9
    )
    index = torch.from_numpy(few["index"])
    source = Subject(run, digits).source(curvature._CURVATURE, index)
    pixels, labels = digits.test.images[index].float() / 255, digits.test.labels[index]
    scale = torch.tensor(digits.std).view(-1, 1, 1)
    expected = finite_difference(
        run.model(), pixels, labels, probes=2, step=1e-2, scale=scale, generator=source
    )
    np.testing.assert_allclose(few["finite_difference"], expected, rtol=1e-3, atol=1e-9)


def test_every_part_is_written_as_strict_json_and_arrays(whole):
    found = read(whole)
    assert found is not None
    assert found.parts == list(ALL)
    text = (whole.path / "analysis" / "analysis.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for part in ALL:
        assert (whole.path / "analysis" / f"{part}.npz").is_file()
        made = content["parts"][part]
        assert made["settings"]["seed"] == 0
        assert made["rows"]
        assert all(row["part"] == part and "value" in row for row in made["rows"])


def test_a_second_analysis_computes_nothing(whole, digits, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a part was computed again")

    for name, part in verb.PARTS.items():
        monkeypatch.setitem(verb.PARTS, name, part._replace(measure=refuse))
    before = (whole.path / "analysis" / "analysis.json").read_bytes()
    analyse(whole, stages=True, dataset=digits, **SMALL)
    assert (whole.path / "analysis" / "analysis.json").read_bytes() == before


def test_only_what_a_changed_setting_touches_is_computed_again(run, digits, monkeypatch):
    computed: list[str] = []
    for name, part in verb.PARTS.items():

        def counted(subject, progress, name=name, part=part):
            computed.append(name)
            return part.measure(subject, progress)

        monkeypatch.setitem(verb.PARTS, name, part._replace(measure=counted))
    parts = ["curvature", "counts", "surface", "separation"]
    analyse(run, parts=parts, dataset=digits, **SMALL)
    assert computed == parts
    analyse(run, parts=parts, dataset=digits, **{**SMALL, "draws": 2})
    assert computed[4:] == ["counts"]
    (run.path / "analysis" / "surface.npz").write_bytes(b"half a file")
    analyse(run, parts=parts, dataset=digits, **{**SMALL, "draws": 2})
    assert computed[5:] == ["surface"]
    state = run.model().state_dict()
    run.save_weights("last", {key: value * 1.01 for key, value in state.items()})
    assert read(run) is None
    analyse(run, parts=["surface"], dataset=digits, **SMALL)
    assert computed[6:] == ["surface"]


@pytest.mark.parametrize("damage", [b"half a file", None])
def test_damaged_arrays_are_an_error_that_names_the_file_and_the_command(run, digits, damage):
    options: dict[str, Any] = {**SMALL, "parts": ["surface"], "dataset": digits}
    analysis = analyse(run, **options)
    path = run.path / "analysis" / "surface.npz"
    whole = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(ValueError, match="is missing or damaged") as failure:
        analysis.arrays("surface")
    command = f"`noiseproof analyse {run.path} --parts surface --samples 60 --weights last`"
    assert str(path) in str(failure.value)
    assert str(failure.value).endswith(command)
    assert analysis.arrays("theory") is None  # never measured
    analyse(run, **options)
    assert path.read_bytes() == whole


def test_parts_agree_with_the_functions_they_stand_for(whole, digits):
    found = read(whole)
    assert found is not None
    geometry = found.arrays("geometry")
    assert geometry is not None
    index = torch.from_numpy(geometry["index"])
    with torch.no_grad():
        model = whole.model()
        q, y = model.features(digits.test.images[index].float() / 255), digits.test.labels[index]
        centroids = torch.from_numpy(geometry["centroids"])
        own = torch.linalg.vector_norm(q - centroids[y], dim=1)
        np.testing.assert_allclose(geometry["clean.centroid"], own, rtol=1e-3)
        hidden = theory.invisible_variance(q, y, model.head)
    metric = "share of within-class variance that softmax cannot see"
    assert found.value("geometry", metric, data="clean") == pytest.approx(hidden.share, rel=1e-3)
    inside = float((own <= 0.5).double().mean())
    assert found.value("geometry", "share inside the sphere", data="clean") == pytest.approx(inside)
    accuracy = features.knn_accuracy(q, y, features.NEIGHBOURS)
    facts = {"stage": "features", "data": "clean"}
    assert found.value("separation", "k-NN accuracy", **facts) == pytest.approx(accuracy)


def test_the_theory_part_has_a_row_and_a_sentence_for_every_statement(whole):
    found = read(whole)
    assert found is not None
    rows = found.rows("theory")
    metrics = {row["metric"] for row in rows}
    assert metrics == {
        "upper bound on curvature",
        "sharper upper bound on curvature",
        "lower bound on 2Λ + (tr H)²",
        "lower bound on 2Λ + (Σ|λ|)²",
        "feature stability",
        "loss stability",
        "class margin",
        "class dispersion",
        "class separation",
        "margin gradient with momentum / without",
        "scaling of features",
        "directions that softmax cannot see",
        "leaving the sphere, Rademacher bound",
        "leaving the sphere, held-out limit",
        "divergence of two classes, in nats",
    }
    assert all(row["sentence"].endswith(".") for row in rows)
    for always in ("class margin", "class dispersion", "class separation", "scaling of features"):
        assert found.rows("theory", always)[0]["holds"] == 1.0
    bounds = found.arrays("theory")
    assert bounds is not None
    (upper,) = found.rows("theory", "upper bound on curvature")
    assert upper["holds"] == pytest.approx(
        (bounds["curvature.curvature"] <= bounds["curvature.upper"]).mean()
    )
    assert upper["paper"] == "theorem 6.1, part 1"


def test_shares_of_a_bound_are_of_the_samples_for_which_it_is_informative(whole):
    found = read(whole)
    assert found is not None
    bounds = found.arrays("theory")
    assert bounds is not None
    for name, left in (("tr H", "lower_left"), ("Σ|λ|", "lower_left_paper")):
        (lower,) = found.rows("theory", f"lower bound on 2Λ + ({name})²")
        right = bounds["curvature.lower_right"]
        informative = right > 0
        held = informative & (bounds[f"curvature.{left}"] >= right)
        assert lower["informative"] == informative.sum()
        assert lower["held"] == held.sum()
        assert lower["cases"] == len(right) > lower["informative"]
        expected = "holds" if held.sum() == informative.sum() else "violated"
        assert lower["verdict"] == (expected if informative.any() else "vacuous")


def test_only_statements_that_can_fail_are_called_checks(whole):
    found = read(whole)
    assert found is not None
    rows = [row for row in found.rows("theory") if "verdict" in row]
    checks = {row["metric"] for row in rows if row["checked"]}
    assert checks == {
        "upper bound on curvature",
        "sharper upper bound on curvature",
        "lower bound on 2Λ + (tr H)²",
        "lower bound on 2Λ + (Σ|λ|)²",
    }
    # An estimate that is capped below ln 2 cannot be held against a bound on the divergence.
    divergences = found.rows("theory", "divergence of two classes, in nats")
    assert all(row["holds"] is None for row in divergences)
    assert all(row["verdict"] in (None, "vacuous") for row in divergences)


def test_an_analysis_without_verdicts_is_measured_again(whole, digits, tmp_path, monkeypatch):
    run = RunFolder.open(shutil.copytree(whole.path, tmp_path / "old"))
    path = run.path / "analysis" / "analysis.json"
    content = json.loads(path.read_text())
    del content["crc32"], content["parts"]["theory"]["settings"]["edition"]
    for row in content["parts"]["theory"]["rows"]:
        row.pop("verdict", None)
    path.write_text(json.dumps(content))
    measured = Measured({}, [{"metric": "class margin", "value": 1.0, "verdict": "holds"}])
    part = verb.PARTS["theory"]._replace(measure=lambda *_: measured)
    monkeypatch.setitem(verb.PARTS, "theory", part)
    again = analyse(run, parts=["theory", "geometry"], dataset=digits, **SMALL)
    assert [row["verdict"] for row in again.rows("theory")] == ["holds"]
    before = content["parts"]["geometry"]["finished"]
    assert again.content["parts"]["geometry"]["finished"] == before


def test_the_limits_of_the_best_and_the_worst_class_hold_together_in_95_of_100_cases(monkeypatch):
    """Ten classes, 60 samples each, of which 30 % are expected outside the sphere."""
    limit = functools.cache(generalisation.upper_limit)
    monkeypatch.setattr(generalisation, "upper_limit", limit)
    make = torch.Generator().manual_seed(0)
    labels, share, wrong = torch.arange(600) % 10, 0.3, 0
    inside = Features({"features": torch.full((600, 1), 0.1)}, labels, labels)
    for _ in range(200):
        outside = (torch.rand(600, 1, generator=make) < share).float()
        sample = Features({"features": outside}, labels, labels)
        subject: Any = SimpleNamespace(
            radius=0.5,
            centroids=torch.zeros(10, 1),
            train_features=inside,
            features=lambda view, sample=sample: sample,
            facts=lambda view: {"data": view},
        )
        row = next(r for r in theory_part._spheres(subject) if "held-out" in r["metric"])
        stated = re.search(
            r"most ([\d.]+) % of the worst class and ([\d.]+) % of the best", row["sentence"]
        )
        assert stated
        wrong += min(float(stated[1]), float(stated[2])) < 100 * share
    assert wrong / 200 < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_the_table_shows_what_was_measured(run, capsys):
    (found,) = analyse_runs([run.path], parts=("abstention",), samples=100, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    heads = next(i for i, line in enumerate(lines) if line.split() == ["AUROC", "by"] * 2)
    assert lines[heads + 1].split() == ["run", "softmax", "centroid", "seconds"]
    metric = "AUROC of right against wrong answers"
    for cell, score in zip(
        lines[heads + 2].split()[1:4:2], ("probability", "centroid"), strict=True
    ):
        value = found.value("abstention", metric, score=score, data="clean")
        assert value is not None
        assert cell == f"{100 * value:.1f}"


def test_stages_are_embedded_for_one_normal_and_one_discriminative_run(
    tmp_path, made, capsys, monkeypatch
):
    monkeypatch.setattr(features, "embed_together", lambda a, b, seed: (a[:, :2], b[:, :2], 0.0))
    paths = []
    for i, method in enumerate(("normal", "both", "discriminative", "discriminative")):
        path = shutil.copytree(made, tmp_path / f"{method}{i}")
        copy = RunFolder.open(path)
        copy.config = dataclasses.replace(copy.config, method=Method(method=method))
        copy.save_config()
        paths.append(path)
    monkeypatch.setattr("noiseproof.lab.analysis.analyse.terminal", lambda: Console(width=40))
    done = analyse_runs(paths, parts=["embedding"], **SMALL)
    asked = [found.settings("embedding")["stages"] for found in done]
    assert asked == [True, False, True, False]
    printed = capsys.readouterr().out.replace("\n", "")
    assert all(path.name in printed for path in paths)
    assert "…" not in printed  # names and numbers are wrapped, not cut


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ["curvatures"]}, "unknown part 'curvatures'"),
        ({"probes": 0}, "probes must be at least 1, got 0"),
        ({"samples": 1}, "samples must be at least 2, got 1"),
        ({"seed": -1}, "seed must be at least 0 and below"),
        ({"step": 1e-9}, "step must be from 1e-5 to 10, got 1e-09"),
        ({"noise": ()}, "at least one perturbation"),
        ({"noise": ["downup:9"]}, "larger than an image of 8 x 8"),
        ({"weights": "best"}, "has no best weights"),
    ],
)
def test_wrong_settings_are_refused_with_a_reason(run, digits, options, message):
    (run.path / "best.safetensors").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        analyse(run, dataset=digits, **{**SMALL, **options})
    assert not (run.path / "analysis").exists()


def test_other_test_images_and_newer_analyses_are_refused(run, digits):
    other = dataclasses.replace(digits, fingerprint="0" * 16)
    with pytest.raises(ValueError, match="are not those of run"):
        analyse(run, parts=["surface"], dataset=other, **SMALL)
    analyse(run, parts=["surface"], dataset=digits, **SMALL)
    path = run.path / "analysis" / "analysis.json"
    content = without_checksum(json.loads(path.read_text()))
    path.write_text(json.dumps({**content, "schema": 99}))
    with pytest.raises(ValueError, match="newer noiseproof"):
        read(run)


# Models without a second derivative


def test_hard_activations_are_replaced_by_the_same_function_with_two_derivatives():
    from noiseproof.curvature import exact, hessian_probe

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Hardsigmoid(), nn.Linear(6, 2), nn.Hardswish())
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    with pytest.raises(RuntimeError) as failure:
        hessian_probe(model, x, y, probes=1)
    assert lacks_second_derivative(failure.value)
    same = twice_differentiable(model)
    torch.testing.assert_close(same(x), model(x))
    assert isinstance(model[1], nn.Hardsigmoid)  # the model itself stays as it was
    assert bool((exact(same, x, y) > 0).any())
    assert twice_differentiable(same) is same


def test_a_model_that_cannot_be_differentiated_twice_is_analysed_as_far_as_it_goes(
    run, digits, monkeypatch
):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("derivative for aten::op is not implemented")

    monkeypatch.setattr(curvature.estimates, "hessian_probe", refuse)
    monkeypatch.setattr(theory, "bound_curvature", refuse)
    found = analyse(run, parts=["counts", "steps", "theory"], dataset=digits, **SMALL)
    arrays = found.arrays("curvature")
    assert arrays is not None
    assert np.isfinite(arrays["finite_difference"]).all()
    assert np.isnan(arrays["hessian"]).all()
    assert found.value("curvature", "median curvature", estimate="hessian") is None
    (upper,) = found.rows("theory", "upper bound on curvature")
    assert upper["value"] is None
    assert "no second derivative" in upper["sentence"]


# What a comparison analyses


def test_a_comparison_analyses_small_images_whole_and_fewer_of_larger_ones():
    few = tuple(part for part in ALL if part not in verb.COSTLY)
    for size, samples, parts in (
        ((1, 8, 8), 2000, ALL),
        ((3, 32, 32), 2000, ALL),
        ((3, 96, 96), 100, few),
        ((3, 224, 224), 30, few),
        ((3, 400, 500), 30, few),
    ):
        assert verb.comparison_scope(size) == (samples, parts)


def test_a_line_names_what_is_left_out_and_there_is_none_where_nothing_is():
    assert verb.comparison_scope((1, 8, 8)).omission(540) is None
    line = verb.comparison_scope((3, 96, 96)).omission(1478)
    assert line == (
        "Analysis: 100 of 1,478 test images, without steps, surface, theory, to save time. "
        "`noiseproof analyse RUN…` measures all parts on all images."
    )
    assert verb.comparison_scope((3, 96, 96)).describe(24).startswith("24 of 24 test images")


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_names_its_stages_and_what_it_leaves_out(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    for threshold in ("SMALL", "MEDIUM"):  # analyse the digits as if they were photographs
        monkeypatch.setattr(verb, threshold, 0)
    config = small_digits(tmp_path, epochs=1, device="cpu", name=None)
    folder = tmp_path / "compare-digits"
    folder.mkdir()
    (folder / "analysed.json").write_text('{"samples": 20}')  # of an older version: ignored
    assert compare(config, Comparison(("normal", "both"), 1, 1, draws=2)) == 0
    out, err = capfd.readouterr()
    scope = "30 of 540 test images, without steps, surface, theory"
    assert " ".join(out.split()).count(f"Analysis: {scope}, to save time.") == 1
    for name in ("normal-s0", "both-s0"):
        lines = [line for line in err.splitlines() if line.startswith(f"{name}: ")]
        stages = [line.split()[1].rstrip(",") for line in lines]
        assert stages == ["training", "1,131", "epoch", "evaluating", "analysing"]
        assert scope in lines[-1]
        analysis = read(RunFolder.open(folder / name))
        assert analysis is not None
        assert set(analysis.parts) == set(ALL) - set(verb.COSTLY)
        assert analysis.settings("curvature")["samples"] == 30
    assert (folder / "report.html").is_file()
    facts = json.loads((folder / "comparison.json").read_text())
    assert facts["analysis"] == {"samples": 30, "parts": [p for p in ALL if p not in verb.COSTLY]}


def test_the_radius_and_margin_of_spheres_are_shares_of_the_features_norm(
    run: RunFolder, digits: Dataset
) -> None:
    method, subject = run.config.method, Subject(run, digits)
    assert (subject.radius, subject.margin) == (method.radius, method.margin)
    run.config = replace(run.config, method=replace(method, method="spheres"))
    features = subject.train_features.penultimate
    norm = float(torch.stack([row @ row for row in features]).mean().sqrt())
    assert subject.radius == pytest.approx(0.2 * norm, rel=1e-4)
    assert subject.margin == pytest.approx(0.5 * norm, rel=1e-4)
