"""What a report states about curvature and the loss surface."""

from __future__ import annotations

from typing import Any

import numpy as np

from noiseproof.lab.report.curvature_sections import curvature_section, surface_section


class SurfaceAnalysis:
    """An analysis of the loss surface of test images 4 and 9; which are classified correctly."""

    def __init__(self, *correct: bool):
        d = np.linspace(-1, 1, 5)
        flat = np.zeros((2, 5, 5))
        margin = np.stack([np.full((5, 5), 1.0 if c else -1.0) for c in correct])
        self.content = {"distance": d, "negative_loss": flat, "margin": margin,
                        "index": np.array([4, 9]), "label": np.array([0, 1]),
                        "image": np.ones((2, 1, 3, 3))}  # fmt: skip

    def arrays(self, part: str) -> dict[str, Any] | None:
        return self.content if part == "surface" else None


class CurvatureAnalysis:
    """An analysis of curvature only."""

    def __init__(
        self,
        *values: float,
        hessian: list[float] | None = None,
        loss: float | None = None,
        counts: list[int] | None = None,
    ):
        self.content = {"finite_difference": np.array(values)}
        if hessian is not None:
            self.content["hessian"] = np.array(hessian)
        if loss is not None:
            self.content["loss"] = np.full(len(values), loss)
        self.counts = counts

    def arrays(self, part: str) -> dict[str, Any] | None:
        if part == "counts" and self.counts:
            noise, draws = np.array(["gaussian:0.2"]), np.array([9])
            return {"noise": noise, "counts": np.array([self.counts]), "draws": draws}
        return self.content if part == "curvature" else None

    def rows(self, part: str) -> list[dict[str, Any]]:
        return []


def test_curvature_is_compared_by_the_mean_of_the_lowest_90_percent_and_by_the_median():
    zeros = [0.0] * 8
    analyses: Any = {
        "normal": CurvatureAnalysis(*zeros, 18.0, 50.0),
        "both": CurvatureAnalysis(*([1.0] * 9), 90.0),
    }
    section = curvature_section(analyses)
    assert section is not None
    caption = section.figures[0].caption
    assert "The mean of the lowest 90 %" in caption
    mean, median = caption.split(". The median")
    assert mean.endswith("lowest for `both` (1) and highest for `normal` (2)")  # without 50, 90
    assert "lowest for `normal` (0) and highest for `both` (1)" in median


def test_the_report_states_whether_both_estimators_rank_the_same_method_lowest():
    high, low = [4.0, 5.0, 6.0], [1.0, 2.0, 3.0]
    analyses: Any = {
        "normal": CurvatureAnalysis(*low, hessian=high),
        "both": CurvatureAnalysis(*high, hessian=low),
        "noisy": CurvatureAnalysis(
            0.0, 0.0, 0.0, hessian=[float("nan")] * 3
        ),  # without a second derivative
    }
    section = curvature_section(analyses)
    assert section is not None
    assert "Hessian-vector products" in section.intro
    other = section.figures[1]
    assert other.name == "curvature-between-kinks"
    assert "noisy" not in other.caption
    assert "lowest for `both` (2) and highest for `normal` (5)" in other.caption
    assert other.caption.endswith(
        "`normal` with finite differences, `both` with Hessian-vector products."
    )
    analyses["both"] = CurvatureAnalysis(*low, hessian=low)
    analyses["normal"] = CurvatureAnalysis(*high, hessian=high)
    section = curvature_section(analyses)
    assert section is not None
    assert section.figures[1].caption.endswith("Both estimators give `both` the lowest median.")
    del analyses["normal"].content["hessian"], analyses["both"].content["hessian"]
    section = curvature_section(analyses)
    assert section is not None
    assert [figure.name for figure in section.figures] == [
        "curvature-boxplot",
        "curvature-distribution",
    ]
    assert "Hessian-vector" not in section.intro


