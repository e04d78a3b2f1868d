"""Accuracy of a trained run under perturbations: one row for every perturbation and noise draw.

The noise of an image is keyed by (noise seed, perturbation, draw, place of the image in the test
set), so every run sees the same noise, whatever the batch size or the device, and two runs can be
compared image by image. Predictions are kept beside the rows for that purpose. What has been
evaluated before, with the same model file and the same test images, is not computed again.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noiseproof import draws as random
from noiseproof.lab import data, tables
from noiseproof.lab.runs import RunFolder, Weights
from noiseproof.lab.stream import FileDataset
from noiseproof.perturb import Perturbation, parse

__all__ = ["Predictions", "correct", "evaluate", "evaluate_runs", "name_of", "predictions"]

SCHEMA = 1
Row = dict[str, Any]


class Predictions(NamedTuple):
    """Class ids that a model gave to the test images: `classes` is draws x n, `labels` n."""

    classes: NDArray[Any]
    labels: NDArray[np.int64]
    draws: NDArray[np.int64]


def name_of(perturbation: Perturbation | str) -> str:
    """The canonical text of a perturbation, "clean" for none.

    >>> name_of("identity"), name_of("Gaussian: 40/255")
    ('clean', 'gaussian:40/255')
    """
    text = str(parse(perturbation) if isinstance(perturbation, str) else perturbation)
    return "clean" if text == "identity" else text


def evaluate(
    run: RunFolder,
    perturbations: Sequence[Perturbation | str],
    *,
    draws: int = 10,
    weights: Sequence[Weights] = ("last",),
    noise_seed: int = 0,
    device: str = "auto",
    batch_size: int | None = None,
    progress: bool | None = None,
    dataset: data.Dataset | None = None,
) -> list[Row]:
    """The rows of `run` for these perturbations, computed where they are not known yet.

    A deterministic perturbation has draw 0 alone. Of `weights`, those that the run has are taken.

    Args:
        batch_size: images at a time; by default as many as keep memory small.
        progress: show a progress bar; by default on a terminal.
        dataset: the run's data, where the caller has loaded it already.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    have: list[Weights] = [name for name in dict.fromkeys(weights) if run.has(name)]
    if not have:
        raise ValueError(f"run {run.name} has no {' or '.join(weights)} weights to evaluate")
    named = {name_of(p): parse(p) if isinstance(p, str) else p for p in perturbations}
    dataset = dataset or data.load(run.config.data)
    expected = run.info.get("fingerprint", dataset.fingerprint)
    if expected != dataset.fingerprint:
        raise ValueError(
            f"the test images of {dataset.name} are not those of run {run.name}: "
            f"fingerprint {dataset.fingerprint}, expected {expected}"
        )

    where = torch.device(_device(device))
    rows: list[Row] = []
    with _progress(progress) as bar:
        for chosen in have:
            size = batch_size or _batch_size(dataset.size, where)
            session = _Session(run, chosen, dataset, where, noise_seed, size)
            for name, perturbation in named.items():
                wanted = range(1 if perturbation.deterministic else draws)
                rows += session.rows(name, perturbation, wanted, bar)
    return rows


def predictions(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
) -> Predictions | None:
    """What the run's present model predicted under this perturbation; None if it is not known."""
    stored = run.predictions(_key(weights, name_of(perturbation), noise_seed))
    if stored is None or str(stored["model"]) != model_hash(run, weights):
        return None
    return Predictions(stored["classes"], stored["labels"], stored["draws"])


def correct(
    run: RunFolder,
    perturbation: Perturbation | str,
    *,
    weights: Weights = "last",
    noise_seed: int = 0,
    draws: int | None = None,
) -> NDArray[np.bool_] | None:
    """Right or wrong, draws x n, of the first `draws` draws (all by default); None if not known."""
    found = predictions(run, perturbation, weights=weights, noise_seed=noise_seed)
    if found is None:
        return None
    order = np.argsort(found.draws)
    if draws is not None:
        order = order[found.draws[order] < draws]
    return found.classes[order] == found.labels


_HASHES: dict[tuple[str, int, int], str] = {}


def model_hash(run: RunFolder, weights: Weights) -> str:
    """The hash of a file of weights, read once as long as the file does not change."""
    path = run.weights_path(weights).absolute()
    stat = path.stat()
    key = (str(path), stat.st_mtime_ns, stat.st_ino)
    if key not in _HASHES:
        _HASHES[key] = run.weights_hash(weights)
    return _HASHES[key]


