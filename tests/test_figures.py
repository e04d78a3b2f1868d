"""Every figure, on small synthetic data: what it shows, and that it is drawn without a warning."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from noiseproof.lab import figures
from noiseproof.lab.analysis.correlation import count_groups, retained_share
from noiseproof.lab.config import METHODS
from noiseproof.lab.figures import palette, style

LABELS = ("normal", "both", "discriminative")
CLASSES = ("cat", "$dog$", "_bird")
N = 60


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def per_label(make: Any, labels: Sequence[str] = LABELS) -> dict[str, Any]:
    return {label: make(rng(i)) for i, label in enumerate(labels)}


def bound_arrays(r: np.random.Generator) -> dict[str, Any]:
    lam = r.lognormal(0, 3, N)
    upper, right = lam * r.lognormal(2, 1, N), lam * r.normal(0, 1, N)
    held = {"holds_upper": lam <= upper, "holds_upper_sharp": lam <= upper / 2}
    held |= {"holds_lower": 3 * lam >= right}
    held |= {"vacuous_upper": lam > 9, "vacuous_upper_sharp": lam < 0, "vacuous_lower": right <= 0}
    sides = {"curvature": lam, "upper": upper, "upper_sharp": upper / 2}
    return {**sides, **held, "lower_left": 3 * lam, "lower_right": right}


def geometry_arrays(r: np.random.Generator) -> dict[str, Any]:
    return {
        f"{view}.{kind}": r.gamma(2, 1, N) - (kind == "boundary")
        for view in ("clean", "noisy")
        for kind in ("centroid", "rival", "boundary")
    }


def surface_arrays(r: np.random.Generator) -> dict[str, Any]:
    d = np.linspace(-1, 1, 9)
    bowl = -(d[None] ** 2 + d[:, None] ** 2) * r.uniform(1, 3, (2, 1, 1))
    return {"distance": d, "negative_loss": bowl, "margin": 1 + bowl}


def metric_rows(r: np.random.Generator) -> list[dict[str, float]]:
    rows = [{"epoch": e, "loss": 1 / e, "train_accuracy": 1 - 0.5 / e} for e in range(1, 6)]
    looks = {"val_accuracy": 0.9, "val_noisy_accuracy": 0.8}
    return [{**row, **{k: v * row["train_accuracy"] for k, v in looks.items()}} for row in rows]


@cache
def drawings(
    methods: Sequence[str] = LABELS, classes: Sequence[str] = CLASSES, **space: Any
) -> dict[str, Any]:
    """Each figure's function with data for it."""

    def per_label(make: Any) -> dict[str, Any]:
        return {label: make(rng(i)) for i, label in enumerate(methods)}

    curvature = per_label(lambda r: r.lognormal(-4, 3, N))
    counts = per_label(lambda r: r.choice([0, 5, 10], N))
    labels = rng().integers(0, len(classes), N)
    noises = ("gaussian:0.2", "uniform:0.2")
    kept = {
        noise: {x: retained_share(curvature[x], counts[x] / 10)._asdict() for x in methods}
        for noise in noises
    }
    groups = {
        noise: {x: count_groups(curvature[x], counts[x], 10)._asdict() for x in methods}
        for noise in noises
    }
    stages = np.array(["block1", "features"])
    places = per_label(lambda r: {v: r.normal(size=(N, 2)) for v in ("clean", "noisy")})
    study = per_label(
        lambda r: {
            "steps": np.array([1e-3, 1e-2]),
            "hessian": r.random(N),
            "finite_difference": r.random((2, N)),
        }
    )
    split = per_label(
        lambda r: {"stages": stages, "knn": r.random((2, 2)), "silhouette": r.random((2, 2))}
    )
    curves = per_label(lambda r: {"level": [0.2, 0.0], "mean": [0.5, 0.9], "std": [0.01, np.nan]})
    radii = per_label(lambda r: np.where(r.random(N) < 0.2, -1.0, r.gamma(2, 0.1, N)))
    f = figures
    return {
        "curvature_boxplot": lambda t: f.curvature_boxplot(curvature, **space, theme=t),
        "curvature_distribution": lambda t: f.curvature_distribution(curvature, **space, theme=t),
        "accuracy_vs_retained_share": lambda t: f.accuracy_vs_retained_share(kept, theme=t),
        "correct_count_vs_curvature": lambda t: f.correct_count_vs_curvature(
            groups, **space, theme=t
        ),
        "certified_accuracy": lambda t: f.certified_accuracy(radii, theme=t),
        "step_study": lambda t: f.step_study(study, used=1e-2, theme=t),
        "loss_surface": lambda t: f.loss_surface(per_label(surface_arrays), theme=t),
        "tsne": lambda t: f.tsne(places, labels, classes, theme=t),
        "tsne_stages": lambda t: f.tsne_stages(places, labels, classes, theme=t),
        "stage_separation": lambda t: f.stage_separation(split, theme=t),
        "geometry_histograms": lambda t: f.geometry_histograms(
            per_label(geometry_arrays), radius=0.5, theme=t
        ),
        "reliability": lambda t: f.reliability(
            {
                view: per_label(
                    lambda r: {
                        "images": [0, 30, 30],
                        "correct": [0, *r.integers(0, 30, 2)],
                        "confidence": [0.0, 15.0, 28.5],
                    }
                )
                for view in ("clean", "noisy")
            },
            theme=t,
        ),
        "risk_coverage": lambda t: f.risk_coverage(
            per_label(
                lambda r: {
                    "coverage": np.linspace(0.1, 1, 10),
                    **{f"{view}.probability": r.random(10) / 5 for view in ("clean", "noisy")},
                }
            ),
            theme=t,
        ),
        "distances": lambda t: f.distances(per_label(geometry_arrays), theme=t),
        "theory_bounds": lambda t: f.theory_bounds(per_label(bound_arrays), theme=t),
        "accuracy_curves": lambda t: f.accuracy_curves(curves, train_level=0.2, theme=t),
        "training_curves": lambda t: f.training_curves(per_label(metric_rows), theme=t),
        "confusion": lambda t: f.confusion(
            9 * np.eye(len(classes)) + 1, classes, title="normal", theme=t
        ),
        "corruptions": lambda t: f.corruptions(
            per_label(lambda r: r.random(len(classes))),
            classes,
            ["", *["noise"] * (len(classes) - 1)],
            theme=t,
        ),
        "per_class": lambda t: f.per_class(
            per_label(lambda r: r.random(len(classes))), classes, theme=t
        ),
    }


