"""Slots, class sums and running means, against loops over samples."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from noiseproof import DiscriminativeLoss
from noiseproof import centroids as cc

DENSE = torch.tensor([2, 0, 2, 2, 4, 0, 3])  # of 5 classes, 1 is absent
SPARSE = torch.tensor([70, 8, 70, 99, 8, 70, 3])  # of 100 classes: one slot per sample


def slots_of(labels: Tensor) -> cc.Slots:
    return cc.assign(labels, 5 if labels is DENSE else 100, torch.float64)


@pytest.mark.parametrize("labels", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_each_present_class_has_one_slot_with_its_size(labels: Tensor):
    slots = slots_of(labels)
    assert len(slots.classes) == min(len(labels), 5 if labels is DENSE else 100)
    present = slots.present
    result = dict(zip(slots.classes[present].tolist(), slots.size[present].tolist(), strict=True))
    assert result == {c: labels.tolist().count(c) for c in labels.tolist()}
    assert int(slots.present.sum()) == len(result)
    assert torch.equal(slots.classes[slots.of], labels)
    assert slots.present[slots.of].all()


def test_a_single_process_gathers_no_labels_however_many_the_classes():
    slots = cc.assign(SPARSE, 5000, torch.float32)
    assert not slots.dense
    assert torch.equal(slots.classes, SPARSE)


def test_on_other_devices_than_a_cpu_a_matrix_says_which_sample_is_in_which_slot():
    for labels, slots in ((DENSE, 5), (SPARSE, 7)):
        member = cc.assign(labels.to("meta"), 5 if labels is DENSE else 100, torch.float16).member
        assert member is not None
        assert (member.shape, member.dtype) == ((7, slots), torch.float16)


@pytest.mark.parametrize("classes", [5, 100])
def test_on_a_gpu_everything_is_made_there_and_sums_are_in_float64(classes: int):
    with FakeTensorMode():  # shapes, dtypes and devices as on a GPU, without one
        labels = torch.zeros(7, dtype=torch.int64, device="cuda")
        slots = cc.assign(labels, classes, torch.float32)
    assert all(x.is_cuda for x in slots if isinstance(x, Tensor))
    assert slots.member is not None
    assert (slots.member.dtype, slots.size.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("labels", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_means_and_rows_of_samples_are_those_of_a_loop(labels: Tensor):
    torch.manual_seed(0)
    slots, features = slots_of(labels), torch.randn(7, 3, dtype=torch.float64)
    means = cc.class_means(features, slots)
    for i in range(7):
        expected = torch.stack([features[j] for j in range(7) if labels[j] == labels[i]]).mean(0)
        torch.testing.assert_close(means[slots.of[i]], expected)
        torch.testing.assert_close(cc.of_samples(means, slots)[i], expected)
    assert (means[~slots.present] == 0).all()


@pytest.mark.parametrize("labels", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_matrix_products_of_a_gpu_equal_the_additions_of_a_cpu(labels: Tensor):
    torch.manual_seed(1)
    slots = slots_of(labels)
    assert slots.member is None
    member = (slots.of[:, None] == torch.arange(len(slots.classes))).double()
    result = []
    for way in (slots, slots._replace(member=member)):
        torch.manual_seed(2)
        features = torch.randn(7, 3, dtype=torch.float64).requires_grad_()
        means = cc.class_means(features, way)
        rows = cc.of_samples(means, way)
        (rows * torch.randn(7, 3)).sum().backward()
        result.append((means, rows, features.grad))
    torch.testing.assert_close(result[0], result[1])


def test_the_blend_is_the_current_mean_until_a_class_was_seen():
    current, previous = torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [3.0]])
    blended = cc.blend(current, previous, torch.tensor([True, False]), 0.75)
    assert blended.tolist() == [[2.5], [1.0]]


@pytest.mark.parametrize("labels", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_only_classes_of_the_batch_are_stored(labels: Tensor):
    slots, count = slots_of(labels), 5 if labels is DENSE else 100
    buffer, seen = torch.full((count, 1), -1.0), torch.zeros(count)
    values = torch.arange(len(slots.classes), dtype=torch.float64)[:, None] + 10
    cc.store(buffer, seen, slots, values)
    present = set(labels.tolist())
    assert {int(c) for c in seen.nonzero()[:, 0]} == present
    for c in range(count):
        if c not in present:
            assert buffer[c] == -1
        else:
            holder = next(s for s in range(len(values)) if slots.classes[s] == c)
            assert buffer[c] == values[holder]


class TwoRanks:
    """What torch.distributed does, between two threads of this process."""

    def __init__(self) -> None:
        self.thread, self.barrier = threading.local(), threading.Barrier(2, timeout=60)
        self.sent: list[Tensor] = [torch.empty(0)] * 2

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        self.sent[self.thread.rank] = tensor.clone()
        self.barrier.wait()
        received = list(self.sent)
        self.barrier.wait()
        return received

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.exchange(tensor)).sum(0))

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor) -> None:
        out.copy_(torch.cat(self.exchange(tensor)))

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def on_rank(rank: int) -> Any:
            self.thread.rank = rank
            return function(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on_rank, range(2)))


def two_ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    """Ranks whose collective operations go through threads of this process."""
    world = TwoRanks()
    for name in ("all_reduce", "all_gather_into_tensor"):
        monkeypatch.setattr(cc.dist, name, getattr(world, name))
    monkeypatch.setattr(cc.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cc.dist, "get_world_size", lambda: 2)
    return world


@pytest.mark.parametrize("dense", [1024, 1], ids=["dense", "gathered"])
def test_a_feature_that_is_not_finite_on_one_rank_changes_no_centroid_on_either(
    monkeypatch, dense: int
):
    world, head = two_ranks(monkeypatch), torch.nn.Linear(3, 4)
    monkeypatch.setattr(cc, "_DENSE_ON_RANKS", dense)
    y = torch.tensor([0, 0, 1, 2])

    def centroids(rank: int) -> list[Tensor]:
        loss, q = DiscriminativeLoss(4, 3), torch.randn(2, 4, 3, generator=torch.manual_seed(rank))
        states = []
        for step in range(2):
            if (rank, step) == (1, 1):
                q[1, 0, 0] = torch.inf  # of class 0
            loss(q[step], y, head)
            states.append(loss.centroids.clone())
        return states

    (before, after), other = world.run(centroids)
    assert torch.equal(after, other[1])
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1:3], before[1:3])
    assert after.isfinite().all()


@pytest.mark.parametrize(
    ("labels", "classes", "dense"),
    [(DENSE, 5, 1024), (SPARSE, 100, 100), (SPARSE, 100, 99)],
    ids=["dense", "dense beyond the batch", "gathered"],
)
def test_two_ranks_equal_one_with_the_joint_batch(
    monkeypatch, labels: Tensor, classes: int, dense: int
):
    """`test_loss_ranks.py` does the same with processes and DDP."""
    torch.manual_seed(3)
    steps = torch.randn(
        2, 2, 2, 7, 3, dtype=torch.float64
    )  # step, clean or noisy, rank, sample, feature
    both = torch.stack([labels, labels.roll(2).where(labels != 3, 0)])  # class 3 on one rank only
    head = torch.nn.Linear(3, classes, dtype=torch.float64)

    def losses(ranks: list[int]) -> list[Any]:
        loss, y = DiscriminativeLoss(classes, 3, margin=2.0).double(), both[ranks].flatten()
        results = []
        for views in steps:  # the second step has running centroids
            clean, noisy = views[:, ranks].flatten(1, 2)
            total, terms = loss(clean.requires_grad_(), y, head, noisy, return_terms=True)
            gradients = torch.autograd.grad(total, [clean, *head.parameters()])
            results.append(
                (torch.stack(terms), *gradients, loss.centroids.clone(), loss.seen.clone())
            )
        return results

    joint = losses([0, 1])
    world = two_ranks(monkeypatch)
    monkeypatch.setattr(cc, "_DENSE_ON_RANKS", dense)
    for expected, *pair in zip(joint, *world.run(lambda rank: losses([rank])), strict=True):
        terms, clean, weight, bias, centroids, seen = zip(*pair, strict=True)
        means = [torch.stack(values).mean(0) for values in (terms, weight, bias)]  # as DDP's
        torch.testing.assert_close(means, [expected[0], *expected[2:4]])
        torch.testing.assert_close(torch.cat(clean), 2 * expected[1])
        for rank in range(2):
            torch.testing.assert_close((centroids[rank], seen[rank]), expected[4:])
