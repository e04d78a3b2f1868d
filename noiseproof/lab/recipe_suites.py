"""The perturbations that a dataset is tested with when none are named: the paper's levels.

On a folder of images, masks are scaled with the image: the paper's 20 patches of 70 x 70 have about
half the area of its 400 x 500 images, and would hide the whole of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from noiseproof.lab.recipe_kinds import kind

# Standard deviations of Gaussian noise in pixels, as the texts that perturb.parse reads.
_LEVELS: dict[str, tuple[str, ...]] = {
    "digits": ("0.1", "0.2", "0.3", "0.4"),
    "cifar10": ("2/255", "4/255", "8/255", "16/255", "20/255"),
    "svhn": ("5/255", "10/255", "20/255", "36/255", "42/255"),
    "folder": ("10/255", "30/255", "40/255", "60/255"),
}
_PAPER_HEIGHT, _PAPER_WIDTH = 400, 500


def suite(data: str, size: Sequence[int] | None = None) -> list[str]:
    """Texts of perturbations, "clean" first.

    `size` is that of the images, (..., height, width); it sizes the masks of an image folder, and
    none stands for the paper's 400 x 500.

    >>> suite("digits")
    ['clean', 'gaussian:0.1', 'gaussian:0.2', 'gaussian:0.3', 'gaussian:0.4']
    >>> suite("photos/", (3, 200, 250))[-2:]
    ['stripes:10x3', 'downup:3+stripes:10x3']
    """
    which = kind(data)
    specs = ["clean", *(f"gaussian:{level}" for level in _LEVELS[which])]
    if which == "folder":
        height, width = size[-2:] if size is not None else (_PAPER_HEIGHT, _PAPER_WIDTH)
        specs += _masks(height, width)
    return specs


def _masks(height: int, width: int) -> list[str]:
    """The paper's masks, alone and combined, covering the same share of an image of this size."""
    scale = math.sqrt(height * width / (_PAPER_HEIGHT * _PAPER_WIDTH))
    side = min(max(1, round(70 * scale)), height, width)
    stripe = min(max(1, round(6 * width / _PAPER_WIDTH)), width)
    occlusion, stripes = f"occlusion:20x{side}", f"stripes:10x{stripe}"
    return [
        occlusion,
        f"gaussian:40/255+{occlusion}",
        "downup:3",
        f"downup:3+{occlusion}",
        stripes,
        f"downup:3+{stripes}",
    ]
