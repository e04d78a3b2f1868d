"""When two steps count as the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from noiseproof.lab.training.verify_step import StepResult, find_mismatch, step_result

F64, F32 = torch.float64, torch.float32
NEAR = {F64: 5e-6, F32: 0.05}  # half of the tolerance


def mismatch(
    fast: StepResult, plain: StepResult, permuted: StepResult, precise: StepResult | None = None
) -> Any:
    """The permuted step also serves as the precise one if that is not given."""
    return find_mismatch(fast, plain, permuted, precise or permuted)


def step(loss=2.0, scale=1.0, noise=0.0, dtype: Any = F32, finite=True) -> StepResult:
    """A large and a small gradient, scaled, and a buffer; `noise` is relative to each."""
    g = torch.Generator().manual_seed(0)
    sizes = {"the gradient of a": (300, 5.0), "the gradient of b": (5, 0.01), "mean": (7, 1.0)}
    tensors = {}
    for name, (n, size) in sizes.items():
        value = size * torch.randn(n, generator=g, dtype=F64)
        other = torch.randn(n, generator=g, dtype=F64)
        value = value + noise * value.norm() * other / other.norm()
        tensors[name] = (scale * value if "gradient" in name else value).to(dtype)
    return StepResult(loss, tensors, finite)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_steps_that_differ_by_rounding_agree(dtype):
    plain, near = step(dtype=dtype), NEAR[dtype]
    assert mismatch(plain, plain, plain) is None
    assert mismatch(step(2 * (1 + near), 1 + near, dtype=dtype), plain, plain) is None


@pytest.mark.parametrize("dtype", [F64, F32])
def test_different_gradients_are_found_behind_the_same_loss(dtype):
    plain, far = step(dtype=dtype), 4 * NEAR[dtype]
    assert "the gradient of" in str(mismatch(step(scale=1 + far, dtype=dtype), plain, plain))


@pytest.mark.parametrize("name", ["the gradient of a", "the gradient of b", "mean"])
def test_a_tensor_that_is_lost_or_has_the_wrong_sign_is_named_however_small(name):
    plain, permuted = step(), step(noise=0.35)  # bf16, in the first layers of a ResNet18
    for factor in (0.0, -1.0):
        fast = step(noise=0.1)
        fast.tensors[name] = factor * plain.tensors[name]
        message = mismatch(fast, plain, permuted)
        assert message is not None
        assert message.startswith(f"{name} differs by ")
        assert message.endswith(
            " that of a plain step, which changes by 35% when the batch is permuted"
        )
    assert mismatch(step(noise=0.5), plain, permuted) is None


@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_different_loss_is_found_behind_the_same_gradients(dtype):
    plain = step(dtype=dtype)
    message = str(mismatch(step(2 * (1 + 4 * NEAR[dtype]), dtype=dtype), plain, plain))
    assert message.startswith("its loss is")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_values_that_are_not_finite_are_wrong_unless_the_plain_step_has_them_too(loss):
    plain = step()
    for bad in (step(loss), step(finite=False)):
        assert "not finite" in str(mismatch(bad, plain, plain))
        assert mismatch(bad, bad, bad) is None


def test_as_much_difference_is_allowed_as_dropout_causes():
    plain, dropped = step(), step(2.5, 1.4)
    assert mismatch(step(2.4, 0.7), plain, plain) is not None
    assert mismatch(step(2.4, 0.7), plain, dropped) is None


def test_a_step_may_be_closer_to_full_precision_than_the_plain_one():
    """Compiled code rounds less often, which permuting the batch cannot show."""
    plain, permuted, precise = step(), step(noise=0.01), step(noise=0.3)
    for fast in (precise, step(noise=0.2), step(noise=0.05)):
        assert mismatch(fast, plain, permuted, precise) is None
    assert mismatch(precise, plain, permuted) is not None  # without the precise step
    for wrong in (step(noise=-0.3), step(noise=0.8), step(scale=0.0), step(scale=-1.0)):
        assert mismatch(wrong, plain, permuted, precise) is not None


def test_a_gradient_that_is_noise_is_ignored_unless_it_grows():
    """A shift in front of a convolution and a batch-norm: its gradient is rounding alone."""
    plain, permuted, name = step(), step(), "the gradient of b"
    permuted.tensors[name] = 1.7 * plain.tensors[name]
    for factor, wrong in ((0.0, False), (-1.3, False), (8.0, False), (-12.0, True)):
        fast = step()
        fast.tensors[name] = factor * plain.tensors[name]
        message = mismatch(fast, plain, permuted)
        assert (message is not None) == wrong, message
        fast = step(scale=0.8)  # the others are still compared
        fast.tensors[name] = factor * plain.tensors[name]
        assert mismatch(fast, plain, permuted) is not None


def test_a_tensor_of_zeros_is_compared_relative_to_the_others():
    plain, fast = step(), step()
    for result in (plain, fast):
        result.tensors["the gradient of c"] = torch.zeros(4)
    assert mismatch(fast, plain, plain) is None
    fast.tensors["the gradient of c"] = torch.full((4,), 1e-9)  # rounding
    assert mismatch(fast, plain, plain) is None
    fast.tensors["the gradient of c"] = torch.full((4,), 1.0)
    assert "of c differs" in str(mismatch(fast, plain, plain))


def test_missing_gradients_are_recorded_as_zeros():
    linear, norm = nn.Linear(3, 2), nn.BatchNorm1d(2).requires_grad_(False)
    net = nn.Sequential(linear, norm)
    (linear.weight.sum() * 2).backward()
    result = step_result(torch.tensor(1.5), net)
    assert result.loss == 1.5
    assert result.finite
    assert list(result.tensors) == [
        "the gradient of 0.weight", "the gradient of 0.bias", "1.running_mean", "1.running_var",
    ]  # fmt: skip
    assert torch.equal(result.tensors["the gradient of 0.weight"], torch.full((2, 3), 2.0))
    assert torch.equal(result.tensors["the gradient of 0.bias"], torch.zeros(2))
    assert linear.weight.grad is not None
    linear.weight.grad.zero_()
    assert result.tensors["the gradient of 0.weight"].min() == 2.0  # a copy
    with torch.no_grad():
        linear.bias[0] = math.inf
    assert not step_result(torch.tensor(1.5), net).finite
