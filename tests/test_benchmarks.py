"""The benchmarks: the literal step computes what noiseproof does, and reports are consistent."""

from __future__ import annotations

import copy
import json
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import corruptions, evaluate, kernels, literal, scaling, timing, train
from noiseproof import draws
from noiseproof.lab.config import PAPER_METHODS, Config, Model, from_dict
from noiseproof.lab.data.splits import Split
from noiseproof.lab.models.classifier import build_classifier
from noiseproof.lab.training.session import make_objective
from noiseproof.objectives import Batch

CLASSES, SIZE = 4, (1, 8, 8)
ROOT = Path(__file__).resolve().parents[1]


def batch_of(labels: list[int], seed: int, second: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images, other = torch.rand(2, len(labels), *SIZE, generator=generator)
    source = draws.PerSample(draws.keys(seed, torch.arange(len(labels))))
    return Batch(images, torch.tensor(labels), other if second else None, source)


@pytest.mark.parametrize("views", ["paired", "independent"])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_the_literal_step_has_the_loss_and_gradients_of_the_objective(method, views):
    # Some features are inside this radius and some outside: every term has a gradient.
    config = from_dict({"method": method, "views": views, "radius": 0.1, "feature_dim": 6})
    torch.manual_seed(0)
    ours = build_classifier(config.model, num_classes=CLASSES, size=SIZE, mean=[0.5], std=[0.3])
    theirs = copy.deepcopy(ours)
    objective = make_objective(config, CLASSES, 1)
    criterion = literal.LiteralLoss(config.method, CLASSES)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (ours, theirs)]
    # A class appears late, one disappears and returns: running centroids differ from current ones.
    for seed, labels in enumerate([[0, 0, 1, 1, 2, 2], [0, 1, 1, 3, 3, 3], [2, 2, 0, 3, 1, 0]]):
        batch = batch_of(labels, seed, objective.needs_second)
        noisy = batch.images if method == "normal" else objective.noised(batch)
        outcome = objective(ours, batch)
        loss, logits = literal.literal_loss(
            theirs, criterion, batch.labels, batch.images, noisy, half=False
        )
        outcome.loss.backward()
        loss.backward()
        assert all(term > 0 for term in outcome.terms.values())
        torch.testing.assert_close(loss, outcome.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, outcome.logits, rtol=1e-4, atol=1e-5)
        for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, plain in zip(ours.buffers(), theirs.buffers(), strict=True):  # batch-norm's
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


def literal_images(**changes: Any) -> literal.LiteralImages:
    pixels = torch.randint(1, 256, (3, *SIZE), generator=torch.Generator().manual_seed(0))
    split = Split(pixels.to(torch.uint8), None, torch.tensor([2, 0, 1]))
    return literal.LiteralImages(split, from_dict(changes, Config()))


def test_the_literal_views_are_padded_crops_and_flips_of_their_image():
    images = literal_images(augment="crop-flip", noise="gaussian:0", views="independent")
    torch.manual_seed(0)
    padded = F.pad(images.images[1] / 255, (1, 1, 1, 1))
    crops = [padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    allowed = crops + [crop.flip(2) for crop in crops]
    seen = []
    for _ in range(20):
        label, clean, noisy = images[1]
        assert label == 0
        for view in (clean, noisy):
            matches = [k for k, crop in enumerate(allowed) if torch.allclose(crop, view)]
            assert len(matches) == 1
            seen += matches
    assert seen[::2] != seen[1::2]  # the two views are drawn apart
    assert len(set(seen)) > 9  # and vary


def test_the_literal_noise_is_added_to_the_clean_view_if_views_are_paired():
    images = literal_images(augment="crop", noise="gaussian:0.001", views="paired")
    torch.manual_seed(0)
    _, clean, noisy = images[0]
    unclamped = (clean > 0.01) & (clean < 0.99)
    spread = (noisy - clean)[unclamped].std().item()
    assert 0.0007 < spread < 0.0013


@pytest.mark.parametrize(("method", "views"), [("normal", 1), ("noisy", 1), ("both", 2)])
def test_the_literal_step_has_no_view_that_its_method_does_not_need(method, views):
    label, *images = literal_images(method=method)[0]
    assert label == 2
    assert len(images) == views


def test_a_process_that_fails_is_named_after_its_own_traceback(capfd):
    assert timing.in_new_process("sending", Connection.send, 5) == 5
    with pytest.raises(SystemExit, match=r"^normal, seed 3: the process ended with exit code 1, "):
        timing.in_new_process("normal, seed 3", json.loads)  # which refuses a pipe
    assert capfd.readouterr().err.count("Traceback") == 1


def test_timing_excludes_the_first_block(monkeypatch):
    clock = SimpleNamespace(now=0.0, costs=iter([50.0, 4.0, 8.0]))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)

    def run(steps: int) -> None:
        clock.now += next(clock.costs) * steps / 1e3

    assert timing.timed(run, 10, 2, torch.device("cpu")) == pytest.approx([4.0, 8.0])


