"""The loss against literal loops over the paper's sums, in every mode, precision and edge case."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from noiseproof import DiscriminativeLoss, geometry
from tests.reference import ReferenceLoss


def problem(seed, classes, dim, batch, *, bias=True, dtype=torch.float64, only=None):
    """Random features, noisy features, labels and a head; `only` restricts the classes drawn."""
    g = torch.Generator().manual_seed(seed)
    head = nn.Linear(dim, classes, bias=bias, dtype=dtype)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=dtype))
    features = (2 * torch.randn(batch, dim, generator=g, dtype=dtype)).requires_grad_()
    noisy = (2 * torch.randn(batch, dim, generator=g, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, only or classes, (batch,), generator=g)
    return features, noisy, labels, head


def gradients(value, *tensors):
    grads = torch.autograd.grad(value, tensors, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)]


SHAPES = [
    # classes, dim, batch, classes drawn
    (2, 3, 5, 2),
    (3, 2, 8, 3),
    (5, 4, 6, 2),  # absent classes
    (4, 3, 7, 1),  # one class alone
    (12, 5, 4, 12),  # more classes than samples
    (7, 1, 1, 7),  # one sample
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", ["partial", "naive", "momentum"])
@pytest.mark.parametrize("margin_over", ["max", "mean"])
@pytest.mark.parametrize("bias", [True, False])
def test_each_term_and_gradient_equals_the_literal_sums_over_several_steps(
    shape, strategy, margin_over, bias
):
    classes, dim, batch, only = shape
    options: dict[str, Any] = dict(radius=0.3, margin=1.5, momentum=0.8)
    loss = DiscriminativeLoss(
        classes, dim, **options, centroids=strategy, margin_over=margin_over
    ).double()
    slow = ReferenceLoss(classes, **options, centroids=strategy, margin_over=margin_over)
    for step in range(4):
        x, noisy, y, head = problem(100 * classes + step, classes, dim, batch, bias=bias, only=only)
        inputs = (x, noisy, *head.parameters())
        fast = loss.terms(x, y, head, noisy)
        total, returned = loss(x, y, head, noisy, return_terms=True)
        reference = slow.step(x, y, head, noisy)
        for name, a, b, r in zip(fast._fields, fast, reference, returned, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-6), (name, step)
            assert torch.equal(a, r)
            if b.requires_grad:
                for got, want in zip(gradients(a, *inputs), gradients(b, *inputs), strict=True):
                    assert torch.allclose(got, want, atol=1e-6, rtol=1e-6), (name, step)
        weights = (1.0, 1.0, 1e-3, 1.0)
        expected = sum(w * t for w, t in zip(weights, reference, strict=True))
        assert torch.allclose(total, torch.as_tensor(expected), atol=1e-6)


@pytest.mark.parametrize("margin_over", ["max", "mean"])
@pytest.mark.parametrize("compact_hinge", ["squared", "plain"])
@pytest.mark.parametrize("margin_hinge", ["plain", "squared"])
def test_squared_and_plain_hinges_equal_the_literal_sums(margin_over, compact_hinge, margin_hinge):
    options: dict[str, Any] = dict(radius=0.3, margin=1.5, margin_over=margin_over)
    options |= dict(compact_hinge=compact_hinge, margin_hinge=margin_hinge)
    loss, slow = DiscriminativeLoss(3, 2, **options).double(), ReferenceLoss(3, **options)
    for step in range(2):
        x, noisy, y, head = problem(step, 3, 2, 8, bias=True, only=3)
        _, fast = loss(x, y, head, noisy, return_terms=True)
        for a, b in zip(fast, slow.step(x, y, head, noisy), strict=True):
            torch.testing.assert_close(a, b)
            for got, want in zip(
                gradients(a, x, noisy, *head.parameters()),
                gradients(b, x, noisy, *head.parameters()),
                strict=True,
            ):
                torch.testing.assert_close(got, want)
    assert f"compact_hinge={compact_hinge!r}, margin_hinge={margin_hinge!r}" in repr(loss)


def test_random_shapes_equal_the_literal_sums():
    g = torch.Generator().manual_seed(0)
    for trial in range(25):
        classes, dim, batch = (
            int(torch.randint(low, high, (), generator=g))
            for low, high in ((2, 9), (1, 6), (1, 12))
        )
        loss = DiscriminativeLoss(classes, dim).double()
        slow = ReferenceLoss(classes)
        for step in range(2):
            x, noisy, y, head = problem(trial * 10 + step, classes, dim, batch)
            fast = loss(x, y, head, noisy)
            compact, margin, norm, aligned = slow.step(x, y, head, noisy)
            want = compact + margin + 1e-3 * norm + aligned
            assert torch.allclose(fast, want, atol=1e-6)
            inputs = (x, noisy, *head.parameters())
            for a, b in zip(gradients(fast, *inputs), gradients(want, *inputs), strict=True):
                assert torch.allclose(a, b, atol=1e-6)


def test_the_search_over_many_classes_equals_the_literal_sums(monkeypatch):
    x, noisy, y, head = problem(3, 200, 16, 25)
    loss = DiscriminativeLoss(200, 16).double()
    exact = loss.terms(x, y, head, noisy)
    monkeypatch.setattr(geometry, "_EXACT_LIMIT", 0)
    monkeypatch.setattr(geometry, "_CHUNK", 200 * 7)  # seven points at a time, and a rest
    searched = loss.terms(x, y, head, noisy)
    slow = ReferenceLoss(200).step(x, y, head, noisy)
    for a, b, c in zip(exact, searched, slow, strict=True):
        assert torch.allclose(a, c, atol=1e-6)
        assert torch.allclose(b, c, atol=1e-6)
    got, want = (gradients(term, x, *head.parameters()) for term in (searched.margin, slow[1]))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_search_survives_nearly_equal_rows_in_float32(monkeypatch):
    monkeypatch.setattr(geometry, "_EXACT_LIMIT", 0)
    x, _, y, head = problem(4, 60, 32, 64, dtype=torch.float32)
    with torch.no_grad():
        for k, gap in enumerate([0.0, 1e-7, 1e-5, 1e-4, 5e-4, 3e-3, 1e-2]):
            head.weight[50 + k] = head.weight[k] + gap * torch.randn(32)
    loss = DiscriminativeLoss(60, 32)
    slow = ReferenceLoss(60).step(x, y, head)
    assert torch.allclose(loss.terms(x, y, head).margin, slow[1], rtol=1e-3)


def test_eval_mode_uses_the_stored_centroids_and_leaves_out_unseen_classes():
    loss, slow = DiscriminativeLoss(5, 3).double(), ReferenceLoss(5)
    x, noisy, y, head = problem(1, 5, 3, 9, only=3)
    loss(x, y, head, noisy)
    slow.step(x, y, head, noisy)
    loss.eval()
    before = copy.deepcopy(loss.state_dict())
    x, noisy, y, head = problem(2, 5, 3, 9)
    for a, b in zip(loss.terms(x, y, head, noisy), slow.frozen(x, y, head, noisy), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    loss(x, y, head, noisy)
    assert all(torch.equal(v, before[k]) for k, v in loss.state_dict().items())


def test_terms_never_update_the_state_and_forward_does():
    loss = DiscriminativeLoss(4, 3)
    x, noisy, y, head = problem(1, 4, 3, 8, dtype=torch.float32)
    loss.terms(x, y, head, noisy)
    assert not loss.seen.any()
    loss(x, y, head, noisy)
    assert loss.seen.sum() == y.unique().numel()
    first = loss.centroids.clone()
    for c in y.unique():
        assert torch.allclose(first[c], x[y == c].mean(0), atol=1e-6)
    loss(2 * x, y, head, noisy)
    assert torch.allclose(loss.centroids, 1.1 * first, atol=1e-5)


def finite(*tensors):
    return all(bool(torch.isfinite(t).all()) for t in tensors)


@pytest.mark.parametrize(
    "case", ["at the centroid", "zero", "equal rows", "nearly equal rows", "zero head", "empty"]
)
def test_degenerate_inputs_give_finite_values_and_gradients(case):
    x, noisy, y, head = problem(7, 4, 3, 8, dtype=torch.float32)
    with torch.no_grad():
        if case == "at the centroid":
            x.copy_(torch.eye(4, 3)[y])
            noisy.copy_(x)
        elif case == "zero":
            x.zero_()
            noisy.zero_()
        elif case == "equal rows":
            head.weight[1:] = head.weight[0]
        elif case == "nearly equal rows":
            head.weight[1] = head.weight[0] * (1 + 1e-6)
            head.bias[1] = head.bias[0] + 1
        elif case == "zero head":
            head.weight.zero_()
    if case == "empty":
        x, noisy, y = x[:0].detach().requires_grad_(), noisy[:0].detach().requires_grad_(), y[:0]
    loss = DiscriminativeLoss(4, 3)
    for _ in range(3):
        total = loss(x, y, head, noisy)
        grads = gradients(total, x, noisy, *head.parameters())
        assert finite(total, *grads, loss.centroids)
        assert total < 1e3
        assert all(g.abs().max() < 1e3 for g in grads if g.numel())


def test_a_pair_of_nearly_equal_rows_is_left_out():
    x, _, y, head = problem(8, 3, 4, 6)
    with torch.no_grad():
        head.weight[1] = head.weight[0] * (1 + 5e-4)
        head.bias[1] = head.bias[0] + 100.0  # would dominate if the pair counted
    margin = DiscriminativeLoss(3, 4).double().terms(x, y, head).margin
    assert torch.allclose(margin, ReferenceLoss(3).step(x, y, head)[1], atol=1e-6)
    assert margin < 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_of_large_norm_are_computed_in_float32(dtype):
    x, noisy, y, head = problem(9, 4, 64, 16, dtype=torch.float32)
    scale = 1000.0
    half = (x.detach() * scale).to(dtype).requires_grad_()
    half_noisy = (noisy.detach() * scale).to(dtype).requires_grad_()
    loss = DiscriminativeLoss(4, 64)
    total = loss(half, y, head, half_noisy)
    wide = DiscriminativeLoss(4, 64)(half.detach().float(), y, head, half_noisy.detach().float())
    assert total.dtype == torch.float32
    assert torch.allclose(total, wide)
    assert finite(*gradients(total * 1e-3, half, half_noisy, *head.parameters()))


def test_autocast_does_not_lower_the_precision():
    x, noisy, y, head = problem(10, 4, 8, 16, dtype=torch.float32)
    plain = DiscriminativeLoss(4, 8)(x, y, head, noisy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = DiscriminativeLoss(4, 8)(x, y, head, noisy)
    assert torch.equal(plain, cast)


def test_casting_the_module_to_half_keeps_the_centroids_in_float32():
    loss = DiscriminativeLoss(3, 2)
    assert loss.half().centroids.dtype == torch.float32
    assert loss.to(torch.bfloat16).centroids.dtype == torch.float32
    assert loss.double().centroids.dtype == torch.float64


def test_state_survives_state_dict_and_deepcopy():
    x, noisy, y, head = problem(11, 4, 3, 8, dtype=torch.float32)
    loss = DiscriminativeLoss(4, 3)
    loss(x, y, head, noisy)
    assert set(loss.state_dict()) == {"centroids", "seen"}
    loaded = DiscriminativeLoss(4, 3)
    loaded.load_state_dict(loss.state_dict())
    copied = copy.deepcopy(loss)
    want = loss(noisy, y, head, x)
    assert torch.equal(loaded(noisy, y, head, x), want)
    assert torch.equal(copied(noisy, y, head, x), want)


def test_accumulation_equals_consecutive_small_batches_not_the_joint_batch():
    x, noisy, y, head = problem(12, 3, 2, 12)
    loss, slow = DiscriminativeLoss(3, 2).double(), ReferenceLoss(3)
    total, expected = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for part in torch.arange(12).split(4):
        total = total + loss(x[part], y[part], head, noisy[part]) / 3
        terms = slow.step(x[part], y[part], head, noisy[part])
        expected = expected + (terms[0] + terms[1] + 1e-3 * terms[2] + terms[3]) / 3
    assert torch.allclose(total, expected, atol=1e-6)
    for a, b in zip(gradients(total, x, noisy), gradients(expected, x, noisy), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    joint = DiscriminativeLoss(3, 2).double()(x, y, head, noisy)
    assert not torch.allclose(total, joint, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(features=torch.zeros(6)), r"features must be B x D"),
        (dict(features=torch.zeros(6, 3, dtype=torch.int64)), r"features must be B x D"),
        (dict(features=torch.zeros(6, 2)), r"features have 2 values each, but the head takes 3"),
        (dict(labels=torch.zeros(5, dtype=torch.int64)), r"labels must be 6 values"),
        (dict(labels=torch.tensor([0, 1, 2, 3, 4, 0])), r"\[0, 4\), got 4 at index 4"),
        (dict(labels=torch.tensor([0, 1, -1, 3, 2, 0])), r"got -1 at index 2"),
        (dict(head=nn.Linear(5, 4)), r"feature_dim=3, but the head's weight is 4 x 5"),
        (dict(head=nn.Linear(3, 5)), r"num_classes=4 .* weight is 5 x 3"),
        (dict(head=nn.ReLU()), r"head must be a linear layer, got ReLU"),
        (dict(noisy_features=torch.zeros(5, 3)), r"noisy_features must have the shape"),
    ],
)
def test_invalid_inputs_raise_errors_that_name_them(change, message):
    good = dict(
        features=torch.zeros(6, 3), labels=torch.zeros(6, dtype=torch.int64), head=nn.Linear(3, 4)
    )
    with pytest.raises(ValueError, match=message):
        DiscriminativeLoss(4, 3)(**{**good, **change})


@pytest.mark.parametrize(
    "bad",
    [
        dict(num_classes=1),
        dict(feature_dim=0),
        dict(radius=-1.0),
        dict(margin=float("nan")),
        dict(momentum=1.5),
        dict(noisy_weight=-0.1),
        dict(centroids="mean"),
        dict(margin_over="min"),
        dict(compact_hinge="none"),
        dict(margin_hinge="cubed"),
    ],
)
def test_invalid_settings_raise_errors(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        DiscriminativeLoss(**{**dict(num_classes=3, feature_dim=2), **bad})


@pytest.mark.parametrize("classes", [3, 12])  # a slot per class, a slot per sample
def test_a_class_with_a_feature_that_is_not_finite_keeps_its_centroid(classes: int):
    head, loss = nn.Linear(2, classes), DiscriminativeLoss(classes, 2)
    q, y = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 0, 1])
    loss(q, y, head)
    before = loss.centroids.clone()
    q = torch.randn(6, 2)
    q[2, 0], y[5] = torch.nan, 2
    value = loss(q, y, head)
    assert not value.isfinite()  # a gradient scaler has to notice
    assert loss.centroids.isfinite().all()
    assert torch.equal(loss.centroids[1], before[1])
    assert not torch.equal(loss.centroids[0], before[0])
    q[4], y[4] = torch.inf, classes - 1
    loss(q, y, head)
    if classes == 12:
        assert loss.seen[-1] == 0  # never seen with finite features
    loss(torch.randn(6, 2), y, head)
    assert loss.seen[-1] == 1
    assert loss.centroids.isfinite().all()


def test_equal_rows_do_not_crowd_out_other_rivals_of_the_search(monkeypatch):
    """Rounding makes equal rows look as if they had a boundary."""
    torch.manual_seed(29)
    weight, bias = torch.randn(200, 300) + 29, torch.randn(200)
    weight[:30], bias[:30] = weight[0], 10 * torch.linspace(-50, 50, 30)
    points, classes = torch.randn(180, 300), torch.arange(180) % 30
    exact = geometry.hardest_rivals(points, classes, weight, bias)
    monkeypatch.setattr(geometry, "_EXACT_LIMIT", 0)
    searched = geometry.hardest_rivals(points, classes, weight, bias)
    assert searched.exists.all()
    assert torch.equal(searched.rival, exact.rival)


def test_assigning_a_half_precision_state_keeps_the_centroids_in_float32():
    loss = DiscriminativeLoss(3, 2)
    state = {k: v.bfloat16() for k, v in loss.state_dict().items()}
    loss.load_state_dict(state, assign=True)
    assert loss.centroids.dtype == torch.float32


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_with_booleans_from_the_first_edition_loads(assign: bool):
    loss = DiscriminativeLoss(3, 2)
    state = {"centroids": torch.ones(3, 2), "seen": torch.tensor([True, False, True])}
    loss.load_state_dict(state, assign=assign)
    assert loss.seen.tolist() == [1, 0, 1]
    assert loss.seen.dtype == torch.float32


def test_an_averaged_model_averages_the_centroids_too():
    head, loss = nn.Linear(2, 3), DiscriminativeLoss(3, 2)
    averaged = torch.optim.swa_utils.AveragedModel(loss, use_buffers=True)
    for _ in range(2):
        loss(torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 0, 1]), head)
        averaged.update_parameters(loss)
    averaged_loss = averaged.module
    assert isinstance(averaged_loss, DiscriminativeLoss)
    assert (averaged_loss.seen > 0).tolist() == [True, True, False]
    assert averaged_loss.eval()(torch.randn(2, 2), torch.tensor([0, 1]), head).isfinite()


def test_terms_can_be_mapped_over_labels():
    head, loss = nn.Linear(2, 3), DiscriminativeLoss(3, 2)
    loss(torch.randn(6, 2), torch.arange(6) % 3, head)
    loss.eval()
    q, labels = torch.randn(4, 2), torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    mapped = torch.vmap(lambda y: loss.terms(q, y, head).compact)(labels)
    torch.testing.assert_close(
        mapped, torch.stack([loss.terms(q, y, head).compact for y in labels])
    )


def test_gradients_can_be_mapped_over_batches():
    head, loss = nn.Linear(2, 3), DiscriminativeLoss(3, 2)
    q, labels = torch.randn(2, 4, 2), torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    gradient = torch.func.grad(lambda q, y: loss.weighted(loss.terms(q, y, head)))
    mapped = torch.vmap(gradient)(q, labels)
    torch.testing.assert_close(mapped, torch.stack([*map(gradient, q, labels)]))
    with pytest.raises(ValueError, match="got 3 at index 0"):
        gradient(q[0], labels[0] + 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tf32_does_not_touch_the_class_means(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    torch.manual_seed(0)
    q, y = torch.randn(64, 8) + 100, torch.arange(64) % 4
    head, results = nn.Linear(8, 4), []
    for device in ("cpu", "cuda"):
        features, loss = q.to(device).requires_grad_(), DiscriminativeLoss(4, 8).to(device)
        value = loss(features, y.to(device), head.to(device))
        results.append(torch.autograd.grad(value, features)[0].cpu())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
