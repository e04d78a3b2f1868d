"""Compiling must not change gradients: the obvious version gives the right loss and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from noiseproof import DiscriminativeLoss


def steps(compiled: bool, backend: str, strategy: Any, classes=5, margin_over: Any = "max"):
    """Five steps with classes that appear late; values, gradients and state after each."""
    torch.manual_seed(0)
    net, head = nn.Linear(6, 4), nn.Linear(4, classes)
    loss = DiscriminativeLoss(classes, 4, margin=2.0, centroids=strategy, margin_over=margin_over)

    def run(x, x_noisy, y):
        return loss(net(x), y, head, net(x_noisy))

    step = torch.compile(run, backend=backend, fullgraph=True) if compiled else run
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    seen = []
    for k in range(5):
        g = torch.Generator().manual_seed(k)
        x, x_noisy = torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)
        y = torch.randint(
            0, min(k + 2, classes), (8,), generator=g
        )  # later steps bring new classes
        value = step(x, x_noisy, y)
        optimizer.zero_grad()
        value.backward()
        grads = [
            p.grad.clone() for p in (*net.parameters(), *head.parameters()) if p.grad is not None
        ]
        seen.append([value.detach().clone(), *grads, loss.centroids.clone(), loss.seen.clone()])
        optimizer.step()
    return seen


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("strategy", ["partial", "naive", "momentum"])
def test_compiled_gradients_and_state_equal_eager_ones(backend, strategy):
    torch._dynamo.reset()
    for k, (a, b) in enumerate(
        zip(steps(True, backend, strategy), steps(False, backend, strategy), strict=True)
    ):
        for got, want in zip(a, b, strict=True):
            assert torch.allclose(got, want, atol=1e-5), k


@pytest.mark.parametrize("options", [dict(classes=12), dict(margin_over="mean")])
def test_more_classes_than_samples_and_the_mean_compile_too(options):
    torch._dynamo.reset()
    for a, b in zip(
        steps(True, "aot_eager", "partial", **options),
        steps(False, "aot_eager", "partial", **options),
        strict=True,
    ):
        for got, want in zip(a, b, strict=True):
            assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_forward_and_backward_can_be_captured_in_a_cuda_graph():
    torch.manual_seed(0)
    head = nn.Linear(4, 5).cuda()
    loss, eager = DiscriminativeLoss(5, 4).cuda(), DiscriminativeLoss(5, 4).cuda()
    x = torch.randn(8, 4, device="cuda", requires_grad=True)
    noisy = torch.randn(8, 4, device="cuda", requires_grad=True)
    y = torch.randint(0, 5, (8,), device="cuda")
    inputs = (x, noisy, *head.parameters())

    def run(criterion):
        return torch.autograd.grad(criterion(x, y, head, noisy), inputs)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run(loss)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(loss)
    loss.centroids.zero_()
    loss.seen.zero_()
    for k in range(4):
        g = torch.Generator().manual_seed(k)
        with torch.no_grad():
            x.copy_(torch.randn(8, 4, generator=g))
            noisy.copy_(torch.randn(8, 4, generator=g))
            y.copy_(torch.randint(0, min(k + 2, 5), (8,), generator=g))
        graph.replay()
        for got, want in zip(captured, run(eager), strict=True):
            assert torch.allclose(got, want, atol=1e-5), k
        assert torch.allclose(loss.centroids, eager.centroids, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_synchronises_with_the_host():
    head = nn.Linear(4, 5).cuda()
    loss = DiscriminativeLoss(5, 4).cuda()
    x = torch.randn(8, 4, device="cuda", requires_grad=True)
    y = torch.randint(0, 5, (8,), device="cuda")
    loss(x, y, head, x).backward()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(x, y, head, x).backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
