"""A loss that updates its state refuses to be recomputed, since its gradient would be wrong."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from noiseproof import DiscriminativeLoss
from noiseproof.objectives import Objective, Stability
from noiseproof.objectives.base import Batch

REFUSED = (
    r"the backward pass now computes the loss again from the new values, so its gradient would be "
    r"wrong\. Keep the loss outside of torch\.utils\.checkpoint \(checkpoint the network alone\); "
    r"under torch\.compile, leave torch\._functorch\.config\.activation_memory_budget at 1"
)


def make_step() -> Any:
    torch.manual_seed(0)
    net, head = nn.Linear(6, 4), nn.Linear(4, 5)
    loss = DiscriminativeLoss(5, 4, margin=2.0)
    x, noisy, y = torch.randn(8, 6), torch.randn(8, 6), torch.arange(8) % 5
    return lambda: loss(net(x), y, head, net(noisy))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_loss_is_refused_in_the_backward_pass(reentrant: bool):
    head, loss = nn.Linear(4, 5), DiscriminativeLoss(5, 4)
    q, y = torch.randn(8, 4, requires_grad=True), torch.arange(8) % 5

    def region(features: Tensor) -> Tensor:
        value = loss(features, y, head)
        assert isinstance(value, Tensor)
        return value

    value = checkpoint(region, q, use_reentrant=reentrant)
    assert isinstance(value, Tensor)
    with pytest.raises(RuntimeError, match=REFUSED):
        value.backward()


def test_a_checkpointed_network_below_the_loss_gives_the_plain_gradient():
    torch.manual_seed(0)
    net, head = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 5)
    x, y = torch.randn(8, 6), torch.arange(8) % 5
    plain, saved = DiscriminativeLoss(5, 4), DiscriminativeLoss(5, 4)
    for _ in range(2):
        want = torch.autograd.grad(plain(net(x), y, head), list(net.parameters()))
        features = checkpoint(net, x, use_reentrant=False)
        assert isinstance(features, Tensor)
        got = torch.autograd.grad(saved(features, y, head), list(net.parameters()))
        torch.testing.assert_close(got, want)


def test_a_loss_in_eval_mode_may_be_recomputed():
    head, loss = nn.Linear(4, 5), DiscriminativeLoss(5, 4)
    q, y = torch.randn(8, 4, requires_grad=True), torch.arange(8) % 5
    loss(q, y, head)
    loss.eval()
    (want,) = torch.autograd.grad(loss(q, y, head), q)
    value = checkpoint(lambda features: loss(features, y, head), q, use_reentrant=False)
    assert isinstance(value, Tensor)
    torch.testing.assert_close(torch.autograd.grad(value, q)[0], want)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_compilers_memory_budget_is_refused_where_it_recomputes_the_loss(budget: float):
    torch._dynamo.reset()
    with patch("torch._functorch.config.activation_memory_budget", budget):
        value = torch.compile(make_step(), backend="aot_eager", fullgraph=True)()
        with pytest.raises(RuntimeError, match=REFUSED):
            value.backward()


def test_a_compiled_checkpoint_is_refused():
    torch._dynamo.reset()
    step = make_step()
    compiled = torch.compile(lambda: checkpoint(step, use_reentrant=False), backend="aot_eager")
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled().backward()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 4), nn.Linear(4, 5)

    def features(self, images: Tensor) -> Tensor:
        return self.body(images.flatten(1))


def ramped(net: Net, objective: Objective) -> Tensor:
    """The loss of one checkpointed step."""
    batch = Batch(torch.rand(8, 3, 2, 2), torch.arange(8) % 5)
    value = checkpoint(lambda: objective(net, batch).loss, use_reentrant=False)
    assert isinstance(value, Tensor)
    return value


def test_a_checkpointed_ramp_is_refused():
    value = ramped(Net(), Stability("gaussian:0.1", ramp_steps=10))
    with pytest.raises(RuntimeError, match=REFUSED):
        value.backward()


def test_a_ramp_in_eval_mode_may_be_recomputed():
    net, objective = Net(), Stability("gaussian:0.1", ramp_steps=10)
    objective.steps.fill_(5)
    ramped(net, objective.eval()).backward()
    assert net.body.weight.grad is not None
    assert int(objective.steps) == 5
