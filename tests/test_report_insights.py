"""What a report says of curvature and of the loss around images."""

from __future__ import annotations

from typing import Any

import numpy as np

from noiseproof.lab.report import curvature_sections as insights


class _Mapped:
    """An analysis of the loss around two test images, 4 and 9; `right`: which are recognised."""

    def __init__(self, *right: bool):
        d = np.linspace(-1, 1, 5)
        flat = np.zeros((2, 5, 5))
        margin = np.stack([np.full((5, 5), 1.0 if r else -1.0) for r in right])
        self.content = {"distance": d, "negative_loss": flat, "margin": margin,
                        "index": np.array([4, 9]), "label": np.array([0, 1]),
                        "image": np.ones((2, 1, 3, 3))}  # fmt: skip

    def arrays(self, part: str) -> dict[str, Any] | None:
        return self.content if part == "surface" else None


class _Bent:
    """An analysis of nothing but curvature."""

    def __init__(self, *values: float, smooth: list[float] | None = None):
        self.found = {"finite_difference": np.array(values)}
        if smooth is not None:
            self.found["hessian"] = np.array(smooth)

    def arrays(self, part: str) -> dict[str, Any] | None:
        return self.found if part == "curvature" else None

    def rows(self, part: str) -> list[dict[str, Any]]:
        return []


def test_curvature_is_told_by_the_mean_of_the_lowest_nine_tenths_and_by_the_median():
    flat = [0.0] * 8
    analyses: Any = {"normal": _Bent(*flat, 18.0, 50.0), "both": _Bent(*([1.0] * 9), 90.0)}
    section = insights._curvature(analyses)
    assert section is not None
    said = section.plates[0].caption
    assert "The mean of these 90 %" in said
    mean, median = said.split("; the median")
    assert mean.endswith("lowest for both (1) and highest for normal (2)")  # without 50 and 90
    assert "lowest for normal (0) and highest for both (1)" in median


def test_where_two_estimates_of_curvature_disagree_on_the_flattest_the_report_says_so():
    bent, level = [4.0, 5.0, 6.0], [1.0, 2.0, 3.0]
    analyses: Any = {
        "normal": _Bent(*level, smooth=bent),
        "both": _Bent(*bent, smooth=level),
        "noisy": _Bent(0.0, 0.0, 0.0, smooth=[float("nan")] * 3),  # cannot be derived twice
    }
    section = insights._curvature(analyses)
    assert section is not None
    assert "Hessian-vector products" in section.intro
    other = section.plates[1]
    assert other.name == "curvature-between-kinks"
    assert "noisy" not in other.caption
    assert "lowest for both (2) and highest for normal (5)" in other.caption
    assert other.caption.endswith("normal by finite differences, both between kinks.")
    analyses["both"] = _Bent(*level, smooth=level)
    analyses["normal"] = _Bent(*bent, smooth=bent)
    section = insights._curvature(analyses)
    assert section is not None
    assert section.plates[1].caption.endswith(
        "By the median, both is the flattest for either estimate."
    )
    del analyses["normal"].found["hessian"], analyses["both"].found["hessian"]
    section = insights._curvature(analyses)
    assert section is not None
    assert [plate.name for plate in section.plates] == [
        "curvature-boxplot",
        "curvature-distribution",
    ]
    assert "Hessian-vector" not in section.intro


def test_the_surfaces_are_those_of_all_images_that_the_runs_share():
    analyses: Any = {"normal": _Mapped(True, True), "both": _Mapped(False, True)}
    section = insights._surface(analyses, ["cat", "dog"])
    assert section is not None
    (plate,) = section.plates
    assert plate.draw("light") is not None
    assert "test images 5 (cat) and 10 (dog)" in plate.caption
    shown: Any = plate.draw("light")
    assert [ax.get_xlabel() for ax in shown.axes if ax.images] == ["cat", "dog"]
    for analysis in analyses.values():
        del analysis.content["image"]  # as in analyses of old
    bare: Any = plate.draw("light")
    assert {"cat\nacross it", "dog\nacross it"} <= {ax.get_ylabel() for ax in bare.axes}
    assert "100.0 %" in plate.caption
    assert "50.0 %" in plate.caption
    analyses["noisy"] = _Mapped(True, True)
    analyses["noisy"].content["index"] = np.array([4, 8])
    assert insights._surface(analyses, ["cat", "dog"]) is None
    assert insights._surface({}, ["cat"]) is None