def texts(figure: Figure) -> str:
    """All texts of a figure that has been drawn."""
    found = figure.findobj(lambda artist: isinstance(artist, Text))
    return "\n".join(artist.get_text() for artist in found if isinstance(artist, Text))


@pytest.mark.parametrize("name", drawings())
def test_a_figure_is_drawn_in_both_themes_names_every_method_and_leaves_matplotlib_alone(name):
    before = dict(matplotlib.rcParams)
    make = drawings()[name]
    for theme in ("light", "dark"):
        figure = make(theme)
        assert isinstance(figure, Figure)
        figure.set_layout_engine(None)  # which takes most of the time; tests below lay them out
        figure.savefig(io.BytesIO(), format="svg")
        assert figure.get_facecolor() == (0, 0, 0, 0)
        ticks = [t for ax in figure.axes for t in (*ax.get_xticklabels(), *ax.get_yticklabels())]
        inks = {to_hex(tick.get_color()).upper() for tick in ticks if tick.get_text()}
        assert inks <= {palette.INK[theme]}
        if name != "confusion":  # of one method
            assert all(label in texts(figure) for label in LABELS)
    assert dict(matplotlib.rcParams) == before


CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPACE = "normalised (u = x / std, std = 0.247, 0.243, 0.262)"


@pytest.mark.parametrize("methods", [("normal",), ("normal", "discriminative"), tuple(METHODS)])
@pytest.mark.parametrize("name", drawings())
def test_no_text_is_cut_off_however_many_runs_and_classes(name, methods):
    _check_texts(drawings(methods, CIFAR, space=SPACE)[name]("light"))


@pytest.mark.parametrize("methods", [("normal",), ("normal", "discriminative"), tuple(METHODS)])
@pytest.mark.parametrize("name", sorted(set(drawings()) - {"confusion"}))
def test_every_figure_fits_a_phone(name, methods):
    with style.narrow_figures():
        figure = drawings(methods, CIFAR, space=SPACE)[name]("light")
    assert figure.get_figwidth() <= style.NARROW
    _check_texts(figure)


