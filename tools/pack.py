"""The images behind `results/robust-gtsrb` and `results/robust-imagenette` as .npz files.

    python -m tools.pack signs FOLDER gtsrb.npz
    python -m tools.pack imagenette FOLDER imagenette.npz
    noiseproof reproduce robust-gtsrb --data gtsrb.npz

FOLDER is a checkout of the GitHub repository krupallad09/Traffic_Sign or thunderInfy/imagenette.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from noiseproof.lab.data.folder import read_images

SIDES = {"signs": 48, "imagenette": 128}
Labelled = dict[str, list[tuple[Path, int]]]


def signs(root: Path) -> Labelled:
    """Files and classes of GTSRB's final training and test images."""
    train = sorted((root / "GTSRB/Final_Training/Images").glob("*/*.ppm"))
    with open(root / "GT-final_test.csv") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    test = root / "GTSRB/Final_Test/Images"
    return {
        "train": [(file, int(file.parent.name)) for file in train],
        "test": [(test / row["Filename"], int(row["ClassId"])) for row in rows],
    }


def imagenette(root: Path) -> Labelled:
    """Files and classes; the test images are those in val/."""
    names = sorted(folder.name for folder in (root / "train").iterdir())
    return {
        split: [(f, i) for i, n in enumerate(names) for f in sorted((root / folder / n).iterdir())]
        for split, folder in (("train", "train"), ("test", "val"))
    }


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[0] not in SIDES:
        print("usage: python -m tools.pack signs|imagenette FOLDER FILE.npz", file=sys.stderr)
        return 2
    kind, root, out = argv
    found = signs(Path(root)) if kind == "signs" else imagenette(Path(root))
    arrays = {}
    for split, labelled in found.items():
        pixels = read_images([str(file) for file, _ in labelled], (SIDES[kind], SIDES[kind]))
        arrays[f"{split}_images"] = pixels.numpy()
        arrays[f"{split}_labels"] = np.array([label for _, label in labelled])
    if kind == "signs":  # TRACK_FRAME.ppm, with tracks numbered by class
        arrays["train_groups"] = np.array(
            [int(file.name.partition("_")[0]) * 43 + label for file, label in found["train"]]
        )
    np.savez(out, **arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
