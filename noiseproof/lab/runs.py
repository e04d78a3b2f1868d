"""The run folder: plain files, and the only thing that the stages share.

    config.json          schema version, settings, and facts about data, machine and versions
    metrics.csv          one row per epoch
    checkpoints/         last.pt and, while that is replaced, previous.pt: all that resuming needs
    model.safetensors    weights after the last epoch; with config.json, what to share
    best.safetensors     weights of the best epoch by validation, if there is a validation split
    evaluation.jsonl     one row per perturbation and noise draw
    attacks.jsonl        one row per adversarial attack
    certificates.jsonl   one row per certified test image
    predictions/         the predicted class of every test image, for paired comparisons
    .lock                the id of the process that trains here, while it does

Files are replaced as a whole (temporary file, fsync, rename), so that a reader or a power cut never
sees half of one. All have checksums: a damaged file raises an error that says what to do. Files of
older versions, which have none, are read as they are.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shlex
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from noiseproof.lab.command import command_record
from noiseproof.lab.config import Config, Data, from_dict, run_path, to_dict
from noiseproof.lab.data.datasets import Dataset, load_dataset, same_images
from noiseproof.lab.data.images import DataError
from noiseproof.lab.files import (
    appending,
    refuse_bomb,
    with_checksum,
    without_checksum,
    write_atomically,
)
from noiseproof.lab.paths import with_absolute_paths
from noiseproof.lab.validate import validate_types

if TYPE_CHECKING:
    from noiseproof.lab.models.classifier import Classifier
    from noiseproof.wrapped import Wrapped

SCHEMA = 1
Weights = Literal["last", "best"]
ENOUGH_TO_CHOOSE = 1000  # validation images, so that the best epoch is more than a lucky one
EvaluationRow = dict[str, Any]
"""One accuracy: its run, weights, perturbation, draw and value, and what else a table needs."""
DERIVED = ("renormalised", "calibrated")
"""Keys of a run's info if its model is a changed copy of another run's, with facts about it."""
_WEIGHT_FILES: dict[Weights, str] = {"last": "model.safetensors", "best": "best.safetensors"}
_NOT_COMPARED = {"output", "name", "resume", "threads", "checkpoint_minutes", "tensorboard",
                 "workers", "device", "data_dir", "download", "engine",
                 "follow_links"}  # fmt: skip
_NUMBER = (int, float)
# Of rows that are about the weights of a run, which alone are read
_FIELDS = {
    "evaluation.jsonl": (("metric", str), ("weights", str), ("model", str), ("perturbation", str),
                         ("draw", int), ("noise_seed", int), ("value", _NUMBER)),
    "attacks.jsonl": (("attack", str), ("value", _NUMBER), ("clean", _NUMBER), ("n", int)),
    "certificates.jsonl": (("image", int), ("label", int), ("radius", _NUMBER), ("sigma", _NUMBER),
                           ("samples", int), ("alpha", _NUMBER)),
}  # fmt: skip
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
    new = with_recorded_input(new, old)
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


def with_recorded_input(config: Config, recorded: Config) -> Config:
    """The config with an existing run's image size and way of reading files, as far as the config
    leaves them to us.

    Args:
        config: the settings to continue the run with.
        recorded: the settings of the run.
    """
    names = ("img_size", "crop_share", "interpolation") if config.data.img_size == "auto" else ()
    if config.data.background == Data.background:  # black in older runs
        names = (*names, "background")
    settings = {name: getattr(recorded.data, name) for name in names}
    return replace(config, data=replace(config.data, **settings))


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
        facts = {**info, **command_record()}
        run = cls(run_path(config), with_absolute_paths(config), facts)
        run.path.mkdir(parents=True, exist_ok=True)
        run.save_config()
        return run

    def derive(
        self,
        change: str,
        *,
        output: str | Path | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> RunFolder:
        """A run folder for a changed copy of this run's model. Nothing is written yet: its weights
        must be saved, and then its config. ValueError if the folder exists, or if this run is not
        finished.

        Args:
            change: one of `DERIVED`, the key of the new run's info for facts about the change.
            output: folder of the new run folder; by default that of this run.
            name: name of the new run folder; by default this one's with the change.
            overwrite: replace a run folder of that name, unless it is this one.
        """
        self.require("last")
        path = Path(output or self.path.parent) / (name or f"{self.name}-{change}")
        exists = (path / "config.json").exists() and not overwrite
        if exists or path.resolve() == self.path.resolve():
            raise ValueError(f"{path} already exists; choose another --name")
        settings = replace(self.config.run, output=str(path.parent), name=path.name)
        facts = {"run": str(self.path.absolute()), **command_record()}
        return RunFolder(path, replace(self.config, run=settings), {**self.info, change: facts})

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The existing run at `path`; ValueError if it is not a run folder, damaged or too new."""
        # "." and "..", too, get a name and a parent
        path = Path(os.path.abspath(path) if Path(path).name in ("", "..") else path)
        file = path / "config.json"
        if not file.is_file():
            raise ValueError(f"{path} is not a run folder: it has no config.json")
        damage = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
        try:
            content = without_checksum(json.loads(file.read_bytes()))
            schema = int(content["schema"])
        except damage as error:
            raise ValueError(_damaged_config(file, error)) from None
        check_schema(path, schema)
        try:
            # Before there were settings, links were followed and transparent pixels were black.
            before = {"follow_links": True, "background": "black"}
            config = from_dict({**before, **content["config"]})
            validate_types(config)
            info = dict(content["info"])
            for name in ("classes", "size", "mean", "std"):
                if not isinstance(info.get(name, []), list):
                    raise ValueError(f"{name} must be a list, got {info[name]!r}")
            return cls(path, config, info)
        except damage as error:
            raise ValueError(_damaged_config(file, error)) from None

    def save_config(self) -> None:
        """Writes config.json."""
        content = {"schema": SCHEMA, "config": to_dict(self.config), "info": self.info}
        text = json.dumps(with_checksum(content), indent=2) + "\n"
        write_atomically(self.path / "config.json", text)

    @property
    def finished(self) -> bool:
        """True once the last epoch is trained and its weights are written."""
        return bool(self.info.get("finished")) and self.has("last")

    def finish(self, **facts: Any) -> None:
        """Marks the run as finished and adds `facts` to its info."""
        checksum = _crc32(self.metrics_text())
        self.info |= {"finished": True, "metrics_checksum": checksum, **facts}
        self.save_config()

    # Data

    def dataset(self, loaded: Dataset | None = None) -> Dataset:
        """The data of the run; ValueError if its test images are not those it was trained with.

        Args:
            loaded: the data, if the caller has loaded it already.
        """
        path = Path(self.config.data.data)
        if loaded is None and path.is_absolute() and not path.exists():
            file = self.path / "config.json"
            checksum = " and delete the line `crc32`" if _has_checksum(file) else ""
            raise DataError(
                f"the data of run {self.name} is no longer at {path}; move it back, or set `data` "
                f"in {file} to its new path{checksum}"
            )
        dataset = loaded or load_dataset(self.config.data)
        expected = self.info.get("fingerprint", dataset.fingerprint)
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
        """The fingerprint that the run knows the test images of `dataset` by: the dataset's, unless
        they are its own and were recorded in an older form."""
        own = self.info.get("fingerprint", dataset.fingerprint)
        return own if same_images(own, dataset.fingerprint) else dataset.fingerprint

    # Weights

    def weights_path(self, weights: Weights = "last") -> Path:
        """The file of the weights after the last epoch, or of the best epoch."""
        return self.path / _WEIGHT_FILES[weights]

    def has(self, weights: Weights = "last") -> bool:
        """True if the run has these weights."""
        return self.weights_path(weights).is_file()

    @property
    def available_weights(self) -> list[Weights]:
        """The weights that the run has."""
        return [weights for weights in _WEIGHT_FILES if self.has(weights)]

    def default_weights(self) -> Weights:
        """The weights to use where none are named: "best" if the best epoch was chosen on
        `ENOUGH_TO_CHOOSE` validation images or more, otherwise "last"."""
        enough = self.validation_images >= ENOUGH_TO_CHOOSE
        return "best" if enough and self.has("best") else "last"

    def weights_note(self, weights: Weights) -> str:
        """A sentence that says which epoch `weights` are of and, if it is the last although there
        is a best one, why."""
        if "weights_note" in self.info:  # of a shared model, which has only one file of weights
            return self.info["weights_note"]
        count, epochs = self.validation_images, self.config.optim.epochs
        if weights == "best":
            epoch = (self.info.get("best") or {}).get("epoch", "?")
            return f"Weights of epoch {epoch} of {epochs}, the best on {count:,} validation images."
        text = f"Weights of the last epoch, {epochs}"
        if self.has("best") and self.default_weights() == "last":
            text += f"; {count:,} validation images are too few to choose one"
            text += f" (fewer than {ENOUGH_TO_CHOOSE:,})"
        return f"{text}."

    @property
    def validation_images(self) -> int:
        """How many images were held out for validation."""
        return self.info.get("samples", {}).get("validation", 0)

    def save_weights(self, weights: Weights, state: dict[str, torch.Tensor]) -> None:
        """Writes the state dict of a model as the `weights` of the run."""
        from safetensors.torch import save

        state = {k: v.detach().cpu().contiguous() for k, v in state.items()}
        content = save(state, metadata={"crc32": _state_crc32(state)})
        write_atomically(self.weights_path(weights), content)

    def measured_with(self, weights: Weights) -> dict[str, Any]:
        """What a row says that was measured with these weights on the run's own test images."""
        fingerprint = self.info.get("fingerprint")
        return {"weights": weights, "model": self.weights_hash(weights), "fingerprint": fingerprint}

    def weights_hash(self, weights: Weights = "last") -> str:
        """Identifies the weights, so that those of an earlier training are not mistaken for them;
        ValueError if their file is damaged.

        The file is read again only if it has changed.
        """
        path = self.weights_path(weights).absolute()
        stat = path.stat()
        key = (str(path), stat.st_mtime_ns, stat.st_ino)
        if key not in _hashes:
            self._load_weights(weights)  # else a damaged file would count as other weights
            _hashes[key] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return _hashes[key]

    def model(
        self, weights: Weights = "last", device: str | torch.device = "cpu"
    ) -> Classifier | Wrapped:
        """The trained classifier with these weights, on `device` and in eval mode; ValueError if
        their file is missing, damaged or of another model."""
        from noiseproof.lab.models.classifier import build_classifier

        self.require(weights)
        try:
            model = build_classifier(
                self.config.model,
                num_classes=len(self.info["classes"]),
                size=tuple(self.info["size"]),
                mean=tuple(self.info["mean"]),
                std=tuple(self.info["std"]),
                load=False,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(_damaged_config(self.path / "config.json", error)) from None
        state = self._load_weights(weights)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.weights_path(weights)} does not hold the weights of this run's model: "
                f"{reason[:200]}"
            ) from None
        return model.to(device).eval()

    def _load_weights(self, weights: Weights) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        path = self.weights_path(weights)
        try:
            with safe_open(path, "pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                expected = (file.metadata() or {}).get("crc32")
            if expected and expected != _state_crc32(state):
                raise ValueError("wrong checksum")
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged ({error}); delete {_WEIGHT_FILES['last']} and resume the "
                "training, which writes it again"
            ) from None
        return state

    def require(self, *weights: Weights) -> list[Weights]:
        """Those of `weights` that the run has; ValueError if it has none of them, with the command
        to resume its training if that is not finished."""
        available: list[Weights] = [name for name in dict.fromkeys(weights) if self.has(name)]
        if available:
            return available
        if self.has("last"):
            missing, known = " or ".join(weights), ", ".join(self.available_weights)
            raise ValueError(f"{self.path} has no {missing} weights (it has: {known})")
        done, epochs = len(self.metrics()), self.config.optim.epochs
        folder = ["--output", str(self.path.parent), "--name", self.name]
        command = ["train", "--config", str(self.path / "config.json"), *folder, "--resume"]
        raise ValueError(
            f"the training in {self.path} is not finished ({done} of {epochs} epochs); "
            f"resume it with: noiseproof {shlex.join(command)}"
        )

    # Rows

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Adds the `row` of an epoch to metrics.csv; the first row gives the header."""
        path = self.path / "metrics.csv"
        is_new = not path.exists() or path.stat().st_size == 0
        with appending(path) as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv; a line that a power cut left incomplete is skipped. ValueError
        if the file is damaged."""
        text = self.metrics_text()
        expected = self.info.get("metrics_checksum") if self.finished and text else None
        try:
            if expected and expected != _crc32(text):
                raise ValueError("wrong checksum")
            lines = io.StringIO(text, newline="")
            rows = list(csv.DictReader(line for line in lines if line.endswith("\n")))
            return [{k: float(v) for k, v in row.items() if v not in ("", None)} for row in rows]
        except (ValueError, TypeError, csv.Error) as error:
            names = "`metrics_checksum`"
            names += " and `crc32`" if _has_checksum(self.path / "config.json") else ""
            edited = f". If you have edited it, delete {names} in config.json" if expected else ""
            raise ValueError(
                f"{self.path / 'metrics.csv'} is damaged ({error}); delete it: only the metrics of "
                f"each epoch are lost{edited}"
            ) from None

    def metrics_text(self) -> str:
        """The text of metrics.csv, which checkpoints hold as well."""
        path = self.path / "metrics.csv"
        return path.read_bytes().decode(errors="replace") if path.exists() else ""

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
        """Adds `rows` to the file `name`, without any damaged lines that it has."""
        self.drop_damaged_rows(name)
        with appending(self.path / name) as file:
            # All at once, so that another process does not see half a row
            file.write("".join(json.dumps(with_checksum(row)) + "\n" for row in rows))

    def drop_damaged_rows(self, name: str = "evaluation.jsonl") -> int:
        """Removes damaged and incomplete lines from the file `name`; returns their number."""
        path = self.path / name
        content = path.read_bytes() if path.exists() else b""
        lines = [line.strip() for line in content.split(b"\n") if line.strip()]
        intact = [line for line in lines if _row(line, name)]
        text = b"".join(line + b"\n" for line in intact)
        if text != content:
            write_atomically(path, text)
        return len(lines) - len(intact)

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The rows of the file `name`. ValueError if a line is damaged or incomplete, unless an
        older version wrote the file, which left incomplete lines in it."""
        path = self.path / name
        content = path.read_bytes() if path.exists() else b""
        lines = content.split(b"\n")
        rows = {i: _row(line, name) for i, line in enumerate(lines) if line.strip()}
        damaged = [i for i, row in rows.items() if row is None]
        if damaged and b"crc32" in content:
            edited = "; if you have edited it, delete its `crc32`"
            raise ValueError(
                f"line {damaged[0] + 1} of {path} is damaged; repeat the command that measured it, "
                f"or delete the line{edited if b'crc32' in lines[damaged[0]] else ''}"
            )
        return [row for row in rows.values() if row is not None]

    def save_predictions(self, key: str, **arrays: np.ndarray) -> None:
        """Writes `arrays` to a file of predictions/ named after `key`."""
        path = self._predictions_path(key)
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # pyright: ignore[reportArgumentType]

    def predictions(self, key: str, names: Iterable[str] = ()) -> dict[str, np.ndarray] | None:
        """The arrays saved under `key`, or None; ValueError if the file is damaged or lacks one of
        `names`."""
        path = self._predictions_path(key)
        if not path.exists():
            return None
        try:
            arrays = read_arrays(path)
        except Exception:  # numpy, zipfile and zlib raise errors of their own
            arrays = None
        if arrays is None or not arrays.keys() >= set(names):
            raise ValueError(f"{path} is damaged; delete it and evaluate again")
        return arrays

    def _predictions_path(self, key: str) -> Path:
        safe = "".join(ch if ch.isalnum() or ch in "._-" else "_" for ch in key)
        return self.path / "predictions" / f"{safe}.npz"


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; damage raises an exception of any type."""
    refuse_bomb(path)
    # Opened here because numpy leaves a damaged file open, and does not verify all checksums
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        if corrupt := archive.testzip():
            raise ValueError(f"wrong checksum of {corrupt}")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)


