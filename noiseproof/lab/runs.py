"""The run folder: plain files, and the only thing that the stages share.

    config.json          schema version, settings, and facts about data, machine and versions
    metrics.csv          one row per epoch
    checkpoints/         last.pt and, while that is replaced, previous.pt: all that resuming needs
    model.safetensors    weights after the last epoch; with config.json, what to share
    best.safetensors     weights of the best epoch by validation, if there is a validation split
    evaluation.jsonl     one row per perturbation and noise draw
    predictions/         the predicted class of every test image, for paired comparisons
    .lock                the id of the process that trains here, while it does

Files are replaced as a whole (temporary file, fsync, rename), so that a reader or a power cut never
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from noiseproof.lab.command import command_record
from noiseproof.lab.config import Config, from_dict, run_name, to_dict
from noiseproof.lab.data.datasets import Dataset, load_dataset, same_images
from noiseproof.lab.data.images import DataError
from noiseproof.lab.files import write_atomically
from noiseproof.lab.paths import with_absolute_paths

if TYPE_CHECKING:
    from noiseproof.lab.models.classifier import Classifier

SCHEMA = 1
Weights = Literal["last", "best"]
EvaluationRow = dict[str, Any]
"""One accuracy: its run, weights, perturbation, draw and value, and what else a table needs."""
_WEIGHT_FILES: dict[Weights, str] = {"last": "model.safetensors", "best": "best.safetensors"}
_NOT_COMPARED = {"output", "name", "resume", "threads", "checkpoint_minutes", "tensorboard",
                 "workers", "device", "data_dir", "download", "engine",
                 "follow_links"}  # fmt: skip
_hashes: dict[tuple[str, int, int], str] = {}  # by path, modification time and inode


def check_schema(path: Path, schema: int) -> None:
    """Raises ValueError if the `schema` of the file or folder at `path` is newer than this one."""
    if schema > SCHEMA:
        raise ValueError(
            f"{path} was written by a newer noiseproof (its schema is {schema}, "
            f"this one reads up to {SCHEMA}); please upgrade"
        )


def changed_settings(old: Config, new: Config) -> list[str]:
    """A description of each setting that differs between two configs.

    Settings that only affect where and how fast a run computes are left out. Paths are made
    absolute. An old path that no longer exists may have moved: the images' fingerprint decides.
    """
    ignored = set(_NOT_COMPARED)
    if new.optim.sched != "multistep":
        ignored.add("decay_milestones")  # which have no effect
    before, after = to_dict(with_absolute_paths(old)), to_dict(with_absolute_paths(new))
    return [
        f"{name} was {value!r}, is now {after[group][name]!r}"
        for group, values in before.items()
        for name, value in values.items()
        if name not in ignored and value != after[group][name] and not _is_gone(name, value)
    ]


def _is_gone(name: str, path: object) -> bool:
    return name in ("data", "weights") and os.path.isabs(str(path)) and not Path(str(path)).exists()


class RunFolder:
    """One run on disk.

    Args:
        path: the folder.
        config: the settings of the run.
        info: facts about data, machine and versions, as in config.json.
    """

    def __init__(self, path: Path, config: Config, info: dict[str, Any]):
        self.path, self.config, self.info = path, config, info

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, config: Config, info: dict[str, Any]) -> RunFolder:
        """Creates the folder of a new run and writes its config.json.

        Paths to data are recorded as absolute paths.

        Args:
            config: the settings; `config.run` decides where the folder is.
            info: facts about data, machine and versions.
        """
        path, config = Path(config.run.output) / run_name(config), with_absolute_paths(config)
        run = cls(path, config, {**info, **command_record()})
        run.path.mkdir(parents=True, exist_ok=True)
        run.save_config()
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The existing run at `path`; ValueError if it is not a run folder or is too new."""
        # "." and "..", too, get a name and a parent
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
        # Before there was a setting, links were followed.
        return cls(path, from_dict({"follow_links": True, **config}), info)

    def save_config(self) -> None:
        """Writes config.json."""
        content = {"schema": SCHEMA, "config": to_dict(self.config), "info": self.info}
        write_atomically(self.path / "config.json", json.dumps(content, indent=2) + "\n")

    @property
    def finished(self) -> bool:
        """True once the last epoch is trained and its weights are written."""
        return bool(self.info.get("finished")) and self.has("last")

    def finish(self, **facts: Any) -> None:
        """Marks the run as finished and adds `facts` to its info."""
        self.info |= {"finished": True, **facts}
        self.save_config()

    # Data

    def dataset(self, loaded: Dataset | None = None) -> Dataset:
        """The data of the run; ValueError if its test images are not those it was trained with.

        Args:
            loaded: the data, if the caller has loaded it already.
        """
        path = Path(self.config.data.data)
        if loaded is None and path.is_absolute() and not path.exists():
            raise DataError(
                f"the data of run {self.name} is no longer at {path}; move it back, or set `data` "
                f"in {self.path / 'config.json'} to its new path"
            )
        dataset = loaded or load_dataset(self.config.data)
        expected = self.fingerprint(dataset)
        if not same_images(expected, dataset.fingerprint):
            where = self.config.data.data
            listing, *contents = expected.split("-")
            if contents and same_images(listing, dataset.fingerprint):
                change = f"files in {where} kept their names and sizes, but not their contents"
            else:
                change = f"images were added, removed, renamed or changed in {where}"
                if dataset.test_from == "split off":
                    change += (
                        " (adding or removing a single image changes which images are held out "
                        "for testing)"
                    )
            raise ValueError(
                f"the test images of {dataset.name} are not those of run {self.name}: since it was "
                f"trained, {change}; fingerprint {dataset.fingerprint}, expected {expected}. "
                "Restore the original images, or train again under another --name"
            )
        return dataset

    def fingerprint(self, dataset: Dataset) -> str:
        """The fingerprint that the run knows its test images by: that of `dataset`, unless it was
        recorded in an older form."""
        return self.info.get("fingerprint", dataset.fingerprint)

    # Weights

    def weights_path(self, weights: Weights = "last") -> Path:
        """The file of the weights after the last epoch, or of the best epoch."""
        return self.path / _WEIGHT_FILES[weights]

    def has(self, weights: Weights = "last") -> bool:
        """True if the run has these weights."""
        return self.weights_path(weights).is_file()

    def save_weights(self, weights: Weights, state: dict[str, torch.Tensor]) -> None:
        """Writes the state dict of a model as the `weights` of the run."""
        from safetensors.torch import save

        state = {k: v.detach().cpu().contiguous() for k, v in state.items()}
        write_atomically(self.weights_path(weights), save(state))

    def weights_hash(self, weights: Weights = "last") -> str:
        """Identifies the weights, so that those of an earlier training are not mistaken for them.

        The file is read again only if it has changed.
        """
        path = self.weights_path(weights).absolute()
        stat = path.stat()
        key = (str(path), stat.st_mtime_ns, stat.st_ino)
        if key not in _hashes:
            _hashes[key] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return _hashes[key]

    def model(self, weights: Weights = "last", device: str | torch.device = "cpu") -> Classifier:
        """The trained classifier with these weights, on `device` and in eval mode."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from noiseproof.lab.models.classifier import build_classifier

        if not self.has(weights):
            raise ValueError(self.missing_weights(weights))
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
            raise ValueError(
                f"{self.weights_path(weights)} is damaged ({error}); delete "
                f"{_WEIGHT_FILES['last']} and resume the training, which writes it again"
            ) from None
        return model.to(device).eval()

    def missing_weights(self, weights: str) -> str:
        """The error message for `weights` that the run does not have, with the command to resume
        its training if that is not finished."""
        if self.has("last"):
            available = [name for name in _WEIGHT_FILES if self.has(name)]
            return f"{self.path} has no {weights} weights (it has: {', '.join(available)})"
        done, epochs = len(self.metrics()), self.config.optim.epochs
        folder = ["--output", str(self.path.parent), "--name", self.name]
        command = ["train", "--config", str(self.path / "config.json"), *folder, "--resume"]
        return (
            f"the training in {self.path} is not finished ({done} of {epochs} epochs); "
            f"resume it with: noiseproof {shlex.join(command)}"
        )

    # Rows

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Adds the `row` of an epoch to metrics.csv; the first row gives the header."""
        path = self.path / "metrics.csv"
        is_new = not path.exists() or path.stat().st_size == 0
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv; a line that a power cut left incomplete is skipped."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return []
        with open(path, newline="") as file:
            rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
        return [{k: float(v) for k, v in row.items() if v not in ("", None)} for row in rows]

    def truncate_metrics(self, epochs: int) -> None:
        """Drops the rows after the first `epochs`, which a resumed run will write again."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return
        with open(path, newline="") as file:  # keeps line endings
            header, *lines = file.read().splitlines(keepends=True) or [""]
        lines = [line for line in lines if line.endswith("\n") and _epoch(line) <= epochs]
        if lines:
            write_atomically(path, "".join([header, *lines]))
        else:
            path.unlink()

    def remove_temporary_files(self) -> None:
        """Removes what a killed training was writing."""
        for folder in (self.path, self.path / "checkpoints"):
            for file in folder.glob(".*.tmp"):
                file.unlink(missing_ok=True)

    def append_evaluation(self, rows: Iterable[EvaluationRow]) -> None:
        """Adds `rows` to evaluation.jsonl."""
        self.append_jsonl("evaluation.jsonl", rows)

    def evaluation(self) -> list[EvaluationRow]:
        """The rows of evaluation.jsonl, including those of earlier weights."""
        return self.read_jsonl("evaluation.jsonl")

    def append_jsonl(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Adds `rows` to the file `name`, on a new line: a power cut may have left half a line."""
        path = self.path / name
        complete = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        with open(path, "a") as file:
            file.writelines(["" if complete else "\n", *(json.dumps(row) + "\n" for row in rows)])

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The rows of the file `name`; lines that a power cut left incomplete are skipped."""
        path = self.path / name
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def save_predictions(self, key: str, **arrays: np.ndarray) -> None:
        """Writes `arrays` to a file of predictions/ named after `key`."""
        path = self._predictions_path(key)
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # pyright: ignore[reportArgumentType]

    def predictions(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays saved under `key`, or None; ValueError if the file is damaged."""
        path = self._predictions_path(key)
        if not path.exists():
            return None
        try:
            # Opened here because numpy leaves a damaged file open
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        except Exception:  # numpy, zipfile and zlib raise errors of their own
            raise ValueError(f"{path} is damaged; delete it and evaluate again") from None

    def _predictions_path(self, key: str) -> Path:
        safe = "".join(ch if ch.isalnum() or ch in "._-" else "_" for ch in key)
        return self.path / "predictions" / f"{safe}.npz"


def training_seconds(groups: Mapping[str, Iterable[RunFolder]]) -> dict[str, float]:
    """The mean duration of the trainings of each group, if it was recorded."""
    recorded = {
        label: [run.info["seconds"] for run in runs if run.info.get("seconds") is not None]
        for label, runs in groups.items()
    }
    return {label: sum(times) / len(times) for label, times in recorded.items() if times}


def _epoch(line: str) -> int:
    """The epoch of a line of metrics.csv; a line without one counts as later than all others."""
    try:
        return int(float(line.split(",", 1)[0]))
    except ValueError:
        return sys.maxsize
