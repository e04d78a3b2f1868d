"""What a statement says about a case, a sample or a class: nothing, something true, or false."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Verdict = Literal["vacuous", "holds", "violated"]
LOOSE = 100.0  # a bound this many times the measured value, or more, is called loose


def verdict(holds: bool, *, vacuous: bool) -> Verdict:
    """The verdict on one case.

    Args:
        holds: whether the statement is true of it.
        vacuous: whether it says nothing about it.

    >>> verdict(True, vacuous=False), verdict(True, vacuous=True), verdict(False, vacuous=False)
    ('holds', 'vacuous', 'violated')
    """
    return "vacuous" if vacuous else "holds" if holds else "violated"


class Cases(NamedTuple):
    """A measured quantity and its bound, case by case: N each."""

    measured: Tensor
    bound: Tensor
    holds: Tensor  # True for vacuous bounds, too
    vacuous: Tensor  # the bound says nothing about this case

    @property
    def informative(self) -> Tensor:
        """The cases about which the bound says something; a bound that fails has said something."""
        return ~(self.vacuous & self.holds)

    @property
    def verdict(self) -> list[Verdict]:
        """The verdict on each case."""
        pairs = zip(self.holds.tolist(), self.informative.tolist(), strict=True)
        return [verdict(holds, vacuous=not informative) for holds, informative in pairs]

    @property
    def factor(self) -> float:
        """Median factor between the two sides where an informative bound holds and both are
        positive; NaN if nowhere."""
        positive = (self.measured > 0) & (self.bound > 0)
        chosen = positive & self.informative & self.holds
        ratios = (self.bound[chosen].double() / self.measured[chosen]).log().abs()
        return float(ratios.median().exp()) if len(ratios) else float("nan")

    def sentence(self, what: str = "samples") -> str:
        """For how many cases the bound is informative, for how many of these it holds, and how
        loose it is, without a subject.

        >>> import torch
        >>> one, all_true = torch.ones(2), torch.tensor([True, True])
        >>> Cases(one, 500 * one, all_true, ~all_true).sentence("rows")
        'is informative for 2 of 2 rows and holds for all 2, but is loose by a median factor of 500'
        >>> Cases(one, 2 * one, all_true, torch.tensor([True, False])).sentence("classes")
        'is informative for 1 of 2 classes and holds for it'
        >>> Cases(one, 2 * one, all_true, all_true).sentence()
        'is vacuous for all 2 samples'
        """
        total, count = len(self.holds), int(self.informative.sum())
        held = int((self.informative & self.holds).sum())
        if not count:
            return f"is vacuous for all {total} {what}"
        text = f"is informative for {count} of {total} {what} and "
        if held == 0:
            return text + ("fails for it" if count == 1 else f"fails for all {count}")
        which = "it" if count == 1 else f"all {count}" if held == count else f"{held} of them"
        text += f"holds for {which}"
        if self.factor >= LOOSE:
            text += f", but is loose by a median factor of {self.factor:.3g}"
        return text
