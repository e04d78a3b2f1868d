"""Several gloo processes under DDP against one process with the global batch."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from noiseproof import DiscriminativeLoss, centroids, wrap
from noiseproof.objectives import Batch, Spheres
from tests.faults.commands import CONTEXT

DIM = 4
WORLD, PER_RANK = 3, 6
CASES = {
    "partial": (5, {}, 1024),
    "momentum": (5, {"centroids": "momentum"}, 1024),
    "labels gathered": (30, {}, 8),  # more classes than the limit of dense slots
    "spheres": (5, {"spheres": True}, 1024),
    "wrapped": (5, {"wrapped": True}, 1024),
}


class Step(nn.Module):
    """A net, its head and the loss, as one module for DDP."""

    def __init__(self, classes, spheres=False, wrapped=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, DIM)).double()
        self.head = nn.Linear(DIM, classes).double()
        self.loss = DiscriminativeLoss(classes, DIM, margin=2.0, **options).double()
        self.objective = Spheres(self.loss, "identity", views="independent") if spheres else None
        whole = nn.Sequential(nn.Flatten(), self.net, self.head)
        example = torch.zeros(2, 3, 1, 1).double()
        self.wrapped = wrap(whole, [0.0] * 3, [1.0] * 3, example) if wrapped else None

    def features(self, images):
        return self.net(images.flatten(1))

    def forward(self, x, noisy, y):
        if self.objective is not None:
            images, second = (view.sigmoid()[:, :, None, None] for view in (x, noisy))
            return self.objective(self, Batch(images, y, second=second)).loss
        if self.wrapped is not None:
            clean, noisy = (self.wrapped.features(v[:, :, None, None]) for v in (x, noisy))
            return self.loss(clean, y, self.wrapped.head, noisy)
        return self.loss(self.net(x), y, self.head, self.net(noisy))


def global_batches(classes: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Three batches; rank 0 never sees the last class, the other ranks never the first."""
    batches = []
    for k in range(3):
        g = torch.Generator().manual_seed(k)
        x = torch.randn(WORLD * PER_RANK, 3, generator=g, dtype=torch.float64)
        noisy = x + 0.1 * torch.randn(x.shape, generator=g, dtype=torch.float64)
        y = torch.randint(1, classes, (WORLD * PER_RANK,), generator=g)
        y[:PER_RANK] = torch.randint(0, classes - 1, (PER_RANK,), generator=g)
        batches.append((x, noisy, y))
    return batches


def train(step, module, data, world):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    out = []
    for x, noisy, y in data:
        optimizer.zero_grad()
        value = step(x, noisy, y)
        value.backward()
        value = value.detach().clone()
        if world > 1:
            dist.all_reduce(value)
        grads = [p.grad.clone() for p in module.parameters()]
        out.append((value / world, grads, module.loss.centroids.clone(), module.loss.seen.clone()))
        optimizer.step()
    return out


def start_ranks(port: int, path: str):
    """Forks the ranks from a process that has imported what all of them need."""
    start_processes(worker, (port, path), WORLD, start_method="fork")


def worker(rank: int, port: int, path: str):
    """Trains every case in one process group; the last rank saves the results."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    results = {}
    for name, (classes, options, dense) in CASES.items():
        centroids._DENSE_ON_RANKS = dense
        own = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        data = [tuple(t[own] for t in batch) for batch in global_batches(classes)]
        module = Step(classes, **options)
        results[name] = train(DistributedDataParallel(module), module, data, WORLD)
    if rank == WORLD - 1:  # not rank 0, whose buffers DDP copies to the others
        torch.save(results, path)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = tmp_path_factory.mktemp("ranks") / "results.pt"
    process = CONTEXT.Process(target=start_ranks, args=(port, str(path)))
    process.start()
    process.join()
    assert process.exitcode == 0
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_one_process_on_the_global_batch(on_ranks: dict[str, Any], name: str):
    classes, options, _ = CASES[name]
    module = Step(classes, **options)
    alone = train(module, module, global_batches(classes), 1)
    for (va, ga, ca, sa), (vb, gb, cb, sb) in zip(on_ranks[name], alone, strict=True):
        assert torch.allclose(va, vb, atol=1e-6)
        assert torch.allclose(ca, cb, atol=1e-6)
        assert torch.equal(sa, sb)
        for a, b in zip(ga, gb, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
