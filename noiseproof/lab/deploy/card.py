"""What a model is, for those who get it without its run: metadata and a model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import noiseproof
from noiseproof.lab.config import NAMED, NOISELESS
from noiseproof.lab.console import printable
from noiseproof.lab.data.images import Reading, before_crop
from noiseproof.lab.deploy.load import PixelClassifier, load
from noiseproof.lab.evaluation import severities
from noiseproof.lab.evaluation.stats import ClassScores, mean_class_scores, mean_std
from noiseproof.lab.evaluation.writers import markdown_text
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import EvaluationRow, RunFolder, Weights
from noiseproof.perturb.text import heading, is_clean, ordered

_LISTED = 100  # classes that a card names, at most


def robustness(run: RunFolder, weights: Weights) -> list[dict[str, Any]]:
    """The accuracy under each perturbation that the run was evaluated under: mean and standard
    deviation over noise draws, and macro-F1 and the recall of each class if the test images are
    unbalanced; empty if these weights were not evaluated.

    Args:
        run: a trained run, or a shared model, whose config holds these numbers.
        weights: "last" or "best".
    """
    expected = run.measured_with(weights) | {"metric": "accuracy"}
    rows = [row for row in run.evaluation() if expected.items() <= row.items()]
    if not rows:
        return run.info.get("robustness", [])
    rows = severities.averaged(r for r in rows if r["noise_seed"] == rows[0]["noise_seed"])
    by_spec: dict[str, dict[int, EvaluationRow]] = {}
    for row in rows:
        by_spec.setdefault(row["perturbation"], {})[row["draw"]] = row
    table = []
    for spec in ordered(by_spec):
        draws = by_spec[spec].values()
        accuracy = mean_std([row["value"] for row in draws])
        numbers = {"accuracy": accuracy.mean, "std": accuracy.std, "draws": accuracy.n}
        scores = [ClassScores(**row["class_scores"]) for row in draws if "class_scores" in row]
        if len(scores) == len(draws) and (mean := mean_class_scores(scores)):
            numbers |= asdict(mean)
        table.append({"perturbation": spec, **numbers, "n": rows[0]["n"]})
    return table


def metadata(model: PixelClassifier) -> dict[str, Any]:
    """The facts about a model as plain values: classes, preprocessing, training, robustness."""
    run, config = model.run, model.run.config
    channels, height, width = model.size
    return {
        "noiseproof": noiseproof.__version__,
        "name": run.name,
        "classes": list(model.classes),
        "size": [channels, height, width],
        "preprocessing": {
            "colour": "greyscale" if channels == 1 else "RGB",
            "resize": resizing(model),
            "mean": model.classifier.mean.flatten().tolist(),
            "std": model.classifier.std.flatten().tolist(),
        },
        "model": _file_name(config.model.model),
        "method": config.method.method,
        "training_noise": None if config.method.method in NOISELESS else config.method.noise,
        "data": data_name(run),
        "weights": model.note,
        "robustness": robustness(run, model.weights),
    }


def resizing(model: PixelClassifier) -> str:
    """How images of another size are resized, in words."""
    reading, (_, height, width) = Reading.of(model.run.config.data), model.size
    how = f"{reading.interpolation} interpolation with antialiasing"
    if reading.crop_share is None:
        return f"to {height} x {width}, {how}"
    least = " x ".join(map(str, before_crop(height, width, reading.crop_share)))
    return f"to at least {least}, {how}, then cropped at the centre to {height} x {width}"


def data_name(run: RunFolder) -> str:
    """The name of the run's data: a dataset's, or that of a file or folder without its path."""
    data = run.config.data.data
    return data if data in NAMED else _file_name(data)


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def card(model: PixelClassifier, name: str | None = None) -> str:
    """A model card in Markdown, with the header that the Hugging Face Hub reads.

    Args:
        model: the model.
        name: its title; by default that of its run.
    """

    def text(words: str) -> str:
        return markdown_text(printable(words))

    facts = metadata(model)
    epochs, samples = model.run.config.optim.epochs, model.run.info.get("samples", {})
    noise, (channels, height, width) = facts["training_noise"], model.size
    classes = ", ".join(map(text, model.classes[:_LISTED]))
    if len(model.classes) > _LISTED:
        classes += f" and {len(model.classes) - _LISTED} more"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    counted = f"{samples['train']:,} images of " if "train" in samples else ""
    length = f"{epochs} epoch{'s' if epochs != 1 else ''}"
    own = model.run.config.model.head == "own"
    training = f"""{"trained elsewhere, then tuned on" if own else "trained on"}
{counted}{text(facts["data"])} with the method `{facts["method"]}` for {length},
{f"under the noise `{noise}`" if noise else "without noise"}. {facts["weights"]}"""
    if model.run.info.get("before_tuning"):
        training = "trained elsewhere; these are its\nown weights, before tuning."
    return f"""---
library_name: noiseproof
pipeline_tag: image-classification
tags: [noiseproof, robustness]
metrics: [accuracy]
---

# {text(name or facts["name"])}

An image classifier ({text(facts["model"])}, {parameters / 1e6:,.2f} million parameters), {training}

## Robustness

{_table(facts["robustness"])}

Noise and corruptions are random; these numbers say nothing about adversarial images, nor about
images from another source.

## Use

```python
import noiseproof

model = noiseproof.load("PATH")  # this folder
logits = model(images)  # B x {channels} x {height} x {width}: bytes, or floats in [0, 1]
```

The model normalises its input itself. Images of another size are resized
{facts["preprocessing"]["resize"]}.

## Classes

{len(model.classes)}: {classes}.
"""


def _table(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return "Not evaluated yet: `noiseproof evaluate RUN` measures it."
    lines = ["| | accuracy (%) |", "|---|---:|"]
    digits, draws = 1 if rows[0]["n"] < 1000 else 2, max(row["draws"] for row in rows)
    for row in rows:
        std = "" if row["std"] is None else f" ± {100 * row['std']:.{digits}f}"
        accuracy = f"{100 * row['accuracy']:.{digits}f}"
        lines.append(f"| {markdown_text(heading(row['perturbation']))} | {accuracy}{std} |")
    note = f"On {rows[0]['n']:,} test images"
    note += f"; ± is the standard deviation over {draws} noise draws." if draws > 1 else "."
    for row in rows:
        if is_clean(row["perturbation"]) and "macro_f1" in row:
            recall = ", ".join(
                f"{markdown_text(printable(name))} {100 * value:.{digits}f} %"
                for name, value in sorted(row["recall"].items(), key=lambda item: item[1])[:_LISTED]
            )
            note += (
                f" Classes are unbalanced: on clean images, macro-F1 is "
                f"{100 * row['macro_f1']:.{digits}f} %, and the recall of each class, "
                f"lowest first: {recall}."
            )
    if any(row["perturbation"] in severities.MEANS for row in rows):
        note += (
            " Corruptions 1–5: the mean over severities, of images made with the constants of "
            "CIFAR-10-C and ImageNet-C; these are not the published files."
        )
    return "\n".join([*lines, "", note])


def write_card(path: str) -> None:
    """Writes README.md into a run folder, and says so.

    Args:
        path: the run folder.
    """
    model = load(path)
    file = model.run.path / "README.md"
    write_atomically(file, card(model))
    print(f"Model card: {file}")
