"""Gradient descent without the ceremony, for networks so small that it shows."""

from __future__ import annotations

import torch

_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class PlainSGD(torch.optim.SGD):
    """torch's fused SGD, whose `update` leaves out what torch does around the kernel: for a network
    of 16 small tensors that takes several times as long as the kernel."""

    @torch.no_grad()
    def update(self) -> None:
        """`step` and `zero_grad` in one. The first step, which makes the moments, is torch's own,
        and so is every one in which a weight has no gradient or no moments are kept."""
        (group,) = self.param_groups
        weights = group["params"]
        gradients = [p.grad for p in weights]
        moments = [self.state.get(p, {}).get("momentum_buffer") for p in weights]
        if any(t is None for t in (*gradients, *moments)):
            self.step()
            self.zero_grad()
            return
        options = {name: group[name] for name in _OPTIONS}
        torch._fused_sgd_(weights, gradients, moments, is_first_step=False, **options)  # pyright: ignore[reportPrivateImportUsage]
        for p in weights:
            p.grad = None
