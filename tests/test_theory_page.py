"""The page on theory states what the records of results/ say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/theory.md").read_text(encoding="utf-8")
TITLES = {"cifar10": "CIFAR-10", "svhn": "SVHN"}
Row = dict[str, Any]


def models() -> dict[tuple[str, str], Callable[..., Row]]:
    """For each model, a function that finds a row of its theory by metric and facts."""
    found: dict[tuple[str, str], Callable[..., Row]] = {}
    for folder in ("cifar10", "cifar10/batch-norm", "svhn"):
        data = folder.partition("/")[0]
        text = (ROOT / f"results/{folder}/figures/numbers.jsonl").read_text(encoding="utf-8")
        rows = [row for row in map(json.loads, text.splitlines()) if row["part"] == "theory"]
        for run in dict.fromkeys(row["run"] for row in rows):

            def row(metric: str, run: str = run, rows: list[Row] = rows, **facts: str) -> Row:
                facts |= {"metric": metric, "run": run}
                return next(r for r in rows if all(r.get(k) == v for k, v in facts.items()))

            name, _, seed = run.removeprefix(f"{data}-").rpartition("-s")
            found[
                data, f"`{name}`" + (f", seed {seed}" if (data, f"`{name}`") in found else "")
            ] = row
    return found


def pair(cells: list[str]) -> str:
    return cells[0] if set(cells) == {"vacuous"} else ", ".join(cells)


def line(data: str, name: str, row: Callable[..., Row]) -> str:
    upper, lower = row("upper bound on curvature"), row("lower bound on 2Λ + (tr H)²")
    held, loose = "vacuous", "–"
    if upper["informative"]:
        held = f"{upper['held']} of {upper['informative']}"
        factor = upper.get("factor_of_medians") or upper["bound"] / upper["value"]
        loose = re.sub(r"e\+0*", "e", f"{factor:.0e}")
    views = ("clean", "noisy")
    limits = [row("leaving the sphere, held-out limit", data=view) for view in views]
    metric = "divergence of two classes, in nats"
    nats = [row(metric, data=view, stage="features") for view in views]
    outside = [f"{100 * r['bound']:.0f} %" if r["informative"] else "vacuous" for r in limits]
    apart = [
        "vacuous" if not r["informative"]
        else f"{r['bound']:.2g}" if r["bound"] else f"{r['informative']} of 45 pairs"
        for r in nats
    ]  # fmt: skip
    cells = [f"{TITLES[data]} {name}", f"{row('feature stability')['value']:.2g}", held, loose,
             f"{lower['held']} of {lower['informative']}", pair(outside), pair(apart)]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_the_table_of_models_is_that_of_the_records():
    found = models()
    assert len(found) == 15
    for (data, name), row in found.items():
        assert line(data, name, row) in PAGE


def test_the_totals_are_those_of_the_records():
    rows = models().values()
    upper = [row("upper bound on curvature") for row in rows]
    lower = [row("lower bound on 2Λ + (tr H)²") for row in rows]
    (upper_held, upper_count), (lower_held, lower_count) = (
        [sum(row[key] for row in side) for key in ("held", "informative")]
        for side in (upper, lower)
    )
    assert f"The upper bound holds for {upper_held} of the {upper_count} images" in PAGE
    assert f"The lower bound holds for {lower_held} of {lower_count}." in PAGE
    gradients = [row("margin gradient with momentum / without") for row in rows]
    applies, classes = (sum(r[key] for r in gradients) for key in ("informative", "cases"))
    assert f"applies to {applies} of the {classes} classes" in PAGE
    for metric in ("class margin", "class separation", "leaving the sphere, Rademacher bound"):
        assert {row(metric)["verdict"] for row in rows} == {"vacuous"}


def test_every_function_of_the_theory_is_on_the_page():
    from noiseproof import theory

    functions = {name for name in theory.__all__ if name[0].islower()}
    unnamed = {"class_radius", "lower_limit", "upper_limit", "sharper_bound"}
    assert {name for name in functions if f"`{name}" not in PAGE} == unnamed


def test_every_numbered_statement_of_the_paper_is_on_the_page():
    named = re.sub(r"\s+", " ", PAGE)
    for text in (
        "definition 3.1", "proposition 4.1", "proposition 5.1", "definition 5.1",
        "proposition 5.2, part 1", "proposition 5.2, part 2", "proposition 5.3", "corollary 5.1",
        "definition 6.1", "theorem 6.1, part 1", "theorem 6.1, part 2", "definition 6.2",
        "theorem 6.2", "theorem 6.3", "lemma E.1", "lemmas E.2, E.3", "lemma E.4",
        "definition F.1, theorems F.1 and F.2, lemma F.1", "theorem F.3", "definitions G.1 to G.3",
        "lemma G.1", "lemma G.2",
    ):  # fmt: skip
        assert f"| {text} |" in named, text
