"""How many near-duplicates a dataset has, and which share of them the search finds.

    python -m benchmarks.duplicates cifar10
    python -m benchmarks.duplicates photos/

The search compares each image with its neighbours in sorted orders; here, all pairs are compared as
well.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from noiseproof.lab.config import Data
from noiseproof.lab.data import duplicates
from noiseproof.lab.data.datasets import load_dataset

_BLOCK = 1000  # rows of the matrix of all dot products at a time


def all_pairs(vectors: np.ndarray) -> set[tuple[int, int]]:
    """Pairs of near-duplicates among all pairs.

    Args:
        vectors: a description per image.
    """
    found = set()
    for start in range(0, len(vectors), _BLOCK):
        products = vectors[start : start + _BLOCK] @ vectors[start:].T
        rows, columns = np.nonzero(products >= duplicates.SIMILAR)
        later = rows < columns
        found |= {
            *zip((rows[later] + start).tolist(), (columns[later] + start).tolist(), strict=True)
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", help="a name, a folder with one folder per class, or a .npz file")
    parser.add_argument("--data-dir", default="data", help="folder of the datasets known by name")
    arguments = parser.parse_args()
    size = None if arguments.data == "cifar10" or arguments.data.endswith(".npz") else "auto"
    data = load_dataset(
        Data(arguments.data, data_dir=arguments.data_dir, val_share=0, img_size=size)
    )
    began = time.perf_counter()
    pairs = duplicates.near_duplicates(data.train, data.test)
    seconds = time.perf_counter() - began
    one, other = pairs
    leaking = np.unique(other[(one < data.train.count) & (other >= data.train.count)])
    print(f"{data.train.count + data.test.count:,} images, searched in {seconds:.1f} s")
    print(f"{pairs.shape[1]:,} pairs of near-duplicates")
    print(f"{len(leaking):,} of {data.test.count:,} test images have some in training")
    vectors = np.concatenate([duplicates.described(part) for part in (data.train, data.test)])
    exhaustive = all_pairs(vectors)
    share = len({*zip(one.tolist(), other.tolist(), strict=True)} & exhaustive) / len(exhaustive)
    print(f"{100 * share:.0f} % of the {len(exhaustive):,} pairs that a comparison of all finds")


if __name__ == "__main__":
    main()
