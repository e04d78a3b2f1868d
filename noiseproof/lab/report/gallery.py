"""Test images under every perturbation, with what each model makes of them.

The images are picked by class and place alone, never by result, and carry the noise of the first
draw of the evaluation, so that what is shown is what was counted. Photographs are shown smaller
than the models saw them.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.data.images import DataError
from noiseproof.lab.report.results import Results
from noiseproof.perturb import parse
from noiseproof.perturb.text import families, heading
from noiseproof.robustness import perturb_samples

__all__ = ["LARGEST", "build", "picked", "uri"]

IMAGES = 8
LARGEST = 160  # pixels on the longer side of what is embedded
_PICTURES = 160  # images x conditions, which bounds the file


def build(results: Results) -> dict[str, Any]:
    """The gallery as plain values for the page; ValueError where the data cannot be had."""
    config = dataclasses.replace(results.first.config.data, download=False)
    dataset = load_dataset(config)
    expected = results.first.info.get("fingerprint")
    if dataset.fingerprint != expected:
        raise DataError("the test images have changed since the runs were made")
    specs = [spec for spec in results.table.perturbations if spec != "clean"]
    count = max(2, min(IMAGES, _PICTURES // (len(specs) + 1)))
    index = picked(dataset.test.labels, count)
    batches = Batches(dataset.test, dataset.size, len(index), torch.device("cpu"), index=index)
    pixels = next(iter(batches)).pixels.float() / 255
    shown = {
        spec: perturb_samples(pixels, index, parse(spec), 0, results.noise_seed)
        for spec in ["clean", *specs]
    }
    said = {label: _said(results, label, shown) for label in results.table.labels}

    def level(spec: str) -> dict[str, Any]:
        return {
            "spec": spec,
            "title": heading(spec),
            "images": [uri(image) for image in shown[spec]],
            "accuracy": [_accuracy(results, label, spec) for label in results.table.labels],
            "said": [[said[x][spec][i] for x in results.table.labels] for i in range(len(index))],
        }

    levels = {spec: level(spec) for spec in shown}
    groups = families(specs) or {"Clean": []}
    return {
        "labels": list(results.table.labels),
        "classes": results.classes,
        "truth": dataset.test.labels[index].tolist(),
        "place": index.tolist(),
        "pixelated": max(dataset.size[1:]) <= LARGEST // 2,
        "levels": list(levels.values()),
        "families": [
            {"title": title, "levels": [list(levels).index(s) for s in ("clean", *members)]}
            for title, members in groups.items()
        ],
    }


def _accuracy(results: Results, label: str, spec: str) -> float | None:
    cell = results.table.cells.get((label, spec))
    return None if cell is None else cell.mean


def picked(labels: Tensor, count: int) -> Tensor:
    """Places of `count` images, or of all where there are fewer, one class after the other, classes
    spread evenly over the list.

    >>> picked(torch.tensor([0, 0, 1, 1, 2, 2]), 3).tolist()
    [0, 2, 4]
    """
    present = labels.unique().tolist()
    if len(present) > count:  # some classes, evenly spaced
        present = [present[i * len(present) // count] for i in range(count)]
    places = [(labels == c).nonzero().flatten().tolist() for c in present]
    rounds = [p[turn] for turn in range(count) for p in places if turn < len(p)]
    return torch.tensor(rounds[:count])


@torch.inference_mode()
def _said(
    results: Results, label: str, shown: dict[str, Tensor]
) -> dict[str, list[tuple[int, float]]]:
    """(class, confidence) for each image of each condition."""
    model = results.run(label).model(results.weights).float()
    found = {}
    for spec, images in shown.items():
        confidence, classes = model(images).softmax(1).max(1)
        pairs = zip(classes.tolist(), confidence.tolist(), strict=True)
        found[spec] = [(c, round(p, 4)) for c, p in pairs]
    return found


def uri(image: Tensor) -> str:
    """An image in [0, 1], C x H x W, as a data URI: PNG, or a smaller JPEG of a photograph."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    out = io.BytesIO()
    if max(picture.size) <= LARGEST:
        picture.save(out, "PNG", optimize=True)
        kind = "png"
    else:
        picture.thumbnail((LARGEST, LARGEST))
        picture.save(out, "JPEG", quality=80)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
