"""A trained run as a file for other programs, checked against torch and timed.

    onnx           one .onnx file for onnxruntime and what else reads ONNX
    torch-export   one .pt2 file, which torch.export.load opens without this package
    safetensors    a folder for `noiseproof.load` and the Hugging Face Hub

The first two hold the preprocessing (scaling of bytes, resizing, normalisation) in the graph, and
the facts of `card.metadata` beside it. A file gets its name only once it agrees with torch.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.lab.config import NAMED
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.deploy.card import metadata
from noiseproof.lab.deploy.load import PixelClassifier, find_run, load
from noiseproof.lab.deploy.model_folders import refuse_run_folder
from noiseproof.lab.deploy.share import save_folder
from noiseproof.lab.evaluation.suites import suite
from noiseproof.lab.runs import Weights
from noiseproof.lab.training.interrupt import uninterrupted
from noiseproof.lab.validate import validate_format
from noiseproof.perturb import parse
from noiseproof.perturb.text import heading, noise_levels
from noiseproof.robustness import perturb_samples

Format = Literal["onnx", "torch-export", "safetensors"]
Input = Literal["float", "bytes"]
Size = Literal["fixed", "any"]
Images = np.ndarray[Any, Any]
Forward = Callable[[Images], Images]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ""}
INPUT, OUTPUT = "images", "logits"
_CHECKED = 128  # test images
_TOLERANCE = 1e-3  # of a logit, relative to the largest
_HALF_TOLERANCE = 3e-2  # with weights in 16 bits
_BATCH = 64  # images, at most, of which the throughput is measured
_SECONDS = 1.0  # to measure each speed


class Check(NamedTuple):
    """How an exported model compares with torch under one condition."""

    condition: str
    difference: float  # the largest of a logit
    agreement: float  # share of the images with the same class


class Speed(NamedTuple):
    """How fast an exported model is on this machine."""

    latency: float  # seconds for one image, the median
    throughput: float  # images per second
    batch: int


class Exported(NamedTuple):
    """An exported model."""

    path: Path
    images: str  # what it was checked with, in words
    checks: list[Check]
    speed: Speed


class _Graph(nn.Module):
    """What is traced: from pixels of one type to logits, with or without resizing."""

    def __init__(self, model: PixelClassifier, resize: bool):
        super().__init__()
        self.model, self.resize = model, resize

    def forward(self, images: Tensor) -> Tensor:
        return self.model.classifier(self.model.pixels(images, resize=self.resize))


def trace(model: PixelClassifier, *, as_bytes: bool, resize: bool) -> torch.export.ExportedProgram:
    """The model as a graph, for batches of any length.

    Args:
        model: a loaded model.
        as_bytes: whether images are bytes, or floats in [0, 1].
        resize: whether to accept any height and width, and resize in the graph.
    """
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    if resize:
        dims |= {2: torch.export.Dim("height", min=2), 3: torch.export.Dim("width", min=2)}
    example = torch.rand(2, *model.size)
    example = (example * 255).byte() if as_bytes else example
    graph = _Graph(model, resize).eval()
    with uninterrupted():  # it imports triton
        return torch.export.export(graph, (example,), dynamic_shapes=(dims,))


def write_onnx(program: torch.export.ExportedProgram, path: Path, facts: dict[str, Any]) -> Forward:
    """Writes one .onnx file, and returns it as onnxruntime executes it on the CPU.

    Args:
        program: the traced model.
        path: the file.
        facts: its metadata, each value as JSON; the shape of the input names its dimensions.
    """
    import onnxruntime

    names = {i: side for i, side in enumerate(facts["input"]["shape"]) if isinstance(side, str)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx about itself
        exported: Any = torch.onnx.export(
            program, dynamo=True, external_data=False, verbose=False,
            input_names=[INPUT], output_names=[OUTPUT], dynamic_shapes=(names,),
        )  # fmt: skip
    exported.model.metadata_props.update({k: json.dumps(v) for k, v in facts.items()})
    exported.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: np.asarray(session.run(None, {INPUT: images})[0])


def write_program(
    program: torch.export.ExportedProgram, path: Path, facts: dict[str, Any]
) -> Forward:
    """Writes one .pt2 file, with the facts as `metadata.json` in it, and returns it as
    torch.export.load opens it; arguments as for `write_onnx`."""
    torch.export.save(program, path, extra_files={"metadata.json": json.dumps(facts)})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.9 to 2.11
        module = torch.export.load(path).module()
    return _torch_forward(module)


def _torch_forward(module: Callable[[Tensor], Tensor]) -> Forward:
    def forward(images: Images) -> Images:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()

    return forward


def export(
    model: PixelClassifier,
    path: str | Path,
    *,
    format: Format = "onnx",
    input: Input = "float",
    size: Size | None = None,
    half: bool = False,
) -> Exported:
    """Writes a model to a file or folder, after checking it against torch and timing it.

    Args:
        model: a loaded model.
        path: the file; for safetensors, a folder.
        format: onnx, torch-export or safetensors.
        input: what a graph takes: floats in [0, 1], or bytes.
        size: whether a graph takes images of the training size, or of any size; by default of any
            if the run's images are files, which were resized for it as well.
        half: for safetensors, store the weights of layers in 16 bits.
    """
    validate_format(format)
    path, folder_format = Path(path), format == "safetensors"
    if folder_format:
        refuse_run_folder(model.run.path, path)
    as_bytes = input == "bytes"
    data = model.run.config.data.data
    from_files = not folder_format and data not in NAMED and not data.endswith(".npz")
    resize = from_files if size is None else size == "any"
    conditions, words = check_images(model, resize)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        temporary = Path(folder) / path.name
        if folder_format:
            forward = _torch_forward(load(save_folder(model, temporary, half=half)))
        else:
            facts = {**metadata(model), "input": _input_facts(model, as_bytes, resize)}
            write = write_onnx if format == "onnx" else write_program
            forward = write(trace(model, as_bytes=as_bytes, resize=resize), temporary, facts)
        given = {name: _as_input(pixels, as_bytes) for name, pixels in conditions.items()}
        checks = compare(model, forward, given, _HALF_TOLERANCE if half else _TOLERANCE)
        speed = measure(forward, given[next(iter(given))])
        for file in temporary.iterdir() if folder_format else ():
            path.mkdir(exist_ok=True)
            os.replace(file, path / file.name)
        if not folder_format:
            os.replace(temporary, path)
    return Exported(path, words, checks, speed)


def _input_facts(model: PixelClassifier, as_bytes: bool, resize: bool) -> dict[str, Any]:
    channels, height, width = model.size
    sides = ["height", "width"] if resize else [height, width]
    kind = {"dtype": "uint8", "range": [0, 255]} if as_bytes else {"dtype": "float32"}
    return {"name": INPUT, "shape": ["batch", channels, *sides], "range": [0, 1], **kind}


def check_images(model: PixelClassifier, resize: bool) -> tuple[dict[str, Tensor], str]:
    """The images to check with under each condition, B x C x H x W in [0, 1], and what they are:
    evenly spaced test images of the model's run, or random ones if these are not available; clean
    and under some of the noise that the run is evaluated under.

    Args:
        model: a loaded model.
        resize: also check images of another size.
    """
    run, (_, height, width) = model.run, model.size
    try:
        dataset = run.dataset(load_dataset(replace(run.config.data, download=False)))
    except ValueError as error:
        pixels = torch.rand(_CHECKED, *model.size, generator=torch.Generator().manual_seed(0))
        index, words = torch.arange(len(pixels)), f"{len(pixels)} random images, since {error}"
    else:
        index = torch.arange(0, dataset.test.count, math.ceil(dataset.test.count / _CHECKED))
        batches = Batches(dataset.test, dataset.size, len(index), torch.device("cpu"), index=index)
        pixels = next(iter(batches)).pixels.float() / 255
        words = f"{len(pixels)} test images"
    texts = suite("noise", run.config.data.data, model.size)
    noise = [text for text in texts if noise_levels(text)]
    conditions = {
        heading(text): perturb_samples(pixels, index, parse(text), 0, 0)
        for text in ("clean", noise[len(noise) // 2], noise[-1], texts[-1])
    }
    if resize:
        size = (height * 3 // 2, width * 2)
        larger = F.interpolate(pixels, size, mode="bilinear").clamp(0, 1)
        conditions[f"clean, {size[0]} x {size[1]}"] = larger
    return conditions, words


def compare(
    model: PixelClassifier, forward: Forward, given: Mapping[str, Images], tolerance: float
) -> list[Check]:
    """How an exported model differs from torch under each condition; ValueError if it does by more
    than `tolerance` of the largest logit.

    Args:
        model: the model in torch.
        forward: the exported one.
        given: images by condition.
        tolerance: relative to the largest logit.
    """
    checks = []
    for condition, images in given.items():
        parts = np.split(images, range(_BATCH, len(images), _BATCH))  # all at once fill the memory
        expected = np.concatenate([_torch_forward(model)(part) for part in parts])
        got = np.concatenate([forward(part) for part in parts])
        difference = float(np.abs(got - expected).max())
        agreement = float((got.argmax(1) == expected.argmax(1)).mean())
        checks.append(Check(condition, difference, agreement))
        if not difference <= tolerance * max(1.0, float(np.abs(expected).max())):
            raise ValueError(
                f"the exported model differs from torch by up to {difference:.2g} in its logits "
                f"({condition}; {100 * agreement:.1f} % of the classes agree); expected at most "
                f"{tolerance:g} of the largest"
            )
    return checks


def _as_input(pixels: Tensor, as_bytes: bool) -> Images:
    return ((pixels * 255).round().byte() if as_bytes else pixels).contiguous().numpy()


def measure(forward: Forward, images: Images) -> Speed:
    """Latency of one image and throughput of a batch, each over about a second after a warm-up.

    Args:
        forward: the exported model.
        images: some of its inputs.
    """
    batch = images[:_BATCH]
    return Speed(_duration(forward, batch[:1]), len(batch) / _duration(forward, batch), len(batch))


def _duration(forward: Forward, given: Images) -> float:
    """The median number of seconds of a call."""
    forward(given)
    times: list[float] = []
    while not times or sum(times) < _SECONDS:
        start = time.perf_counter()
        forward(given)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def export_run(
    path: str,
    *,
    format: Format = "onnx",
    input: Input = "float",
    size: Size | None = None,
    half: bool = False,
    output: str | None = None,
    weights: Weights | None = None,
) -> None:
    """Exports a run, and prints where to, how it compares with torch, and how fast it is.

    Args:
        path: a run folder, or what else `load` takes.
        format: as for `export`.
        input: as for `export`.
        size: as for `export`.
        half: as for `export`.
        output: the file or folder; by default in `export/` in the run folder.
        weights: as for `load`.
    """
    model = PixelClassifier(find_run(path), weights)
    print(model.note)
    run = model.run
    target = Path(output) if output else run.path / "export" / f"{run.name}{SUFFIXES[format]}"
    _, images, checks, speed = export(
        model, target, format=format, input=input, size=size, half=half
    )
    files = [target] if target.is_file() else list(target.iterdir())
    print(f"Exported: {target} ({sum(file.stat().st_size for file in files) / 1e6:,.1f} MB)")
    print(f"Compared with torch on {images}:")
    width = max(len(check.condition) for check in checks)
    for condition, difference, agreement in checks:
        print(
            f"  {condition:<{width}}  logits differ by at most {difference:.1e}, "
            f"{100 * agreement:.1f} % of the classes agree"
        )
    threads = torch.get_num_threads()
    print(
        f"On this CPU ({threads} {'thread' if threads == 1 else 'threads'}): "
        f"{1000 * speed.latency:.2f} ms for one image, {speed.throughput:,.0f} images per second "
        f"in batches of {speed.batch}"
    )
