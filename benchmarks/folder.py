"""Time and memory to list, check and hash a folder of many small images, first and from the cache.

    python -m benchmarks.folder --files 200000

The folder is made once, of 32 x 32 JPEGs in ten classes, and kept in --folder. The cache of this
benchmark is in a folder of its own, which is removed. Memory is the peak of this process above what
it had before.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from noiseproof.lab.config import Data
from noiseproof.lab.data.datasets import load_dataset

_KINDS, _CLASSES, _SIDE = 1000, 10, 32


def make_folder(folder: Path, files: int) -> None:
    """Writes `files` JPEGs, if the folder does not have them.

    Args:
        folder: where to.
        files: how many, in ten classes.
    """
    generator, contents = np.random.default_rng(0), []
    for _ in range(_KINDS):
        coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((_SIDE, _SIDE)).save(buffer, "JPEG", quality=80)
        contents.append(buffer.getvalue())
    for label in range(_CLASSES):
        inner = folder / f"class{label}"
        inner.mkdir(parents=True, exist_ok=True)
        present = len(os.listdir(inner))
        for i in range(present, files // _CLASSES):
            (inner / f"{i:07}.jpg").write_bytes(contents[(7 * i + label) % _KINDS])


def measure(folder: Path) -> tuple[float, float]:
    """Seconds to load the folder for streaming, and megabytes of memory that it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    load_dataset(Data(str(folder), img_size="auto", storage="stream"))
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, (after - before) / 1024  # kilobytes on Linux


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "many-images")
    arguments = parser.parse_args()
    make_folder(arguments.folder, arguments.files)
    time.sleep(3)  # files that have only just changed are not cached
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for what in ("first", "cached"):
            seconds, megabytes = measure(arguments.folder)
            rate = arguments.files / seconds
            print(f"{what:7} {seconds:6.1f} s  {rate:8,.0f} files/s  +{megabytes:.0f} MB")
        size = sum(file.stat().st_size for file in Path(cache).rglob("*.npy"))
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"cache {size / 1e6:.1f} MB; largest worker process {largest:.0f} MB, mostly shared")


if __name__ == "__main__":
    main()