def test_steps_continue_from_epoch_to_epoch_in_strides():
    calls: list[Any] = []
    meter = SimpleNamespace(sums=torch.zeros(1), reset=lambda: calls.append("reset"))
    engine = SimpleNamespace(run=lambda *place: calls.append(place), meter=meter)
    fake: Any = SimpleNamespace(engine=engine, loader=SimpleNamespace(steps=70), epoch=0, step=0)
    run = timing.step_runner(fake)
    run(60)
    run(15)
    assert calls == [(0, 0, 50), (0, 50, 60), (0, 60, 70), "reset", (1, 0, 5)]


def layers_gflop(batch: int, size: int, dim: int, classes: int) -> float:
    """Multiplications and additions of small_cnn's layers, forward and backward."""
    total, half = 0, -(-size // 2)
    plan = [(3, 16, size), (16, 32, half), (32, 32, half), (32, 32, half)]
    for k, (inside, out, side) in enumerate(plan):
        passes = 2 if k == 0 else 3  # the images need no gradient
        total += passes * 2 * batch * inside * out * 9 * side**2
    total += 3 * 2 * batch * (32 * dim + dim * classes)
    return total / 1e9


def test_augmentations_are_timed_against_the_first(tmp_path, capsys):
    file = tmp_path / "train.json"
    train.main(
        "--device cpu --methods both --batch 8 --steps 1 --blocks 1 --size 8 --images 60 --epochs 0"
        f" --augment crop crop-flip+trivial+cutmix --json {file}".split()
    )
    plain, strong = json.loads(file.read_text())["rows"]
    assert (plain["augment"], strong["augment"]) == ("crop", "crop-flip+trivial+cutmix")
    assert "augment_ratio" not in plain
    assert strong["augment_ratio"] == pytest.approx(strong["ms"] / plain["ms"])
    assert f"cutmix: {strong['augment_ratio']:.3f} times the first" in capsys.readouterr().out
    assert "literal" in plain  # torchvision's transforms in a DataLoader
    assert "literal" not in strong


def test_the_training_benchmark_writes_a_consistent_report(tmp_path):
    file = tmp_path / "train.json"
    train.main(
        "--device cpu --methods normal discriminative --engines eager graph --batch 8 --steps 1"
        f" --blocks 1 --size 8 --images 60 --epochs 1 --json {file}".split()
    )
    text = file.read_text()
    report = json.loads(text)
    assert {"torch", "device", "commit", "python", "platform"} <= report["environment"].keys()
    assert report["matrix"]["dtype"] == "float32"
    notes = [(row["method"], row["note"] is not None) for row in report["rows"]]
    assert notes == [(m, n) for m in ("normal", "discriminative") for n in (False, True)]
    for row in report["rows"]:
        assert (row["batch"], row["engine"]) == (8, "eager")
        assert row["images_per_second"] == pytest.approx(8000 / row["ms"])
        views = 2 if row["method"] == "discriminative" else 1
        assert row["views_per_second"] == pytest.approx(views * row["images_per_second"])
        assert row["ratio"] == pytest.approx(row["literal"]["ms"] / row["ms"])
        rate = row["gflop"] / row["ms"]  # in TFLOP per second
        assert row["matrix_share"] == pytest.approx(rate / report["matrix"]["tflops"])
    dim = timing.benchmark_config("some.npz").model.feature_dim
    gflop = {row["method"]: row["gflop"] for row in report["rows"]}
    assert gflop["normal"] == pytest.approx(layers_gflop(8, 8, dim, 10))
    # the loss adds small products of its own, and noisy features have no head
    assert gflop["discriminative"] == pytest.approx(2 * layers_gflop(8, 8, dim, 10), rel=0.05)
    (epoch,) = report["epochs"]
    assert epoch["steps"] == 54 // 8  # a tenth of the 60 images is for validation
    parts = epoch["steps_seconds"] + epoch["checkpoint_seconds"] + epoch["other_seconds"]
    assert parts == pytest.approx(epoch["epoch_seconds"])
    assert 0 < epoch["checkpoint_seconds"] < epoch["epoch_seconds"]
    assert 0 < epoch["training_seconds"] < epoch["epoch_seconds"]
    for place in (str(ROOT), str(tmp_path), str(Path.home()) + "/", "/tmp"):
        assert place not in text


def test_the_scaling_benchmark_varies_one_thing_at_a_time(tmp_path):
    file = tmp_path / "scaling.json"
    scaling.main(
        "--device cpu --classes 3 --batches 4 --features --sizes 6 --ranks --steps 1 --blocks 1"
        f" --json {file}".split()
    )
    report = json.loads(file.read_text())
    points = [
        (r["axis"], r["classes"], r["batch"], r["features"], r["size"]) for r in report["rows"]
    ]
    assert points == [
        ("classes", 3, 64, 128, 8),
        ("batch", 10, 4, 128, 8),
        ("size", 10, 64, 128, 6),
    ]
    for row in report["rows"]:
        assert row["ranks"] == 1
        assert min(row["loss_ms"], row["linear_ms"], row["step_ms"]) > 0
    assert str(tmp_path) not in file.read_text()


@pytest.mark.long
def test_the_scaling_benchmark_shares_a_batch_between_processes(tmp_path):
    file = tmp_path / "scaling.json"
    scaling.main(
        "--device cpu --classes --batches --features --sizes --ranks 1 2 --steps 1 --blocks 1"
        f" --json {file}".split()
    )
    rows = json.loads(file.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["batch"] == 64 and row["step_ms"] > 0 and row["loss_ms"] > 0 for row in rows)


def test_the_evaluation_benchmark_times_the_suite_and_both_curvatures(tmp_path):
    file = tmp_path / "evaluate.json"
    evaluate.main(
        "--device cpu --images 20 --hessian-images 5 --draws 2 --probes 1 --blocks 1 --size 6"
        f" --json {file}".split()
    )
    text = file.read_text()
    report = json.loads(text)
    assert report["settings"]["model"] == "small_cnn"
    rows = report["rows"]
    assert {name: row["images"] for name, row in rows.items()} == {
        "evaluate": 20,
        "finite_difference": 20,
        "hessian_probe": 5,
    }
    assert rows["evaluate"]["passes"] == 1 + 5 * 2
    assert rows["evaluate"]["perturbations"][-1] == "gaussian:20/255"
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["seconds_per_1000_images"] == pytest.approx(row["seconds"] * 1e3 / row["images"])
        assert row["precision"] == "float32"
        assert "peak_memory_mb" not in row
    for place in (str(ROOT), str(tmp_path), "/tmp"):
        assert place not in text


@pytest.mark.long
def test_corruptions_are_timed_alone_and_in_an_evaluation(tmp_path: Path):
    file = tmp_path / "corruptions.json"
    corruptions.main(["--images", "20", "--size", "8", "--blocks", "1", "--device", "cpu",
                      "--json", str(file)])  # fmt: skip
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 15 + 2
    assert rows["all 15"]["images"] == 75 * 20
    assert rows["evaluate"]["images"] == 76 * 20
    assert all(row["seconds"] > 0 for row in rows.values())


def test_random_tests_have_many_test_and_few_training_images(tmp_path):
    with np.load(evaluate.random_tests(tmp_path, 200, 6)) as arrays:
        assert arrays["test_images"].shape == (200, 6, 6, 3)
        assert arrays["train_images"].shape == (20, 6, 6, 3)
        assert set(arrays["train_labels"]) == set(arrays["test_labels"]) == set(range(10))


def test_random_images_have_every_class_in_both_splits(tmp_path):
    path = timing.random_images(tmp_path / "some.npz", 25, 6, classes=20)
    with np.load(path) as arrays:
        assert arrays["train_images"].shape == (25, 6, 6, 3)
        assert arrays["test_images"].shape == (20, 6, 6, 3)
        for split in ("train", "test"):
            assert set(arrays[f"{split}_labels"]) == set(range(20))


def test_the_literal_step_refuses_files():
    split = Split(None, ("a.png",), torch.tensor([0]))
    with pytest.raises(ValueError, match="no files"):
        literal.LiteralImages(split, Config(model=Model()))


def test_kernels_are_summed_by_kind_and_name():
    seen = [("sm90_xmma_fprop", 3.0), ("triton_poi_fused_relu", 1.0), ("sm90_xmma_fprop", 5.0)]
    found = kernels.summed(seen, steps=2)
    assert found["busy_us"] == pytest.approx(4.5)
    assert found["launches"] == pytest.approx(1.5)
    assert [part["name"] for part in found["kinds"]] == ["products", "elementwise"]
    assert found["kernels"][0] == {"name": "sm90_xmma_fprop", "us": 4.0, "launches": 1.0}
    kinds = {
        "multi_tensor_apply_kernel<FusedSgd>": "optimiser",
        "void at::native::reduce_kernel<512>": "reductions",
        "void cutlass__5x_cudnn::Kernel<x>": "products",
        "Memcpy DtoD": "other",
    }
    assert {name: kernels.kind(name) for name in kinds} == kinds


def test_kernels_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        kernels.main([])
