"""docs/results.md and docs/figures.md from the records in results/: the paper's tables with our
numbers beside them, and its figures.

    python -m tools.publish results docs

The pages are generated and never edited. Words stand in results/notes.md, and those that explain a
table in results/NAME/notes.md, and are copied after it; figures are those that `tools.figures`
has drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from noiseproof.paper.experiments import EXPERIMENTS
from noiseproof.paper.tables import section, sources

_MADE = """\
Made by `python -m tools.publish results docs` from `results/`; not edited by hand."""

_HEAD = f"""# Results

{_MADE}
A record there is one training: config, seed, commit, versions, device, time, and the accuracy of
every noise draw.

A cell shows **paper / measured / difference**, in % of the test images. Measured is the mean over
noise draws (10 for random perturbations), with their standard deviation in brackets; with several
trainings it is the mean over them, and ± is the standard deviation between trainings. `–` is a
number that the paper does not give, `not run` one that we have not measured.
"""

_SOURCES = """## Where the numbers come from

`--only ROW --seed SEED` after a table's command makes one of its trainings, and `--along 10` looks
at it every tenth epoch. Minutes say little where trainings shared a GPU, which those of separate
commands did; the commands of a `(3)` shared it by `--jobs 3`.
"""


def pages(results: Path) -> dict[str, str]:
    """The pages by the names of their files. They lie in a folder beside `results`."""
    notes = results / "notes.md"
    words = [notes.read_text().strip() + "\n"] if notes.exists() else []
    tables = [section(results, name) for name in EXPERIMENTS]
    origins = [made for name in EXPERIMENTS if (made := sources(results, name))]
    drawn = [made for name in EXPERIMENTS if (made := _figures(results, name))]
    made = {
        "results.md": "\n".join(
            [_HEAD, *words, *tables, *([_SOURCES, *origins] if origins else [])]
        )
    }
    if drawn:
        made["figures.md"] = "\n".join(
            [
                "# Figures",
                "",
                _MADE,
                "What they show is said in [results.md](results.md).",
                "",
                *drawn,
            ]
        )
    return made


def _figures(results: Path, name: str) -> str:
    file = results / name / "figures" / "figures.json"
    if not file.exists():
        return ""
    content = json.loads(file.read_text())
    runs = ", ".join(f"`{run['run']}`" for run in content["runs"])
    lines = [
        f"## {EXPERIMENTS[name]().title}",
        "",
        f"Of {runs}, by `noiseproof analyse`; its numbers are in "
        f"`results/{name}/figures/numbers.jsonl`.",
    ]
    for figure in content["figures"]:
        place = f"../results/{name}/figures/{figure['file']}"
        lines += ["", f"![{figure['alt']}]({place})", "", figure["caption"]]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m tools.publish RESULTS FOLDER", file=sys.stderr)
        return 2
    for name, text in pages(Path(argv[0])).items():
        (Path(argv[1]) / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
