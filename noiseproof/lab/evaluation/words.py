"""The sentences about a table: its notes, what a column shows, and the summary.

The terminal, comparison.json and the report all use these. Names of methods and runs are in
backticks, which the report shows as code. A difference is stated as one only if the tests of
`evaluation.tables` find it significant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from noiseproof.lab.console import printable
from noiseproof.lab.evaluation import severities
from noiseproof.lab.evaluation.tables import Cell, Table, Test
from noiseproof.perturb.text import heading, is_clean, steps

_TESTS: dict[Test, str] = {
    "games-howell": "the Games-Howell test over trainings",
    "tukey-kramer": "the paired Tukey-Kramer test over test images",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def listed(items: Iterable[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    *first, last = list(items) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def names(labels: Iterable[str]) -> str:
    """
    >>> names(["both", "normal"])
    '`both` and `normal`'
    """
    return listed(f"`{label.replace('`', chr(39))}`" for label in labels)


def number_word(n: int) -> str:
    """
    >>> number_word(3), number_word(12)
    ('three', '12')
    """
    return _NUMBERS[n] if n < len(_NUMBERS) else str(n)


def condition(spec: str) -> str:
    """
    >>> condition("clean"), condition("gaussian:8/255"), condition("stripes:10x3")
    ('on clean images', 'at σ=8/255', 'under stripes 10×3')
    >>> condition("sensor:iso1600"), condition("exposure:-2")
    ('at sensor ISO 1600', 'at exposure −2')
    """
    if spec == severities.ALL:
        return "on average over all corruptions"
    if is_clean(spec):
        return "on clean images"
    level = steps(spec)[0].name in ("gaussian", "uniform", "sensor", "exposure")
    return f"{'at' if level else 'under'} {heading(spec)}"


def points(*values: float) -> list[str]:
    """Fractions as percentage points, with the same number of decimals: one, or as many more as it
    takes to show that a value is not 0.

    >>> points(0.0512, 0.01), points(-0.0003, 0.021), points(0.0)
    (['5.1', '1.0'], ['-0.03', '2.10'], ['0.0'])
    """
    values = tuple(100 * value for value in values)
    shown = (d for d in range(1, 6) if all(round(x, d) or abs(x) < 1e-9 for x in values))
    digits = next(shown, 6)
    return [f"{round(x, digits) + 0.0:.{digits}f}" for x in values]  # + 0.0: no -0.0


def table_title(data: str, weights: str) -> str:
    """
    >>> table_title("digits", "last")
    'digits, weights after the last epoch'
    """
    which = "after the last epoch" if weights == "last" else "of the best epoch by validation"
    return f"{data}, weights {which}"


def notes(table: Table) -> list[str]:
    """The notes below a table: what its numbers and signs mean, and which labels are at chance."""
    lines = [f"Accuracy in % on {table.n:,} test images."]
    if severities.ALL in table.perturbations:
        lines.append(
            "1–5 is the mean over the severities 1 to 5; of all corruptions, over all 75 cells."
        )
    if table.seeds > 1:
        lines.append(
            f"Mean over {training_count(table)} trainings ± standard deviation over trainings; in "
            "brackets, the standard deviation over noise draws of one training."
        )
    elif table.draws > 1:
        lines.append(
            f"± is the standard deviation over {table.draws} noise draws of one model; a "
            "value without ± comes from a single pass."
        )
    lines += _mark_notes(table)
    weights = Counter(table.weights.values())
    if len(weights) > 1 and max(weights.values()) > 1:
        lines.append("Weights of the last and of the best epoch are ranked separately.")
    return [*lines, *_class_notes(table), *training_caveat(table), *chance_warnings(table)]


def _class_notes(table: Table) -> list[str]:
    """Macro-F1 and the lowest recall, if the test images are unbalanced: on clean images, and where
    accuracies differ most."""
    specs = [spec for spec in table.perturbations if is_clean(spec)] + [table.widest_gap() or ""]
    lines = []
    for spec in dict.fromkeys(specs):
        parts = []
        for label, cell in table.column(spec).items():
            if scores := cell.classes:
                lowest, worst = min((value, name) for name, value in scores.recall.items())
                f1, recall = map(table.percent, (scores.macro_f1, lowest))
                parts.append(
                    f"{names([label])} {f1} % (lowest recall: {recall} %, {printable(worst)})"
                )
        if parts:
            lines.append(f"Classes are unbalanced. Macro-F1 {condition(spec)}: {', '.join(parts)}.")
    return lines


def _mark_notes(table: Table) -> list[str]:
    """What the signs mean, and by which tests."""
    best, signs, lines = "the best under the same condition", [], []
    marks = {cell.mark for cell in table.cells.values()}
    if "close" in marks:
        signs.append(f"≈: not significantly different from {best}")
    if "" in marks:
        signs.append(f"no sign: {'the best itself' if signs else best}, or significantly below it")
    if signs:
        used = {test for cell in table.cells.values() for test in cell.tests}
        tests = listed(text for test, text in _TESTS.items() if test in used)
        together = f"5 % level and 95 % intervals for all {table.by}s together"
        text = "; ".join(signs)
        lines.append(f"{text[0].upper()}{text[1:]} ({together}; {tests}).")
    if "untested" in marks:
        lines.append(f"?: could not be tested against {best}.")
    return lines


def corruption_notes(table: Table) -> list[str]:
    """What the tables of corruptions show."""
    lines = ["Each row is a mean over the severities 1 to 5."]
    if any(table.drop(label, severities.ALL) is not None for label in table.labels):
        lines[0] += " Drop: accuracy on clean images minus this accuracy, in percentage points."
    if table.baseline:
        label = next(iter(table.baseline.values()))
        base = names([label.removesuffix(f" ({table.weights[label]} epoch)")])
        lines.append(
            f"CE, the corruption error: errors divided by those of {base}, in %; below 100 is "
            "better. Of all 15, the mean of their CEs (mCE)."
        )
    return lines


def calibration_notes(table: Table) -> list[str]:
    """What the columns of a table of calibration mean."""
    over = [text for text, n in (("noise draws", table.draws), ("trainings", table.seeds)) if n > 1]
    means = f" Means over {' and '.join(over)}." if over else ""
    return [
        "ECE is the expected calibration error of the predicted class, with 15 bins; NLL the "
        "negative log-likelihood, in nats; the Brier score goes from 0 to 2. Lower is better."
        f"{means} {table.n:,} test images."
    ]


def training_count(table: Table) -> str:
    """The number of trainings per cell: '3', or 'up to 3' if some have fewer."""
    fewest = min(cell.seeds for cell in table.cells.values())
    return f"{'up to ' if fewest < table.seeds else ''}{table.seeds}"


def chance_warnings(table: Table) -> list[str]:
    """Which labels are no better than always predicting one class: a sentence for each accuracy."""
    clean = next((spec for spec in table.perturbations if is_clean(spec)), "")
    labels: dict[str, list[str]] = {}
    for label in table.at_chance:
        labels.setdefault(table.percent(table.cells[label, clean].mean), []).append(label)
    return [
        f"{names(who)} {'is at chance: its' if len(who) == 1 else 'are at chance: their'} "
        f"{accuracy} % on clean images is not above the "
        f"{table.percent(table.majority_share or 0.0)} % of always predicting the most frequent "
        "class."
        for accuracy, who in labels.items()
    ]


def column_sentence(table: Table, spec: str, weights: str | None = None) -> str:
    """Who is best under one perturbation, by how much, and who is not significantly different.

    Differences are percentage points on the same images; the interval is that of the table, over
    trainings or over test images.

    Args:
        table: the table.
        spec: one of its perturbations.
        weights: of a table with both weights, those to describe.
    """
    cells = {
        label.removesuffix(f" ({weights} epoch)"): cell
        for label, cell in table.column(spec, weights).items()
    }
    best, close, untested, below = (
        [label for label, cell in cells.items() if cell.mark == mark]
        for mark in ("best", "close", "untested", "")
    )
    where = condition(spec)
    if weights:
        where = f"with the weights of the {weights} epoch, {where}"
    where, top = f"{where[0].upper()}{where[1:]}", table.percent(cells[best[0]].mean)
    if len(best) == len(cells):
        same = "has an" if len(best) == 1 else "have the same"
        return f"{where}, {names(best)} {same} accuracy of {top} %."
    has, them = ("has", "it") if len(best) == 1 else ("share", "them")
    text = f"{where}, {names(best)} {has} the highest accuracy, {top} %"
    if close and not below and not untested:
        over = listed(sorted({cells[label].interval_over or "" for label in close}))
        others = f"the other {table.by}s are" if len(close) > 1 else f"{names(close)} is"
        return f"{text}; {others} not significantly different from {them} (tested over {over})."
    if close:
        verb = "is" if len(close) == 1 else "are"
        text += f"; {names(close)} {verb} not significantly different from {them}"
    elif below:
        second = max(below, key=lambda label: cells[label].mean)
        (lead,) = points(cells[best[0]].mean - cells[second].mean)
        text += f", {lead} points above {names([second])}, the next best"
        text += interval(cells[second])
        below.remove(second)
    if untested:
        text += f"; {names(untested)} could not be tested against {them}"
    if below:
        lowest = min(cells[label].mean for label in below)
        last = [label for label in below if cells[label].mean == lowest]
        has, are = ("has", "is") if len(last) == 1 else ("have", "are")
        is_lowest = lowest == min(cell.mean for cell in cells.values())
        how = f"{has} the lowest" if is_lowest else f"{are} significantly lower"
        text += f"; {names(last)} {how}, {table.percent(lowest)} %"
    return text + "."


def interval(cell: Cell) -> str:
    """How far a cell is behind the best, as an interval in brackets; empty if unknown."""
    if cell.behind is None:
        return ""
    low, high = points(-cell.behind.high, -cell.behind.low)
    return f" (95 % interval over {cell.interval_over}: {low} to {high})"


def cell_comparison(cell: Cell) -> str:
    """How a cell compares with the best of its column; empty if it was not tested."""
    if cell.behind is None:
        return "highest mean of this column" if cell.mark == "best" else ""
    text = f"{points(-cell.behind.diff)[0]} points below the best{interval(cell)}"
    return text + ("; not significantly different" if cell.mark == "close" else "")


def main_sentences(table: Table) -> list[str]:
    """What the most important columns show: clean images, the mean over all corruptions if there is
    one, and where accuracies differ most. Last and best weights are described separately; a single
    label is not described, nor are labels that are all at chance."""
    if len(table.at_chance) == len(table.labels):
        return []
    sentences = []
    kinds = Counter(table.weights[label] for label in table.labels)
    for weights, count in kinds.items():
        if count > 1:
            specs = [spec for spec in table.perturbations if is_clean(spec)]
            specs += [spec for spec in (severities.ALL,) if spec in table.perturbations]
            specs += [spec for spec in [table.widest_gap(weights)] if spec and spec not in specs]
            chosen = weights if len(kinds) > 1 else None
            sentences += [
                column_sentence(table, s, chosen) for s in specs if table.column(s, weights)
            ]
    return sentences


def training_caveat(table: Table) -> list[str]:
    """What a comparison of one or two trainings per method cannot show; nothing for three or more,
    or if nothing is compared."""
    if max(Counter(table.weights.values()).values()) < 2:
        return []
    if table.seeds == 1:
        once = "One training per method" if table.by == "method" else "Every training was done once"
        return [
            f"{once}: the variation between trainings is not covered, so another seed may change "
            "the order."
        ]
    single = dict.fromkeys(label for (label, _), cell in table.cells.items() if cell.seeds == 1)
    if single:
        return [
            f"One training of {names(single)}: there the variation between trainings is not "
            "covered."
        ]
    if table.seeds == 2:
        return [
            "Two trainings per method give a test little power: use three or more (--seeds) to "
            "tell methods apart."
        ]
    return []