def _check_texts(figure: Any) -> None:
    """No text is cut off at the edges of the figure."""
    figure.draw_without_rendering()
    page = figure.bbox.padded(2)
    found: list[Any] = [*figure.texts, *(t for legend in figure.legends for t in legend.texts)]
    for ax in figure.axes:
        found += [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
        found += ax.get_legend().texts if ax.get_legend() else []
    for text in found:
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent()
            corners = ((box.x0, box.y0), (box.x1, box.y1))
            assert all(page.contains(*corner) for corner in corners), text


LONG = tuple(
    f"discriminative-{kind}-s3" for kind in ("renormalised-noisy", "code", "together", "a")
)


@pytest.mark.parametrize("name", sorted(set(drawings()) - {"confusion"}))
def test_long_names_of_runs_fit(name):
    figure = drawings(LONG)[name]("light")
    _check_texts(figure)
    titles = [t for ax in figure.axes for t in (ax.title, ax._left_title) if t.get_text()]
    boxes = [title.get_window_extent() for title in titles]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_certified_accuracy_is_the_share_of_radii_at_or_above_each():
    figure = figures.certified_accuracy({"both": [-1.0, 0.2, 0.4, 0.4]})
    x, y = figure.axes[0].lines[0].get_data()
    assert np.array_equal(x, [0, 0.2, 0.4, 0.4])
    assert np.array_equal(y, [0.75, 0.75, 0.5, 0])
    assert figure.axes[0].lines[0].get_drawstyle() == "steps-pre"  # a step at x belongs to its left


def test_reliability_is_the_share_of_right_answers_by_mean_probability():
    sums = {"images": [5, 20, 40], "correct": [5, 8, 30], "confidence": [1.0, 10.0, 36.0]}
    figure = figures.reliability({"clean": {"both": sums}}, fewest=20)
    diagonal, line = figure.axes[0].lines
    assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata())
    assert np.allclose(line.get_xdata(), [0.5, 0.9])  # the bin of 5 images is left out
    assert np.allclose(line.get_ydata(), [0.4, 0.75])


def test_a_table_of_drawings_covers_the_module():
    public = {name for name in figures.__all__ if name.islower()} - {"colour"}
    assert set(drawings()) == public


def test_a_method_has_one_colour_everywhere_and_every_method_has_its_own():
    for theme in ("light", "dark"):
        assert set(figures.METHOD_COLOURS[theme]) == set(METHODS)
        assert len(set(figures.METHOD_COLOURS[theme].values())) == len(METHODS)
    assert len(set(figures.METHOD_MARKERS.values())) == len(METHODS)
    assert figures.colour("noisy-s3 (best)") == figures.METHOD_COLOURS["light"]["noisy"]
    theirs = [figures.colour(label) for label in ("noisy", "noisy-code", "both", "mine", "yours")]
    assert len(set(theirs)) == 5  # other settings of a method, and names without one, differ too
    rows = ("", "-code", "-together", "-renormalised-mixed", "-renormalised-noisy")
    variants = [f"discriminative{row}-s3" for row in rows]
    assert len({palette.marker(label) for label in variants}) == len(rows)
    assert len({str(palette.line_style(label, "light")) for label in variants}) == len(rows)
    curves = drawings()["accuracy_curves"]("dark").axes[0].get_lines()
    drawn = {line.get_label(): line.get_color() for line in curves}
    for label in LABELS:
        assert drawn[label] == figures.METHOD_COLOURS["dark"][label]


def test_training_curves_have_a_panel_for_each_recorded_metric():
    rows = metric_rows(rng())
    figure = figures.training_curves({"both": rows})
    titles = ["training loss", "training accuracy", "validation, clean", "validation, noisy"]
    assert [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes] == titles
    drawn: Any = figure.axes[3].get_lines()[0].get_ydata()
    assert list(drawn) == [row["val_noisy_accuracy"] for row in rows]
    for row in rows:
        del row["val_noisy_accuracy"]
    figure = figures.training_curves({"both": rows})
    titles = ["training loss (own terms)", "training accuracy", "validation accuracy"]
    assert [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes] == titles


def test_the_box_plot_shows_the_median_of_the_lowest_ninety_percent():
    values = np.arange(1.0, 101.0)
    figure = figures.curvature_boxplot({"both": values})
    medians = [
        float(np.unique(line.get_xdata())[0])
        for line in figure.axes[0].get_lines()
        if line.get_linewidth() == 2.6
    ]
    assert medians == [45.5]
    assert "lowest 90 %" in figure.axes[0].get_xlabel()
    assert figure.axes[0].get_xscale() == "linear"
    values[80:] *= 1e4  # a long whisker alone, which would flatten the box on a linear axis
    assert figures.curvature_boxplot({"both": values}).axes[0].get_xscale() == "log"


def test_empty_groups_are_listed():
    groups = count_groups([3.0, 2.0, 1.5, 1.2, 1.0, 1.0], [0, 3, 4, 5, 10, 10], 10)
    figure = figures.correct_count_vs_curvature({"gaussian:0.2": {"both": groups._asdict()}})
    text = texts(figure)
    assert "empty: k = 1–2, 6–9" in text
    assert f"r = {groups.r_groups:.2f} over groups" in text
    crosses = [c for c in figure.axes[0].collections if c.get_label() == "empty"]
    assert np.asarray(crosses[0].get_offsets())[:, 0].tolist() == groups.empty


