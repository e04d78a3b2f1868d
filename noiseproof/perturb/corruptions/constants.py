"""The constants of each corruption for the severities 1 to 5.

From create_c/make_cifar_c.py and create_c/make_imagenet_c.py of github.com/hendrycks/robustness.
"""

from __future__ import annotations

from noiseproof.perturb.values import severity as checked

__all__ = ["SMALL_SIDE", "constants"]

SMALL_SIDE = 64  # images whose shorter side is longer than this take the constants of ImageNet-C
_IMAGENET_SIDE = 224

Constants = tuple[float, ...]
_CIFAR: dict[str, tuple[Constants, ...]] = {
    "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
    "shot": ((500,), (250,), (100,), (75,), (50,)),
    "impulse": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
    "defocus": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    # The third number is 5 x 32: the original reduces its pictures to a fifth.
    "frost": ((1, 0.2, 160), (1, 0.3, 160), (0.9, 0.4, 160), (0.85, 0.4, 160), (0.75, 0.45, 160)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
    "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
    "elastic": ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6),
                (3.2, 0.96, 0.96)),
    "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
    "jpeg": ((80,), (65,), (58,), (50,), (40,)),
}  # fmt: skip
_IMAGENET: dict[str, tuple[Constants, ...]] = {
    "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
    "shot": ((60,), (25,), (12,), (5,), (3,)),
    "impulse": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
    "defocus": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4, 224), (0.8, 0.6, 224), (0.7, 0.7, 224), (0.65, 0.7, 224), (0.6, 0.75, 224)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
    "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
    # Multiples of 244, the original's slip for 224.
    "elastic": ((488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88),
                (29.28, 2.44, 4.88)),
    "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
    "jpeg": ((25,), (18,), (15,), (10,), (7,)),
}  # fmt: skip
_LENGTHS = {"defocus": (0,), "glass": (0, 1), "motion": (0, 1), "snow": (2, 4, 5),
            "elastic": (0, 1, 2)}  # fmt: skip


def constants(name: str, severity: int, side: int) -> Constants:
    """The constants of a corruption.

    Args:
        name: of the corruption.
        severity: 1 to 5.
        side: the shorter side of the image in pixels. Up to 64 the constants are those of
            CIFAR-10-C as they are, above it those of ImageNet-C, with lengths times side / 224.

    >>> constants("motion", 1, 32), constants("motion", 1, 448)
    ((6, 1), (20.0, 6.0))
    """
    if side <= SMALL_SIDE:
        return _CIFAR[name][checked("severity", severity) - 1]
    values = _IMAGENET[name][checked("severity", severity) - 1]
    scale, lengths = side / _IMAGENET_SIDE, _LENGTHS.get(name, ())
    return tuple(v * scale if i in lengths else v for i, v in enumerate(values))