@dataclass
class _Session:
    """One model on one device: the test images and what is known of it already."""

    run: RunFolder
    weights: Weights
    dataset: data.Dataset
    device: torch.device
    noise_seed: int
    batch_size: int

    @cached_property
    def hash(self) -> str:
        return model_hash(self.run, self.weights)

    @cached_property
    def model(self) -> nn.Module:
        model: nn.Module = self.run.model(self.weights, self.device).float()
        gpu = self.device.type == "cuda"
        return model.to(memory_format=torch.channels_last) if gpu else model  # pyright: ignore

    @cached_property
    def images(self) -> Tensor | None:
        images = self.dataset.test.images
        return None if images is None else images.to(self.device)

    @cached_property
    def known(self) -> dict[tuple[str, int], Row]:
        """The rows of this model on these images under this noise seed, by (perturbation, draw)."""
        mine = {"weights": self.weights, "noise_seed": self.noise_seed, "model": self.hash}
        mine |= {"fingerprint": self.dataset.fingerprint}
        rows = (row for row in self.run.evaluation() if mine.items() <= row.items())
        return {(row["perturbation"], row["draw"]): row for row in rows}

    def rows(
        self, name: str, perturbation: Perturbation, wanted: Sequence[int], bar: Progress
    ) -> list[Row]:
        """The rows of the wanted draws; those that are missing are computed and written."""
        key = _key(self.weights, name, self.noise_seed)
        stored = self._stored(key)
        todo = [d for d in wanted if d not in stored or (name, d) not in self.known]
        if todo:
            start = time.perf_counter()
            classes = self._predict(name, perturbation, todo, bar)
            seconds = (time.perf_counter() - start) / len(todo)
            stored |= dict(zip(todo, classes, strict=True))
            labels = self.dataset.test.labels.numpy()
            self.run.save_predictions(  # before the rows, so that a row always has its predictions
                key,
                classes=np.stack([stored[d] for d in sorted(stored)]),
                labels=labels,
                draws=np.array(sorted(stored), dtype=np.int64),
                model=np.array(self.hash),
                fingerprint=np.array(self.dataset.fingerprint),
                perturbation=np.array(name),
                noise_seed=np.array(self.noise_seed),
            )
            new = [
                self._row(name, perturbation, draw, float((stored[draw] == labels).mean()), seconds)
                for draw in todo
                if (name, draw) not in self.known  # predictions may have been lost, rows not
            ]
            self.run.append_evaluation(new)
            self.known |= {(name, row["draw"]): row for row in new}
        return [self.known[name, draw] for draw in wanted]

    def _stored(self, key: str) -> dict[int, NDArray[Any]]:
        found = self.run.predictions(key)
        if found is None or str(found["model"]) != self.hash:
            return {}
        if str(found["fingerprint"]) != self.dataset.fingerprint:
            return {}
        return {
            int(d): classes for d, classes in zip(found["draws"], found["classes"], strict=True)
        }

    def _row(
        self, name: str, perturbation: Perturbation, draw: int, value: float, seconds: float
    ) -> Row:
        level = getattr(perturbation, "std", getattr(perturbation, "amplitude", None))
        return {
            "schema": SCHEMA,
            "run": self.run.name,
            "data": self.dataset.name,
            "fingerprint": self.dataset.fingerprint,
            "method": self.run.config.method.method,
            "seed": self.run.config.run.seed,
            "weights": self.weights,
            "model": self.hash,
            "perturbation": name,
            "level": 0.0 if name == "clean" else level if isinstance(level, float) else None,
            "draw": draw,
            "noise_seed": self.noise_seed,
            "metric": "accuracy",
            "value": value,
            "n": self.dataset.test.count,
            "precision": _precision(self.run, self.device),
            "device": self.device.type,
            "seconds": round(seconds, 4),
        }

    @torch.inference_mode()
    def _predict(
        self, name: str, perturbation: Perturbation, todo: Sequence[int], bar: Progress
    ) -> NDArray[Any]:
        """Predicted class ids, draws x n, in the smallest unsigned integers that hold them."""
        n, count = self.dataset.test.count, len(self.dataset.classes)
        found = torch.empty(len(todo), n, dtype=torch.int32, device=self.device)
        spec = torch.tensor(zlib.crc32(name.encode()), device=self.device)
        half = _precision(self.run, self.device) == "bf16"
        task = bar.add_task(f"{self.run.name} {self.weights} {name}", total=n * len(todo))
        for pixels, index in self._batches():
            x = pixels.float() / 255
            for i, draw in enumerate(todo):
                number = torch.tensor(draw, device=self.device)
                source = random.PerSample(random.keys(self.noise_seed, spec, number, index))
                noisy = perturbation(x, source)
                if self.device.type == "cuda":
                    noisy = noisy.contiguous(memory_format=torch.channels_last)
                with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
                    logits = self.model(noisy)
                found[i, index] = logits.argmax(1).to(torch.int32)
                bar.advance(task, len(index))
        bar.remove_task(task)
        dtype = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.int32
        return found.cpu().numpy().astype(dtype)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(uint8 pixels, place in the test set), both on the device."""
        test = self.dataset.test
        if self.images is not None:
            index = torch.arange(test.count, device=self.device).split(self.batch_size)
            yield from zip(self.images.split(self.batch_size), index, strict=True)
            return
        loader = DataLoader(
            FileDataset(test, self.dataset.size, augment="none", seed=0, epoch=0, views=1),
            batch_size=self.batch_size,
            num_workers=min(self.run.config.data.workers, os.cpu_count() or 1),
            pin_memory=self.device.type == "cuda",
        )
        for pixels, _, index in loader:
            yield pixels.to(self.device, non_blocking=True), index.to(self.device)


def evaluate_runs(
    paths: Sequence[str | Path],
    perturb: Sequence[str] | None = None,
    draws: int = 10,
    weights: Sequence[Weights] = ("last",),
    noise_seed: int = 0,
    device: str = "auto",
    table: str | Path | None = None,
) -> None:
    """Evaluates runs, prints one table for all that share their test images, says where rows lie.

    `perturb` none takes the default suite of each run's data. `table` also writes the table, as
    .md, .csv or .tex; several tables (of different data) follow one another in it.
    """
    from noiseproof.recipes.suites import suite

    if table is not None and Path(table).suffix not in tables.WRITERS:
        raise ValueError(f"a table ends in {', '.join(tables.WRITERS)}, got {Path(table).name}")
    runs = {run.path: run for run in (RunFolder.open(Path(path)) for path in paths)}
    names = [run.name for run in runs.values()]
    labels = {r.name if names.count(r.name) == 1 else str(p): r for p, r in runs.items()}
    groups: dict[str, list[Row]] = {}
    out, loaded = tables.output(), {}
    for label, run in labels.items():
        if run.config.data not in loaded:
            loaded = {run.config.data: data.load(run.config.data)}  # one dataset at a time
        dataset = loaded[run.config.data]
        specs = perturb or suite(run.config.data.data, dataset.size)
        rows = evaluate(
            run, specs, draws=draws, weights=weights, noise_seed=noise_seed, device=device,
            dataset=dataset,
        )  # fmt: skip
        groups.setdefault(dataset.fingerprint, []).extend({**row, "run": label} for row in rows)
        for missing in [w for w in weights if not run.has(w)]:
            out.print(f"{label} has no {missing} weights; they are left out.", markup=False)

    def known(label: str, chosen: str, spec: str) -> NDArray[np.bool_] | None:
        found = cast(Weights, chosen)
        return correct(labels[label], spec, weights=found, noise_seed=noise_seed, draws=draws)

    made = [
        tables.build(rows, by="run", correct=known, title=str(rows[0]["data"]))
        for rows in groups.values()
    ]
    for one in made:
        show(one, out)
    if table is not None:
        path = Path(table)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tables.written(made, path.suffix), encoding="utf-8")
        out.print(f"Table: {path}", markup=False)
    for run in runs.values():
        out.print(f"Rows: {run.path / 'evaluation.jsonl'}", markup=False, soft_wrap=True)


def show(table: tables.Table, out: Console, *, summary: bool = True) -> None:
    """Prints a table, its notes and, where asked for, its sentences."""
    out.print()
    out.print(tables.console(table, out.width))
    for line in [*table.notes(), *(tables.summary(table) if summary else ())]:
        out.print(line, markup=False, highlight=False)


def _key(weights: Weights, name: str, noise_seed: int) -> str:
    """A file name of its own for each; the checksum parts texts that look alike once cleaned."""
    clean = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:60]
    return f"{weights}_{clean}_{zlib.crc32(name.encode()):08x}_n{noise_seed}"


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no CUDA device; expected cpu or auto")
    return name


def _precision(run: RunFolder, device: torch.device) -> str:
    """bf16 on a GPU for a run trained so, float32 everywhere else."""
    half = device.type == "cuda" and run.info.get("precision") == "bf16"
    return "bf16" if half else "float32"


def _batch_size(size: tuple[int, int, int], device: torch.device) -> int:
    """As many images as make half a million pixels (on a GPU, 32 million), within bounds.

    A pixel costs some 40 bytes while its noise is drawn, and several times that in the network.
    """
    pixels, most = (1 << 25, 4096) if device.type == "cuda" else (1 << 19, 1024)
    return max(8, min(most, pixels // (size[0] * size[1] * size[2])))


@contextlib.contextmanager
def _progress(wanted: bool | None) -> Iterator[Progress]:
    console = Console(stderr=True)
    shown = console.is_terminal if wanted is None else wanted
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        yield bar