def test_surfaces_of_an_input_share_one_scale_and_have_a_dot_at_the_input():
    figure = figures.loss_surface(per_label(surface_arrays))
    surfaces = list(per_label(surface_arrays).values())
    maps = np.array([ax for ax in figure.axes if ax.get_lines()]).reshape(2, len(LABELS))
    for k, line in enumerate(maps):
        lowest = min(s["negative_loss"][k].min() for s in surfaces)
        for ax in line:
            levels = ax.collections[0].levels
            assert (levels[0], levels[-1]) == pytest.approx((lowest, 0.0))
            assert ax.collections[0].get_clim() == pytest.approx((lowest, 0.0))
            (dot,) = ax.get_lines()
            assert np.asarray(dot.get_data()).tolist() == [[0], [0]]
            assert dot.get_color() == "black"


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_shown_before_their_surfaces(channels: int):
    pictures = np.random.default_rng(0).random((2, channels, 4, 4))
    figure = figures.loss_surface(per_label(surface_arrays), images=pictures, names=["cat", "dog"])
    shown = [ax for ax in figure.axes if ax.images]
    assert [ax.get_xlabel() for ax in shown] == ["cat", "dog"]
    for ax, picture in zip(shown, pictures, strict=True):
        pixels = np.asarray(ax.images[0].get_array()).reshape(4, 4, channels)
        assert np.allclose(np.moveaxis(pixels, -1, 0), picture)


def test_flat_surfaces_and_zero_curvatures_are_drawn():
    flat = {"distance": np.linspace(-1, 1, 5), "negative_loss": np.zeros((1, 5, 5))}
    figures.loss_surface({"both": {**flat, "margin": np.ones((1, 5, 5))}}).draw_without_rendering()
    zero = {"both": np.zeros(9), "normal": np.r_[0.0, 1e-9, 1.0]}
    figures.curvature_boxplot(zero).draw_without_rendering()
    figures.curvature_distribution(zero).draw_without_rendering()


def test_clean_and_noisy_points_share_their_axes_limits():
    clean = rng().normal(size=(N, 2))
    figure = figures.tsne({"both": {"clean": clean, "noisy": 9 * clean}}, np.zeros(N, int), "a")
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_ylim() == below.get_ylim()
    low, high = below.get_xlim()
    assert low < 9 * clean[:, 0].min()
    assert 9 * clean[:, 0].max() < high


def test_bounds_show_for_how_many_informative_samples_they_hold():
    arrays = bound_arrays(rng())
    text = texts(figures.theory_bounds({"both": arrays}))
    for name in ("upper", "upper_sharp", "lower"):
        holds, vacuous = arrays[f"holds_{name}"], arrays[f"vacuous_{name}"]
        informative = ~(vacuous & holds)
        held = int((informative & holds).sum())
        assert f"both: holds for {held} of {int(informative.sum())}" in text
    assert int((~arrays["vacuous_lower"]).sum()) < N
    arrays["vacuous_lower"] = arrays["holds_lower"] = arrays["lower_right"] < np.inf
    text = texts(figures.theory_bounds({"both": arrays}))
    assert "both: vacuous" in text
    assert "vacuous here" in text


def test_the_confusion_matrix_shows_shares_of_the_true_class():
    figure = figures.confusion([[8, 2, 0], [0, 5, 5], [0, 0, 4]], CLASSES)
    cells = {(t.get_position(), t.get_text()) for t in figure.axes[0].texts}
    assert ((0, 0), "80") in cells
    assert ((1, 0), "20") in cells
    assert ((2, 1), "50") in cells
    assert ((0, 1), "0") not in cells
    with pytest.raises(ValueError, match="expected 3 x 3 counts"):
        figures.confusion(np.eye(2), CLASSES)


def test_classes_are_ordered_from_hardest_to_easiest():
    figure = figures.per_class({"both": [0.9, 0.1, 0.5]}, ["a", "b", "c"])
    from_the_top = [t.get_text() for t in figure.axes[0].get_yticklabels()][::-1]
    assert from_the_top == ["b", "c", "a"]


def test_labels_at_line_ends_are_moved_apart_and_stay_in_order():
    places = style.spread([0.5, 0.5, 0.52, 0.9], 0.1, 0.0, 1.0)
    assert np.diff(places).min() >= 0.1 - 1e-12
    assert places[-1] == pytest.approx(0.9)
    assert np.mean(places[:3]) == pytest.approx(np.mean([0.5, 0.5, 0.52]))
    top = style.spread([1.0, 1.0, 1.0], 0.1, 0.0, 1.0)
    assert top[-1] <= 1.0 + 1e-12


def test_an_unknown_theme_is_refused():
    with pytest.raises(ValueError, match="theme must be light or dark, got 'blue'"):
        figures.distances(per_label(geometry_arrays), theme="blue")  # pyright: ignore
