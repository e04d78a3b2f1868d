"""How many images a split has, before any are read: no torch, and of a .npz file only a header."""

from __future__ import annotations

import math


def chosen_count(count: int, share: float) -> int:
    """How many of `count` images a split with this share has, if no class needs more.

    >>> chosen_count(1001, 0.1), chosen_count(1000, 0.1)
    (101, 100)
    """
    return math.ceil(share * count - 1e-9)
