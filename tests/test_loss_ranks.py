"""Several gloo processes under DDP against one process with the global batch."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from noiseproof import DiscriminativeLoss, centroids

DIM = 4


class Step(nn.Module):
    """A net, its head and the loss, as one module for DDP."""

    def __init__(self, classes, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, DIM)).double()
        self.head = nn.Linear(DIM, classes).double()
        self.loss = DiscriminativeLoss(classes, DIM, margin=2.0, **options).double()

    def forward(self, x, noisy, y):
        return self.loss(self.net(x), y, self.head, self.net(noisy))


def batches(world, classes, per_rank):
    """Three global batches; rank 0 never sees the last class, the others rarely the first."""
    made = []
    for k in range(3):
        g = torch.Generator().manual_seed(k)
        x = torch.randn(world * per_rank, 3, generator=g, dtype=torch.float64)
        noisy = x + 0.1 * torch.randn(x.shape, generator=g, dtype=torch.float64)
        y = torch.randint(1, classes, (world * per_rank,), generator=g)
        y[:per_rank] = torch.randint(0, classes - 1, (per_rank,), generator=g)
        made.append((x, noisy, y))
    return made


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


def worker(rank, world, port, classes, options, dense, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    centroids._DENSE_ON_RANKS = dense
    per_rank = 6
    data = [
        tuple(t[rank * per_rank : (rank + 1) * per_rank] for t in batch)
        for batch in batches(world, classes, per_rank)
    ]
    module = Step(classes, **options)
    out = train(DistributedDataParallel(module), module, data, world)
    if rank == world - 1:  # not rank 0, whose buffers DDP copies to the others
        torch.save(out, path)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "classes", "options", "dense"),
    [
        (2, 5, {}, 1024),
        (4, 5, {"centroids": "momentum"}, 1024),
        (2, 30, {}, 8),  # more classes than the limit: labels are gathered
    ],
)
def test_ranks_agree_with_one_process_on_the_global_batch(world, classes, options, dense, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = tmp_path / "out.pt"
    spawn(worker, (world, port, classes, options, dense, str(path)), world)
    many = torch.load(path, weights_only=True)
    module = Step(classes, **options)
    one = train(module, module, batches(world, classes, 6), 1)
    for (va, ga, ca, sa), (vb, gb, cb, sb) in zip(many, one, strict=True):
        assert torch.allclose(va, vb, atol=1e-6)
        assert torch.allclose(ca, cb, atol=1e-6)
        assert torch.equal(sa, sb)
        for a, b in zip(ga, gb, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