def open_runs(paths: Iterable[str | Path]) -> list[RunFolder]:
    """The runs in these folders, each once, however its path is written."""
    return list({run.path.resolve(): run for run in map(RunFolder.open, paths)}.values())


def shared_weights(runs: Iterable[RunFolder]) -> Weights:
    """The weights to compare runs by where none are named: "best" if `RunFolder.default_weights`
    chooses them for all runs, otherwise "last"."""
    return "best" if all(run.default_weights() == "best" for run in runs) else "last"


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


def _damaged_config(file: Path, error: Exception) -> str:
    reason = f"it has no {error}" if isinstance(error, KeyError) else error
    return (
        f"{file} cannot be read as a run's config: {reason}. Restore it from a copy, or train "
        "again under another --name"
    )


def _has_checksum(file: Path) -> bool:
    return file.is_file() and b'"crc32"' in file.read_bytes()


def _row(line: bytes, name: str) -> dict[str, Any] | None:
    """The row on a line of the file `name`; None if it is damaged, incomplete or empty."""
    try:
        row = without_checksum(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    fields = _FIELDS.get(name, ()) if "model" in row else ()
    return row if all(isinstance(row.get(field), kind) for field, kind in fields) else None


def _crc32(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _state_crc32(state: Mapping[str, torch.Tensor]) -> str:
    """A checksum of the names, types, shapes and values of a state dict."""
    checksum = 0
    for name, value in sorted(state.items()):
        checksum = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), checksum)
        checksum = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"
