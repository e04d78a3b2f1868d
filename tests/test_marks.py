"""How often the marks of a table are wrong, and how often they find a true difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noiseproof.lab.evaluation import stats, tables

METHODS = "abcde"
SPEC = "gaussian:0.2"


def table_of(
    accuracies: NDArray[Any], n: int, correct: NDArray[Any] | None = None
) -> dict[str, tables.Cell]:
    """The column of a table.

    Args:
        accuracies: methods x trainings.
        n: number of test images.
        correct: whether predictions are right, methods x trainings x draws x n.
    """
    rows = [
        {"run": f"{i}-{seed}", "method": METHODS[i], "weights": "last", "perturbation": SPEC}
        | {"draw": 0, "noise_seed": 0, "fingerprint": "f", "value": value, "n": n}
        for i, values in enumerate(accuracies)
        for seed, value in enumerate(values)
    ]

    def known(run: str, weights: str, spec: str) -> NDArray[Any] | None:
        method, seed = map(int, run.split("-"))
        return None if correct is None else correct[method, seed]

    return tables.build(rows, correct=known).column(SPEC)


def over_images(
    columns: int, n: int, draws: int, accuracy: float, lower: float = 0.0
) -> Iterator[dict[str, tables.Cell]]:
    """Columns of five methods, trained once. Each image has the same chance to be right with all of
    them, except for the last method, which is `lower` standard errors of a difference worse."""
    rng = np.random.default_rng(n)
    for _ in range(columns):
        chance = rng.beta(3 * accuracy, 3 * (1 - accuracy), n)
        chances = np.tile(chance, (5, 1))
        error = np.sqrt(2 * np.mean(chance * (1 - chance)) / draws / n)
        chances[-1] *= 1 - lower * error / chance.mean()
        correct = rng.random((5, 1, draws, n)) < chances[:, None, None]
        yield table_of(correct.mean(axis=(2, 3)), n, correct)


def over_trainings(
    columns: int, trainings: int, spreads: NDArray[Any], n: int = 10_000, lower: float = 0.0
) -> Iterator[dict[str, tables.Cell]]:
    """Columns of five methods with standard deviations of `spreads` points over trainings. The last
    is `lower` standard errors worse."""
    rng = np.random.default_rng(trainings)
    for _ in range(columns):
        values = rng.normal(90.0, spreads[:, None], (5, trainings))
        values[-1] -= lower * np.sqrt(2 / trainings) * spreads.mean()
        yield table_of(np.round(values / 100 * n) / n, n)


def share(columns: Iterator[dict[str, tables.Cell]], label: str | None = None) -> float:
    """The share of columns in which this cell, or any, is called worse than the best."""
    marked = [
        any(cell.mark == "" for name, cell in cells.items() if label in (None, name))
        for cells in columns
    ]
    return float(np.mean(marked))


ALIKE, DIFFERENT = np.full(5, 0.4), np.linspace(0.3, 0.5, 5)


def test_of_five_equal_methods_few_are_called_worse():
    assert share(over_images(150, 540, 1, 0.9)) <= 0.06
    assert share(over_trainings(50, 3, DIFFERENT)) <= 0.06


def test_a_method_three_standard_errors_worse_is_usually_found():
    assert share(over_images(100, 540, 1, 0.9, lower=3.0), "e") >= 0.6


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "draws", "accuracy"),
    [(20, 10, 0.8), (100, 1, 0.9), (540, 1, 0.97), (540, 10, 0.9), (2000, 1, 0.9)],
)
def test_over_images_at_most_6_percent_of_columns_have_a_false_mark(
    n: int, draws: int, accuracy: float
):
    assert share(over_images(2000, n, draws, accuracy)) <= 0.06


@pytest.mark.long
@pytest.mark.parametrize("trainings", [2, 3, 5])
@pytest.mark.parametrize(("spreads", "n"), [(ALIKE, 10_000), (DIFFERENT, 10_000), (DIFFERENT, 540)])
def test_over_trainings_at_most_6_percent_of_columns_have_a_false_mark(
    trainings: int, spreads: NDArray[Any], n: int
):
    assert share(over_trainings(1000, trainings, spreads, n)) <= 0.06


@pytest.mark.long
def test_a_method_three_standard_errors_worse_is_found_in_most_columns():
    assert share(over_images(500, 2000, 1, 0.9, lower=3.0), "e") >= 0.6
    assert share(over_trainings(500, 5, ALIKE, lower=3.0), "e") >= 0.5


def test_the_p_value_of_a_cell_is_the_larger_of_its_two_tests():
    correct = (
        np.random.default_rng(0).random((2, 2, 1, 500)) < np.array([0.9, 0.8])[:, None, None, None]
    )
    accuracies = correct.mean(axis=(2, 3))
    cell = next(c for c in table_of(accuracies, 500, correct).values() if c.mark != "best")
    first, second = correct.mean(axis=(1, 2))
    images = stats.compare_images(first, second, predictions=2, groups=2)
    trainings = stats.compare_trainings(*accuracies, groups=2)
    assert images
    assert trainings
    assert cell.p == max(images[1], trainings[1])
