"""What a statement says about one case: nothing, something true, or something false."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Verdict = Literal["vacuous", "holds", "violated"]


def verdict(holds: bool, *, vacuous: bool) -> Verdict:
    """The verdict on one case.

    Args:
        holds: whether the statement is true of it.
        vacuous: whether it would be true whatever was measured.

    >>> verdict(True, vacuous=False), verdict(True, vacuous=True), verdict(False, vacuous=False)
    ('holds', 'vacuous', 'violated')
    """
    return "vacuous" if vacuous else "holds" if holds else "violated"


def verdicts(holds: Tensor, vacuous: Tensor) -> list[Verdict]:
    """The verdict on each case, from two vectors of booleans."""
    pairs = zip(holds.tolist(), vacuous.tolist(), strict=True)
    return [verdict(true, vacuous=says_nothing) for true, says_nothing in pairs]
