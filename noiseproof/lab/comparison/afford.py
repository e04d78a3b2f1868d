"""How much of an analysis is worth waiting for at the end of a comparison.

Curvature takes a hundred passes through the network for each image, and some parts tens of
thousands whatever the number of images: seconds for the digits, and for photographs on a laptop
longer than their training. How long depends on the network and the machine by more than can be
reckoned, so the curvature of a few images is timed. The first run of a comparison that comes to its
analysis does so, and what it chooses is written down and holds for all of them, that they can be
laid side by side: what is measured depends on the number of images alone, not on the clock.
`noiseproof analyse` takes what it is asked for.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from noiseproof.lab.analysis.analyse import ALL
from noiseproof.lab.analysis.measures import Asked, estimated
from noiseproof.lab.analysis.subject import Subject
from noiseproof.lab.console import lasting
from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.runs import RunFolder

__all__ = ["FILE", "Share", "affordable", "chosen", "pace", "recorded", "share"]

FILE = "analysed.json"  # in the folder of a comparison
FIXED = ("steps", "surface", "theory")  # parts whose cost hardly depends on the number of images
_SECONDS = 60.0  # a run, for the parts that grow with the images, and as much for the fixed ones
_WORTH = 500  # images that last as long as the fixed parts, which look at up to 64
_SIZES = (20, 30, 50, 100, 200, 500, 1000, 2000)  # steps, so that a machine's moods do not show
# An image costs a gradient, its graph, and a gradient and a product for each probe: 22 pairs with
# 20 probes, and two more are worth the parts that are cheap. So many probes are timed:
_PROBES, _PAIRS = 2, 24
_FIRST = 4  # images at least: alone, an image takes twice as long as in company
_ENOUGH = 0.2  # seconds, to be timed well


class Share(NamedTuple):
    """What is taken of an analysis, where an image costs `each` seconds."""

    samples: int
    parts: tuple[str, ...]
    each: float = 0.0

    def plan(self, count: int) -> str:
        """What is about to be measured on so many test images, and how long that should take."""
        n = min(self.samples, count)
        seconds = self.each * (n + (_fixed(n) if set(FIXED) <= set(self.parts) else 0))
        return f"{n:,} of {count:,} test images{self._without()}, {lasting(seconds)}"

    def told(self, count: int) -> str | None:
        """A line about what is left out of so many test images; None where that is nothing."""
        if not self._without() and self.samples >= min(count, _SIZES[-1]):
            return None
        return (
            f"Analysis: on {min(self.samples, count):,} of {count:,} test images{self._without()}; "
            "more takes long here. `noiseproof analyse` measures all."
        )

    def _without(self) -> str:
        missing = [part for part in ALL if part not in self.parts]
        return f", without {', '.join(missing)}" if missing else ""


def chosen(folder: Path, run: RunFolder, device: torch.device, dataset: Dataset) -> Share:
    """What the comparison in `folder` takes of each analysis: as its first run has chosen.

    Delete FOLDER/analysed.json to have it chosen anew.
    """
    path = folder / FILE
    if (known := _read(path)) is not None:
        return known
    found = affordable(run, device, dataset)
    temporary = path.with_name(f".{FILE}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(found._asdict(), indent=2) + "\n", encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        if _read(path) is None:  # a power cut has left half of it
            os.replace(temporary, path)  # else another run was quicker, and its choice holds
    except OSError:  # a file system without links
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read(path) or found


def recorded(folder: Path) -> Share | None:
    """What the comparison in `folder` has chosen, if it has."""
    return _read(folder / FILE)


def _read(path: Path) -> Share | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Share(int(found["samples"]), tuple(found["parts"]), float(found["each"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def affordable(run: RunFolder, device: torch.device, dataset: Dataset) -> Share:
    """What can be had of the analysis of a run in a minute or two."""
    return share(pace(run, device, dataset), dataset.test.count)


def share(each: float, count: int) -> Share:
    """What is taken of `count` test images where one costs `each` seconds.

    >>> share(0.01, 540) == Share(2000, ALL, 0.01), share(0.5, 540).samples, share(9, 540).samples
    (True, 100, 20)
    """
    most = _SECONDS / max(each, 1e-9)
    fitting = [size for size in _SIZES if size <= most]
    samples = _SIZES[-1] if most >= count else fitting[-1] if fitting else _SIZES[0]
    whole = _fixed(min(samples, count)) <= most
    parts = ALL if whole else tuple(part for part in ALL if part not in FIXED)
    return Share(samples, parts, each)


def _fixed(samples: int) -> float:
    """The fixed parts, in images."""
    return _WORTH * min(1.0, samples / 64)


def pace(run: RunFolder, device: torch.device, dataset: Dataset) -> float:
    """Seconds that an image's analysis takes here, from a few probes of a few images."""
    subject = Subject(run, dataset, device=device)
    x, y, place = next(iter(subject.batches(dataset.test, subject.chosen())))

    def timed(images: int, probes: int = _PROBES) -> float:
        asked = Asked(probes, 1e-2, 1, ("clean",), 0, None, False)
        start = time.perf_counter()
        estimated(subject, asked, x[:images], y[:images], place[:images])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed(1, probes=1)  # the first time is not like the others
    images = min(_FIRST, len(x))
    seconds = timed(images)
    while seconds < _ENOUGH and images < len(x):
        images = min(4 * images, len(x))
        seconds = timed(images)
    return seconds / images * _PAIRS / (_PROBES + 2)
