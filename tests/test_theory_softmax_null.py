"""Directions that softmax cannot see: their number, their effect, and the variance along them."""

import pytest
import torch
from torch import nn

from noiseproof.theory import invisible_variance, null_space


def test_a_head_of_ten_classes_on_128_features_leaves_119_directions_free():
    torch.manual_seed(0)
    head = nn.Linear(128, 10)
    null = null_space(head)
    assert (null.dimension, null.rank) == (119, 9)
    assert null.basis.shape == (128, 119)
    torch.testing.assert_close(null.basis.T @ null.basis, torch.eye(119, dtype=torch.float64))


def test_moving_along_the_basis_leaves_probabilities_unchanged_and_other_moves_do_not():
    torch.manual_seed(1)
    head = nn.Linear(6, 3).double()
    null = null_space(head)
    q = torch.randn(6, dtype=torch.float64)
    before = head(q).softmax(0)
    for v in null.basis.T:
        torch.testing.assert_close(head(q + 7 * v).softmax(0), before)
    seen = torch.eye(6, dtype=torch.float64) - null.basis @ null.basis.T
    assert (head(q + seen[:, 0]).softmax(0) - before).abs().max() > 1e-3


def test_the_space_holds_a_direction_along_which_all_logits_rise_together():
    # W = identity: Wv is proportional to ones for v = (1, 1, 1) alone, which W does not send to 0.
    null = null_space(torch.eye(3))
    assert null.dimension == 1
    assert null.basis[:, 0].abs().tolist() == pytest.approx([3**-0.5] * 3)


def test_equal_rows_make_every_direction_invisible():
    row = torch.randn(1, 7, generator=torch.Generator().manual_seed(2))
    assert null_space(row.expand(4, 7)).dimension == 7


def test_the_share_is_that_of_variances_known_by_construction():
    w = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    # Class 0: variance 1 along the visible axis and 9 along the other; class 1: visible only.
    q = torch.tensor([[4.0, 3.0], [6.0, -3.0], [-5.0, 1.0], [-7.0, 1.0]])
    result = invisible_variance(q, torch.tensor([0, 0, 1, 1]), w)
    assert result.per_class.tolist() == pytest.approx([0.9, 0.0])
    assert result.share == pytest.approx(18 / 22)
    assert result.isotropic == 0.5


def test_isotropic_noise_has_the_isotropic_share():
    make = torch.Generator().manual_seed(5)
    q = torch.randn(4000, 20, generator=make)
    result = invisible_variance(q, torch.arange(4000) % 4, torch.randn(4, 20, generator=make))
    assert result.isotropic == 17 / 20
    assert result.share == pytest.approx(17 / 20, abs=0.01)


def test_classes_without_variance_have_no_share():
    result = invisible_variance(torch.ones(2, 3), torch.tensor([0, 1]), torch.eye(3))
    assert result.share != result.share
    assert result.per_class.isnan().all()


def test_features_of_another_width_raise_an_error():
    with pytest.raises(ValueError, match="features must have 3 columns like W, got 2"):
        invisible_variance(torch.ones(2, 2), torch.tensor([0, 1]), torch.eye(3))
