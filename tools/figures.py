"""The paper's figures from the runs of an experiment, for its page in docs/results.

    noiseproof analyse runs/cifar10-*-s0 --samples 2000
    python -m tools.figures cifar10 results docs runs/cifar10-*-s0

Curvature by two estimators, the dependence of one on its step, accuracy by retained share, correct
predictions by curvature, the loss surface, and t-SNE of features and stages, clean and noisy. PNG
files go to docs/results/figures/EXPERIMENT, captions and provenance to
results/EXPERIMENT/figures/figures.json, and the numbers of the analyses to numbers.jsonl next to
it. `publish` puts the figures into the page. With EXPERIMENT/NAME, such as cifar10/batch-norm, some
rows have figures of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noiseproof.lab.analysis.store import read
from noiseproof.lab.report.figure_files import FigureWriter
from noiseproof.lab.report.page import analysis_sections
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.paper.experiments import EXPERIMENTS

SHOWN = (
    "curvature-boxplot",
    "curvature-between-kinks",
    "step-study",
    "accuracy-vs-retained-share",
    "correct-count-vs-curvature",
    "loss-surface",
    "tsne",
    "tsne-stages-clean",
    "tsne-stages-noisy",
    "stage-separation",
)


def draw(experiment: str, results: Path, docs: Path, runs: Sequence[RunFolder]) -> list[Path]:
    """Writes the figures of an experiment; returns their paths.

    Args:
        experiment: one of `EXPERIMENTS`, which a name of the figures can follow, after a slash.
        results: the folder results/, for captions and numbers.
        docs: the folder docs/, for the images.
        runs: analysed runs of the experiment.
    """
    if experiment.partition("/")[0] not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"unknown experiment {experiment!r}; expected one of {known}")
    measured = gather(runs)
    sections = analysis_sections(measured)
    figures = {figure.name: figure for section in sections for figure in section.figures}
    figures = {name: figures[name] for name in SHOWN if name in figures}
    if not figures:
        raise ValueError("none of these runs was analysed; run `noiseproof analyse RUN…` first")
    folder, images = results / experiment / "figures", docs / "results" / "figures" / experiment
    folder.mkdir(parents=True, exist_ok=True)
    writer = FigureWriter(images, budget=0)
    for name, figure in figures.items():
        writer.write(figure)
        (images / f"{name}.svg").unlink()  # the page shows the PNG
    captions = [
        {"file": f"{name}.png", "alt": figure.plain_alt, "caption": figure.caption}
        for name, figure in figures.items()
    ]
    content = {"schema": 1, "figures": captions, "runs": [_provenance(run) for run in runs]}
    (folder / "figures.json").write_text(json.dumps(content, indent=1) + "\n")
    analyses = {run.name: read(run, measured.weights) for run in runs}
    rows = [{"run": name, **row} for name, a in analyses.items() if a for row in a.rows()]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [images / f"{name}.png" for name in figures]


def _provenance(run: RunFolder) -> dict[str, Any]:
    environment = run.info["environment"]
    return {"run": run.name, "commit": environment["commit"], "device": environment["device"]}


def main(argv: Sequence[str]) -> int:
    if len(argv) < 4:
        usage = "usage: python -m tools.figures EXPERIMENT RESULTS DOCS RUN..."
        print(usage, file=sys.stderr)
        return 2
    name, results, docs, *runs = argv
    try:
        paths = draw(name, Path(results), Path(docs), [RunFolder.open(run) for run in runs])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
