"""Named sets of perturbations to test under: `noiseproof evaluate --suite NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from noiseproof.lab import recipes
from noiseproof.perturb.text import CORRUPTIONS

SuiteName = Literal["noise", "paper", "c", "sensor", "all"]

# Phone noise at three settings; too little light, before a sensor or alone; JPEG after the noise,
# as in a camera.
SENSOR = (
    "sensor:iso400",
    "sensor:iso1600",
    "sensor:iso6400",
    "exposure:-2",
    "exposure:-4",
    "exposure:-2+sensor:iso1600",
    "exposure:-2+sensor:iso6400",
    "sensor:iso1600+jpeg:3",
    "exposure:-2+sensor:iso1600+jpeg:3",
)


def suite(name: SuiteName, data: str, size: Sequence[int] | None = None) -> list[str]:
    """The perturbations of a suite, "clean" first.

    Args:
        name: noise, levels of noise that suit the dataset; paper, those of the paper's tables and
            curvature figures; c, the 15 corruptions at severities 1 to 5; sensor, cameras; all of
            these.
        data: a dataset's name, a folder or a .npz file.
        size: size of the images, (..., height, width), for the masks of a folder of images.

    >>> suite("paper", "svhn")[-3:]
    ['gaussian:42/255', 'gaussian:0.15', 'uniform:0.15']
    >>> suite("sensor", "digits")[:2], len(suite("all", "digits"))
    (['clean', 'sensor:iso400'], 89)
    """
    if name == "all":
        parts = [suite(each, data, size) for each in ("noise", "paper", "sensor", "c")]
        return list(dict.fromkeys(text for part in parts for text in part))
    if name == "sensor":
        return ["clean", *SENSOR]
    if name == "c":
        return ["clean", *CORRUPTIONS]
    texts = recipes.suite(data, size)
    if name == "paper" and recipes.kind(data) in ("cifar10", "svhn"):
        noise = recipes.paper(data).method.noise
        texts += [noise, noise.replace("gaussian", "uniform")]
    return texts
