"""`noiseproof analyse`: measures why a run is robust or not, part by part, into the run folder.

A part that exists for the same weights, test images and settings is not measured again, so an
interrupted analysis continues where it stopped. `analysis.store` reads the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table

from noiseproof.lab.analysis.abstention import measure_abstention
from noiseproof.lab.analysis.curvature import measure_counts, measure_curvature, measure_steps
from noiseproof.lab.analysis.features import measure_embedding, measure_geometry, measure_separation
from noiseproof.lab.analysis.store import Analysis, open_analysis
from noiseproof.lab.analysis.subject import Measured, Progress, Settings, Subject
from noiseproof.lab.analysis.surface import measure_surface
from noiseproof.lab.analysis.theory import measure_theory
from noiseproof.lab.command import command_record
from noiseproof.lab.config import STAGED
from noiseproof.lab.console import progress_bars, terminal
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import chosen_device, environment
from noiseproof.lab.runs import RunFolder, Weights, open_runs, shared_weights
from noiseproof.lab.validate import validate_analysis
from noiseproof.perturb.text import is_known, noise_levels, ordered, steps
from noiseproof.robustness import by_name, canonical_name, check_applicable


class Part(NamedTuple):
    """How a part is measured, which settings change its result, and which parts it needs first.

    A new edition of a part is measured again where an older one is stored.
    """

    measure: Callable[[Subject, Progress], Measured]
    settings: tuple[str, ...]
    needs: tuple[str, ...] = ()
    edition: int = 1


PARTS: dict[str, Part] = {
    "curvature": Part(measure_curvature, ("probes", "step", "seed", "samples")),
    "steps": Part(measure_steps, ("probes", "step", "seed", "samples")),
    "counts": Part(
        measure_counts,
        ("probes", "step", "draws", "noise", "seed", "samples"),
        needs=("curvature",),
    ),
    "surface": Part(measure_surface, ("noise", "seed", "samples")),
    "embedding": Part(measure_embedding, ("noise", "seed", "samples", "stages")),
    "separation": Part(measure_separation, ("noise", "seed", "samples")),
    "geometry": Part(measure_geometry, ("noise", "seed", "samples")),
    "abstention": Part(measure_abstention, ("noise", "seed", "samples", "conditions"), edition=2),
    "theory": Part(measure_theory, ("noise", "seed", "samples"), edition=2),
}
ALL: tuple[str, ...] = tuple(PARTS)
# Parts that cost as much as the curvature of about 500 images, however many are analysed.
COSTLY = ("steps", "surface", "theory")
SMALL, MEDIUM = 32 * 32, 128 * 128  # pixels of an image: the steps of `comparison_scope`


class Scope(NamedTuple):
    """What is analysed: at most `samples` test images, and the parts that are measured on them."""

    samples: int
    parts: tuple[str, ...]

    def describe(self, count: int) -> str:
        """The scope on a test set of `count` images, in words.

        >>> Scope(100, ("curvature", "counts", *ALL[3:])).describe(540)
        '100 of 540 test images, without steps'
        """
        missing = [part for part in ALL if part not in self.parts]
        without = f", without {', '.join(missing)}" if missing else ""
        return f"{min(self.samples, count):,} of {count:,} test images{without}"

    def omission(self, count: int) -> str | None:
        """A line that tells the user which parts are missing; None if none are."""
        if self.parts == ALL:
            return None
        return (
            f"Analysis: {self.describe(count)}, to save time. "
            "`noiseproof analyse RUN…` measures all parts on all images."
        )


def comparison_scope(size: Sequence[int]) -> Scope:
    """What `compare` analyses of images of `size` (channels, height, width).

    It depends on the image size alone, so that the same command measures the same thing on every
    machine. Curvature with 20 probes takes about 200 passes through the network per image. On one
    CPU core that is 8 ms for an 8 x 8 image with small_cnn, 0.1 s with small_cnn and 5.6 s with
    resnet18 at 32 x 32, and with mobilenet_v3_small 1.4 s at 96 x 96, 4.2 s at 224 x 224 and 11 s
    at 400 x 400. Up to 32 x 32 everything is measured on up to 2,000 images: seconds for the
    digits, and little next to the training and evaluation of larger networks. Photographs are
    limited to two or three minutes per run: 100 images up to 128 x 128 and 30 beyond, without the
    parts in `COSTLY`.

    >>> comparison_scope((1, 8, 8)).samples, comparison_scope((3, 224, 224)).samples
    (2000, 30)
    """
    pixels = size[-2] * size[-1]
    if pixels <= SMALL:
        return Scope(2000, ALL)
    return Scope(100 if pixels <= MEDIUM else 30, tuple(part for part in ALL if part not in COSTLY))


def noises_of(config_noise: str) -> tuple[str, ...]:
    """The noises of an analysis, by default: Gaussian and uniform of the training noise's level.

    For a range, the upper end is used; for a chain, the first noise. A training noise without a
    level, such as stripes, is used as it is; without training noise the level is 0.1.

    >>> noises_of("gaussian:0..0.1"), noises_of("stripes:2x1")
    (('gaussian:0.1', 'uniform:0.1'), ('stripes:2x1',))
    """
    levels = noise_levels(config_noise)
    if not levels and canonical_name(config_noise) != "clean":
        return (canonical_name(config_noise),)
    level = max(levels, default=0.0) or 0.1
    return canonical_name(f"gaussian:{level!r}"), canonical_name(f"uniform:{level!r}")


def analyse(
    run: RunFolder,
    *,
    parts: Sequence[str] = ALL,
    samples: int | None = None,
    probes: int = 20,
    step: float = 1e-2,
    draws: int = 10,
    noise: str | Sequence[str] | None = None,
    seed: int = 0,
    device: str = "auto",
    stages: bool = False,
    weights: Weights = "last",
    progress: bool | None = None,
    dataset: Dataset | None = None,
) -> Analysis:
    """Measures the parts that are missing or out of date, and writes them into the run folder.

    Args:
        run: the run folder.
        parts: some of `ALL`; the parts that they need are measured as well.
        samples: at most this many test samples, 2 or more, the same for every run, and ten times as
            many training images; all by default.
        probes: random directions per curvature estimate.
        step: of the finite differences, in normalised coordinates: 1e-5 to 10.
        draws: noisy copies of each sample.
        noise: perturbations, the main one first; a single Gaussian is joined by uniform noise of
            the same level. By default those of `noises_of` for the run's training noise.
        seed: of the sample, the noise (as `evaluate`'s noise seed), the probes and t-SNE.
        device: "auto", "cpu", "cuda" or "cuda:N".
        stages: embed the features of every stage, not only the penultimate ones.
        weights: of the last or of the best epoch.
        progress: show progress bars; by default on a terminal, and status lines elsewhere.
        dataset: the run's data, if already loaded.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"unknown part {unknown[0]!r}; expected some of {', '.join(ALL)}")
    run.require(weights)
    settings = Settings(
        probes, step, draws, _noises(run, noise), seed, samples, stages, _evaluated(run, weights)
    )
    lists = {"noise": list(settings.noise), "conditions": list(settings.conditions)}
    values = {**asdict(settings), **lists}
    validate_analysis(values)
    analysis = open_analysis(run, weights)
    wanted = {need for part in parts for need in PARTS[part].needs} | set(parts)
    relevant = {name: {key: values[key] for key in part.settings} for name, part in PARTS.items()}
    for name, part in PARTS.items():
        relevant[name] |= {"edition": part.edition} if part.edition > 1 else {}
    todo = [n for n in PARTS if n in wanted and not analysis.is_current(n, relevant[n])]
    if not todo:
        return analysis
    dataset = run.dataset(dataset)
    check_applicable(by_name(settings.noise).values(), dataset.size)
    subject = Subject(run, dataset, weights, settings, chosen_device(device))
    machine = environment(subject.device)
    machine = {key: machine[key] for key in ("noiseproof", "commit", "torch", "device")}
    with progress_bars(progress) as bars:
        for i, name in enumerate(todo, 1):
            bar = bars.add_task(f"{run.name}: analysing, {name} ({i} of {len(todo)})", total=1.0)
            start = time.perf_counter()
            measured = PARTS[name].measure(
                subject, lambda done, bar=bar: bars.update(bar, completed=done)
            )
            bars.remove_task(bar)
            seconds = round(time.perf_counter() - start, 3)
            facts = {"seconds": seconds, "made_with": machine, **command_record()}
            analysis.write(name, *measured, relevant[name], **facts)
    return analysis


def analyse_runs(
    paths: Sequence[str | Path],
    *,
    stages: Literal["auto", "none", "all"] = "auto",
    weights: Weights | None = None,
    device: str = "auto",
    **options: Any,
) -> list[Analysis]:
    """Analyses runs one after the other; prints a table of the main results and their files.

    Args:
        paths: the run folders.
        stages: "auto" embeds the features of every stage for one `normal` and one `discriminative`
            run, "all" for every run, "none" for no run.
        weights: of the last or of the best epoch; by default as `shared_weights` chooses, which a
            report on these runs is about.
        device: as for `analyse`.
        options: of `analyse`.
    """
    runs = open_runs(paths)
    weights = weights or shared_weights(runs)
    chosen_device(device)  # refused before the data is loaded, which can take a while
    for run in runs:
        run.require(weights)  # likewise
    analyses: list[Analysis] = []
    datasets: dict[Any, Dataset] = {}
    staged: set[tuple[str, str]] = set()
    for run in runs:
        if run.config.data not in datasets:
            datasets = {run.config.data: run.dataset()}  # one dataset at a time
        dataset = datasets[run.config.data]
        kind = (dataset.fingerprint, run.config.method.method)
        embed = stages == "all" or (stages == "auto" and kind[1] in STAGED and kind not in staged)
        staged.add(kind)
        analyses.append(
            analyse(run, stages=embed, weights=weights, device=device, dataset=dataset, **options)
        )
    out = terminal()
    out.print(_overview(runs, analyses))
    for analysis in analyses:
        out.print(f"Analysis: {analysis.folder / 'analysis.json'}", markup=False, soft_wrap=True)
    return analyses


def _overview(runs: Sequence[RunFolder], analyses: Sequence[Analysis]) -> Table:
    """The main results that were measured, one run per line; a dash where a run has none."""
    clean, noisy = {"data": "clean"}, {"data": "noisy"}
    hidden = "share of within-class variance that softmax cannot see"
    knows = "AUROC of right against wrong answers"
    columns = {
        "median\ncurvature": ("curvature", "median curvature", {"estimate": "finite_difference"}),
        "k-NN\nclean": ("separation", "k-NN accuracy", {"stage": "features", **clean}),
        "k-NN\nnoisy": ("separation", "k-NN accuracy", {"stage": "features", **noisy}),
        "in sphere\nclean": ("geometry", "share inside the sphere", clean),
        "in sphere\nnoisy": ("geometry", "share inside the sphere", noisy),
        "hidden\nvariance": ("geometry", hidden, clean),
        "AUROC by\nsoftmax": ("abstention", knows, {"score": "probability", **clean}),
        "AUROC by\ncentroid": ("abstention", knows, {"score": "centroid", **clean}),
    }
    table = Table(title="Analysis", title_justify="left", box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    shown = [[run.name for run in runs]]
    for name, (part, metric, facts) in columns.items():
        values = [analysis.value(part, metric, **facts) for analysis in analyses]
        if any(value is not None for value in values):
            table.add_column(name, justify="right", overflow="fold")
            written = "{:.2e}".format if part == "curvature" else _percent
            shown.append(["-" if v is None else written(v) for v in values])
    table.add_column("seconds", justify="right", overflow="fold")
    for cells, analysis in zip(zip(*shown, strict=True), analyses, strict=True):
        seconds = sum(part["seconds"] for part in analysis.content["parts"].values())
        table.add_row(*cells, f"{seconds:.1f}")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _evaluated(run: RunFolder, weights: Weights) -> tuple[str, ...]:
    """The perturbations that these weights were evaluated under, in order, on the run's own test
    images; a user's own only if it is registered."""
    own = run.measured_with(weights)
    names = [row["perturbation"] for row in run.evaluation() if own.items() <= row.items()]
    return tuple(name for name in ordered(names) if is_known(name))


def _noises(run: RunFolder, noise: str | Sequence[str] | None) -> tuple[str, ...]:
    if noise is None:
        return noises_of(run.config.method.noise)
    named = tuple(by_name(noise))
    if not named:
        raise ValueError("noise must name at least one perturbation, got none")
    if len(named) == 1 and [step.name for step in steps(named[0])] == ["gaussian"]:
        return (named[0], noises_of(named[0])[1])
    return named
