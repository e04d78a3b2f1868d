"""Test images under every perturbation, with the prediction of each model and how much noise it
tolerates.

The images are chosen by class and position, never by result, and have the noise of the evaluation's
first draw: they are shown as they were evaluated, except that photographs are reduced in size.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import load_dataset, same_images
from noiseproof.lab.data.images import DataError
from noiseproof.lab.evaluation import tables
from noiseproof.lab.evaluation.tolerance import noise_tolerance, tolerance_text
from noiseproof.lab.report.figure_files import data_uri
from noiseproof.lab.report.results import Results
from noiseproof.perturb import parse
from noiseproof.perturb.text import families, heading, is_known
from noiseproof.robustness import perturb_samples

IMAGES = 8
LONGER_SIDE = 160  # pixels of an embedded image, at most
_PIXELS = 160 * LONGER_SIDE**2  # of all embedded images, at most, which bounds the file size


def build(results: Results) -> dict[str, Any]:
    """The gallery as plain values for the page; DataError if the data are not available."""
    dataset = load_dataset(dataclasses.replace(results.first.config.data, download=False))
    recorded = results.rows[results.weights][0]["fingerprint"]
    if not same_images(dataset.fingerprint, recorded):
        raise DataError("the test images have changed since the runs were made")
    table = results.table
    tested = tables.build(results.rows[results.weights], by=results.by)
    specs = [s for s in results.perturbations if s != "clean" and _is_shown(s, table)]
    index = choose(dataset.test.labels, image_count(dataset.size, len(specs) + 1))
    batches = Batches(dataset.test, dataset.size, len(index), torch.device("cpu"), index=index)
    pixels = next(iter(batches)).pixels.float() / 255
    shown = {
        spec: perturb_samples(pixels, index, parse(spec), 0, results.noise_seed)
        for spec in ["clean", *specs]
    }
    predictions, tolerances = [], []
    for label in table.labels:
        model = results.run(label).model(results.weights).float()
        predictions.append(_predictions(model, shown))
        levels = noise_tolerance(model, pixels, results.noise_seed).tolist()
        tolerances.append([tolerance_text(each) for each in levels])

    def level(spec: str) -> dict[str, Any]:
        cells = [tested.cells.get((label, spec)) for label in table.labels]
        return {
            "spec": spec,
            "title": heading(spec),
            "images": [image_uri(image) for image in shown[spec]],
            "accuracy": [cell.mean if cell else None for cell in cells],
            "predictions": list(zip(*(by_spec[spec] for by_spec in predictions), strict=True)),
        }

    return {
        "labels": list(table.labels),
        "classes": results.classes,
        "truth": dataset.test.labels[index].tolist(),
        "index": index.tolist(),
        "reasons": reasons(dataset.test.labels, index),
        "tolerance": list(zip(*tolerances, strict=True)),
        "pixelated": max(dataset.size[1:]) <= LONGER_SIDE // 2,
        "levels": [level(spec) for spec in shown],
        "families": [
            {"title": title, "levels": [list(shown).index(s) for s in ("clean", *members)]}
            for title, members in (families(specs) or {"Clean": []}).items()
        ],
    }


def _is_shown(spec: str, table: tables.Table) -> bool:
    """Of a whole suite of corruptions only severities 1, 3 and 5 are shown, to have more images;
    perturbations of a user's own only if they are registered."""
    shown = spec in table.perturbations or spec.endswith((":1", ":3", ":5"))
    return shown and is_known(spec)


def image_count(size: tuple[int, int, int], conditions: int) -> int:
    """How many images to show under so many conditions: 8, or fewer if they are large, at least 2.

    >>> [image_count((3, side, side), 60) for side in (32, 64, 250)]
    [8, 8, 2]
    """
    pixels = min(size[1] * size[2], LONGER_SIDE**2)
    return max(2, min(IMAGES, _PIXELS // (pixels * conditions)))


def choose(labels: Tensor, count: int) -> Tensor:
    """Positions of `count` images, or of all if there are fewer.

    The first image of each class, then the second, and so on; of many classes, evenly spaced ones.

    >>> choose(torch.tensor([0, 0, 1, 1, 2, 2]), 3).tolist()
    [0, 2, 4]
    """
    present = labels.unique().tolist()
    if len(present) > count:
        present = [present[i * len(present) // count] for i in range(count)]
    positions = [(labels == c).nonzero().flatten().tolist() for c in present]
    in_turn = [p[turn] for turn in range(count) for p in positions if turn < len(p)]
    return torch.tensor(in_turn[:count])


def reasons(labels: Tensor, index: Tensor) -> list[str]:
    """Why each image is shown: which one of its class it is.

    >>> reasons(torch.tensor([0, 1, 0, 0]), torch.tensor([0, 3]))
    ['shown as the first of its class (test image 1)', \
'shown as number 3 of its class (test image 4)']
    """
    texts = []
    for position in index.tolist():
        number = int((labels[: position + 1] == labels[position]).sum())
        which = "the first" if number == 1 else f"number {number}"
        texts.append(f"shown as {which} of its class (test image {position + 1})")
    return texts


@torch.inference_mode()
def _predictions(model: nn.Module, shown: dict[str, Tensor]) -> dict[str, list[tuple[int, float]]]:
    """(class, confidence) of each image, by perturbation."""
    by_spec = {}
    for spec, images in shown.items():
        confidence, classes = model(images).softmax(1).max(1)
        pairs = zip(classes.tolist(), confidence.tolist(), strict=True)
        by_spec[spec] = [(c, round(p, 4)) for c, p in pairs]
    return by_spec


def image_uri(image: Tensor) -> str:
    """An image in [0, 1], C x H x W, as a data URI: PNG, or a reduced JPEG if it is large."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    out = io.BytesIO()
    if max(picture.size) <= LONGER_SIDE:
        picture.save(out, "PNG", optimize=True)
        return data_uri(out.getvalue(), "image/png")
    picture.thumbnail((LONGER_SIDE, LONGER_SIDE))
    picture.save(out, "JPEG", quality=80)
    return data_uri(out.getvalue(), "image/jpeg")
