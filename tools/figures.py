"""The paper's figures from the runs of an experiment, for its page in docs/results.

    noiseproof analyse runs/cifar10-*-s0 --samples 2000
    python -m tools.figures cifar10 results docs runs/cifar10-*-s0

Curvature, the share of samples kept, right answers against curvature, the loss surface, t-SNE of
features and stages, clean and noisy; and beside them curvature by another estimate, and how the
first depends on its step. PNG files go to docs/results/figures/EXPERIMENT; what each shows and
where it comes from to results/EXPERIMENT/figures/figures.json, and the numbers of the analyses
beside it, to numbers.jsonl. `publish` puts the figures into the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noiseproof.lab.analysis.store import read
from noiseproof.lab.report import curvature_sections as insights
from noiseproof.lab.report.figure_files import Press
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
    """Draws what the runs were analysed for; ValueError where that is nothing."""
    if experiment not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"no experiment is called {experiment!r}; expected one of {known}")
    sections = insights.sections(gather(runs))
    plates = {plate.name: plate for section in sections for plate in section.plates}
    wanted = [plates[name] for name in SHOWN if name in plates]
    if not wanted:
        raise ValueError("none of these runs is analysed: `noiseproof analyse RUN…` does it")
    folder, pictures = results / experiment / "figures", docs / "results" / "figures" / experiment
    folder.mkdir(parents=True, exist_ok=True)
    press = Press(pictures, budget=0)
    made = []
    for plate in wanted:
        press.file(plate)
        (pictures / f"{plate.name}.svg").unlink()  # a page of results needs one of the two
        made.append(pictures / f"{plate.name}.png")
    shown = [{"file": f"{p.name}.png", "alt": p.alt, "caption": p.caption} for p in wanted]
    content = {"schema": 1, "figures": shown, "runs": [_origin(run) for run in runs]}
    (folder / "figures.json").write_text(json.dumps(content, indent=1) + "\n")
    found = {run.name: read(run, "last") for run in runs}
    rows = [{"run": name, **row} for name, one in found.items() if one for row in one.rows()]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def _origin(run: RunFolder) -> dict[str, Any]:
    environment = run.info["environment"]
    return {"run": run.name, "commit": environment["commit"], "device": environment["device"]}


def main(argv: Sequence[str]) -> int:
    if len(argv) < 4:
        usage = "usage: python -m tools.figures EXPERIMENT RESULTS DOCS RUN..."
        print(usage, file=sys.stderr)
        return 2
    name, results, docs, *runs = argv
    for path in draw(name, Path(results), Path(docs), [RunFolder.open(run) for run in runs]):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
