"""Compiling must not change gradients: a loss that is right can hide gradients that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from noiseproof import DiscriminativeLoss


def five_steps(backend: str | None, classes: int = 5, **options: Any) -> list[list[torch.Tensor]]:
    """Loss, gradients and state after each step; later steps bring classes not seen before."""
    torch.manual_seed(0)
    net, head = nn.Linear(6, 4), nn.Linear(4, classes)
    loss = DiscriminativeLoss(classes, 4, margin=2.0, **options)

    def step(x, x_noisy, y):
        return loss(net(x), y, head, net(x_noisy))

    if backend is not None:
        torch._dynamo.reset()
        step = torch.compile(step, backend=backend, fullgraph=True)
    parameters = [*net.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    results = []
    for k in range(5):
        g = torch.Generator().manual_seed(k)
        x, x_noisy = torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)
        y = torch.randint(0, min(k + 2, classes), (8,), generator=g)
        value = step(x, x_noisy, y)
        optimizer.zero_grad()
        value.backward()
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        results.append([value.detach(), *gradients, loss.centroids.clone(), loss.seen.clone()])
        optimizer.step()
    return results


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("aot_eager", {"centroids": "partial"}),
        ("aot_eager", {"centroids": "naive"}),
        ("aot_eager", {"centroids": "momentum"}),
        ("aot_eager", {"classes": 12}),  # more classes than samples
        ("aot_eager", {"margin_over": "mean"}),
        # Without `centroids.snapshot` both backends give wrong gradients with momentum, and this
        # one takes ten times as long: once is enough.
        ("inductor", {"centroids": "partial"}),
    ],
)
def test_compiled_gradients_and_state_equal_eager_ones(backend: str, options: dict[str, Any]):
    compiled, eager = five_steps(backend, **options), five_steps(None, **options)
    for k, (a, b) in enumerate(zip(compiled, eager, strict=True)):
        for got, want in zip(a, b, strict=True):
            assert torch.allclose(got, want, atol=1e-5), k


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
