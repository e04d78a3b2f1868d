"""Packs the pictures of the frost corruption into the file that Noiseproof ships.

    python tools/frost.py frost1.png frost2.png frost4.jpg frost5.jpg

The pictures are those of ImageNet-C/create_c in github.com/hendrycks/robustness (Apache-2.0).
frost3.png has the same colours as frost2.png, and the original never uses frost6.jpg.

The file holds the coefficients of JPEG at quality 75 as signed bytes, picture by picture and
frequency by frequency, compressed by zlib.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
from noiseproof.perturb.corruptions import frost, jpeg


def main(paths: list[str]) -> None:
    planes: list[bytes] = []
    for path, size in zip(paths, frost.SIZES, strict=True):
        with Image.open(path) as picture:
            pixels = torch.from_numpy(np.array(picture)[..., :3]).permute(2, 0, 1).float()
        if tuple(pixels.shape[1:]) != size:
            raise ValueError(f"{path} must have {size} pixels, got {tuple(pixels.shape[1:])}")
        for plane in jpeg.encode(pixels[None], frost.QUALITY):
            signed = plane[0].permute(2, 3, 0, 1).clamp(-127, 127).to(torch.int8)
            planes.append(signed.numpy().tobytes())
    frost.FILE.write_bytes(zlib.compress(b"".join(planes), 9))


if __name__ == "__main__":
    main(sys.argv[1:])
