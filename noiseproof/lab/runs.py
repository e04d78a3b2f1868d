"""The run folder: plain files, and the only thing that stages share.

    config.json          schema version, settings, and how the run was made
    metrics.csv          a row an epoch
    checkpoints/         last.pt and, while it is replaced, previous.pt: everything to resume
    model.safetensors    weights after the last epoch; with config.json, the thing to share
    best.safetensors     weights of the best epoch by validation, where there is a validation split
    evaluation.jsonl     a row a perturbation and draw
    predictions/         what was predicted for every test image, for paired comparisons
    .lock                while a process trains here: its id

Files are replaced whole (temporary file, fsync, rename), so that a reader or a power cut never
sees half of one.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from noiseproof.lab.command import command_record
from noiseproof.lab.config import Config, from_dict, run_name, to_dict
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.data.images import DataError
from noiseproof.lab.files import write_atomically
from noiseproof.lab.paths import with_absolute_paths

if TYPE_CHECKING:
    from noiseproof.lab.models.classifier import Classifier

__all__ = ["SCHEMA", "RunFolder", "Weights", "changed", "check_schema"]

SCHEMA = 1
Weights = Literal["last", "best"]
_WEIGHT_FILES = {"last": "model.safetensors", "best": "best.safetensors"}


def check_schema(path: Path, schema: int) -> None:
    """Refuses what a newer program has written."""
    if schema > SCHEMA:
        raise ValueError(
            f"{path} was written by a newer noiseproof (its schema is {schema}, "
            f"this one reads up to {SCHEMA}); please upgrade"
        )


def changed(old: Config, new: Config) -> list[str]:
    """The settings that differ between two configs, apart from where and how fast they run. One
    path may be written in two ways; one that is gone may have moved, and the images tell."""
    free = {"output", "name", "resume", "threads", "checkpoint_minutes", "tensorboard", "workers",
            "device", "data_dir", "download", "engine"}  # fmt: skip
    if new.optim.sched != "multistep":
        free.add("decay_milestones")  # which have no effect
    before, now = to_dict(with_absolute_paths(old)), to_dict(with_absolute_paths(new))
    return [
        f"{name} was {was!r}, is now {now[group][name]!r}"
        for group, values in before.items()
        for name, was in values.items()
        if name not in free and was != now[group][name] and not _gone(name, was)
    ]


def _gone(name: str, was: object) -> bool:
    return name in ("data", "weights") and os.path.isabs(str(was)) and not os.path.exists(str(was))


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path, config: Config, info: dict[str, Any]):
        self.path, self.config, self.info = path, config, info

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, config: Config, info: dict[str, Any]) -> RunFolder:
        """A new folder, with its config; `info` is what is known of data, machine and versions.
        Where the data lie is kept as absolute paths."""
        path, config = Path(config.run.output) / run_name(config), with_absolute_paths(config)
        run = cls(path, config, {**info, **command_record()})
        run.path.mkdir(parents=True, exist_ok=True)
        run.save_config()
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """A folder that is there; ValueError where it is none, or is newer than this program."""
        # The folder that one stands in has a name and a parent, too
        path = Path(os.path.abspath(path) if Path(path).name in ("", "..") else path)
        file = path / "config.json"
        if not file.is_file():
            raise ValueError(f"{path} is not a run folder: it has no config.json")
        try:
            content = json.loads(file.read_text())
            check_schema(path, content["schema"])
            config, info = content["config"], content["info"]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be read as a run's config: {error!r}") from None
        return cls(path, from_dict(config), info)

    def save_config(self) -> None:
        content = {"schema": SCHEMA, "config": to_dict(self.config), "info": self.info}
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(self.path / "config.json", text)

    @property
    def finished(self) -> bool:
        """Whether the last epoch was trained and its weights written."""
        return bool(self.info.get("finished")) and self.has("last")

    def finish(self, **facts: Any) -> None:
        self.info |= {"finished": True, **facts}
        self.save_config()

    # data

    def dataset(self, loaded: Dataset | None = None) -> Dataset:
        """The data of the run, with the test images that it was made with, or a ValueError.

        loaded: the data, where the caller has loaded them already.
        """
        place = Path(self.config.data.data)
        if loaded is None and place.is_absolute() and not place.exists():
            raise DataError(
                f"{place}, the data of run {self.name}, is not there any more; put it back, or "
                f"write where it is now as `data` into {self.path / 'config.json'}"
            )
        dataset = loaded or load_dataset(self.config.data)
        expected = self.info.get("fingerprint", dataset.fingerprint)
        if expected != dataset.fingerprint:
            anew = (
                ", and one image more or less divides it anew"
                if dataset.test_from == "split off"
                else ""
            )
            raise ValueError(
                f"the test images of {dataset.name} are not those of run {self.name}: since its "
                "training, images were added, removed, renamed or changed in "
                f"{self.config.data.data}{anew} (fingerprint {dataset.fingerprint}, expected "
                f"{expected}). Put back what was there, or train anew under another --name"
            )
        return dataset

    # weights

    def weights_path(self, weights: Weights = "last") -> Path:
        return self.path / _WEIGHT_FILES[weights]

    def has(self, weights: Weights = "last") -> bool:
        return self.weights_path(weights).is_file()

    def save_weights(self, weights: Weights, state: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save

        state = {k: v.detach().cpu().contiguous() for k, v in state.items()}
        write_atomically(self.weights_path(weights), save(state))

    def weights_hash(self, weights: Weights = "last") -> str:
        """Names the weights, so that rows of an older training are not taken for this one's."""
        return hashlib.sha256(self.weights_path(weights).read_bytes()).hexdigest()[:16]

    def model(self, weights: Weights = "last", device: str | torch.device = "cpu") -> Classifier:
        """The trained classifier, in eval mode."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from noiseproof.lab.models.classifier import build_classifier

        if not self.has(weights):
            raise ValueError(self.lacks(weights))
        model = build_classifier(
            self.config.model,
            num_classes=len(self.info["classes"]),
            size=tuple(self.info["size"]),
            mean=tuple(self.info["mean"]),
            std=tuple(self.info["std"]),
            load=False,
        )
        try:
            model.load_state_dict(load_file(self.weights_path(weights)))
        except SafetensorError as error:
            how = f"delete {_WEIGHT_FILES['last']} and resume the training, which writes it anew"
            raise ValueError(f"{self.weights_path(weights)} is damaged ({error}); {how}") from None
        return model.to(device).eval()

    def lacks(self, weights: str) -> str:
        """What to tell whoever asks for weights that are not there: most often the training is not
        finished, and the command goes on with it."""
        if self.has("last"):
            has = [name for name, file in _WEIGHT_FILES.items() if (self.path / file).is_file()]
            return f"{self.path} has no {weights} weights (it has: {', '.join(has)})"
        done, epochs = len(self.metrics()), self.config.optim.epochs
        place = ["--output", str(self.path.parent), "--name", self.name]
        command = ["train", "--config", str(self.path / "config.json"), *place, "--resume"]
        return (
            f"the training in {self.path} is not finished ({done} of {epochs} epochs); "
            f"to go on with it: noiseproof {shlex.join(command)}"
        )

    # rows

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line of metrics.csv; the header comes from the first row."""
        path = self.path / "metrics.csv"
        new = not path.exists() or path.stat().st_size == 0
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)

    def metrics(self) -> list[dict[str, float]]:
        """The rows so far; one that a power cut left unfinished is passed over."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return []
        with open(path, newline="") as file:
            rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
        return [{k: float(v) for k, v in row.items() if v not in ("", None)} for row in rows]

    def keep_metrics(self, epochs: int) -> None:
        """Drops the rows after `epochs`: those that a resumed run will make again."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return
        with open(path, newline="") as file:  # line ends stay as they are
            lines = file.read().splitlines(keepends=True)
        kept = [ln for ln in lines[1:] if ln.endswith("\n") and _epoch(ln) <= epochs]
        if kept:
            write_atomically(path, "".join(lines[:1] + kept))
        else:
            path.unlink()

    def sweep(self) -> None:
        """Removes temporary files that a killed training has left."""
        for folder in (self.path, self.path / "checkpoints"):
            for file in folder.glob(".*.tmp"):
                file.unlink(missing_ok=True)

    def append_evaluation(self, rows: Iterable[dict[str, Any]]) -> None:
        self.append_lines("evaluation.jsonl", rows)

    def evaluation(self) -> list[dict[str, Any]]:
        return self.lines("evaluation.jsonl")

    def append_lines(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Adds rows to a .jsonl file, on fresh lines: a power cut may have left half of one."""
        path = self.path / name
        whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        with open(path, "a") as file:
            file.writelines(["" if whole else "\n", *(json.dumps(row) + "\n" for row in rows)])

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All rows of such a file; lines that a power cut left unfinished are passed over."""
        path = self.path / name
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def save_predictions(self, key: str, **arrays: np.ndarray) -> None:
        path = self._predictions_path(key)
        write_atomically(path, lambda f: np.savez_compressed(f, **arrays))  # pyright: ignore[reportArgumentType]

    def predictions(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays saved under `key`, or None where there are none."""
        path = self._predictions_path(key)
        if not path.exists():
            return None
        try:
            # Opened here: numpy leaves a damaged file open.
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        except Exception as error:  # numpy, zipfile and zlib raise their own kinds
            raise ValueError(f"{path} is damaged ({error}); delete it and evaluate again") from None

    def _predictions_path(self, key: str) -> Path:
        safe = "".join(ch if ch.isalnum() or ch in "._-" else "_" for ch in key)
        return self.path / "predictions" / f"{safe}.npz"


def _epoch(line: str) -> int:
    try:
        return int(float(line.split(",", 1)[0]))
    except ValueError:
        return sys.maxsize