def test_values_near_rounding_are_not_ranked():
    few, low, high = [1e-16, 2e-16, 3e-16], [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]
    analyses: Any = {
        "normal": CurvatureAnalysis(*high, hessian=high, loss=0.1),
        "both": CurvatureAnalysis(*low, hessian=low, loss=1e-3),
        "discriminative": CurvatureAnalysis(*few, hessian=few, loss=1e-8),
    }
    section = curvature_section(analyses)
    assert section is not None
    for figure in section.figures[:2]:
        for quantity in ("mean of the lowest 90 %, dominated", "median of all samples is"):
            sentence = figure.caption[figure.caption.index(quantity) :]
            assert "lowest for `both` (0.2)" in sentence
            assert "for `discriminative` it is lost in rounding" in sentence
        assert "discriminative" not in figure.alt.partition("medians")[2]
        assert "the lowest median" not in figure.caption
    del analyses["normal"], analyses["both"]
    section = curvature_section(analyses)
    assert section is not None
    assert "The median of all samples is lost in rounding." in section.figures[0].caption


def test_medians_that_are_the_same_to_two_digits_are_not_ranked():
    same, other = [0.5, 0.5, 0.5], [0.5000001] * 3
    analyses: Any = {
        "normal": CurvatureAnalysis(*same, hessian=other),
        "both": CurvatureAnalysis(*other, hessian=same),
    }
    section = curvature_section(analyses)
    assert section is not None
    for figure in section.figures[:2]:
        assert "The median of all samples is 0.5 for `normal` and `both`" in figure.caption
        assert "estimator" not in figure.caption


def test_correlations_over_fewer_than_five_groups_are_not_stated():
    curvature = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    four, five = [0, 1, 2, 9, 9, 9], [0, 1, 2, 5, 9, 9]
    for counts, stated in ((four, False), (five, True)):
        analyses: Any = {"both": CurvatureAnalysis(*curvature, counts=counts)}
        section = curvature_section(analyses)
        assert section is not None
        (figure,) = (f for f in section.figures if f.name == "correct-count-vs-curvature")
        assert "over samples" in figure.caption
        assert ("over groups" in figure.caption) == stated
        drawn: Any = figure.draw(theme="light")
        texts = " ".join(text.get_text() for ax in drawn.axes for text in ax.texts)
        assert ("over groups" in texts) == stated
        assert "nan" not in texts
    constant: Any = {"both": CurvatureAnalysis(*curvature, counts=[9] * 6)}
    section = curvature_section(constant)
    assert section is not None
    (figure,) = (f for f in section.figures if f.name == "correct-count-vs-curvature")
    assert figure.caption.endswith("are classified correctly.")


def test_the_surfaces_are_those_of_all_images_that_the_runs_share():
    analyses: Any = {"normal": SurfaceAnalysis(True, True), "both": SurfaceAnalysis(False, True)}
    section = surface_section(analyses, ["cat", "dog"])
    assert section is not None
    (figure,) = section.figures
    assert figure.draw(theme="light") is not None
    assert "test images 5 (cat) and 10 (dog)" in figure.caption
    shown: Any = figure.draw(theme="light")
    assert [ax.get_xlabel() for ax in shown.axes if ax.images] == ["cat", "dog"]
    for analysis in analyses.values():
        del analysis.content["image"]  # as in older analyses
    section = surface_section(analyses, ["cat", "dog"])
    assert section is not None
    bare: Any = section.figures[0].draw(theme="light")
    assert {"cat\northogonal", "dog\northogonal"} <= {ax.get_ylabel() for ax in bare.axes}
    assert "100.0 %" in figure.caption
    assert "50.0 %" in figure.caption
    analyses["noisy"] = SurfaceAnalysis(True, True)
    analyses["noisy"].content["index"] = np.array([4, 8])
    assert surface_section(analyses, ["cat", "dog"]) is None
    assert surface_section({}, ["cat"]) is None
