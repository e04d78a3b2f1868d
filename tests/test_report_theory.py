"""What a report states about the theory."""

from __future__ import annotations

from typing import Any

from noiseproof.lab.report.theory_section import theory_section


class TheoryAnalysis:
    """An analysis of theory only, without arrays."""

    def __init__(self, *rows: dict[str, Any]):
        self.content = [{"part": "theory", "value": 1.0, "sentence": "Yes.", **row} for row in rows]

    def rows(self, part: str, metric: str | None = None) -> list[dict[str, Any]]:
        return [row for row in self.content if metric in (None, row["metric"])]

    def arrays(self, part: str) -> None:
        return None


def bound(informative: int, held: int, **facts: Any) -> dict[str, Any]:
    verdict = "vacuous" if not informative else "holds" if held == informative else "violated"
    return {"metric": "lower bound", "cases": 64, "informative": informative, "held": held,
            "verdict": verdict, "checked": True, **facts}  # fmt: skip


def test_vacuous_cases_do_not_count_as_cases_in_which_a_bound_holds():
    analyses: Any = {
        "normal": TheoryAnalysis(bound(18, 1, paper="theorem 6.1, part 2")),
        "both": TheoryAnalysis(bound(0, 0, paper="theorem 6.1, part 2")),
        "noisy": TheoryAnalysis(bound(64, 64, paper="theorem 6.1, part 2", factor=2.5e12)),
    }
    section = theory_section(analyses)
    assert section is not None
    assert section.statements is not None
    checks, proved = section.statements["tables"].values()
    assert checks == {
        "lower bound (theorem 6.1, part 2)": {
            "normal": ("1 of 18", ["46 vacuous"]),
            "both": ("", ["vacuous"]),
            "noisy": ("64 of 64", ["loose: 2.5e+12 ×"]),
        }
    }
    assert proved == {}


def test_proved_statements_are_not_among_those_that_can_fail():
    margin = {"metric": "class margin", "cases": 10, "informative": 3, "held": 3, "unit": "classes",
              "verdict": "holds", "checked": False}  # fmt: skip
    fact = {"metric": "hidden directions", "verdict": None, "checked": False}  # nothing to count
    analyses: Any = {"both": TheoryAnalysis(margin, fact)}
    section = theory_section(analyses)
    assert section is not None
    assert section.statements is not None
    checks, proved = section.statements["tables"].values()
    assert checks == {}
    assert proved == {"class margin": {"both": ("3 of 10 classes", [])}}


def test_an_analysis_without_verdicts_is_named_and_not_shown():
    old = {"metric": "lower bound", "holds": 0.734375, "vacuous": 0.71875}
    analyses: Any = {"normal": TheoryAnalysis(old), "both": TheoryAnalysis(bound(18, 1))}
    section = theory_section(analyses)
    assert section is not None
    assert section.statements is not None
    assert list(section.statements["by_label"]) == ["both"]
    assert "The theory of `normal` was measured by an older version" in section.intro
    alone = theory_section({"normal": analyses["normal"]})
    assert alone is not None
    assert alone.statements is None
    assert theory_section({}) is None
