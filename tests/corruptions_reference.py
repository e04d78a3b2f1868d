"""Corruptions of a single image, plainly: numpy, scipy and Pillow, loops over pixels.

An image is H x W x 3, uint8; so is every result. `rng` is a numpy.random.Generator.
"""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

Pixels = NDArray[np.uint8]
Array = NDArray[np.float64]


def to_bytes(x: Array) -> Pixels:
    """From [0, 1], cut off and truncated."""
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def gaussian_noise(image: Pixels, rng: np.random.Generator, std: float) -> Pixels:
    return to_bytes(image / 255 + rng.normal(scale=std, size=image.shape))


def shot(image: Pixels, rng: np.random.Generator, photons: float) -> Pixels:
    return to_bytes(rng.poisson(image / 255 * photons) / photons)


def impulse(image: Pixels, rng: np.random.Generator, share: float) -> Pixels:
    out = image.copy()
    hit, salt = rng.random(image.shape) < share, rng.random(image.shape) < 0.5
    out[hit & salt], out[hit & ~salt] = 255, 0
    return out


def defocus(image: Pixels, rng: np.random.Generator, radius: float, smoothing: float) -> Pixels:
    half, taps = (8, 3) if radius <= 8 else (math.ceil(radius), 5)
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    disk = (x**2 + y**2 <= radius**2).astype(float)
    line = np.exp(-(np.arange(-(taps // 2), taps // 2 + 1) ** 2) / (2 * smoothing**2))
    line /= line.sum()
    kernel = disk / disk.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, line, axis=axis, mode="mirror")
    return to_bytes(ndimage.correlate(image / 255, kernel[..., None], mode="mirror") + 1e-9)


def blurred(x: Array, sigma: float) -> Array:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest", truncate=4)


def glass(
    image: Pixels, rng: np.random.Generator, sigma: float, shift: float, iterations: int
) -> Pixels:
    """As the original runs: x[a], x[b] = x[b], x[a] on views of one array copies b to a."""
    x = to_bytes(blurred(image / 255, sigma) + 1e-9)
    height, width, d = *x.shape[:2], max(1, round(shift))
    for _ in range(iterations):
        shifts = rng.integers(-d, d, size=(height, width, 2)).tolist()
        for h in range(height - d, d, -1):
            for w in range(width - d, d, -1):
                dx, dy = shifts[h][w]
                x[h, w], x[h + dy, w + dx] = x[h + dy, w + dx], x[h, w]
    return to_bytes(blurred(x / 255, sigma) + 1e-9)


def motion_blur(image: Pixels, angle: float, radius: float, sigma: float) -> Pixels:
    """ImageMagick's MotionBlurImage, pixel by pixel."""
    width = 2 * math.ceil(radius) + 1
    kernel = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    out, (rows, columns) = np.zeros(image.shape), image.shape[:2]
    for i in range(width):
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        y = np.clip(np.arange(rows) + down, 0, rows - 1)
        x = np.clip(np.arange(columns) + right, 0, columns - 1)
        out += kernel[i] * image[y][:, x]
    return np.floor(out + 0.5).astype(np.uint8)


def motion(image: Pixels, rng: np.random.Generator, radius: float, sigma: float) -> Pixels:
    return motion_blur(image, rng.uniform(-45, 45), radius, sigma)


def zoomed(x: Array, factor: float) -> Array:
    side = len(x)
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    scale = (factor, factor) + (1,) * (x.ndim - 2)
    large = np.asarray(ndimage.zoom(x[top : top + crop, top : top + crop], scale, order=1))
    top = (len(large) - side) // 2
    return large[top : top + side, top : top + side]


def zoom(image: Pixels, rng: np.random.Generator, end: float, step: float) -> Pixels:
    x, factors = image / 255, np.arange(1, end, step)
    return to_bytes((x + sum(zoomed(x, f) for f in factors)) / (len(factors) + 1) + 1e-9)


def snow(
    image: Pixels,
    rng: np.random.Generator,
    mean: float,
    std: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    share: float,
) -> Pixels:
    layer = zoomed(rng.normal(mean, std, image.shape[:2]), max(1, size))
    layer[layer < threshold] = 0
    layer = motion_blur(to_bytes(layer), rng.uniform(-135, -45), radius, sigma) / 255
    x = image / 255
    grey = (x @ [0.299, 0.587, 0.114])[..., None]
    x = share * x + (1 - share) * np.maximum(x, grey * 1.5 + 0.5)
    return to_bytes(x + layer[..., None] + layer[::-1, ::-1, None])


def plasma(rng: np.random.Generator, side: int, decay: float) -> Array:
    """Diamond–square on a torus, point by point."""
    cloud, step, amplitude = np.zeros((side, side)), side, 100.0
    noise = rng.uniform(-1, 1, (side, side))
    while step >= 2:
        half = step // 2

        def fill(y: int, x: int, neighbours: list[tuple[int, int]]) -> None:
            mean = sum(cloud[(y + b) % side, (x + a) % side] for b, a in neighbours) / 4
            cloud[y, x] = mean + amplitude**2 * noise[y, x]  # noqa: B023

        diagonal = [(-half, -half), (-half, half), (half, -half), (half, half)]
        straight = [(-half, 0), (half, 0), (0, -half), (0, half)]
        for y in range(0, side, step):
            for x in range(0, side, step):
                fill(y + half, x + half, diagonal)
        for y in range(0, side, step):
            for x in range(0, side, step):
                fill(y, x + half, straight)
                fill(y + half, x, straight)
        step, amplitude = half, amplitude / decay
    cloud -= cloud.min()
    return cloud / cloud.max()


def fog(image: Pixels, rng: np.random.Generator, amount: float, decay: float) -> Pixels:
    height, width = image.shape[:2]
    x, side = image / 255, 2 ** math.ceil(math.log2(max(height, width)))
    cloud = plasma(rng, side, decay)[:height, :width, None]
    return to_bytes((x + amount * cloud) * x.max() / (x.max() + amount))


def brightness(image: Pixels, rng: np.random.Generator, added: float) -> Pixels:
    import colorsys

    out = np.empty(image.shape)
    for index in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[index] / 255))
        out[index] = colorsys.hsv_to_rgb(hue, saturation, min(1, value + added))
    return to_bytes(out + 1e-9)


def contrast(image: Pixels, rng: np.random.Generator, factor: float) -> Pixels:
    mean = (image / 255).mean((0, 1))
    return to_bytes((image / 255 - mean) * factor + mean + 1e-9)


def elastic(
    image: Pixels, rng: np.random.Generator, amplitude: float, smoothing: float, corners: float
) -> Pixels:
    """Both maps by scipy, whose "mirror" is OpenCV's BORDER_REFLECT_101."""
    height, width = image.shape[:2]
    reach, centre = min(height, width) // 3, np.array([width // 2, height // 2])
    before = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + rng.uniform(-corners, corners, before.shape)
    back = np.linalg.solve(np.c_[after, np.ones(3)], before)  # (x, y, 1) @ back
    y, x = np.mgrid[:height, :width]
    origin = np.stack([x, y, np.ones_like(x)], -1) @ back
    at = [origin[..., 1], origin[..., 0]]
    channels = [ndimage.map_coordinates(image[..., c] / 255, at, order=1, mode="mirror")
                for c in range(3)]  # fmt: skip

    def displacement() -> Array:
        noise = rng.uniform(-1, 1, (height, width))
        return ndimage.gaussian_filter(noise, smoothing, mode="reflect", truncate=3) * amplitude

    at = [y + displacement(), x + displacement()]
    channels = [ndimage.map_coordinates(c, at, order=1, mode="reflect") for c in channels]
    return to_bytes(np.stack(channels, -1) + 1e-9)


def pixelate(image: Pixels, rng: np.random.Generator, scale: float) -> Pixels:
    height, width = image.shape[:2]
    small = Image.fromarray(image).resize(
        (int(width * scale), int(height * scale)), Image.Resampling.BOX
    )
    return np.array(small.resize((width, height), Image.Resampling.BOX))


def jpeg(image: Pixels, rng: np.random.Generator, quality: int) -> Pixels:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))


def frost(
    image: Pixels,
    rng: np.random.Generator,
    share: float,
    amount: float,
    window: float,
    pictures: list[Pixels],
) -> Pixels:
    """`pictures` in their full size."""
    step, side = round(window / len(image)), len(image)
    picture = pictures[rng.integers(len(pictures))][step // 2 :: step, step // 2 :: step]
    top, left = (rng.integers(size - side) for size in picture.shape[:2])
    part = picture[top : top + side, left : left + side]
    return np.clip(share * image + amount * part.astype(float), 0, 255).astype(np.uint8)
